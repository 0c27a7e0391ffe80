"""The ``memkv`` command. Every subcommand imports what it needs when it runs, so that ``memkv --help`` is instant.

Exit codes: 0 done, 1 an error that is not the caller's, 2 wrong settings or arguments. Settings that are wrong are
printed all at once, without a traceback. Logs go to stderr, one event per line; this module is the only one of the
package that configures logging.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memkv_vllm import __version__
from memkv_vllm.cli_admin import admin
from memkv_vllm.cli_doctor import doctor
from memkv_vllm.cli_net import net
from memkv_vllm.errors import ConfigError, EnvironmentFault, MemkvError
from memkv_vllm.observe import LineFormatter

if TYPE_CHECKING:
    from memkv_vllm.config import RailAddress, ServerConfig
    from memkv_vllm.store.server import StoreServer
    from memkv_vllm.transports.base import DataPath, ServerTransport

DEV_ADDRESS = "127.0.0.1:9900"
KEY_BYTES = 32
MIB = 1 << 20

logger = logging.getLogger("memkv.cli")


class _Group(click.Group):
    """A group whose commands turn this package's errors into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; see the module's exit codes."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            known = find_known(error)
            if known is None:
                raise
            text = str(known)
            click.echo(text if text.startswith("memkv ") else f"memkv: {text}", err=True)
            ctx.exit(2 if isinstance(known, ConfigError) else 1)


def find_known(error: BaseException) -> MemkvError | None:
    """The error of ours that ``error`` is or, coming out of a task group, has inside."""
    if isinstance(error, MemkvError):
        return error
    return next((known for inner in getattr(error, "exceptions", ()) if (known := find_known(inner))), None)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="memkv")
def main() -> None:
    """A shared network store for vLLM's KV cache: serve it, size it, see it work."""


# ---------------------------------------------------------------------------------------------------- start


@main.command()
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="The server's yaml.")
@click.option("--dev", is_flag=True, help="An in-memory store on this machine only, with a key of its own.")
@click.option("--address", metavar="HOST:PORT", help=f"Where --dev listens (default {DEV_ADDRESS}; port 0: any).")
@click.option("--admin-address", metavar="HOST:PORT", help="Where --dev serves admin HTTP (default: the next port).")
@click.option("--max-size", metavar="SIZE", help="Memory that --dev may use, such as 512MiB.")
@click.option(
    "--key-file", type=click.Path(path_type=Path), metavar="FILE", help="Where --dev keeps its key; made if missing."
)
@click.option(
    "--license",
    "license_path",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Accepted for compatibility: this server needs no license of its own.",
)
@click.option("--log-json", is_flag=True, help="Log lines as JSON objects.")
def start(
    config: Path | None,
    dev: bool,
    address: str | None,
    admin_address: str | None,
    max_size: str | None,
    key_file: Path | None,
    license_path: Path | None,
    log_json: bool,
) -> None:
    """Run the server until SIGTERM or Ctrl-C."""
    if dev == (config is not None):
        raise click.UsageError("say either --config FILE or --dev")
    if not dev and (address or admin_address or max_size or key_file):
        names = "--address, --admin-address, --max-size and --key-file"
        raise click.UsageError(f"{names} go with --dev; with --config the yaml has them")
    configure_logging(as_json=log_json)
    if license_path is not None:
        # Without the path: who gives the license itself in its place must not find it in the log.
        logger.warning("event=license_ignored reason='this server needs no license of its own'")
    if config is not None:
        from memkv_vllm.config import load_server_config

        path = config
        _serve(load_server_config(path), {}, lambda: load_server_config(path))
    else:
        _serve_dev(address or DEV_ADDRESS, admin_address, max_size, key_file)


def _serve_dev(address: str, admin_address: str | None, max_size: str | None, key_file: Path | None) -> None:
    from memkv_vllm.config import default_dev_key_file, dev_server_config

    key_file = key_file or default_dev_key_file()
    key = read_or_make_key(key_file)
    _serve(
        dev_server_config(
            key,
            address=address,
            max_size=max_size,
            overrides=None if admin_address is None else {"network": {"admin_address": admin_address}},
        ),
        {"MEMKV_AUTH_KEY_FILE": str(key_file), "MEMKV_TRANSPORT": "loopback"},
    )


def _serve(config: ServerConfig, exports: Mapping[str, str], load: Callable[[], ServerConfig] | None = None) -> None:
    """Serves until a signal; SIGHUP reloads the keys.

    Args:
        config: the settings.
        exports: what a client on this machine must set besides the address.
        load: reads the settings again.
    """
    import anyio

    from memkv_vllm.serve import serve_until_signal
    from memkv_vllm.store.polling import loop_factory
    from memkv_vllm.transports.loopback import LoopbackServerTransport
    from memkv_vllm.transports.tcp import TcpServerTransport

    tcp = TcpServerTransport.from_config(config, data_paths=_data_paths(config))
    # One number for both: with port 0 tcp finds it, since others may hold TCP ports and hardly ever loopback's.
    transports: list[ServerTransport] = [tcp, LoopbackServerTransport.from_config(config, port=tcp.bind())]

    def announce(server: StoreServer, admin: RailAddress) -> None:
        _announce("{}:{}".format(*server.addresses[0]), str(admin), exports)

    try:
        options = {"loop_factory": loop_factory(config.network.idle_poll_us * 1e-6)}
        anyio.run(serve_until_signal, config, transports, announce, load, backend="asyncio", backend_options=options)
    finally:
        tcp.close()


def _data_paths(config: ServerConfig) -> list[DataPath]:
    """What clients may use in place of tcp's own connections; without RDMA devices nothing of verbs is imported."""
    if not config.rdma.devices:
        return []
    from memkv_vllm.transports.verbs.datapath import VerbsDataPath

    return [VerbsDataPath.from_config(config)]


def _announce(address: str, admin: str, exports: Mapping[str, str]) -> None:
    """On stdout: what to set where vLLM runs, then one line that says that clients may come."""
    if exports:
        click.echo("# on this machine, where vLLM runs:")
        for name, value in {"MEMKV_SERVERS": address, **exports}.items():
            click.echo(f"export {name}={value}")
    click.echo(f"ready address={address} admin={admin} pid={os.getpid()}")


main.add_command(admin)
main.add_command(doctor)
main.add_command(net)

# ---------------------------------------------------------------------------------------------------- keys


@main.command()
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write it there, readable by you alone.")
def keygen(out: Path | None) -> None:
    """Make a key: 64 hexadecimal characters, to be shared by the servers and their clients."""
    key = secrets.token_hex(KEY_BYTES)
    if out is None:
        click.echo(key)
        return
    if not write_new_key(out, key):
        raise EnvironmentFault(f"{out} exists and is not overwritten; remove it or name another file")
    click.echo(f"wrote {out} (mode 0600)", err=True)


def write_new_key(path: Path, key: str) -> bool:
    """Writes ``key`` to a new file that only its owner can read; False when the file exists.

    Raises:
        EnvironmentFault: It cannot be written.
    """
    try:
        # The mode is given on creation: at no moment is the key readable by others.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    except OSError as error:
        raise EnvironmentFault(f"cannot write the key to {path}: {error.strerror}") from error
    with os.fdopen(fd, "w") as file:
        file.write(key + "\n")
    return True


def read_or_make_key(path: Path) -> str:
    """The key in ``path``; a new one is written there first when the file does not exist.

    Raises:
        EnvironmentFault: The file cannot be read or made, or others can read it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if write_new_key(path, key := secrets.token_hex(KEY_BYTES)):
            return key
        mode = path.stat().st_mode
        if mode & 0o077:
            raise EnvironmentFault(f"{path} can be read by others (mode {mode & 0o777:o}): chmod 600 {path}")
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentFault(f"cannot use the key file {path}: {error}") from error


# ---------------------------------------------------------------------------------------------------- size


@main.command()
@click.option("--layers", type=click.IntRange(1), required=True, help="Layers with a KV cache.")
@click.option("--kv-heads", type=click.IntRange(1), required=True, help="KV heads of the model.")
@click.option("--head-dim", type=click.IntRange(1), required=True, help="Dimension of a head.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor parallel size.")
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens of a GPU block.")
@click.option("--dtype-bytes", type=click.IntRange(1, 8), default=2, show_default=True, help="Bytes of an element.")
@click.option("--lanes", type=click.IntRange(1), default=4, show_default=True, help="memkv_num_threads.")
@click.option(
    "--budget-mb", type=click.IntRange(1), default=128, show_default=True, help="memkv_scratch_mb_per_thread."
)
@click.option("--gpu-gb", type=click.FloatRange(0, min_open=True), help="Memory of the GPU in GB (1e9).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def size(
    layers: int,
    kv_heads: int,
    head_dim: int,
    tp: int,
    block_size: int,
    dtype_bytes: int,
    lanes: int,
    budget_mb: int,
    gpu_gb: float | None,
    as_json: bool,
) -> None:
    """Work out the staging memory of one rank, for planning: the engine itself measures the live tensors."""
    from memkv_vllm.engine.staging import budget_warning, plan_staging

    value = layers * 2 * block_size * heads_per_rank(kv_heads, tp) * head_dim * dtype_bytes
    plan = plan_staging(
        value,
        lanes,
        budget_mb,
        tokens_per_block=block_size,
        total_gpu_bytes=None if gpu_gb is None else int(gpu_gb * 1e9),
    )
    facts: dict[str, int | float | None] = {
        "value_bytes": plan.value_bytes,
        "chunk_blocks": plan.chunk_blocks,
        "lanes": plan.num_lanes,
        "slots": plan.num_slots,
        "scratch_bytes": plan.scratch_bytes,
        "tokens_lost_at_gpu_medium": plan.tokens_lost,
        "share_of_gpu": plan.headroom,
    }
    if as_json:
        click.echo(json.dumps(facts))
    else:
        _print_size(facts, budget_mb, block_size)
    if warning := budget_warning(plan):
        click.echo(f"warning: {warning}", err=True)


def heads_per_rank(kv_heads: int, tp: int) -> int:
    """KV heads that one rank holds: shared evenly, or one each (copies) when there are fewer heads than ranks.

    Raises:
        ConfigError: The numbers do not divide; vLLM refuses them as well.
    """
    if max(kv_heads, tp) % min(kv_heads, tp):
        raise ConfigError("memkv size", [f"--kv-heads = {kv_heads}, --tp = {tp}: expected one to divide the other"])
    return max(1, kv_heads // tp)


def _print_size(facts: Mapping[str, Any], budget_mb: int, block_size: int) -> None:
    value, scratch = facts["value_bytes"], facts["scratch_bytes"]
    bound = "the cap of 64" if value * 64 <= budget_mb * MIB else f"the budget of {budget_mb} MiB a lane"
    click.echo(f"value    {value / MIB:10.3f} MiB   one block of {block_size} tokens, all layers, one rank")
    click.echo(f"chunk    {facts['chunk_blocks']:10d} blocks bound by {bound}")
    click.echo(f"scratch  {scratch / MIB:10.3f} MiB   {facts['lanes']} lanes, {facts['slots']} slots")
    click.echo(f"tokens   {facts['tokens_lost_at_gpu_medium']:10d}       of KV cache, if memkv_scratch_medium is gpu")
    if facts["share_of_gpu"] is not None:
        click.echo(f"share    {facts['share_of_gpu']:10.3%}       of the GPU's memory, likewise")


# ---------------------------------------------------------------------------------------------------- demo


@main.command()
def demo() -> None:
    """Show it work here: real vLLM on the CPU, a store, a restart, a damaged value."""
    from memkv_vllm.demo.__main__ import main as run

    sys.exit(run())


# ---------------------------------------------------------------------------------------------------- logging


def configure_logging(*, as_json: bool) -> None:
    """Sends all logs to stderr, from level INFO on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(as_json=as_json))
    logging.root.handlers = [handler]
    logging.root.setLevel(logging.INFO)

"""The ``memkv`` command: what it prints, what it refuses, and how it ends."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner, Result

from memkv_vllm import __version__
from memkv_vllm.cli import main, read_or_make_key
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.observe import LineFormatter
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.store.polling import PollingSelector
from memkv_vllm.transports.registry import client_transport
from memkv_vllm.types import Deadline

HEX_KEY = re.compile(r"[0-9a-f]{64}")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_version() -> None:
    assert run("--version").output == f"memkv, version {__version__}\n"


def test_help_names_every_command() -> None:
    output = run("--help").output
    assert all(name in output for name in main.commands)


# ---------------------------------------------------------------------------------------------------- keygen


def test_keygen_prints_a_new_key_each_time() -> None:
    first, second = run("keygen").output.strip(), run("keygen").output.strip()
    assert HEX_KEY.fullmatch(first)
    assert HEX_KEY.fullmatch(second)
    assert first != second


def test_keygen_writes_a_private_file_and_does_not_print_the_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    result = run("keygen", "--out", str(path))
    assert result.exit_code == 0
    assert HEX_KEY.fullmatch(path.read_text().strip())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().strip() not in result.output


def test_keygen_never_overwrites(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("precious")
    result = run("keygen", "--out", str(path))
    assert result.exit_code == 1
    assert "exists and is not overwritten" in result.output
    assert path.read_text() == "precious"


def test_keygen_says_why_it_cannot_write(tmp_path: Path) -> None:
    result = run("keygen", "--out", str(tmp_path / "missing" / "key"))
    assert result.exit_code == 1
    assert "No such file or directory" in result.output


# ---------------------------------------------------------------------------------------------------- the dev key


def test_dev_key_is_made_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "state" / "memkv" / "dev.key"
    key = read_or_make_key(path)
    assert HEX_KEY.fullmatch(key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert read_or_make_key(path) == key


def test_dev_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dev.key"
    path.write_text("00" * 32)
    path.chmod(0o644)
    with pytest.raises(EnvironmentFault, match="chmod 600"):
        read_or_make_key(path)


# ---------------------------------------------------------------------------------------------------- size

SIZES = [
    # layers, kv heads, head dim, tp, block, dtype bytes -> value MiB, chunk, scratch MiB
    ((32, 8, 128, 8, 16, 2), 0.25, 64, 64),
    ((80, 8, 128, 8, 16, 2), 0.625, 64, 160),
    ((80, 8, 128, 8, 64, 2), 2.5, 51, 510),
]


@pytest.mark.parametrize(("shape", "value", "chunk", "scratch"), SIZES)
def test_size(shape: tuple[int, ...], value: float, chunk: int, scratch: int) -> None:
    names = ("--layers", "--kv-heads", "--head-dim", "--tp", "--block-size", "--dtype-bytes")
    arguments = [word for name, number in zip(names, shape, strict=True) for word in (name, str(number))]
    facts = json.loads(run("size", *arguments, "--json").output)
    assert facts["value_bytes"] == value * 2**20
    assert facts["chunk_blocks"] == chunk
    assert facts["scratch_bytes"] == scratch * 2**20
    text = run("size", *arguments).output
    assert f"{value:.3f} MiB" in text
    assert f"{scratch:.3f} MiB" in text


def test_size_share_of_a_gpu() -> None:
    arguments = "--layers 80 --kv-heads 8 --head-dim 128 --tp 8 --block-size 64 --gpu-gb 141".split()
    assert "0.379%" in run("size", *arguments).output


def test_size_warns_of_a_chunk_of_one() -> None:
    result = run(*"size --layers 80 --kv-heads 8 --head-dim 128 --block-size 64 --budget-mb 30".split())
    assert result.exit_code == 0
    assert "memkv_scratch_mb_per_thread" in result.output


def test_more_ranks_than_heads_hold_a_copy_each() -> None:
    facts = json.loads(run(*"size --layers 1 --kv-heads 2 --head-dim 64 --tp 8 --json".split()).output)
    assert facts["value_bytes"] == 2 * 16 * 1 * 64 * 2


def test_size_refuses_heads_that_do_not_divide() -> None:
    result = run(*"size --layers 1 --kv-heads 7 --head-dim 64 --tp 8".split())
    assert result.exit_code == 2
    assert "expected one to divide the other" in result.output


# ---------------------------------------------------------------------------------------------------- logs


def record(message: str, *arguments: object, failure: bool = False) -> logging.LogRecord:
    info: Any = None
    if failure:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            info = sys.exc_info()
    return logging.LogRecord("memkv.test", logging.WARNING, __file__, 1, message, arguments, info)


def test_log_line_is_pairs() -> None:
    line = LineFormatter(as_json=False).format(record("event=hello who=%s", "you"))
    assert re.fullmatch(r"ts=\S+Z level=warning logger=memkv.test event=hello who=you", line)


def test_log_line_of_an_event_name_becomes_a_pair() -> None:
    line = LineFormatter(as_json=False).format(record("server.started id=%s", "ab"))
    assert line.endswith(" event=server.started id=ab")


def test_log_line_of_others_is_quoted() -> None:
    line = LineFormatter(as_json=False).format(record('two\nlines "quoted"'))
    assert line.endswith(r'message="two\nlines \"quoted\""')


@pytest.mark.parametrize("as_json", [False, True])
def test_log_line_stays_one_line_with_an_exception(as_json: bool) -> None:
    line = LineFormatter(as_json=as_json).format(record("event=bad", failure=True))
    assert "\n" not in line
    assert "ValueError" in line
    if as_json:
        assert json.loads(line)["message"] == "event=bad"


# ---------------------------------------------------------------------------------------------------- start


@pytest.mark.parametrize("arguments", [[], ["--dev", "--config", "x"], ["--config", "x", "--address", "y:1"]])
def test_start_wants_one_way_to_be_told(arguments: list[str]) -> None:
    assert run("start", *arguments).exit_code == 2


def memkv(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memkv_vllm", *arguments], capture_output=True, text=True, timeout=15, **options
    )


def test_wrong_settings_are_shown_at_once_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("network: {adress: 1}\nmemory: {max_size: many}\n")
    done = memkv("start", "--config", str(path))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "network.adress" in done.stderr
    assert "memory.max_size" in done.stderr
    assert done.stdout == ""


def test_start_with_a_missing_file(tmp_path: Path) -> None:
    done = memkv("start", "--config", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    assert "none.yaml" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("network", "polls"), [("", True), (", idle_poll_us: 70", True), (", idle_poll_us: 0", False)])
def test_a_server_looks_for_the_next_request_as_long_as_its_setting_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, network: str, polls: bool
) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(f"network: {{address: 127.0.0.1:0, auth_key: {'5e' * 32}{network}}}\nmemory: {{max_size: 8MiB}}\n")
    path.chmod(0o600)
    loops = []

    def keep(*_: object, backend_options: dict[str, Any], **__: object) -> None:
        loops.append(backend_options["loop_factory"]())

    monkeypatch.setattr(anyio, "run", keep)
    assert run("start", "--config", str(path)).exit_code == 0
    (loop,) = loops
    assert isinstance(loop._selector, PollingSelector) == polls
    if polls:
        assert repr(loop._selector._idle) == f"<IdlePoll 0 of {70 if network else 200} us>"
    loop.close()


@contextmanager
def dev_server(state: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """``memkv start --dev`` on any free port, with what it printed until it was ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "memkv_vllm", "start", "--dev", "--address=127.0.0.1:0", "--max-size=8MiB", *arguments],
        env={**os.environ, "XDG_STATE_HOME": str(state)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if line.startswith("ready "):
                break
        else:
            process.wait(5)
            assert process.stderr is not None
            pytest.fail(f"exit {process.returncode}: {process.stderr.read()}")
        yield process, lines
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_dev_server_says_what_to_export_and_ends_in_order(tmp_path: Path, number: signal.Signals) -> None:
    with dev_server(tmp_path) as (process, lines):
        exports = dict(line.removeprefix("export ").split("=", 1) for line in lines if line.startswith("export "))
        assert exports.keys() == {"MEMKV_SERVERS", "MEMKV_AUTH_KEY_FILE", "MEMKV_TRANSPORT"}
        assert exports["MEMKV_TRANSPORT"] == "loopback"
        key = Path(exports["MEMKV_AUTH_KEY_FILE"]).read_text().strip()
        assert lines[-1].startswith(f"ready address={exports['MEMKV_SERVERS']} ")
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
        assert process.returncode == 0, err
        assert "Traceback" not in err
        assert "event=stopped" in err
        assert key not in "\n".join([*lines, out, err])


def test_dev_server_uses_the_same_key_again(tmp_path: Path) -> None:
    keys = []
    for _ in range(2):
        with dev_server(tmp_path):
            keys.append((tmp_path / "memkv" / "dev.key").read_text())
    assert keys[0] == keys[1]


@pytest.mark.parametrize("transport", ["tcp", "loopback"])
def test_one_port_serves_every_transport(tmp_path: Path, transport: str) -> None:
    with dev_server(tmp_path) as (_, lines):
        host, _, port = lines[-1].split()[1].removeprefix("address=").rpartition(":")
        key = bytes.fromhex((tmp_path / "memkv" / "dev.key").read_text().strip())

        async def ask() -> None:
            deadline = Deadline(time.monotonic() + 10)
            client = client_transport(transport)
            connection = await client.connect(host, int(port), Credentials(key), PeerKind.TOOL, deadline)
            assert connection.alive
            await connection.aclose()

        anyio.run(ask)


def test_a_second_server_on_the_same_address_says_so(tmp_path: Path) -> None:
    with dev_server(tmp_path) as (_, lines):
        address = lines[-1].split()[1].removeprefix("address=")
        done = memkv("start", "--dev", "--address", address, env={**os.environ, "XDG_STATE_HOME": str(tmp_path)})
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.startswith("memkv: ")
        assert address.rpartition(":")[2] in last


def test_json_logs(tmp_path: Path) -> None:
    with dev_server(tmp_path, "--log-json", "--license", "x.jwt") as (process, _):
        process.terminate()
        _, err = process.communicate(timeout=10)
    messages = [json.loads(line)["message"] for line in err.splitlines()]
    assert any(message.startswith("event=license_ignored") for message in messages)
    assert messages[-1] == "event=stopped"

"""The settings of either side as the checks need them. What is wrong with them is a finding, not the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from memkv_vllm.config import (
    DirectConfig,
    RailAddress,
    ServerConfig,
    TransportName,
    load_client_config,
    load_server_config,
    parse_servers,
)
from memkv_vllm.doctor.asking import Asking
from memkv_vllm.doctor.facts import Need, Side
from memkv_vllm.errors import ConfigError
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.transports.verbs.opening import Knobs

__all__ = ["Settings", "client_settings", "default_staging_bytes", "server_settings"]

MIB = 1 << 20
ASK_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Settings:
    """What was configured."""

    side: Side
    need: Need
    transport: str = TransportName.VERBS.value
    problems: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    knobs: Knobs = field(default_factory=Knobs)
    servers: tuple[tuple[str, RailAddress], ...] = ()
    """Name and address of every rail."""
    asking: Asking | None = None
    """None: there is no key to ask with."""
    pinned_bytes: int = 0
    pinned_purpose: str = ""
    server: ServerConfig | None = None


def default_staging_bytes() -> int:
    """Of one rank with the settings' defaults, at the most."""
    fields = DirectConfig.model_fields
    return int(fields["num_threads"].default) * int(fields["scratch_mb_per_thread"].default) * MIB


def client_settings(servers: Sequence[str], staging_bytes: int) -> Settings:
    """A client's, from the yaml of ``MEMKV_CONFIG`` and ``MEMKV_*``.

    Args:
        servers: in place of the configured ones.
        staging_bytes: of one rank.
    """
    try:
        config = load_client_config(servers=servers)
    except ConfigError as error:
        return Settings(
            Side.CLIENT,
            Need.REQUIRED,
            problems=error.problems,
            servers=_rails(servers),
            pinned_bytes=staging_bytes,
            pinned_purpose="staging memory of one rank, for each server",
        )
    # Left out it is verbs in direct mode, which is the main one; in tier mode it would be auto.
    transport = config.transport or TransportName.VERBS
    needs = {TransportName.VERBS: Need.REQUIRED, TransportName.AUTO: Need.WANTED}
    count = len(config.servers)
    return Settings(
        Side.CLIENT,
        needs.get(transport, Need.NONE),
        transport.value,
        devices=config.rdma_devices,
        knobs=Knobs(config.gid_index, config.traffic_class, config.service_level, config.mtu),
        servers=tuple((server.name, rail) for server in config.servers for rail in server.rails),
        asking=Asking(
            "loopback" if transport is TransportName.LOOPBACK else "tcp",
            Credentials(config.auth_key.get_secret_value(), config.auth_key_id, config.license_text),
            min(ASK_TIMEOUT_S, config.connect_timeout_s),
            tls=config.tls,
            tls_ca=config.tls_ca,
            tls_server_name=config.tls_server_name,
        ),
        pinned_bytes=staging_bytes * count,
        pinned_purpose=f"{staging_bytes // MIB} MiB of staging memory of a rank, for each of {_count(count, 'server')}",
    )


def server_settings(path: Path | None, servers: Sequence[str]) -> Settings:
    """A storage host's, from its yaml.

    Args:
        path: of the yaml; None: not given.
        servers: addresses to ask, with this server's own key; none: its own, if something listens there.
    """
    if path is None:
        # Whether it shall have RDMA is not known.
        return Settings(Side.SERVER, Need.WANTED, servers=_rails(servers))
    try:
        config = load_server_config(path)
    except ConfigError as error:
        return Settings(Side.SERVER, Need.WANTED, problems=error.problems, servers=_rails(servers))
    rdma, count = config.rdma, len({name.partition(":")[0] for name in config.rdma.devices})
    own = config.network.address
    if own.host in ("0.0.0.0", "::"):
        own = RailAddress("127.0.0.1" if own.host == "0.0.0.0" else "::1", own.port)
    return Settings(
        Side.SERVER,
        Need.REQUIRED if rdma.devices else Need.NONE,
        "verbs" if rdma.devices else "tcp",
        devices=rdma.devices,
        knobs=Knobs(rdma.gid_index, rdma.traffic_class, rdma.service_level, rdma.mtu),
        servers=_rails(servers) or ((str(own), own),),
        asking=_own_key(config),
        pinned_bytes=config.memory.max_size * count,
        pinned_purpose=f"the arena of {config.memory.max_size / MIB:.0f} MiB, on each of {_count(count, 'device')}",
        server=config,
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def _own_key(config: ServerConfig) -> Asking | None:
    """The server's first key. With TLS on the control channel its certificate's name is not known here."""
    keys = config.network.keys
    if config.network.tls_control or not keys:
        return None
    key_id, entry = next(iter(keys.items()))
    return Asking("tcp", Credentials(entry.key.get_secret_value(), key_id), ASK_TIMEOUT_S)


def _rails(servers: Sequence[str]) -> tuple[tuple[str, RailAddress], ...]:
    """Of ``--server``, which the command has checked."""
    if not servers:
        return ()
    return tuple((server.name, rail) for server in parse_servers(list(servers)) for rail in server.rails)

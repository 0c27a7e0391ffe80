"""The servers and clients of a soak: their settings, sizes and number."""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from memkv_vllm.store.log.format import BLOCK_BYTES, SUPERBLOCK_COPIES, parse_superblock
from tests.soak.client_process import Orders
from tests.soak.clients import ClientActor
from tests.support.actors import ServerActor

__all__ = ["Options", "make_clients", "make_servers"]

MIB = 1 << 20
ARENA_BYTES, DRIVE_BYTES, SEGMENT_BYTES, WRITE_BEHIND_BYTES = 64 * MIB, 256 * MIB, 16 * MIB, 24 * MIB
"""So small that values are evicted, segments reclaimed and values read back from disk all the time."""


@dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
        seed: of everything that is decided by chance.
        duration_s: length of the load in seconds.
        transport: ``loopback``, ``tcp`` or ``verbs``.
        modes: ``storage.mode`` of each server.
        spoil: see ``tests.soak.spoilt_server``; None for the product as it is.
        rest_s: how long a server may take to come to rest after its last client.
        clients: names of those of :data:`CLIENTS` that take part.
        host: the address of the servers.
        devices: RDMA devices of the servers and of the clients, for verbs.
    """

    seed: int
    duration_s: float
    transport: str = "loopback"
    modes: Sequence[str] = ("memory", "file", "direct")
    spoil: str | None = None
    rest_s: float = 30.0
    clients: Sequence[str] = ("ledger-a", "ledger-b", "rank-a", "rank-b", "rank-c")
    host: str = "127.0.0.1"
    devices: tuple[str, str] | None = None


@dataclass(frozen=True)
class ClientPlan:
    """One client: its name, its module, what it is told, and whether it may be killed."""

    name: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    steady: bool = False


def _engine(name: str, value_bytes: int, blocks: int, space: str, verify: str, steady: bool = False) -> ClientPlan:
    options = {
        "value_bytes": value_bytes, "blocks": blocks, "space": space, "private": space == name, "verify": verify,
    }  # fmt: skip
    return ClientPlan(name, "tests.soak.engine_client", options, steady)


CLIENTS = (
    ClientPlan("ledger-a", "tests.soak.ledger_client", steady=True),
    ClientPlan("ledger-b", "tests.soak.ledger_client"),
    _engine("rank-a", 64 << 10, 500, "shared", "full", steady=True),
    _engine("rank-b", 64 << 10, 500, "shared", "off"),
    _engine("rank-c", 2_500_001, 60, "rank-c", "sampled"),
)
"""Two kinds, two that live through it all. A value of ``rank-c`` is a multiple of nothing."""


def make_servers(options: Options, folder: Path) -> list[ServerActor]:
    """The servers, not started; their key is in ``folder / "key"``."""
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(random.Random(os.urandom(16)).randbytes(32).hex() + "\n", encoding="ascii")
    servers = []
    for number, (mode, port) in enumerate(zip(options.modes, _free_ports(options), strict=True)):
        name = f"{mode}-{number}"
        medium = None if mode == "memory" else folder / f"{name}.disk"
        if medium is not None and mode == "direct":
            _preallocate(medium)
        config = folder / f"{name}.yaml"
        config.write_text(yaml.safe_dump(_settings(options, mode, port, key, medium)), encoding="utf-8")
        module = () if options.spoil is None else ("tests.soak.spoilt_server", options.spoil)
        servers.append(ServerActor(name, folder, config=config, medium=medium, module=module))
    return servers


def _settings(options: Options, mode: str, port: int, key: Path, medium: Path | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "network": {"address": f"{options.host}:{port}", "auth_key_file": str(key)},
        "memory": {"max_size": ARENA_BYTES, "hugepages": "off"},
        "storage": {"mode": mode},
        "limits": {"transfer_timeout_s": 10},
    }
    if options.devices is not None:
        settings["rdma"] = {"devices": [options.devices[0]]}
    if medium is not None:
        settings["storage"] |= {
            "drives": [{"media": str(medium), "max_size": DRIVE_BYTES}],
            "segment_size": SEGMENT_BYTES,
            "max_write_behind": WRITE_BEHIND_BYTES,
        }
    return settings


def _preallocate(medium: Path) -> None:
    with medium.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, DRIVE_BYTES)


def _free_ports(options: Options) -> list[int]:
    """A port for each server: nobody uses it and its neighbour (admin HTTP); below those that the kernel gives away."""
    found: list[int] = []
    candidates = list(range(20_000, 32_000, 2))
    random.Random(os.urandom(8)).shuffle(candidates)
    for port in candidates:
        if all(_is_free(options.host, port + step) for step in (0, 1)):
            found.append(port)
        if len(found) == len(options.modes):
            return found
    raise RuntimeError("no free ports between 20000 and 32000")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def environ_of(options: Options, servers: Sequence[ServerActor], folder: Path) -> dict[str, str]:
    """The environment of a client."""
    addresses = [yaml.safe_load(server.config.read_text())["network"]["address"] for server in servers]
    return {
        "MEMKV_SERVERS": ",".join(f"{server.name}={at}" for server, at in zip(servers, addresses, strict=True)),
        "MEMKV_AUTH_KEY_FILE": str(folder / "key"),
        "MEMKV_TRANSPORT": options.transport,
        "MEMKV_CONNECT_TIMEOUT_S": "3",
        "MEMKV_OP_TIMEOUT_S": "8",
        **({} if options.devices is None else {"MEMKV_RDMA_DEVICES": options.devices[1]}),
    }


def make_clients(options: Options, servers: Sequence[ServerActor], folder: Path) -> list[ClientActor]:
    """The clients, not started."""
    environ = environ_of(options, servers, folder)
    mode = "tier" if options.transport == "tcp" else "direct"

    def orders_of(plan: ClientPlan) -> Any:
        def orders(life: int) -> Orders:
            journal = str(folder / f"{plan.name}.{life}.journal")
            return Orders(plan.name, life, options.seed, environ, mode, journal, plan.options)

        return orders

    return [ClientActor(plan.name, folder, module=plan.module, orders=orders_of(plan)) for plan in _plans(options)]


def _plans(options: Options) -> list[ClientPlan]:
    return [plan for plan in CLIENTS if plan.name in options.clients]


def killable(options: Options) -> list[str]:
    """Names of the clients that a plan may break."""
    return [plan.name for plan in _plans(options) if not plan.steady]


def steady(options: Options) -> list[str]:
    """Names of those that live through it all."""
    return [plan.name for plan in _plans(options) if plan.steady]


def note(folder: Path, options: Options, plan: Sequence[str]) -> None:
    """Write down what is run, so that it can be run again."""
    (folder / "plan.txt").write_text("\n".join([f"seed {options.seed}", *plan]) + "\n", encoding="utf-8")
    facts = {"seed": options.seed, "duration_s": options.duration_s, "modes": list(options.modes)}
    (folder / "options.json").write_text(json.dumps(facts | {"transport": options.transport}), encoding="utf-8")


def values_begin(medium: Path) -> int:
    """Where the segments begin on a medium: superblock and journal, which stand before, are not damaged here."""
    with medium.open("rb") as file:
        copies = [parse_superblock(file.read(BLOCK_BYTES)) for _ in range(SUPERBLOCK_COPIES)]
    superblock = next((copy for copy in copies if copy is not None), None)
    assert superblock is not None, f"{medium} has no superblock"
    return superblock.geometry.segments_offset

"""Names to transports: what is configured is what runs, and ``auto`` says what it leaves out. Faults P072, P088."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memkv_vllm.config import RailAddress, ServerAddress
from memkv_vllm.engine.client import ClusterClient, ClusterSettings
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports import registry
from memkv_vllm.transports.registry import client_transport, client_transports

ROOT = Path(__file__).resolve().parents[2]


class Fake:
    """A transport that remembers its options."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.closed = False

    async def aclose(self) -> None:
        self.closed = True


class Verbs(Fake):
    """In the place of verbs."""


class Tcp(Fake):
    """In the place of tcp."""


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._CLIENTS, "verbs", (__name__, "Verbs"))
    monkeypatch.setitem(registry._CLIENTS, "tcp", (__name__, "Tcp"))


def settings(transport: str, **more: Any) -> ClusterSettings:
    server = ServerAddress("s", (RailAddress("10.0.0.1", 9900),))
    return ClusterSettings((server,), Credentials(bytes(32)), transport, 5.0, 30.0, **more)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(EnvironmentFault, match="no transport is called 'rdma'; known: loopback, tcp, verbs"):
        client_transports("rdma")


def test_a_named_transport_that_cannot_run_refuses_at_once_and_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Direct mode without verbs must not start, and never turns to another."""

    def no_nic(**options: Any) -> Fake:
        raise EnvironmentFault("no RDMA device")

    monkeypatch.setattr(sys.modules[__name__], "Verbs", no_nic)
    monkeypatch.setitem(registry._CLIENTS, "verbs", (__name__, "Verbs"))
    for make in (client_transport, client_transports):
        with pytest.raises(EnvironmentFault, match="no RDMA device"):
            make("verbs")


def test_a_module_that_is_not_part_of_this_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._CLIENTS, "verbs", ("memkv_vllm.transports.later", "X"))
    with pytest.raises(EnvironmentFault, match="'verbs' is not part of this version"):
        client_transport("verbs")


def test_a_transport_whose_library_is_missing_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "memkv_needs_this":
                raise ModuleNotFoundError("no module", name="pyverbs")

    monkeypatch.setitem(registry._CLIENTS, "verbs", ("memkv_needs_this", "X"))
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(EnvironmentFault, match="'verbs' needs the Python package 'pyverbs'"):
        client_transport("verbs")


@pytest.mark.anyio
@pytest.mark.usefixtures("fakes")
async def test_auto_is_verbs_then_tcp_each_made_on_first_use() -> None:
    transports = client_transports("auto", {"tcp": {"num_connections": 3}})
    assert transports.names == ("verbs", "tcp")
    verbs, tcp = transports.get("verbs"), transports.get("tcp")
    assert isinstance(verbs, Verbs) and isinstance(tcp, Tcp)
    assert transports.get("tcp") is tcp
    assert (verbs.options, tcp.options) == ({}, {"num_connections": 3})
    await transports.aclose()
    assert verbs.closed and tcp.closed


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.usefixtures("fakes")
def test_the_number_of_connections_reaches_tcp_and_nothing_else(transport: str) -> None:
    cluster = settings(transport, num_connections=9)
    client = ClusterClient(cluster, cluster.transports(), PeerKind.TOOL)
    assert client._transports.get("tcp").options["num_connections"] == 9  # type: ignore[attr-defined]
    if transport == "auto":
        assert "num_connections" not in client._transports.get("verbs").options  # type: ignore[attr-defined]


@pytest.mark.usefixtures("fakes")
def test_what_reaches_verbs() -> None:
    cluster = settings(
        "verbs", rdma_devices=("mlx5_1",), gid_index=3, traffic_class=104, service_level=1, mtu=4096, tls=True
    ).on_rail(5, 8, "0000:17:00.0")
    made = cluster.transports(PeerKind.ENGINE, 512).get("verbs")
    assert made.options == {  # type: ignore[attr-defined]
        "devices": ("mlx5_1",), "gid_index": 3, "traffic_class": 104, "service_level": 1, "mtu": 4096,
        "rank": 5, "num_ranks": 8, "gpu": "0000:17:00.0", "data_path": True, "staging_bytes": 512,
        "servers": [("s", ("10.0.0.1",))], "tls": True, "tls_ca": None, "tls_server_name": None,
    }  # fmt: skip


@pytest.mark.usefixtures("fakes")
def test_only_an_engine_needs_a_nic() -> None:
    for kind in PeerKind:
        made = settings("verbs").transports(kind).get("verbs")
        assert made.options["data_path"] is (kind is PeerKind.ENGINE)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("fakes")
def test_under_auto_a_server_on_no_rail_rules_verbs_out_for_nobody_else() -> None:
    made = settings("auto").transports(PeerKind.ENGINE).get("verbs")
    assert made.options["servers"] == []  # type: ignore[attr-defined]


def test_auto_without_verbs_says_so_once_for_all_servers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._CLIENTS, "verbs", ("memkv_vllm.transports.later", "X"))
    transports = client_transports("auto")
    for _ in range(20):
        with pytest.raises(EnvironmentFault):
            transports.get("verbs")
    (line,) = [record for record in caplog.records if "event=transport_unavailable" in record.getMessage()]
    assert line.levelno == logging.WARNING
    assert "transport=verbs" in line.getMessage() and "over tcp" in line.getMessage()


@pytest.mark.usefixtures("fakes")
def test_verbs_that_come_later_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library was installed, the NIC came up: the next try may succeed."""
    transports = client_transports("auto")
    monkeypatch.setitem(registry._CLIENTS, "verbs", ("memkv_vllm.transports.verbs_to_come", "X"))
    with pytest.raises(EnvironmentFault):
        transports.get("verbs")
    module = ModuleType("memkv_vllm.transports.verbs_to_come")
    module.X = Verbs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert isinstance(transports.get("verbs"), Verbs)


PROBE = """
import os, sys

asked, opened = [], []

class Watch:
    def find_spec(self, name, *_):
        asked.append(name)

sys.meta_path.insert(0, Watch())
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event in ("ctypes.dlopen", "open") else None)

from memkv_vllm.config import load_client_config
from memkv_vllm.engine.client import ClusterClient, ClusterSettings
from memkv_vllm.protocol.session import PeerKind

cluster = ClusterSettings.from_config(load_client_config(), "tier")
ClusterClient(cluster, cluster.transports(), PeerKind.ENGINE)
bad = [name for name in asked if "verbs" in name]
bad += [path for path in opened if "ibverbs" in path or "infiniband" in path]
print(cluster.transport, bad)
"""


@pytest.mark.timeout(60)
def test_another_transport_never_looks_for_verbs() -> None:
    """P072: devices are there and configured, transport says loopback: nothing of verbs is opened or imported.

    ``auto`` is the control: it does look.
    """
    environ = {
        "MEMKV_SERVERS": "127.0.0.1:9900",
        "MEMKV_AUTH_KEY": "a" * 64,
        "MEMKV_RDMA_DEVICES": "mlx5_0",
        "PATH": "/usr/bin:/bin",
    }
    code = textwrap.dedent(PROBE)

    def run(transport: str, more: str = "") -> str:
        done = subprocess.run(
            [sys.executable, "-c", code.replace("bad =", more + "\nbad =")],
            env={**environ, "MEMKV_TRANSPORT": transport},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=50,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip().splitlines()[-1]

    assert run("loopback") == "loopback []"
    look = "try:\n    cluster.transports().get('verbs')\nexcept Exception:\n    pass"
    assert "memkv_vllm.transports.verbs" in run("auto", look)

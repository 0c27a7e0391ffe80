"""The server's start over verbs: everything that makes it refuse, each with its own message, and what it holds."""

from __future__ import annotations

import errno
import logging
import re
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from memkv_vllm.config import ServerConfig
from memkv_vllm.errors import EnvironmentFault, LocalProtocolError
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs import datapath as datapath_module
from memkv_vllm.transports.verbs.datapath import VerbsDataPath
from memkv_vllm.transports.verbs.opening import Knobs
from memkv_vllm.transports.verbs.provider import Access, PortState
from tests.support.fake_verbs import FakeMemoryRegion
from tests.support.harness import wait_until
from tests.support.verbs_host import FakeHost

pytestmark = pytest.mark.anyio

ARENA_BYTES = 1 << 20


@pytest.fixture
def host(tmp_path: Path) -> FakeHost:
    return FakeHost.make(tmp_path, "10.77.0.1", "10.78.0.1")


@asynccontextmanager
async def opened(path: VerbsDataPath) -> AsyncIterator[None]:
    with HostMemory.create("arena", ARENA_BYTES) as arena:
        try:
            await path.open(arena)
            yield
        finally:
            await path.aclose()
            await path.aclose()


def without_cap(host: FakeHost) -> None:
    """This process may pin only what its limit says."""
    (host.root / "proc/self/status").write_text("CapEff:\t0000000000000000\n")


async def refusal(host: FakeHost, **options: Any) -> str:
    """The message with which it refuses to start; nothing of it stays."""
    with pytest.raises(EnvironmentFault) as caught:
        async with opened(host.data_path(**options)):
            pass
    assert host.provider.num_live() == 0
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def test_what_a_server_says_and_holds(host: FakeHost, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memkv")
    knobs = Knobs(traffic_class=104, service_level=3)
    async with opened(host.data_path(knobs=knobs)):
        regions = [owned for owned in host.provider.ledger._live if isinstance(owned, FakeMemoryRegion)]
        # Nobody at the other end of a network may ever reach the arena.
        assert [region.access for region in regions] == [Access.LOCAL] * 4
        lines = [record.getMessage() for record in caplog.records if "event=rdma_ready" in record.getMessage()]
        assert len(lines) == 2
        for part in (
            "device=fake0 port=1 gid=10.77.0.1 gid_index=1 mtu=1024 address=10.77.0.1",
            "traffic_class=104 service_level=3 rate=",
            "Gbit/s max_reads=",
            "library=fake",
            "RoCE v2",
        ):
            assert part in lines[0]
        host.nics[1].set_port(1, PortState.DOWN)
        await wait_until(lambda: "event=rdma_port_err device=fake1 element=1" in caplog.text, "the event is logged")
        assert "rdma_address" not in caplog.text
    assert host.provider.num_live() == 0


async def test_a_port_that_goes_down_is_in_the_health_until_it_is_back(host: FakeHost) -> None:
    """P070."""
    path = host.data_path()
    assert path.health() == []
    async with opened(path):
        assert path.health() == []
        host.nics[1].set_port(1, PortState.DOWN)
        await wait_until(path.health, "the event has arrived")
        (line,) = path.health()
        assert line.startswith("RDMA port fake1:1 (10.78.0.1) is down")
        host.nics[1].set_port(1, PortState.ACTIVE)
        await wait_until(lambda: not path.health(), "it is over")
    assert path.health() == []


async def test_addresses_that_nobody_can_come_to_are_told(host: FakeHost, caplog: pytest.LogCaptureFixture) -> None:
    """P070: the second rail of a server that listens on the first one's address only."""
    async with opened(host.data_path(listen_host="10.77.0.1")):
        lines = [record.getMessage() for record in caplog.records if "event=rdma_address" in record.getMessage()]
    (line,) = lines
    assert line.startswith("event=rdma_address device=fake1 port=1 reason='network.address is 10.77.0.1, so no client")


async def test_only_the_named_devices_are_opened(host: FakeHost) -> None:
    """P073."""
    async with opened(host.data_path(devices=["fake1:1"])):
        assert host.provider.num_opened == 1
        assert len(host.nics[1].opened) == 1 and not host.nics[0].opened


async def test_two_ports_of_one_device_share_the_registration(tmp_path: Path) -> None:
    host = FakeHost.make(tmp_path, "10.77.0.1")
    path = host.data_path(devices=["fake0", "fake0:1"])
    async with opened(path):
        assert host.provider.num_opened == 1


async def test_no_library(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise EnvironmentFault("transport verbs needs libibverbs, which cannot be loaded")

    monkeypatch.setattr(datapath_module, "load_provider", missing)
    host_path = VerbsDataPath(["fake0"], root=host.root)
    with pytest.raises(EnvironmentFault, match="needs libibverbs"):
        async with opened(host_path):
            pass


async def test_no_device_at_all(host: FakeHost, tmp_path: Path) -> None:
    """P076: a container that shows none."""
    empty = tmp_path / "empty"
    (empty / "sys/class").mkdir(parents=True)
    host.root = empty
    text = await refusal(host)
    assert "no RDMA device: found no /sys/class/infiniband" in text
    assert "--device=/dev/infiniband" in text and "kubernetes" in text


async def test_a_named_device_that_is_missing(host: FakeHost) -> None:
    """P073: never another one instead."""
    text = await refusal(host, devices=["fake0", "mlx5_7"])
    assert re.match(r"RDMA device mlx5_7 is not on this host: found fake0:1, fake1:1; expected .*rdma.devices", text)


async def test_a_device_that_the_library_does_not_know(host: FakeHost) -> None:
    del host.provider.nics["fake1"]
    assert re.search("fake1", await refusal(host))


async def test_a_port_that_is_down(host: FakeHost) -> None:
    host.nics[1].ports[1].state = PortState.DOWN
    assert "RDMA port fake1:1 is DOWN; expected ACTIVE: check its cable" in await refusal(host)


async def test_no_usable_gid(host: FakeHost) -> None:
    for path in (host.root / "sys/class/infiniband/fake1/ports/1/gids").iterdir():
        path.write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    assert "no usable GID" in await refusal(host)


async def test_a_gid_index_that_is_empty(host: FakeHost) -> None:
    text = await refusal(host, knobs=Knobs(gid_index=9))
    assert "fake0:1 has no GID at index 9: found GIDs 1: 10.77.0.1 (RoCE v2, IPv4)" in text


async def test_an_mtu_that_the_port_does_not_carry(host: FakeHost) -> None:
    text = await refusal(host, knobs=Knobs(mtu=4096))
    assert "mtu is 4096, but fake0:1 carries at most 1024" in text and "rdma.mtu" in text


async def test_memlock_too_small_for_the_arena(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """P074: both numbers, and the fix for every way to run it."""
    without_cap(host)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 65536))
    text = await refusal(host)
    for part in (
        "the limit is 0.1 MiB",
        "the arena of 1.0 MiB on 2 devices needs 2.0 MiB",
        "ulimit -l unlimited",
        "LimitMEMLOCK=infinity",
        "--ulimit memlock=-1",
        "IPC_LOCK",
        "memory.max_size",
    ):
        assert part in text


async def test_a_registration_that_is_refused(host: FakeHost) -> None:
    host.nics[1].troubles.refuse["ibv_reg_mr"] = errno.ENOMEM
    text = await refusal(host)
    assert "the arena of 1.0 MiB cannot be registered on fake1: ibv_reg_mr: Cannot allocate memory" in text
    assert "LimitMEMLOCK=infinity" in text and "memory.max_size" in text


async def test_a_device_that_cannot_be_opened(host: FakeHost) -> None:
    host.nics[0].troubles.refuse["ibv_open_device"] = errno.EACCES
    assert "/dev/infiniband" in await refusal(host)


async def test_it_has_devices_and_is_opened_before_sessions(host: FakeHost) -> None:
    with pytest.raises(LocalProtocolError, match="without devices"):
        host.data_path(devices=[])
    with pytest.raises(LocalProtocolError, match="was not opened"):
        host.data_path().make("10.77.0.1", cut=lambda: None, counted=lambda event: None)


def test_the_settings_reach_it() -> None:
    config = ServerConfig.model_validate(
        {
            "network": {"auth_key": "11" * 32},
            "memory": {"max_size": "64MiB"},
            "rdma": {"devices": ["mlx5_0", "mlx5_1:2"], "gid_index": 3, "traffic_class": 104, "mtu": 2048},
            "limits": {"max_regions_per_session": 5, "max_region_bytes": "1 GiB"},
        }
    )
    config.validate_supported()
    path = VerbsDataPath.from_config(config)
    assert path._devices == ("mlx5_0", "mlx5_1:2")
    assert path._knobs == Knobs(gid_index=3, traffic_class=104, service_level=None, mtu=2048)
    assert (path._options.max_regions, path._options.max_region_bytes) == (5, 1 << 30)

"""Calls of the verbs library that hardly ever fail: their error never leaves the transport untranslated, nor a leak."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from memkv_vllm.errors import ConnectionLost, EnvironmentFault
from memkv_vllm.topology import read_host
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs.gpu_memory import try_registration
from memkv_vllm.transports.verbs.libibverbs import LibibverbsCompletionQueue
from memkv_vllm.transports.verbs.opening import Knobs, rail_of
from memkv_vllm.transports.verbs.ownership import Owned
from memkv_vllm.transports.verbs.passive import PassiveEnd
from memkv_vllm.transports.verbs.provider import PortState, VerbsError
from memkv_vllm.types import MemoryKind
from tests.support.fake_verbs import FakeDevice
from tests.support.verbs_host import FakeHost

pytestmark = pytest.mark.fault


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FakeHost]:
    made = FakeHost.make(tmp_path, "10.77.0.1", "10.78.0.1")
    yield made
    made.fabric.close()


@pytest.fixture
def unclosable(monkeypatch: pytest.MonkeyPatch, host: FakeHost) -> Iterator[None]:
    """Devices that the library does not close."""
    left: list[Owned] = []

    def refuse(device: FakeDevice) -> None:
        left.append(device)
        raise VerbsError("ibv_close_device", errno.EBUSY)

    monkeypatch.setattr(FakeDevice, "_destroy", refuse)
    yield
    for device in left:
        host.provider.ledger.closed(device)


def test_devices_that_cannot_be_listed(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Sequence[str]:
        raise VerbsError("ibv_get_device_list", errno.EMFILE)

    monkeypatch.setattr(host.provider, "device_names", refuse)
    with pytest.raises(EnvironmentFault, match=r"ibv_get_device_list: Too many open files.*fake0.*ulimit -n"):
        host.client()


def test_a_device_that_cannot_be_closed_after_the_check(host: FakeHost, unclosable: None) -> None:
    with pytest.raises(EnvironmentFault, match="RDMA device fake0 cannot be closed again: ibv_close_device.*dmesg"):
        host.client()


def test_the_first_problem_is_the_one_that_is_told(host: FakeHost, unclosable: None) -> None:
    host.nics[0].ports[1].state = PortState.DOWN
    with pytest.raises(EnvironmentFault, match="fake0:1 is DOWN"):
        host.client()


def test_a_trial_whose_device_cannot_be_closed(host: FakeHost, unclosable: None) -> None:
    with HostMemory.create("trial", 4096) as memory:
        region = Region(1, MemoryKind.HOST, 4096, memory)
        with pytest.raises(EnvironmentFault, match="cannot be registered with fake0: ibv_close_device"):
            try_registration(host.provider, ["fake0"], region, root=host.root)


def test_a_set_up_that_failed_is_not_begun_again(host: FakeHost) -> None:
    """A second set of queue pairs would hide the first one from the fence."""
    end = PassiveEnd(host.provider, rail_of(read_host(host.root), "fake0"), Knobs(), 2, host.root)
    host.nics[0].troubles.refuse["ibv_create_qp"] = errno.ENOMEM
    with pytest.raises(VerbsError, match="ibv_create_qp"):
        end.make()
    host.nics[0].troubles.refuse.clear()
    with pytest.raises(ConnectionLost, match="a new one is needed"):
        end.make()
    assert end.close(5.0)
    assert host.provider.num_live() == 0


class EventsThenGone:
    """As much of the library as a completion queue's events need, on a device that the kernel takes away."""

    def __init__(self, num_events: int) -> None:
        self.num_events = num_events
        self.num_acknowledged = 0

    def call(self, name: str, *arguments: int) -> int:
        if name == "ibv_ack_cq_events":
            self.num_acknowledged += arguments[1]
            return 0
        assert name == "ibv_get_cq_event"
        if self.num_events:
            self.num_events -= 1
            return 0
        ctypes.set_errno(errno.EIO)
        return -1


@pytest.mark.parametrize("num_events", [0, 1, 3])
def test_events_are_acknowledged_whatever_comes_behind_them(num_events: int) -> None:
    """``ibv_destroy_cq`` waits for ever for one that was taken and not acknowledged: no fence would end any more."""
    queue = object.__new__(LibibverbsCompletionQueue)
    library = EventsThenGone(num_events)
    queue._library, queue._pointer, queue._channel = library, 1, 2  # type: ignore[assignment]
    queue._event, queue._closing = (ctypes.c_void_p * 2)(), False
    with pytest.raises(VerbsError, match="ibv_get_cq_event"):
        queue.drain()
    assert library.num_acknowledged == num_events


@pytest.mark.parametrize(("call", "gone"), [("ibv_destroy_qp", False), ("", True)])
def test_memory_is_given_back_once_nothing_can_reach_it(
    host: FakeHost, call: str, gone: bool, unclosable: None, caplog: pytest.LogCaptureFixture
) -> None:
    """P039: queue pairs and registrations decide; a device that is not closed reaches nothing without them."""
    end = PassiveEnd(host.provider, rail_of(read_host(host.root), "fake0"), Knobs(), 2, host.root)
    end.make()
    with HostMemory.create("staging", 4096) as memory:
        end.register(Region(1, MemoryKind.HOST, 4096, memory))
        host.nics[0].troubles.refuse = {call: errno.EIO}
        for _ in range(2):
            assert (end.close(5.0), end.is_released) == (gone, gone)
    assert ("event=release_failed" in caplog.text, "event=not_closed" in caplog.text) == (not gone, gone)
    for owned in list(host.provider.ledger._live):
        host.provider.ledger.closed(owned)

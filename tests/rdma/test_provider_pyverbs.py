"""What the pyverbs provider does about pyverbs, where soft-RoCE gives no occasion: over pretended pyverbs objects."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable

import pytest

if not os.environ.get("RDMA_VM"):  # in the VM, where these tests run, it has to be there
    pytest.importorskip("pyverbs", reason="python3-pyverbs is not installed: apt-get install python3-pyverbs")

from pyverbs.cq import CompChannel
from pyverbs.device import Context, get_device_list
from pyverbs.pyverbs_error import PyverbsRDMAError

from memkv_vllm.transports.verbs import pyverbs_provider
from memkv_vllm.transports.verbs.ownership import Ledger
from memkv_vllm.transports.verbs.pyverbs_provider import (
    PyverbsCompletionQueue,
    PyverbsDevice,
    PyverbsMemoryRegion,
    PyverbsProtectionDomain,
    PyverbsQueuePair,
)
from tests.support.provider_suite import num_fds, refused


class Pretended:
    """Any pyverbs object: closes, and refuses to if told so."""

    qp_num = lkey = rkey = 7

    def __init__(self, refuses: int = 0) -> None:
        self.refuses, self.num_closed = refuses, 0
        self.on_close: Callable[[], None] = lambda: None

    def close(self) -> None:
        self.num_closed += 1
        self.on_close()
        if self.refuses:
            raise PyverbsRDMAError("refused", self.refuses)


class Event:
    """An asynchronous event whose acknowledgement takes as long as the test likes."""

    event_type = 3

    def __init__(self) -> None:
        self.acknowledging, self.go_on, self.acknowledged = threading.Event(), threading.Event(), False

    def ack(self) -> None:
        self.acknowledging.set()
        assert self.go_on.wait(10)
        self.acknowledged = True


@pytest.mark.parametrize("kind", ["queue pair", "completion queue"])
def test_nothing_is_destroyed_between_taking_and_acknowledging_an_event(kind: str) -> None:
    """The library would wait for the acknowledgement with the interpreter lock held: for ever."""
    event, context, fd = Event(), Pretended(), os.eventfd(1)

    def take() -> Event:
        os.eventfd_read(fd)
        return event

    context.get_async_event = take  # type: ignore[attr-defined]
    device = PyverbsDevice(Ledger(), "pretended", context, fd)
    domain = PyverbsProtectionDomain(device, Pretended())
    inner = Pretended()
    queue = PyverbsCompletionQueue(device, inner if kind == "completion queue" else Pretended(), Pretended(), -1)
    pair = PyverbsQueuePair(domain, queue, inner if kind == "queue pair" else Pretended())
    was_acknowledged: list[bool] = []
    inner.on_close = lambda: was_acknowledged.append(event.acknowledged)

    taker = threading.Thread(target=device.async_events)
    taker.start()
    assert event.acknowledging.wait(10)
    closer = threading.Thread(target=(pair if kind == "queue pair" else queue).close)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive() and not was_acknowledged
    event.go_on.set()
    for thread in (taker, closer):
        thread.join(10)
        assert not thread.is_alive()
    assert was_acknowledged == [True]
    device.close()
    os.close(fd)


def test_an_object_that_was_not_destroyed_is_never_tried_again() -> None:
    """pyverbs' own destructor would, whenever it is collected: so it is kept, and counted as the leak that it is."""
    ledger = Ledger()
    device = PyverbsDevice(ledger, "pretended", Pretended(), -1)
    domain = PyverbsProtectionDomain(device, Pretended())
    region = PyverbsMemoryRegion(domain, Pretended(errno.EBUSY), 4096, 100)
    with refused("ibv_dereg_mr", errno.EBUSY):
        device.close()
    device.close()
    region.close()
    assert region._region.num_closed == 1
    assert ledger.num_live() == 1 and region in ledger._live


def test_a_queue_that_stays_does_not_keep_its_channel() -> None:
    device = PyverbsDevice(Ledger(), "pretended", Pretended(), -1)
    channel = Pretended()
    queue = PyverbsCompletionQueue(device, Pretended(errno.EBUSY), channel, -1)
    with refused("ibv_destroy_cq", errno.EBUSY):
        queue.close()
    assert channel.num_closed == 1
    device.close()


class TestDescriptors:
    """Finding out which descriptor is new while others in this process open some too."""

    @pytest.fixture
    def context(self) -> Context:
        return Context(name=get_device_list()[0].name.decode())

    @pytest.mark.parametrize("times", [0, 1, 4, 5])
    def test_it_tries_again(self, context: Context, times: int) -> None:
        """``times`` attempts are disturbed by somebody else's channel; the fifth of them is the last."""
        strangers: list[CompChannel] = []
        before = num_fds()

        def make() -> CompChannel:
            if len(strangers) < times:
                strangers.append(CompChannel(context))
            return CompChannel(context)

        expected = refused("ibv_create_comp_channel", errno.EAGAIN) if times == 5 else contextlib.nullcontext()
        with expected:
            made, fd = pyverbs_provider._with_event_fd("ibv_create_comp_channel", make, lambda found: found.close())
            assert not os.get_blocking(fd) and "infinibandevent" in os.readlink(f"/proc/self/fd/{fd}")
            os.fstat(fd)
            made.close()
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)
        for stranger in strangers:
            stranger.close()
        assert num_fds() == before
        context.close()

    def test_errors_keep_their_number(self) -> None:
        with refused("ibv_x", errno.ENOSPC), pyverbs_provider._calling("ibv_x"):
            raise PyverbsRDMAError("anything", errno.ENOSPC)
        with refused("ibv_x", errno.EINVAL), pyverbs_provider._calling("ibv_x", errno.EINVAL):
            raise PyverbsRDMAError("without one")

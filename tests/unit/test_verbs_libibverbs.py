"""The libibverbs provider without a device: layouts, arrays of work requests, and what it does when a call fails.

What the library does for real is shown in ``tests/rdma/test_provider.py``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from memkv_vllm.transports.verbs import abi, structs, symbols
from memkv_vllm.transports.verbs.libibverbs import LibibverbsDevice, LibibverbsProvider, WorkRequestArray
from memkv_vllm.transports.verbs.ownership import Ledger
from memkv_vllm.transports.verbs.provider import Access, LinkLayer, Opcode, PortState, VerbsError, WorkRequests
from tests.support.provider_suite import refused

ALL = Access.LOCAL | Access.REMOTE_READ | Access.REMOTE_WRITE


def work(count: int) -> WorkRequests:
    """Rows that differ in every column."""
    n = np.arange(count, dtype=np.uint64)
    return WorkRequests(
        wr_ids=n + np.uint64(1 << 63),
        opcodes=np.where(n % 2, Opcode.READ, Opcode.WRITE).astype(np.uint32),
        local=n + np.uint64(0x7F00_0000_0000),
        lkeys=(n + np.uint64(0xF000_0000)).astype(np.uint32),
        lengths=(n + np.uint64(0x7FFF_0000)).astype(np.uint32),
        remote=n + np.uint64(0xFFFF_0000_0000_0000),
        rkeys=(n + np.uint64(0xE000_0000)).astype(np.uint32),
        signalled=n % 3 == 0,
    )


class Post:
    """``ibv_post_send`` that follows the chain as a library does, reading the C structs byte by byte."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, ...]] = []
        self.refuse: tuple[int, int] | None = None
        """(row, result)."""
        self.tells = True
        """Whether it says which one it refused."""
        self.function = symbols.POST(self._post)

    def _post(self, queue_pair: int, head: int, bad: int) -> int:
        assert queue_pair == 0xABC
        while head:
            if self.refuse is not None and len(self.rows) == self.refuse[0]:
                if self.tells:
                    ctypes.c_uint64.from_address(bad).value = head
                return self.refuse[1]
            wr_id, after, sges = (ctypes.c_uint64 * 3).from_address(head)
            num_sge, opcode, flags, immediate = (ctypes.c_uint32 * 4).from_address(head + 24)
            remote, rkey = ctypes.c_uint64.from_address(head + 40).value, ctypes.c_uint32.from_address(head + 48).value
            address = ctypes.c_uint64.from_address(sges).value
            length, lkey = (ctypes.c_uint32 * 2).from_address(sges + 8)
            assert num_sge == 1 and immediate == 0
            self.rows.append((wr_id, opcode, address, lkey, length, remote, rkey, flags))
            head = after
        return 0


def rows_of(batch: WorkRequests) -> list[tuple[int, ...]]:
    return list(
        zip(
            batch.wr_ids.tolist(), batch.opcodes.tolist(), batch.local.tolist(), batch.lkeys.tolist(),
            batch.lengths.tolist(), batch.remote.tolist(), batch.rkeys.tolist(),
            [2 if signalled else 0 for signalled in batch.signalled], strict=True,
        )
    )  # fmt: skip


class TestWorkRequestArray:
    """The memory that ``ibv_post_send`` gets to see."""

    @pytest.mark.parametrize("counts", [(1,), (8,), (8, 1, 8), (3, 5, 2, 1, 8)])
    def test_every_column_of_every_row(self, counts: tuple[int, ...]) -> None:
        """Also after longer and shorter batches: nothing of one shows in the next."""
        array, post = WorkRequestArray(8), Post()
        for count in counts:
            post.rows.clear()
            batch = work(count)
            batch.wr_ids[:] += np.uint64(count)
            array.post(batch, post.function, 0xABC)
            assert post.rows == rows_of(batch)

    def test_one_that_is_too_long(self) -> None:
        post = Post()
        with refused("ibv_post_send", errno.ENOMEM) as caught:
            WorkRequestArray(8).post(work(9), post.function, 0xABC)
        assert caught.value.accepted == 0 and post.rows == []

    @pytest.mark.parametrize("row", [0, 1, 4])
    def test_the_refused_one_is_recognised(self, row: int) -> None:
        array, post = WorkRequestArray(8), Post()
        post.refuse = (row, errno.EINVAL)
        with refused("ibv_post_send", errno.EINVAL) as caught:
            array.post(work(5), post.function, 0xABC)
        assert caught.value.accepted == row

    def test_what_an_earlier_refusal_said_is_forgotten(self) -> None:
        """Soft-RoCE refuses a post on a queue pair in INIT without saying which one it was."""
        array, post = WorkRequestArray(8), Post()
        post.refuse = (3, errno.EINVAL)
        with refused("ibv_post_send"):
            array.post(work(5), post.function, 0xABC)
        post.rows.clear()
        post.refuse, post.tells = (0, errno.EINVAL), False
        with refused("ibv_post_send", errno.EINVAL) as caught:
            array.post(work(8), post.function, 0xABC)
        assert caught.value.accepted == 0

    @pytest.mark.parametrize(("result", "number"), [(12, 12), (-12, 12), (-22, 22)])
    def test_results_in_all_fashions(self, result: int, number: int) -> None:
        post = Post()
        post.refuse = (0, result)
        with refused("ibv_post_send", number):
            WorkRequestArray(8).post(work(1), post.function, 0xABC)

    def test_the_interpreter_lock_is_let_go_during_a_post(self) -> None:
        """usleep() stands for a post that takes 0.2 s; meanwhile another thread runs."""
        place = ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value
        assert place is not None
        sleeping, begun, ticks = symbols.POST(place), threading.Event(), []

        def tick() -> None:
            begun.wait(10)
            for _ in range(10):
                ticks.append(time.monotonic())
                time.sleep(0.001)

        thread = threading.Thread(target=tick)
        thread.start()
        begun.set()
        WorkRequestArray(8).post(work(1), sleeping, 200_000)
        ended = time.monotonic()
        thread.join(10)
        assert len([at for at in ticks if at < ended]) >= 2


class TestCodes:
    """Numbers of the library."""

    @pytest.mark.parametrize(("kind", "name"), [(0, "cq_err"), (3, "qp_access_err"), (8, "device_fatal")])
    def test_names_of_events(self, kind: int, name: str) -> None:
        assert abi.async_event(kind, 5) == (kind, name, 5)

    def test_what_a_newer_library_knows(self) -> None:
        assert abi.async_event(99, 0).name == "event_99"
        assert (abi.port_state(9), abi.link_layer(9)) == (PortState.NOP, LinkLayer.UNSPECIFIED)
        assert (abi.port_state(4), abi.link_layer(2)) == (PortState.ACTIVE, LinkLayer.ETHERNET)

    def test_bytes_of_mtu_codes(self) -> None:
        assert [abi.mtu_bytes(code) for code in abi.MTU_CODES.values()] == list(abi.MTU_CODES)


class TestLibrary:
    """Loading it."""

    def test_no_library(self) -> None:
        with pytest.raises(OSError, match=r"libno-such-verbs\.so"):
            LibibverbsProvider("libno-such-verbs.so.1")

    def test_a_library_without_what_is_needed(self) -> None:
        with pytest.raises(OSError, match=r"libc\.so\.6 has no ibv_get_device_list"):
            LibibverbsProvider("libc.so.6")

    def test_a_layout_that_does_not_hold(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(structs, "LAYOUTS", {structs.Channel: {"fd": 12}})
        with pytest.raises(ImportError, match=r"Channel is laid out as \{'fd': 8\}"):
            structs._check()

    def test_records_are_laid_out_as_the_structs(self) -> None:
        sizes = structs.WORK_REQUEST.itemsize, structs.SGE.itemsize, structs.COMPLETION.itemsize
        assert sizes == (128, 16, 48)

    def test_errno_of_a_call_that_returns_minus_one(self) -> None:
        ctypes.set_errno(errno.EIO)
        assert symbols.error_number(-1) == errno.EIO


class ScriptedLibrary:
    """The library's functions, as a list of what was called; some fail."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.fails: dict[str, int] = {}
        self.lacks: set[str] = set()
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self._memory = (ctypes.c_uint64 * 64)()
        self.fd = os.eventfd(0)

    def has(self, name: str) -> bool:
        return name not in self.lacks

    def call(self, name: str, *arguments: Any) -> int:
        self.called.append(name)
        self.arguments[name] = arguments
        return 0

    def make(self, name: str, *arguments: Any) -> int:
        if not self.has(name):
            raise VerbsError(name, errno.ENOSYS)
        self.check(name, *arguments)
        if name == "ibv_create_comp_channel":
            structs.Channel.from_address(ctypes.addressof(self._memory)).fd = self.fd
        return ctypes.addressof(self._memory)

    def check(self, name: str, *arguments: Any) -> None:
        self.call(name, *arguments)
        if name in self.fails:
            raise VerbsError(name, self.fails[name])


@pytest.fixture
def library() -> Iterator[ScriptedLibrary]:
    made = ScriptedLibrary()
    yield made
    os.close(made.fd)


@pytest.fixture
def device(library: ScriptedLibrary) -> LibibverbsDevice:
    context = structs.Context(async_fd=library.fd)
    context.ops[:] = [1] * len(context.ops)  # never called here
    made = LibibverbsDevice(library, Ledger(), "scripted", ctypes.addressof(context))  # type: ignore[arg-type]
    made.keeps = context  # type: ignore[attr-defined]
    return made


class TestCallsThatFail:
    """Nothing is left behind, and nothing is hidden."""

    def test_no_completion_queue_no_channel(self, library: ScriptedLibrary, device: LibibverbsDevice) -> None:
        library.fails["ibv_create_cq"] = errno.ENOMEM
        with refused("ibv_create_cq", errno.ENOMEM):
            device.completion_queue(16)
        assert library.called == ["ibv_create_comp_channel", "ibv_create_cq", "ibv_destroy_comp_channel"]

    def test_a_queue_that_stays_does_not_keep_its_channel(
        self, library: ScriptedLibrary, device: LibibverbsDevice
    ) -> None:
        queue = device.completion_queue(16)
        library.called.clear()
        library.fails["ibv_destroy_cq"] = errno.EBUSY
        with refused("ibv_destroy_cq", errno.EBUSY):
            queue.close()
        assert library.called == ["ibv_destroy_cq", "ibv_destroy_comp_channel"]
        queue.close()
        assert library.called == ["ibv_destroy_cq", "ibv_destroy_comp_channel"], "once"

    def test_an_old_library_knows_no_dmabuf(self, library: ScriptedLibrary, device: LibibverbsDevice) -> None:
        library.lacks.add("ibv_reg_dmabuf_mr")
        with refused("ibv_reg_dmabuf_mr", errno.ENOSYS):
            device.protection_domain().register_dmabuf(3, 0, 4096, 0, ALL)

    def test_relaxed_ordering_is_only_asked_for_where_it_can_be_ignored(
        self, library: ScriptedLibrary, device: LibibverbsDevice
    ) -> None:
        domain = device.protection_domain()
        domain.register(4096, 100, ALL | Access.RELAXED_ORDERING)
        assert library.arguments["ibv_reg_mr_iova2"][1:] == (4096, 100, 4096, int(ALL) | 1 << 20)
        library.lacks.add("ibv_reg_mr_iova2")
        domain.register(4096, 100, ALL | Access.RELAXED_ORDERING)
        assert library.arguments["ibv_reg_mr"][1:] == (4096, 100, int(ALL))

    def test_a_whole_device_closes_in_order(self, library: ScriptedLibrary, device: LibibverbsDevice) -> None:
        domain, queue = device.protection_domain(), device.completion_queue(16)
        domain.register(4096, 100, ALL)
        domain.queue_pair(queue, 4)
        library.called.clear()
        device.close()
        assert library.called == [
            "ibv_destroy_qp", "ibv_destroy_cq", "ibv_destroy_comp_channel", "ibv_dereg_mr", "ibv_dealloc_pd",
            "ibv_close_device",
        ]  # fmt: skip

"""Host memory: sealed, shared, mapped once and unmapped once, never under a reader's feet."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import tempfile
from pathlib import Path

import pytest

from memkv_vllm.errors import EnvironmentFault, LocalProtocolError, RemoteProtocolError
from memkv_vllm.transports.memory import HostMemory
from tests.support.resources import num_fds, num_mappings

LENGTH = 3 * mmap.PAGESIZE + 5


def test_created_memory_is_zero_writable_and_sealed_against_another_size() -> None:
    with HostMemory.create("made", LENGTH) as memory:
        assert not memory.array.any()
        assert (len(memory.array), memory.length) == (LENGTH, LENGTH)
        assert memory.address % mmap.PAGESIZE == 0
        memory.view(7, 5)[:] = b"hello"
        assert bytes(memory.array[6:13]) == b"\0hello\0"
        for size in (0, LENGTH - 1, LENGTH + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert not os.get_inheritable(memory.fd)


def test_both_sides_see_the_same_bytes() -> None:
    with HostMemory.create("both", LENGTH) as ours, HostMemory.adopt(os.dup(ours.fd), LENGTH) as theirs:
        ours.view(0, 4)[:] = b"ours"
        theirs.view(LENGTH - 6, 6)[:] = b"theirs"
        assert bytes(theirs.view(0, 4)) == b"ours"
        assert bytes(ours.view(LENGTH - 6, 6)) == b"theirs"
        assert num_mappings("both") == 2
    assert num_mappings("both") == 0


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1), (0, LENGTH + 1), (LENGTH, 1), (1 << 64, 1)])
def test_views_outside_are_refused(offset: int, length: int) -> None:
    with HostMemory.create("views", LENGTH) as memory, pytest.raises(LocalProtocolError):
        memory.view(offset, length)


def test_empty_views_are_legal() -> None:
    with HostMemory.create("views", LENGTH) as memory:
        assert len(memory.view(LENGTH, 0)) == 0


def test_closing_unmaps_once_and_closes_the_descriptor() -> None:
    fds = num_fds()
    memory = HostMemory.create("closed", LENGTH)
    assert num_mappings("closed") == 1
    memory.close()
    assert memory.closed
    assert (num_mappings("closed"), num_fds()) == (0, fds)
    other = os.dup(0)  # most likely takes the number that was just closed
    memory.close()
    os.fstat(other)
    os.close(other)
    assert "closed" in repr(memory)


def test_a_view_keeps_the_mapping_until_it_is_gone() -> None:
    memory = HostMemory.create("viewed", LENGTH)
    view, array = memory.view(0, 4), memory.array[4:8]
    memory.close()
    view[:] = b"late"
    array[:] = 1
    assert bytes(view) == b"late"
    assert num_mappings("viewed") == 1
    view.release()
    del view, array, memory
    assert num_mappings("viewed") == 0


@pytest.mark.parametrize("length", [0, -1, 1 << 62, 1 << 70])
def test_memory_that_cannot_be_made_is_the_environments_fault(length: int) -> None:
    fds = num_fds()
    with pytest.raises(EnvironmentFault, match="for impossible"):
        HostMemory.create("impossible", length)
    assert num_fds() == fds


def test_out_of_address_space_is_the_environments_fault() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
    try:
        with pytest.raises(EnvironmentFault):
            HostMemory.create("large", 1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def memfd(length: int, seals: int, flags: int = os.MFD_ALLOW_SEALING) -> int:
    fd = os.memfd_create("offered", flags)
    os.ftruncate(fd, length)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def a_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(LENGTH)
        return os.dup(file.fileno())


def a_pipe() -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def a_read_only_memfd() -> int:
    fd = memfd(LENGTH, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    reopened = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return reopened


OFFERS = {
    "not sealed": lambda: memfd(LENGTH, 0),
    "may grow": lambda: memfd(LENGTH, fcntl.F_SEAL_SHRINK),
    "may shrink": lambda: memfd(LENGTH, fcntl.F_SEAL_GROW),
    "another size": lambda: memfd(LENGTH - 1, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW),
    "not writable": lambda: memfd(LENGTH, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE),
    "read only": a_read_only_memfd,
    "a file": a_file,
    "a pipe": a_pipe,
    "a directory": lambda: os.open("/", os.O_RDONLY),
}


@pytest.mark.parametrize("offer", list(OFFERS))
def test_what_a_peer_offers_is_checked_and_closed(offer: str) -> None:
    fds = num_fds()
    with pytest.raises(RemoteProtocolError) as caught:
        HostMemory.adopt(OFFERS[offer](), LENGTH)
    assert caught.value.kind == "region"
    assert num_fds() == fds


def test_an_empty_offer() -> None:
    with pytest.raises(RemoteProtocolError):
        HostMemory.adopt(memfd(0, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW), 0)

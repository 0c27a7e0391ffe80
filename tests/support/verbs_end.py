"""One end of a verbs connection over the provider seam, and the same in a process of its own that can be frozen.

``python -m tests.support.verbs_end PROVIDER DEVICE`` is such a process: it prints its details as a line of JSON, takes
the peer's, prints ``"connected"``, and then carries out one command a line, answering each with a line::

    ["fill", 170]               all of its memory holds this byte
    ["write", count, length]    post so many RDMA WRITEs, the n-th to and from offset n * length
    ["drain"]                   statuses of the work requests that completed since
    ["count", 170]              how many bytes of its memory are this
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from memkv_vllm.transports.verbs.provider import Access, Opcode, Path, PeerQueuePair, Provider, WorkRequests
from memkv_vllm.transports.verbs.providers import load_provider

__all__ = ["ALL_ACCESS", "MEMORY_BYTES", "PeerProcess", "VerbsEnd", "peer_process"]

ROOT = FilePath(__file__).resolve().parents[2]
MIB = 1 << 20
MEMORY_BYTES = 8 * MIB
PORT, MTU, MAX_READS, DEPTH = 1, 4096, 16, 64
ALL_ACCESS = Access.LOCAL | Access.REMOTE_READ | Access.REMOTE_WRITE


class VerbsEnd:
    """A device, ``MEMORY_BYTES`` of registered memory, and one queue pair.

    Attributes:
        buffer: the memory, which lives on after :meth:`close`.
        region: its registration.
    """

    def __init__(self, provider: Provider, device: str, buffer: mmap.mmap | None = None) -> None:
        self.buffer = mmap.mmap(-1, MEMORY_BYTES) if buffer is None else buffer
        self.bytes = np.frombuffer(self.buffer, dtype=np.uint8)
        self.device = provider.open(device)
        self.domain = self.device.protection_domain()
        self.completions = self.device.completion_queue(4 * DEPTH)
        self.completions.arm()
        self.address = int(self.bytes.ctypes.data)
        self.region = self.domain.register(self.address, MEMORY_BYTES, ALL_ACCESS)
        self.queue_pair = self.domain.queue_pair(self.completions, DEPTH)
        self.queue_pair.initialize(PORT, Access.REMOTE_READ | Access.REMOTE_WRITE)
        self.gid_index, self.gid = self._ipv4_gid()
        self._peer: dict[str, Any] = {}
        self._num_posted = 0

    def _ipv4_gid(self) -> tuple[int, bytes]:
        for index in range(self.device.port(PORT).num_gids):
            gid = self.device.gid(PORT, index)
            if gid[:12] == bytes(10) + b"\xff\xff":
                return index, gid
        raise LookupError(f"{self.device.name} has no IPv4 GID: has its interface an address?")

    def details(self) -> dict[str, Any]:
        """What the peer needs to know."""
        return {
            "number": self.queue_pair.number,
            "packet_number": self.queue_pair.packet_number,
            "gid": self.gid.hex(),
            "address": self.region.address,
            "rkey": self.region.rkey,
        }

    def connect(self, peer: dict[str, Any], *, timeout: int = 14, retry_count: int = 6) -> None:
        """To RTS. ``timeout`` and ``retry_count`` as in ``Path``: together they give up after about half a second."""
        self._peer = peer
        path = Path(PORT, self.gid_index, MTU, 0, 0, 64, MAX_READS, timeout, retry_count)
        gid = bytes.fromhex(peer["gid"])
        self.queue_pair.connect(path, PeerQueuePair(peer["number"], peer["packet_number"], gid, 0))

    def post(self, opcode: Opcode, count: int, length: int, *, rkey: int | None = None) -> None:
        """Post ``count`` signalled work requests, the n-th between the offsets ``n * length`` of both ends."""
        offsets = np.arange(count, dtype=np.uint64) * np.uint64(length)
        first, self._num_posted = self._num_posted, self._num_posted + count
        self.queue_pair.post(
            WorkRequests(
                wr_ids=np.arange(first, first + count, dtype=np.uint64),
                opcodes=np.full(count, opcode, np.uint32),
                local=offsets + np.uint64(self.region.address),
                lkeys=np.full(count, self.region.lkey, np.uint32),
                lengths=np.full(count, length, np.uint32),
                remote=offsets + np.uint64(self._peer["address"]),
                rkeys=np.full(count, self._peer["rkey"] if rkey is None else rkey, np.uint32),
                signalled=np.ones(count, np.bool_),
            )
        )

    def statuses(self, count: int, timeout_s: float = 10.0) -> list[int]:
        """Statuses of completions, once there are ``count`` of them or the time is over."""
        end, found = time.monotonic() + timeout_s, [completion.status for completion in self.completions.drain()]
        while len(found) < count and time.monotonic() < end:
            time.sleep(0.005)
            found += [completion.status for completion in self.completions.drain()]
        return found

    def count(self, value: int) -> int:
        """How many bytes of the memory are ``value``."""
        return int(np.count_nonzero(self.bytes == value))

    def close(self) -> None:
        """Everything but the memory."""
        self.device.close()


class PeerProcess:
    """A :class:`VerbsEnd` in another process; made by :func:`peer_process`."""

    def __init__(self, process: subprocess.Popen[str], details: dict[str, Any]) -> None:
        self._process = process
        self.details = details

    def ask(self, *command: Any) -> Any:
        """Carry out a command, see the module's text; returns the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the peer process has ended"
        return json.loads(line)

    def freeze(self) -> None:
        """SIGSTOP, and return once it stands still."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.wait()


@contextmanager
def peer_process(provider: str, device: str, end: VerbsEnd) -> Iterator[PeerProcess]:
    """Start an end on ``device`` and connect it with ``end``; killed on exit."""
    command = [sys.executable, "-m", "tests.support.verbs_end", provider, device]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, "the peer process ended at once"
        peer = PeerProcess(process, json.loads(line))
        end.connect(peer.details)
        assert peer.ask(end.details()) == "connected"
        yield peer
    finally:
        process.kill()
        process.communicate()


def _carry_out(end: VerbsEnd, command: list[Any]) -> Any:
    match command:
        case ["fill", value]:
            end.bytes[:] = value
            return "filled"
        case ["write", count, length]:
            end.post(Opcode.WRITE, count, length)
            return "posted"
        case ["drain"]:
            return end.statuses(0)
        case ["count", value]:
            return end.count(value)
        case [dict() as peer]:
            end.connect(peer)
            return "connected"
    raise ValueError(f"no such command: {command}")


def _main(provider: str, device: str) -> None:
    end = VerbsEnd(load_provider(provider), device)
    sys.stdout.write(json.dumps(end.details()) + "\n")
    sys.stdout.flush()
    with contextlib.closing(end):
        for line in sys.stdin:
            sys.stdout.write(json.dumps(_carry_out(end, json.loads(line))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])

"""Byte streams for control frames: the small seam under the session drivers, and its socket implementation.

Sending never awaits: a frame goes out at once as far as the socket takes it, the rest waits in a
:class:`FrameWriter` whose task sends it. So cancelling a request can never leave half a frame on the wire, and
frames never interleave. The writers above bound how much may wait.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import anyio
from anyio.lowlevel import checkpoint

from memkv_vllm.errors import ConnectionLost, MemkvError, RemoteProtocolError

READ_BYTES = 64 * 1024
_MAX_FDS_PER_READ = 8
_MAX_FDS_WAITING = 8


class ControlStream(Protocol):
    """A connected byte stream. One task reads, one waits for room to write; ``close`` may come from anywhere."""

    async def receive(self) -> bytes:
        """The next bytes; empty at the end of the stream. Raises ``ConnectionLost``."""
        ...

    def send_nowait(self, data: memoryview, fds: Sequence[int] = ()) -> int:
        """Number of bytes of ``data`` that were taken now; ``fds`` travel with the first. Raises ``ConnectionLost``."""
        ...

    async def wait_writable(self) -> None:
        """Return when ``send_nowait`` may take bytes again. Raises ``ConnectionLost``."""
        ...

    def accept_fds(self) -> None:
        """Keep the file descriptors that come from now on; before, they are dropped unseen."""
        ...

    def take_fd(self) -> int | None:
        """The oldest file descriptor that came and was not taken yet; the caller owns it."""
        ...

    def end(self) -> None:
        """End the stream both ways: what has arrived can still be read, then comes the end."""
        ...

    def close(self) -> None:
        """End the stream and release it; a second call does nothing."""
        ...


class SocketStream:
    """A connected stream socket, Unix or TCP. Owns the socket; belongs to the loop that first reads from it.

    The socket stays registered with the loop between reads, which makes a message three times cheaper than waiting
    anew for each. It is taken out only while data is there that nobody reads (back pressure).
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching = False
        self._reader: asyncio.Future[bytes | MemkvError] | None = None
        self._unread: bytes | MemkvError | None = None
        self._writers = 0
        self._closing = False
        self._keep_fds = False
        self._fds: deque[int] = deque()

    async def receive(self) -> bytes:
        """See :class:`ControlStream`."""
        if self._closing:
            await checkpoint()
            return b""
        self._loop = self._loop or asyncio.get_running_loop()
        reader = self._reader = self._loop.create_future()
        if self._unread is not None:
            reader.set_result(self._unread)
            self._unread = None
        elif not self._watching:
            self._loop.add_reader(self._sock, self._on_readable)
            self._watching = True
        try:
            data: bytes | MemkvError = await reader
        except BaseException:
            # Cancelled in the moment in which data came: the next reader gets it.
            if reader.done() and not reader.cancelled():
                self._unread = reader.result()
            raise
        finally:
            self._reader = None
        if isinstance(data, MemkvError):
            raise data
        return data

    def send_nowait(self, data: memoryview, fds: Sequence[int] = ()) -> int:
        """See :class:`ControlStream`."""
        if self._closing:
            raise ConnectionLost("the connection is closed")
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            return self._sock.sendmsg([data], ancillary, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise ConnectionLost(f"writing to the peer: {error}") from error

    async def wait_writable(self) -> None:
        """See :class:`ControlStream`."""
        if self._closing:
            raise ConnectionLost("the connection is closed")
        # The socket must not be closed under a task that waits for it: the last one closes it.
        self._writers += 1
        try:
            await anyio.wait_writable(self._sock)
        finally:
            self._writers -= 1
            if self._closing and not self._writers:
                self._sock.close()

    def accept_fds(self) -> None:
        """See :class:`ControlStream`."""
        self._keep_fds = self._sock.family == socket.AF_UNIX

    def take_fd(self) -> int | None:
        """See :class:`ControlStream`."""
        return self._fds.popleft() if self._fds else None

    def end(self) -> None:
        """See :class:`ControlStream`."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer went first

    def close(self) -> None:
        """See :class:`ControlStream`."""
        if self._closing:
            return
        self._closing = True
        self.end()
        self._pause()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(b"")
        while (fd := self.take_fd()) is not None:
            os.close(fd)
        if not self._writers:
            self._sock.close()

    def _on_readable(self) -> None:
        reader = self._reader
        if reader is None:
            self._pause()
        if reader is None or reader.done():
            return
        try:
            reader.set_result(self._read_fds() if self._keep_fds else self._sock.recv(READ_BYTES))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            reader.set_result(ConnectionLost(f"reading from the peer: {error}"))
        except RemoteProtocolError as error:
            reader.set_result(error)

    def _pause(self) -> None:
        if self._watching and self._loop is not None:
            self._watching = False
            self._loop.remove_reader(self._sock)

    def _read_fds(self) -> bytes:
        space = socket.CMSG_SPACE(_MAX_FDS_PER_READ * array.array("i").itemsize)
        data, ancillary, _, _ = self._sock.recvmsg(READ_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                self._fds.extend(fds)
        if len(self._fds) > _MAX_FDS_WAITING:
            raise RemoteProtocolError("fds", f"{len(self._fds)} file descriptors that belong to no request")
        return data


class FrameWriter:
    """Sends frames in the order given. ``send`` never blocks; ``run`` is the task that sends what had to wait."""

    def __init__(self, stream: ControlStream) -> None:
        self._stream = stream
        self._waiting: deque[tuple[memoryview, list[int]]] = deque()
        self._wake = anyio.Event()
        self._progress = anyio.Event()
        self._closed = False
        self._given = 0
        self.sent = 0
        """Bytes sent so far, to compare with the marks that :meth:`send` returns."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were given and are not sent yet."""
        return self._given - self.sent

    def send(self, data: bytes, fds: Sequence[int] = ()) -> int:
        """Send ``data`` with ``fds`` (needed only until this returns) now or, in turn, later.

        A broken stream is no error here: the reader of the stream learns of it.

        Returns:
            The mark that :meth:`wait_sent` takes.
        """
        view = memoryview(data)
        self._given += len(view)
        if self._closed:
            self.sent = self._given
        elif not self._waiting:
            view, fds = self._try(view, fds)
        if view and not self._closed:
            self._waiting.append((view, [os.dup(fd) for fd in fds]))
            self._wake.set()
        return self._given

    async def run(self) -> None:
        """Send what waits, until cancelled or the stream breaks."""
        try:
            while not self._closed:
                while self._waiting:
                    await self._stream.wait_writable()
                    self._send_waiting()
                self._wake = anyio.Event()
                await self._wake.wait()
        except ConnectionLost:
            self._stream.end()
        finally:
            self.close()

    async def wait_sent(self, mark: int) -> None:
        """Return when everything up to ``mark`` is sent, or nothing will be any more."""
        while self.sent < mark:
            await self._progress.wait()

    def close(self) -> None:
        """Drop what waits; nothing is sent any more."""
        self._closed = True
        while self._waiting:
            for fd in self._waiting.popleft()[1]:
                os.close(fd)
        self._advance(self._given - self.sent)
        self._wake.set()

    def _try(self, view: memoryview, fds: Sequence[int]) -> tuple[memoryview, Sequence[int]]:
        try:
            taken = self._stream.send_nowait(view, fds)
        except ConnectionLost:
            self._stream.end()
            self.close()
            return view, fds
        self.sent += taken
        return view[taken:], () if taken else fds

    def _send_waiting(self) -> None:
        while self._waiting:
            view, fds = self._waiting[0]
            taken = self._stream.send_nowait(view, fds)
            if taken:
                for fd in fds:
                    os.close(fd)
                self._advance(taken)
            if taken < len(view):
                self._waiting[0] = (view[taken:], [] if taken else fds)
                return
            self._waiting.popleft()

    def _advance(self, taken: int) -> None:
        self.sent += taken
        self._progress.set()
        self._progress = anyio.Event()


async def send_all(stream: ControlStream, data: bytes) -> None:
    """Send ``data``, waiting for room; only before a :class:`FrameWriter` has the stream."""
    view = memoryview(data)
    while view:
        view = view[stream.send_nowait(view) :]
        if view:
            await stream.wait_writable()

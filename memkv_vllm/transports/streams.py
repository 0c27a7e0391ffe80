"""Byte streams for control frames: the small seam under the session drivers, and its socket implementation.

Sending never awaits: a frame goes out at once as far as the socket takes it, the rest waits in a
:class:`FrameWriter` whose task sends it. So cancelling a request can never leave half a frame on the wire, and
frames never interleave. The writers above bound how much may wait.

Reading goes two ways. ``receive`` awaits the next bytes; a handshake reads so. ``feed`` hands bytes to a plain
function straight from the loop's read callback: what can be answered at once costs neither a task nor a further turn
of the loop. Where the function needs to wait it gives back what to await, and nothing is read until that has returned.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import anyio
from anyio.lowlevel import checkpoint

from memkv_vllm.errors import ConnectionLost, LocalProtocolError, MemkvError, RemoteProtocolError

READ_BYTES = 64 * 1024
_MAX_FDS_PER_READ = 8
_MAX_FDS_WAITING = 8
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_FDS_PER_READ * array.array("i").itemsize)

Rest = Callable[[], Awaitable[bool]]
"""What is left to do where a reader has to wait; awaited by ``feed``, it says whether to read on."""

Take = Callable[[bytes], Rest | None]
"""Takes what came. It never blocks: where it would have to, it returns the :data:`Rest`."""


class ControlStream(Protocol):
    """A connected byte stream. One task reads, one waits for room to write; ``close`` may come from anywhere."""

    @property
    def secured(self) -> bool:
        """Whether what travels is encrypted; known after :meth:`secure`."""
        ...

    @property
    def binding(self) -> bytes:
        """What both ends know of the encryption beneath, for the handshake to cover; empty without any."""
        ...

    async def secure(self) -> None:
        """Set up what lies beneath, once, before anything is read or sent; nothing for a plain socket.

        Raises:
            AuthError, ConnectionLost, RemoteProtocolError: it could not be set up.
        """
        ...

    async def receive(self) -> bytes:
        """The next bytes; empty at the end of the stream. Raises ``ConnectionLost``."""
        ...

    async def feed(self, take: Take) -> None:
        """Give ``take`` whatever comes, in order, until the end of the stream or until a rest says so.

        ``take`` may be called straight from the loop, outside any task. While a rest is awaited nothing is read.
        A stream that has nothing quicker uses :func:`feed_by_receive`.

        Raises:
            ConnectionLost: the stream broke.
            Exception: what ``take`` or a rest raised; nothing is read any more.
        """
        ...

    def send_nowait(self, data: bytes | memoryview, fds: Sequence[int] = ()) -> int:
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

    secured = False
    binding = b""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching = False
        self._reader: asyncio.Future[bytes | MemkvError] | None = None
        self._unread: bytes | MemkvError | None = None
        self._take: Take | None = None
        self._turn: asyncio.Future[Rest | Exception | None] | None = None
        """Of the task in ``feed``: done when there is a rest to await, an error to raise, or the end (None)."""
        self._writers = 0
        self._closing = False
        self._keep_fds = False
        self._fds: deque[int] = deque()

    async def secure(self) -> None:
        """See :class:`ControlStream`."""

    def unread(self, data: bytes) -> None:
        """Give back what :meth:`receive` returned last: the next reader gets it."""
        self._unread = data

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
        else:
            self._watch(self._loop)
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

    async def feed(self, take: Take) -> None:
        """See :class:`ControlStream`."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        self._take = take
        try:
            while not self._closing:
                turn = self._turn = loop.create_future()
                if self._unread is not None:
                    unread, self._unread = self._unread, None
                    self._deliver(turn, unread)
                if not turn.done():
                    self._watch(loop)
                rest = await turn
                if isinstance(rest, Exception):
                    raise rest
                if rest is None or not await rest():
                    return
        finally:
            self._take = self._turn = None

    def send_nowait(self, data: bytes | memoryview, fds: Sequence[int] = ()) -> int:
        """See :class:`ControlStream`."""
        if self._closing:
            raise ConnectionLost("the connection is closed")
        try:
            if not fds:
                return self._sock.send(data, socket.MSG_NOSIGNAL)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
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
        if self._turn is not None and not self._turn.done():
            self._turn.set_result(None)
        while (fd := self.take_fd()) is not None:
            os.close(fd)
        if not self._writers:
            self._sock.close()

    def release(self) -> socket.socket:
        """Stop using the socket and give it to the caller, who owns it: this stream has ended.

        Nobody may be waiting to read or write. Bytes that were read and not taken would be lost, so there must be none.
        """
        if self._closing or self._writers or self._reader is not None or self._unread is not None:
            raise LocalProtocolError("a stream was released while it was in use")
        self._pause()
        self._closing = True
        return self._sock

    def _on_readable(self) -> None:
        turn, reader = self._turn, self._reader
        if turn is not None and not turn.done():
            data = self._read()
            if data is not None:
                self._deliver(turn, data)
        elif reader is None or turn is not None:
            self._pause()
        elif not reader.done() and (data := self._read()) is not None:
            reader.set_result(data)

    def _read(self) -> bytes | MemkvError | None:
        """What has come, why nothing will come any more, or None: nothing yet."""
        try:
            return self._read_fds() if self._keep_fds else self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            return ConnectionLost(f"reading from the peer: {error}")
        except RemoteProtocolError as error:
            return error

    def _deliver(self, turn: asyncio.Future[Rest | Exception | None], data: bytes | MemkvError) -> None:
        """Hand ``data`` to the function that takes it; wake its task if it is needed. Never raises."""
        outcome: Rest | Exception | None = None
        if isinstance(data, MemkvError):
            outcome = data
        elif data and self._take is not None:
            try:
                outcome = self._take(data)
            except Exception as error:
                outcome = error
            if outcome is None:
                return
        # Closed by the function itself: the task was woken by that.
        if not turn.done():
            turn.set_result(outcome)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._watching:
            loop.add_reader(self._sock, self._on_readable)
            self._watching = True

    def _pause(self) -> None:
        if self._watching and self._loop is not None:
            self._watching = False
            self._loop.remove_reader(self._sock)

    def _read_fds(self) -> bytes:
        data, ancillary, _, _ = self._sock.recvmsg(READ_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
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
        self._given += len(data)
        if self._closed:
            self.sent = self._given
            return self._given
        taken = 0
        if not self._waiting:
            try:
                taken = self._stream.send_nowait(data, fds)
            except ConnectionLost:
                self._stream.end()
                self.close()
            self.sent += taken
        if taken < len(data) and not self._closed:
            left = () if taken else fds
            self._waiting.append((memoryview(data)[taken:], [os.dup(fd) for fd in left]))
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


async def feed_by_receive(stream: ControlStream, take: Take) -> None:
    """:meth:`ControlStream.feed` for a stream that can only ``receive``."""
    while data := await stream.receive():
        rest = take(data)
        if rest is not None and not await rest():
            return


async def send_all(stream: ControlStream, data: bytes) -> None:
    """Send ``data``, waiting for room; only before a :class:`FrameWriter` has the stream."""
    view = memoryview(data)
    while view:
        view = view[stream.send_nowait(view) :]
        if view:
            await stream.wait_writable()

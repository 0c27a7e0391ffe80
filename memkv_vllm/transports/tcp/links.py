"""The client's threads: one per data connection, which does what the server asks and nothing else.

A thread waits in one system call for a command, checks it, and moves all bytes of it in as few calls as the kernel
allows, outside the interpreter lock; that lock is shared with vLLM, so each time a thread needs it may cost
milliseconds. Threads that block are cheap here because a client has few connections, unlike a server.

Fencing is local: :meth:`Links.stop` shuts the sockets down, which ends every call that is under way, and returns when
no thread runs. From then on nothing reads or writes the regions: the kernel works on copies. What the server has not
received completely by then it never takes for a value, since the rest will not come.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import anyio

from memkv_vllm.errors import ConnectionLost, MemkvError, RemoteProtocolError
from memkv_vllm.protocol.auth import Sealer
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.sockets import tune_data
from memkv_vllm.transports.tcp.commands import FIRST_BYTES, CommandOpener, CommandSealer, Kind
from memkv_vllm.transports.tcp.eager import may_be_eager
from memkv_vllm.transports.tcp.pieces import advance, joined
from memkv_vllm.types import Extent

_log = logging.getLogger("memkv.transports.tcp")


class _DataLink:
    """One data connection, driven by one thread that owns the socket."""

    def __init__(
        self,
        sock: socket.socket,
        ours: Sealer,
        theirs: Sealer,
        regions: dict[int, HostMemory],
        ended: Callable[[_DataLink, MemkvError | None], None],
    ) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._sealer = CommandSealer(ours)
        self._opener = CommandOpener(theirs)
        self._regions = regions
        self._ended = ended
        self._stopping = False
        self._lock = threading.Lock()
        # A daemon: a process that ends without closing its connections must not hang for them.
        self.thread = threading.Thread(target=self._run, name="memkv-data", daemon=True)

    def stop(self) -> None:
        """Make the thread end soon; from any thread."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                try:
                    self._sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # the server went first

    # -- inside, in the thread

    def _run(self) -> None:
        failure: MemkvError | None = None
        try:
            self._serve()
        except OSError as error:
            # The server ends data connections when it fences us; what it means for us it says on the control channel.
            _log.debug("a data connection ended: %s", error)
        except RemoteProtocolError as error:
            failure = error
        except Exception:
            _log.exception("a data connection failed by a fault of this client")
            failure = ConnectionLost("a data connection failed by a fault of this client")
        finally:
            # First why, then the end of the socket, at which the server ends the session without knowing why.
            self._ended(self, failure)
            with self._lock:
                self._stopping = True
                self._sock.close()

    def _serve(self) -> None:
        while not self._stopping and (command := self._receive_command()) is not None:
            self._carry_out(*command)

    def _receive_command(self) -> tuple[Kind, list[Extent]] | None:
        frame = bytearray(FIRST_BYTES)
        if not self._receive([memoryview(frame)], may_end=True):
            return None
        if more := self._opener.more_bytes(frame):
            rest = bytearray(more)
            self._receive([memoryview(rest)])
            frame += rest
        return self._opener.open(frame, Kind.READ, Kind.WRITE)

    def _carry_out(self, kind: Kind, spans: list[Extent]) -> None:
        buffers = [self._view(span) for span in spans]
        if kind is Kind.READ:
            self._send([memoryview(self._sealer.pack(Kind.SENT)), *buffers])
        else:
            self._receive(buffers)
            self._send([memoryview(self._sealer.pack(Kind.WRITTEN))])

    def _view(self, span: Extent) -> memoryview:
        region, offset, length = span
        memory = self._regions.get(region)
        # The server checks extents before it sends them: one that is wrong here is a fault or an attack.
        if memory is None or memory.closed or offset + length > memory.length:
            raise RemoteProtocolError("extent", f"the server named {span}, which is not in a registered region")
        return memory.view(offset, length)

    def _send(self, buffers: list[memoryview]) -> None:
        while buffers:
            self._check_running()
            advance(buffers, self._sock.sendmsg(buffers, (), socket.MSG_NOSIGNAL))

    def _receive(self, buffers: list[memoryview], *, may_end: bool = False) -> bool:
        while buffers:
            self._check_running()
            received = self._sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
            if not received:
                if may_end:
                    return False
                raise OSError("the server closed in the middle of a command")
            advance(buffers, received)
            may_end = False
        return True

    def _check_running(self) -> None:
        if self._stopping:
            raise OSError("stopped on this side")


HOLD_OFF = 16
"""Where values are there already, or refused, all bytes would travel for nothing, and the answers wait for them."""


class EagerLink(_DataLink):
    """The data connection whose thread sends what the loop gives it, one put at a time.

    The bytes are kept here and nowhere else: who has a put under way, or the error of one, holds no memory by it.
    """

    def __init__(
        self,
        sock: socket.socket,
        ours: Sealer,
        theirs: Sealer,
        regions: dict[int, HostMemory],
        ended: Callable[[_DataLink, MemkvError | None], None],
    ) -> None:
        super().__init__(sock, ours, theirs, regions, ended)
        # While a put waits for its turn nobody takes its bytes: its deadline bounds it, not the time for a dead host.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self._hung_up = select.poll()
        self._hung_up.register(sock, select.POLLRDHUP)
        self._loop = asyncio.get_running_loop()
        self._given: SimpleQueue[list[memoryview] | None] = SimpleQueue()
        self._free = True
        self._held_off = 0
        self._claimed: list[memoryview] = []
        self._is_sending = False
        self._sent: asyncio.Future[None] | None = None

    def stop(self) -> None:
        """Make the thread end soon; from any thread."""
        super().stop()
        self._given.put(None)

    # On the loop

    def claim(self, extents: Sequence[Extent]) -> bool:
        """Begin an eager put of ``extents``, to be ended by :meth:`release`; False: it is to be none."""
        if not self._free or self._stopping or not may_be_eager([extent.length for extent in extents]):
            return False
        if self._held_off:
            self._held_off -= 1
            return False
        if self._hung_up.poll(0):
            self.stop()  # broken while nobody looked; what this put would send would be lost, and the session with it
            return False
        try:
            self._claimed = [self._view(span) for span in joined(extents)]
        except RemoteProtocolError:
            return False  # the server says what is wrong with them
        self._free = False
        return True

    def send(self) -> None:
        """Have the thread send what was claimed, once the PUT is on its way."""
        views, self._claimed = self._claimed, []
        with self._lock:
            if not self._stopping:
                self._is_sending = True
                self._given.put(views)

    async def wait_sent(self, timeout_s: float) -> bool:
        """Return when the thread does not read the memory any more; False: it still does after ``timeout_s``."""
        with self._lock:
            if not self._is_sending:
                return True
            sent = self._sent = self._loop.create_future()
        with anyio.move_on_after(timeout_s):
            await sent
            return True
        return False

    def release(self, *, in_vain: bool = False) -> None:
        """Both ends are through with the put: another one may begin. One that is never released stays the last.

        Args:
            in_vain: the server wanted no value of it: ``HOLD_OFF`` puts are asked for then.
        """
        self._claimed = []
        self._free = True
        self._held_off = HOLD_OFF if in_vain else 0

    # In the thread

    def _serve(self) -> None:
        try:
            while (views := self._given.get()) is not None:
                self._send([memoryview(self._sealer.pack(Kind.SENT)), *views])
                views = []  # nothing is held while waiting
                self._note_sent()
        finally:
            with self._lock:
                self._stopping = True
                self._claimed, self._given = [], SimpleQueue()
            self._note_sent()

    def _note_sent(self) -> None:
        with self._lock:
            self._is_sending = False
            sent, self._sent = self._sent, None
        if sent is not None:
            try:
                self._loop.call_soon_threadsafe(_set, sent)
            except RuntimeError:
                pass  # the loop has ended: nobody waits


def _set(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


class Links:
    """All data connections of one client connection. Used on one event loop.

    Args:
        failed: called on the event loop when the server broke the rules on one of them.
    """

    def __init__(self, failed: Callable[[MemkvError], None]) -> None:
        self.regions: dict[int, HostMemory] = {}
        """What the server may name, by region id."""
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._links: set[_DataLink] = set()
        self.eager: EagerLink | None = None
        self._stopping = False
        self._idle = anyio.Event()

    def __len__(self) -> int:
        return len(self._links)

    def add(self, sock: socket.socket, ours: Sealer, theirs: Sealer, *, eager: bool = False) -> None:
        """Serve ``sock``, an attached data connection, in a thread; owns it."""
        if self._stopping:
            sock.close()
            return
        tune_data(sock)
        link = (EagerLink if eager else _DataLink)(sock, ours, theirs, self.regions, self._report_end)
        if isinstance(link, EagerLink):
            self.eager = link
        self._links.add(link)
        link.thread.start()

    def shut_down(self) -> None:
        """Make all threads end soon; a second call does nothing."""
        self._stopping = True
        for link in self._links:
            link.stop()
        if not self._links:
            self._idle.set()

    async def stop(self) -> None:
        """End all threads; when this returns, none of them touches a region any more."""
        self.shut_down()
        await self._idle.wait()
        self.regions.clear()

    def _report_end(self, link: _DataLink, failure: MemkvError | None) -> None:
        """From a link's thread, which has nothing more to do then than close its socket."""
        try:
            self._loop.call_soon_threadsafe(self._on_end, link, failure)
        except RuntimeError:
            pass  # the loop has ended: nobody waits

    def _on_end(self, link: _DataLink, failure: MemkvError | None) -> None:
        link.thread.join()  # at once: it was about to end
        self._links.discard(link)
        if failure is not None and not self._stopping:
            self._failed(failure)
        if self._stopping and not self._links:
            self._idle.set()

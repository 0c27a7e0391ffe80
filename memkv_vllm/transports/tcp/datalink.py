"""One of the client's threads: each has a data connection, and does what the server asks and nothing else.

A thread waits in one system call for a command, checks it, and moves all bytes of it in as few calls as the kernel
allows, outside the interpreter lock; that lock is shared with vLLM, so each time a thread needs it may cost
milliseconds. Threads that block are cheap here because a client has few connections, unlike a server.

Fencing is local: ``Links.stop`` shuts the sockets down, which ends every call that is under way, and returns when
no thread runs. From then on nothing reads or writes the regions: the kernel works on copies. What the server has not
received completely by then it never takes for a value, since the rest will not come.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from memkv_vllm.errors import ConnectionLost, MemkvError, RemoteProtocolError
from memkv_vllm.protocol.auth import Sealer
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.tcp.commands import FIRST_BYTES, CommandOpener, CommandSealer, Kind
from memkv_vllm.transports.tcp.pieces import advance
from memkv_vllm.types import Extent

_log = logging.getLogger("memkv.transports.tcp")


class DataLink:
    """One data connection, driven by one thread that owns the socket."""

    def __init__(
        self,
        sock: socket.socket,
        ours: Sealer,
        theirs: Sealer,
        regions: dict[int, HostMemory],
        ended: Callable[[DataLink, MemkvError | None], None],
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

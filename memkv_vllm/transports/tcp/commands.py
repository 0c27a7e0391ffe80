"""Frames of a data connection: what the server tells the client's threads to send or to take. Pure.

::

    offset  bytes  field
    0       4      magic  b"mKD1"
    4       1      kind (Kind)
    5       1      0
    6       2      number of spans
    8       8      sequence number of this direction, exactly the next
    16      20     first span: region (4), offset (8), length (8); zeros where there is none
    36      20*n   the other spans
    36+20n  a      of ANSWER, the answer to the get
    then    16     first 16 bytes of HMAC-SHA256 over all of the above

All integers are little-endian. A server's READ names spans of the client's regions; the client answers SENT and then
the bytes of all spans, one after the other. A server's WRITE is followed by the bytes of all its spans; the client
answers WRITTEN once they are in place. A connection carries one command at a time, so an answer needs no name. ANSWER
names no span, and is followed by the bytes of the values that it says are OK: see ``memkv_vllm.transports.tcp.eager``.
Its sequence number is that of the get.

The MACs are made with the seals of the handshake that opened the connection; the magic differs from that of control
frames, so neither can be taken for the other. Payload carries no MAC: the values' checksums stand for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import chain
from struct import Struct

from memkv_vllm.errors import LocalProtocolError, RemoteProtocolError
from memkv_vllm.protocol import auth
from memkv_vllm.protocol.auth import Sealer
from memkv_vllm.protocol.frame import MAC_BYTES
from memkv_vllm.types import Extent

MAGIC = b"mKD1"
MAX_SPANS = 256
"""Spans of one command: a frame of 5 KiB, and far below what one ``sendmsg`` takes (1024)."""

_HEAD = Struct("<4sBxHQIQQ")
_SPAN = Struct("<IQQ")
_NO_SPAN = (0, 0, 0)

FIRST_BYTES = _HEAD.size + MAC_BYTES
"""Bytes of the shortest frame, one with no or one span: what to read before anything else is known."""


class Kind(IntEnum):
    """What a frame says."""

    READ = 1
    """Server: send these spans."""
    WRITE = 2
    """Server: the bytes of these spans follow."""
    SENT = 3
    """Client: the bytes that READ asked for follow."""
    WRITTEN = 4
    """Client: the bytes of WRITE are in place."""
    ANSWER = 5
    """Server: the answer to an eager get, whose bytes follow."""


class CommandSealer:
    """Makes the frames of one direction."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer
        self._sequence = 0

    def pack(self, kind: Kind, spans: Sequence[Extent] = ()) -> bytes:
        """The next frame."""
        self._sequence += 1
        return self._pack(kind, self._sequence - 1, spans, b"")

    def pack_answer(self, number: int, answer: bytes) -> bytes:
        """An ANSWER to eager get ``number``, on a connection of which nothing else uses this direction."""
        return self._pack(Kind.ANSWER, number, (), answer)

    def _pack(self, kind: Kind, sequence: int, spans: Sequence[Extent], answer: bytes) -> bytes:
        first = spans[0] if spans else _NO_SPAN
        frame = _HEAD.pack(MAGIC, kind, len(spans), sequence, *first)
        if len(spans) > 1:
            others = len(spans) - 1
            frame += Struct("<" + "IQQ" * others).pack(*chain.from_iterable(spans[1:]))
        frame += answer
        return frame + self._sealer.mac(frame, b"")


class CommandOpener:
    """Checks and parses the frames of one direction."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer
        self._sequence = 0

    @property
    def due(self) -> int:
        """Sequence number of the next frame."""
        return self._sequence

    def expect(self, number: int) -> None:
        """The frame that is due is numbered so: an answer to this get, after others that were answered otherwise.

        Raises:
            LocalProtocolError: one of that number was due before; it could be a repeated one.
        """
        if number < self._sequence:
            raise LocalProtocolError(f"frame {number} was due before; {self._sequence} is now")
        self._sequence = number

    def more_bytes(self, first: bytes | bytearray | memoryview) -> int:
        """How much longer than ``FIRST_BYTES`` the frame is that begins with ``first``.

        Raises:
            RemoteProtocolError: it is no frame of this protocol, or not the one that is due.
        """
        magic, _, count, sequence, *_ = _HEAD.unpack_from(first)
        if magic != MAGIC:
            raise RemoteProtocolError("magic", "bytes on a data connection that are no command (wrong magic)")
        if count > MAX_SPANS:
            raise RemoteProtocolError("length", f"a command of {count} spans; at most {MAX_SPANS}")
        if sequence != self._sequence:
            raise RemoteProtocolError("sequence", f"command {sequence}; {self._sequence} was due")
        return int(max(0, count - 1)) * _SPAN.size

    def open(
        self, frame: bytes | bytearray | memoryview, *due: Kind, answer_bytes: int = 0
    ) -> tuple[Kind, list[Extent]]:
        """The kind and spans of a whole frame.

        Args:
            frame: of the length that :meth:`more_bytes` told, and ``answer_bytes`` more.
            due: the kinds that may come now.
            answer_bytes: length of the answer between the spans and the MAC.

        Raises:
            RemoteProtocolError: the MAC does not match, or another kind came.
        """
        end = len(frame) - MAC_BYTES
        if not auth.check(self._sealer.mac(bytes(frame[:end]), b""), bytes(frame[end:])):
            raise RemoteProtocolError("mac", "a command's MAC does not match")
        self._sequence += 1
        _, kind, count, _, *first = _HEAD.unpack_from(frame)
        if kind not in due:
            raise RemoteProtocolError("type", f"a command of kind {kind} where {[k.name for k in due]} was due")
        spans = [Extent(*first)] if count else []
        spans += map(Extent._make, _SPAN.iter_unpack(memoryview(frame)[_HEAD.size : end - answer_bytes]))
        return Kind(kind), spans

"""Sessions over a link that cuts the stream anywhere or spoils it: all arrives in order, or the session closes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memkv_vllm.errors import MemkvError, ProtocolError, RemoteProtocolError
from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import ErrorCode, ErrorReply
from memkv_vllm.protocol.session import ReplyReceived, RequestReceived, Session, State
from tests.support.sessions import Pair, client, server

BODIES = st.lists(st.binary(max_size=300), max_size=8)
REQUEST_TYPES = st.sampled_from([type for type in MessageType if type >= MessageType.REGISTER])


def fed(session: Session, data: bytes, cuts: list[int]) -> list[object]:
    """Feed ``data`` in pieces."""
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    events: list[object] = []
    for start, end in zip(edges, edges[1:]):  # noqa: B905
        events += session.receive_data(data[start:end])
    return events


@given(BODIES, REQUEST_TYPES, st.lists(st.integers(0, 10_000), max_size=10))
def test_messages_arrive_whole_and_in_order_however_the_stream_is_cut(
    bodies: list[bytes], type: MessageType, cuts: list[int]
) -> None:
    pair = Pair().shake_hands()
    ids = [pair.client.send_request(type, body) for body in bodies]
    events = fed(pair.server, pair.client.data_to_send(), cuts)
    assert [(e.request_id, e.type, bytes(e.body)) for e in events if isinstance(e, RequestReceived)] == [
        (i, type, body)
        for i, body in zip(ids, bodies)  # noqa: B905
    ]
    for number, body in reversed(list(enumerate(bodies))):
        if number % 3 == 2:
            pair.server.send_error(ids[number], type, ErrorReply(ErrorCode.DENIED, str(number)))
        else:
            pair.server.send_reply(ids[number], type, body)
    replies = fed(pair.client, pair.server.data_to_send(), cuts)
    assert len(replies) == len(bodies)
    for reply, number in zip(replies, reversed(range(len(bodies)))):  # noqa: B905
        assert isinstance(reply, ReplyReceived)
        assert reply.request_id == ids[number]
        assert (reply.error is not None) == (number % 3 == 2)
        assert reply.error is not None or bytes(reply.body) == bodies[number]


@given(BODIES, st.integers(0, 10_000), st.integers(0, 7), st.lists(st.integers(0, 10_000), max_size=5))
def test_after_a_flipped_bit_nothing_more_is_heard(bodies: list[bytes], at: int, bit: int, cuts: list[int]) -> None:
    pair, lengths = Pair().shake_hands(), []
    data = b""
    for body in [*bodies, b"last"]:
        pair.client.send_request(MessageType.PUT, body)
        data += pair.client.data_to_send()
        lengths.append(len(data))
    at %= len(data)
    intact = sum(end <= at for end in lengths)
    spoilt = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    events: list[object] = []
    try:
        # Frame by frame, since a call that raises returns no events.
        for start, end in zip([0, *lengths], lengths):  # noqa: B905
            events += fed(pair.server, spoilt[start:end], cuts)
        pair.server.receive_eof()
        raise AssertionError("the flipped bit was not found")
    except RemoteProtocolError:
        assert len(events) == intact
        assert pair.server.state is State.CLOSED


@given(st.lists(st.binary(max_size=80), max_size=6), st.booleans(), st.booleans())
def test_noise_is_the_peers_fault_and_closes(chunks: list[bytes], as_client: bool, with_magic: bool) -> None:
    session = client() if as_client else server()
    if as_client:
        session.start()
    try:
        for chunk in chunks:
            assert session.receive_data(b"mKV1\x01" + chunk if with_magic else chunk) == []
    except MemkvError as error:
        assert session.state is State.CLOSED
        assert isinstance(error, ProtocolError) or as_client
    assert session.established is None


@given(st.data())
def test_sequence_numbers_never_repeat_and_never_skip(data: st.DataObject) -> None:
    pair = Pair().shake_hands()
    for _ in range(data.draw(st.integers(1, 30))):
        if data.draw(st.booleans()):
            pair.client.send_request(MessageType.PING, b"")
            pair.to_server()
        else:
            pair.server.send_reply(1, MessageType.PING, b"")
            pair.to_client()
    assert pair.client._sequence_ours == pair.server._sequence_theirs
    assert pair.server._sequence_ours == pair.client._sequence_theirs
    assert pair.server._sequence_ours + pair.client._sequence_ours == len(pair.client_events + pair.server_events) - 1

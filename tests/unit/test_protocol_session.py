"""The session as a state machine: every (state, input) pair, the handshake, and everything that must not pass."""

from __future__ import annotations

import hmac
from collections.abc import Callable
from itertools import product

import pytest

from memkv_vllm.errors import (
    AuthError,
    ConnectError,
    LocalProtocolError,
    MemkvError,
    ProtocolError,
    RemoteProtocolError,
    VersionError,
)
from memkv_vllm.protocol import auth
from memkv_vllm.protocol.auth import Credentials, Sealer
from memkv_vllm.protocol.frame import HEADER_BYTES, MAC_BYTES, MAX_VERSION, Flags, Header, MessageType, pack_header
from memkv_vllm.protocol.messages import ErrorCode, ErrorReply
from memkv_vllm.protocol.session import (
    MAX_REJECT_TEXT,
    TRANSITIONS,
    Established,
    Input,
    ReplyReceived,
    RequestReceived,
    Session,
    State,
)
from memkv_vllm.types import Role, SessionId
from tests.support.sessions import IDENTITY, KEY, LIMITS, Pair, client, one_byte_at_a_time, server

STATES_OF = {role: sorted({state for state, _ in table}, key=str) for role, table in TRANSITIONS.items()}
PAIRS = [(role, state, what) for role in Role for state in STATES_OF[role] for what in Input]


# -- every (state, input) pair


def brought_to(role: Role, state: State) -> tuple[Session, Session]:
    """A session of ``role`` that was brought to ``state`` by honest traffic, and its peer."""
    pair = Pair()
    ours, theirs = (pair.client, pair.server) if role is Role.CLIENT else (pair.server, pair.client)
    steps: dict[State, list[Callable[[], object]]] = {
        State.HELLO_SENT: [pair.client.start, pair.client.data_to_send],
        State.PROOF_SENT: [pair.client.start, pair.to_server, pair.to_client],
        State.PROOF_AWAITED: [pair.client.start, pair.to_server],
        State.PROVEN: [pair.client.start, pair.to_server, pair.to_client, lambda: prove(pair)],
        State.READY: [pair.shake_hands],
        State.CLOSED: [ours.close],
        State.IDLE: [],
    }
    for step in steps[state]:
        step()
    assert ours.state is state
    return ours, theirs


def prove(pair: Pair) -> None:
    pair.server.receive_data(pair.client.data_to_send())


def frame_for(ours: Session, theirs: Session, type: MessageType) -> bytes:
    """A frame of ``type`` such as the peer of ``ours`` would send in its place, sealed if it is time to seal."""
    sealed = ours._seal_theirs is not None
    flags = Flags.REPLY if ours.role is Role.CLIENT else Flags.NONE
    request_id = 0 if type in (MessageType.HELLO, MessageType.PROOF, MessageType.REJECT) else 1
    body = ErrorReply(ErrorCode.BUSY, "no").pack() if type is MessageType.REJECT else b""
    if type is MessageType.HELLO and (ours.role, ours.state) in (
        (Role.SERVER, State.IDLE),
        (Role.CLIENT, State.HELLO_SENT),
    ):
        body = _honest_hello(ours, theirs)
    if type is MessageType.PROOF and ours.role is Role.SERVER and ours.state is State.PROOF_AWAITED:
        body = auth.proof(KEY, Role.CLIENT, ours._handshake.transcript)
    sequence = ours._sequence_theirs if sealed else 0
    header = pack_header(Header(MAX_VERSION, type, flags, request_id, len(body), sequence))
    return header + body + (ours._seal_theirs.mac(header, body) if ours._seal_theirs is not None else b"")


def _honest_hello(ours: Session, theirs: Session) -> bytes:
    pair = Pair() if ours.role is Role.SERVER else Pair(client=ours)
    if ours.role is Role.SERVER:
        pair.client.start()
        return pair.client.data_to_send()[HEADER_BYTES:]
    pair.server.receive_data(
        pack_header(Header(MAX_VERSION, MessageType.HELLO, Flags.NONE, 0, len(ours._handshake.transcript), 0))
        + ours._handshake.transcript
    )
    return pair.server.data_to_send()[HEADER_BYTES:]


def apply(ours: Session, theirs: Session, what: Input) -> None:
    actions: dict[Input, Callable[[], object]] = {
        Input.START: ours.start,
        Input.SEND_REQUEST: lambda: ours.send_request(MessageType.PING, b""),
        Input.SEND_REPLY: lambda: ours.send_reply(1, MessageType.PING, b""),
        Input.ACCEPT: ours.accept,
        Input.REJECT: lambda: ours.reject(ErrorCode.BUSY, "no"),
        Input.CLOSE: ours.close,
        Input.RECV_HELLO: lambda: ours.receive_data(frame_for(ours, theirs, MessageType.HELLO)),
        Input.RECV_PROOF: lambda: ours.receive_data(frame_for(ours, theirs, MessageType.PROOF)),
        Input.RECV_REJECT: lambda: ours.receive_data(frame_for(ours, theirs, MessageType.REJECT)),
        Input.RECV_REQUEST: lambda: ours.receive_data(frame_for(ours, theirs, MessageType.PING)),
        Input.RECV_REPLY: lambda: ours.receive_data(frame_for(ours, theirs, MessageType.PING)),
    }
    actions[what]()


@pytest.mark.parametrize(("role", "state", "what"), PAIRS, ids=lambda value: value.value.replace(" ", "_"))
def test_every_pair_moves_as_the_table_says_or_closes(role: Role, state: State, what: Input) -> None:
    ours, theirs = brought_to(role, state)
    after = TRANSITIONS[role].get((state, what))
    received = what.value.startswith("receive")
    foreign = what is (Input.RECV_REQUEST if role is Role.CLIENT else Input.RECV_REPLY)
    if state is State.CLOSED and received:
        apply(ours, theirs, what)  # a closed session hears nothing
        assert ours.state is State.CLOSED
    elif what is Input.RECV_REJECT and after is not None:
        with pytest.raises(ConnectError):
            apply(ours, theirs, what)
        assert ours.state is State.CLOSED
    elif after is None and not (foreign and state is State.READY):
        with pytest.raises(RemoteProtocolError if received else LocalProtocolError):
            apply(ours, theirs, what)
        assert ours.state is State.CLOSED
    else:
        apply(ours, theirs, what)
        assert ours.state is (after or state)


def test_a_closed_session_neither_sends_nor_hears() -> None:
    pair = Pair().shake_hands()
    pair.client.send_request(MessageType.PING, b"")
    frame = pair.client.data_to_send()
    pair.server.close()
    pair.server.close()
    assert pair.server.receive_data(frame) == []
    for send in (lambda: pair.server.send_reply(1, MessageType.PING, b""), pair.server.accept):
        with pytest.raises(LocalProtocolError):
            send()


def test_a_session_without_what_its_role_needs_says_so() -> None:
    with pytest.raises(LocalProtocolError, match="needs"):
        Session(Role.CLIENT, bytes(32)).start()


# -- handshake


def handshake_sizes() -> list[int]:
    """Bytes of the four frames."""
    sizes: list[int] = []

    def note(_: str, data: bytes) -> bytes:
        sizes.append(len(data))
        return data

    Pair().shake_hands(note)
    return sizes


def test_handshake_and_messages_both_ways() -> None:
    pair = Pair().shake_hands()
    assert pair.client_events == pair.server_events == [pair.client.established]
    assert pair.client.established == pair.server.established
    established = pair.client.established
    assert established is not None
    assert established.server == IDENTITY
    assert (established.key_id, established.version) == ("default", MAX_VERSION)
    ids = [pair.client.send_request(MessageType.PUT, bytes([i] * i)) for i in range(3)]
    pair.to_server()
    requests = pair.server_events[1:]
    assert requests == [RequestReceived(i, MessageType.PUT, memoryview(bytes([n] * n))) for n, i in enumerate(ids)]
    pair.server.send_reply(ids[2], MessageType.PUT, b"third")
    pair.server.send_error(ids[0], MessageType.PUT, ErrorReply(ErrorCode.DENIED, "not yours"))
    pair.to_client()
    third, first = pair.client_events[1:]
    assert third == ReplyReceived(ids[2], MessageType.PUT, memoryview(b"third"))
    assert isinstance(first, ReplyReceived)
    assert first.error == (ErrorCode.DENIED, "not yours")


def test_byte_at_a_time() -> None:
    ours, theirs = client(), server()
    ours.start()
    assert one_byte_at_a_time(theirs, ours.data_to_send()) == []
    assert one_byte_at_a_time(ours, theirs.data_to_send()) == []
    (established,) = one_byte_at_a_time(theirs, ours.data_to_send())
    theirs.accept()
    assert one_byte_at_a_time(ours, theirs.data_to_send()) == [established]
    for body in (b"", b"x" * 1000):
        ours.send_request(MessageType.STAT, body)
    events = one_byte_at_a_time(theirs, ours.data_to_send())
    assert [bytes(event.body) for event in events if isinstance(event, RequestReceived)] == [b"", b"x" * 1000]


def test_another_key_is_found_by_the_client_before_it_proves_anything() -> None:
    pair = Pair(client=client(key=bytes(32)))
    with pytest.raises(AuthError, match="same auth_key"):
        pair.shake_hands()
    assert pair.client.state is State.CLOSED
    assert pair.client.data_to_send() == b""


def test_an_unknown_key_id_and_a_wrong_proof_are_rejected() -> None:
    pair = Pair(client=client(key_id="nobody"))
    pair.client.start()
    with pytest.raises(AuthError):
        pair.to_server()
    with pytest.raises(AuthError, match="'nobody'"):
        pair.to_client()
    pair = Pair()
    pair.client.start()
    pair.to_server()
    pair.to_client()
    with pytest.raises(AuthError, match="does not hold"):
        pair.to_server(lambda _, data: data[:-1] + bytes([data[-1] ^ 1]))
    assert pair.server.state is State.CLOSED
    assert pair.server_events == []


def test_versions_that_do_not_meet() -> None:
    """P096: of two sides of different versions, each says what it speaks."""
    for lowest, highest in ((MAX_VERSION + 1, 255), (0, 0)):
        pair = Pair()
        pair.client.start()
        with pytest.raises(VersionError, match=f"{lowest}-{highest}"):
            pair.to_server(lambda _, data: data[:HEADER_BYTES] + bytes([lowest, highest]) + data[HEADER_BYTES + 2 :])  # noqa: B023
        with pytest.raises(VersionError):
            pair.to_client()


def test_a_newer_client_is_answered_with_the_servers_version() -> None:
    pair = Pair()
    pair.client.start()
    hello = bytearray(pair.client.data_to_send())
    hello[4] = hello[HEADER_BYTES + 1] = MAX_VERSION + 1
    assert pair.server.receive_data(hello) == []
    assert pair.server.data_to_send()[HEADER_BYTES] == MAX_VERSION


def test_a_server_that_chooses_a_version_we_do_not_speak() -> None:
    pair = Pair()
    pair.client.start()
    pair.to_server()
    with pytest.raises(VersionError, match="chose version 9"):
        pair.to_client(lambda _, data: data[:HEADER_BYTES] + b"\x09" + data[HEADER_BYTES + 1 :])


@pytest.mark.parametrize("number", range(4))
def test_a_bit_flipped_in_any_byte_of_a_handshake_frame_lets_nobody_in(number: int) -> None:
    sizes = handshake_sizes()
    for at in range(sizes[number]):
        for bit in (0, 7):
            pair, frames = Pair(), []

            def spoil(_: str, data: bytes) -> bytes:
                frames.append(data)  # noqa: B023
                if len(frames) - 1 != number:  # noqa: B023
                    return data
                return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]  # noqa: B023

            try:
                pair.shake_hands(spoil)
                with pytest.raises(RemoteProtocolError):
                    (pair.server if number % 2 == 0 else pair.client).receive_eof()
            except (ProtocolError, AuthError, ConnectError):
                pass
            assert pair.client.state is not State.READY, (at, bit)
            assert pair.client_events == [], (at, bit)


@pytest.mark.parametrize("number", range(4))
def test_a_handshake_that_ends_at_any_byte_is_an_error(number: int) -> None:
    sizes = handshake_sizes()
    for length in range(sizes[number]):
        pair, frames = Pair(), []

        def cut(_: str, data: bytes) -> bytes:
            frames.append(data)  # noqa: B023
            return data if len(frames) - 1 < number else data[:length] if len(frames) - 1 == number else b""  # noqa: B023

        pair.shake_hands(cut)
        reader = pair.server if number % 2 == 0 else pair.client
        with pytest.raises(RemoteProtocolError) as caught:
            reader.receive_eof()
        assert caught.value.kind == ("truncated" if length else "handshake")
        assert reader.state is State.CLOSED


def test_a_recorded_handshake_proves_nothing_to_a_fresh_server() -> None:
    recorded: list[bytes] = []

    def record(sender: str, data: bytes) -> bytes:
        if sender == "client":
            recorded.append(data)
        return data

    Pair().shake_hands(record)
    fresh = server(nonce=b"t" * 32)
    fresh.receive_data(recorded[0])
    with pytest.raises(AuthError):
        fresh.receive_data(recorded[1])


def test_a_servers_proof_cannot_be_reflected_as_the_clients() -> None:
    pair = Pair()
    pair.client.start()
    pair.to_server()
    reflected = pair.server.data_to_send()[-auth.PROOF_BYTES :]
    header = pack_header(Header(MAX_VERSION, MessageType.PROOF, Flags.NONE, 0, len(reflected), 0))
    with pytest.raises(AuthError):
        pair.server.receive_data(header + reflected)


def test_rejections_reach_the_client_with_their_reason() -> None:
    pair = Pair()
    pair.client.start()
    pair.server.reject(ErrorCode.BUSY, "come back later " * 100)
    with pytest.raises(ConnectError, match=r"busy.*come back later"):
        pair.to_client()
    sealed = Pair()
    sealed.client.start()
    sealed.to_server()
    sealed.to_client()
    prove(sealed)
    sealed.server.reject(ErrorCode.LIMIT, "\U0001f600" * 1000)
    with pytest.raises(ConnectError, match="limit"):
        sealed.to_client()
    assert sealed.client.state is sealed.server.state is State.CLOSED
    assert MAX_REJECT_TEXT * 4 + 2 <= 512


# -- sealed frames


def spoilt(frame: bytes, other: bytes) -> dict[str, bytes]:
    return {
        "replay": frame + frame,
        "reorder": other + frame,
        "drop": other,
        "truncated mac": frame[:-1] + other,
        "no mac": frame[:-MAC_BYTES] + other,
        "zero mac": frame[:-MAC_BYTES] + bytes(MAC_BYTES),
        "other's mac": frame[:-MAC_BYTES] + other[-MAC_BYTES:],
    }


@pytest.mark.parametrize("name", list(spoilt(b"", b"")))
@pytest.mark.parametrize("sender", list(Role))
def test_no_replay_reorder_drop_or_truncation_passes(name: str, sender: Role) -> None:
    pair = Pair().shake_hands()
    frame, other = sealed_frames(pair, sender)
    reader = pair.server if sender is Role.CLIENT else pair.client
    events = []
    with pytest.raises(RemoteProtocolError) as caught:
        # In chunks of one frame, so that what was right before the fault is seen.
        data = spoilt(frame, other)[name]
        for at in range(0, len(data), len(frame)):
            events += reader.receive_data(data[at : at + len(frame)])
    assert caught.value.kind in ("sequence", "mac", "magic")
    assert len(events) == (1 if name == "replay" else 0)
    assert reader.state is State.CLOSED
    assert reader.receive_data(frame) == []


def sealed_frames(pair: Pair, sender: Role) -> tuple[bytes, bytes]:
    frames = []
    for _ in range(2):
        if sender is Role.CLIENT:
            pair.client.send_request(MessageType.PUT, b"some bytes")
            frames.append(pair.client.data_to_send())
        else:
            pair.server.send_reply(7, MessageType.PUT, b"some bytes")
            frames.append(pair.server.data_to_send())
    return frames[0], frames[1]


@pytest.mark.parametrize("sender", list(Role))
def test_a_bit_flipped_in_any_byte_of_a_sealed_frame_is_found(sender: Role) -> None:
    length = len(sealed_frames(Pair().shake_hands(), sender)[0])
    for at in range(length):
        pair = Pair().shake_hands()
        frame, other = sealed_frames(pair, sender)
        reader = pair.server if sender is Role.CLIENT else pair.client
        with pytest.raises(RemoteProtocolError):
            events = reader.receive_data(frame[:at] + bytes([frame[at] ^ 1 << at % 8]) + frame[at + 1 :] + other)
            assert events == []
            reader.receive_eof()
        assert reader.state is State.CLOSED


def test_frames_of_another_session_or_direction_do_not_pass() -> None:
    pair, stranger = Pair().shake_hands(), Pair(client=client(nonce=b"d" * 32)).shake_hands()
    frame, _ = sealed_frames(stranger, Role.CLIENT)
    with pytest.raises(RemoteProtocolError) as caught:
        pair.server.receive_data(frame)
    assert caught.value.kind == "mac"
    pair = Pair().shake_hands()
    frame, _ = sealed_frames(pair, Role.SERVER)
    pair.server._sequence_theirs = 1  # the one that the reflected frame carries
    with pytest.raises(RemoteProtocolError) as caught:
        pair.server.receive_data(frame)
    assert caught.value.kind == "mac"


@pytest.mark.parametrize("role", list(Role))
def test_an_oversize_body_is_refused_before_any_of_it_is_kept(role: Role) -> None:
    for ready, length in product((False, True), (1, 0xFFFFFFFF)):
        pair = Pair()
        if ready:
            pair.shake_hands()
        else:
            pair.client.start()
        reader, flags = (pair.client, Flags.REPLY) if role is Role.CLIENT else (pair.server, Flags.NONE)
        if length == 1:
            length += LIMITS.max_frame_bytes if ready else 512
        header = pack_header(Header(MAX_VERSION, MessageType.PING, flags, 0, length, reader._sequence_theirs))
        with pytest.raises(RemoteProtocolError) as caught:
            reader.receive_data(header)
        assert caught.value.kind == "length"
        assert len(reader._incoming) <= HEADER_BYTES
        reader.receive_data(bytes(1000))
        assert len(reader._incoming) <= HEADER_BYTES


def test_a_body_that_the_peer_would_refuse_is_not_sent() -> None:
    pair = Pair().shake_hands()
    with pytest.raises(LocalProtocolError, match="4097 bytes"):
        pair.client.send_request(MessageType.ADMIN, bytes(LIMITS.max_frame_bytes + 1))
    pair.client.send_request(MessageType.ADMIN, bytes(LIMITS.max_frame_bytes))
    pair.to_server()
    assert isinstance(pair.server_events[-1], RequestReceived)


def test_a_frame_of_another_version_after_the_handshake() -> None:
    pair = Pair().shake_hands()
    seal = pair.server._seal_theirs
    assert seal is not None
    header = pack_header(Header(MAX_VERSION + 1, MessageType.PING, Flags.NONE, 1, 0, 0))
    with pytest.raises(RemoteProtocolError) as caught:
        pair.server.receive_data(header + seal.mac(header, b""))
    assert caught.value.kind == "version"


# -- ends


def test_the_end_of_the_stream() -> None:
    pair = Pair().shake_hands()
    pair.server.receive_eof()
    pair.server.receive_eof()
    assert pair.server.state is State.CLOSED
    pair.server.close()
    pair.client.send_request(MessageType.PING, b"")
    reader = Pair().shake_hands().server
    reader.receive_data(b"mKV1")
    with pytest.raises(RemoteProtocolError) as caught:
        reader.receive_eof()
    assert caught.value.kind == "truncated"


# -- secrets


def test_no_secret_in_any_repr_or_message() -> None:
    pair, texts = Pair(), []
    pair.client.start()
    texts += [repr(pair.client), repr(pair.client._handshake), repr(Credentials(KEY)), str(Credentials(KEY))]
    pair.to_server()
    texts += [repr(pair.server._handshake)]
    pair.to_client()
    pair.to_server()
    pair.to_client()
    texts += [repr(pair.server), repr(pair.client), repr(vars(pair.client)), repr(vars(pair.server))]
    texts += [repr(pair.client.established), repr(Sealer(KEY, Role.CLIENT, b""))]
    for make in (lambda: Credentials(KEY[:31]), lambda: Credentials(KEY, "x" * 33)):
        with pytest.raises(MemkvError) as caught:
            make()
        texts.append(str(caught.value))
    transcript = pair.client._handshake.transcript
    for role in Role:
        key = hmac.digest(KEY, f"memkv session {role.value}".encode() + b"\0" + transcript, "sha256")
        assert not any(repr(key)[2:-1] in text or key.hex() in text for text in texts)
    for text in texts:
        assert repr(KEY)[2:-1] not in text
        assert KEY.hex() not in text


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 5000])
def test_the_mac_of_a_frame_is_hmac_sha256(length: int) -> None:
    header, body, transcript = b"h" * HEADER_BYTES, bytes(length), b"both hellos"
    key = hmac.digest(KEY, b"memkv session client\0" + transcript, "sha256")
    expected = hmac.digest(key, header + body, "sha256")[:MAC_BYTES]
    seal = Sealer(KEY, Role.CLIENT, transcript)
    assert seal.mac(header, body) == seal.mac(header + body) == seal.mac(header, memoryview(body)) == expected


def test_the_shared_key_is_forgotten_after_the_handshake() -> None:
    pair = Pair().shake_hands()
    assert pair.client._handshake.key == pair.server._handshake.key == b""


@pytest.mark.parametrize("key_id", ["", "x" * 33, "smörgås", "a\nb", "nul\0"])
def test_key_ids_that_do_not_fit(key_id: str) -> None:
    with pytest.raises(LocalProtocolError):
        Credentials(KEY, key_id)


def test_sealers_of_both_directions_and_sessions_differ() -> None:
    macs = {
        Sealer(key, role, transcript).mac(b"h", b"b")
        for key in (KEY, bytes(32))
        for role in Role
        for transcript in (b"1", b"2")
    }
    assert len(macs) == 8
    assert {len(mac) for mac in macs} == {MAC_BYTES}


def test_ids_are_what_the_types_say() -> None:
    established = Pair().shake_hands().client.established
    assert isinstance(established, Established)
    assert established.session == SessionId(b"I" * 16)

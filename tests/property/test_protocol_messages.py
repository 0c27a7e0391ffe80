"""Messages: what is packed is what is unpacked; what does not parse is the peer's fault, never another exception."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memkv_vllm.errors import LocalProtocolError, RemoteProtocolError, StoreError
from memkv_vllm.protocol import codec
from memkv_vllm.protocol.columns import GetColumns, PutColumns, pack_get_reply
from memkv_vllm.protocol.frame import HEADER_BYTES, Flags, Header, MessageType, pack_header, unpack_header
from memkv_vllm.protocol.messages import (
    MAX_LICENSE_BYTES,
    Admin,
    BadValue,
    Bye,
    Delete,
    ErrorCode,
    ErrorReply,
    Exists,
    Fence,
    Get,
    GetItem,
    GetResult,
    License,
    Manifest,
    ManifestEntry,
    Ping,
    Put,
    PutItem,
    Register,
    ReportBad,
    Stat,
    batch_count,
)
from memkv_vllm.types import Extent, MemoryKind, SessionId, Status

U8, U16, U32, U64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
EXTENTS = st.builds(Extent, U32, U64, U64)
DIGESTS = st.binary(min_size=32, max_size=32)


def batches(*fields: st.SearchStrategy[Any]) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """Lists of (key, fields...) whose keys have one length."""
    return st.integers(1, codec.MAX_KEY_BYTES).flatmap(
        lambda length: st.lists(st.tuples(st.binary(min_size=length, max_size=length), *fields), max_size=20)
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
U7 = st.integers(0, 127)
PUTS = st.builds(
    lambda rows, a, t, eager: Put([PutItem(*r) for r in rows], a, t, eager),
    batches(U64, U64, EXTENTS),
    U7,
    U32,
    st.booleans(),
)
GETS = st.builds(
    lambda rows, t, eager: Get([GetItem(*r) for r in rows], t, eager), batches(U64, EXTENTS), U32, st.booleans()
)
EXISTS = st.builds(lambda rows, shards: Exists([r[0] for r in rows], shards), batches(), st.integers(1, 65535))
REPORTS = st.builds(lambda rows: ReportBad([BadValue(*r) for r in rows]), batches(U64))
DELETES = st.builds(lambda rows: Delete([r[0] for r in rows]), batches())
REGISTERS = st.builds(Register, U32, st.sampled_from(MemoryKind), U64, st.binary(max_size=300))
MANIFESTS = st.builds(Manifest, DIGESTS, DIGESTS, st.binary(max_size=500))
FENCES = st.builds(lambda session: Fence(SessionId(session)), st.binary(min_size=16, max_size=16))
ADMINS = st.builds(Admin, st.dictionaries(st.text(), JSON, max_size=3))
REQUESTS: st.SearchStrategy[Any] = st.one_of(PUTS, GETS, EXISTS, REPORTS, DELETES, REGISTERS, MANIFESTS, FENCES, ADMINS)
REQUEST_TYPES: list[Any] = [Put, Get, Exists, ReportBad, Delete, Register, Manifest, Fence, Admin]


@given(REQUESTS)
def test_requests_round_trip(request_: Any) -> None:
    body = request_.pack()
    assert type(request_).unpack(memoryview(body)) == request_
    items = getattr(request_, "items", getattr(request_, "keys", getattr(request_, "prefixes", ())))
    assert batch_count(request_.TYPE, body) == len(items)


@given(REQUESTS, st.data())
def test_a_request_that_is_cut_or_longer_is_refused(request_: Any, data: st.DataObject) -> None:
    body = request_.pack()
    cut = data.draw(st.integers(0, max(0, len(body) - 1)))
    for wrong in (body[:cut], body + b"x"):
        if wrong != body:
            with pytest.raises(RemoteProtocolError):
                type(request_).unpack(memoryview(wrong))


@settings(max_examples=300)
@given(st.sampled_from(REQUEST_TYPES), st.binary(max_size=200))
def test_random_bodies_parse_or_are_the_peers_fault(kind: Any, body: bytes) -> None:
    try:
        parsed = kind.unpack(memoryview(body))
    except RemoteProtocolError:
        return
    if kind is not Admin:
        assert kind.unpack(memoryview(parsed.pack())) == parsed


@given(st.text(st.characters(max_codepoint=127), max_size=300))
def test_licenses_round_trip_and_are_not_shown(token: str) -> None:
    assert License.unpack(memoryview(License(token).pack())) == License(token)
    assert repr(License(token)) == "License()"


def test_a_license_is_bounded() -> None:
    with pytest.raises(RemoteProtocolError):
        License.unpack(memoryview(bytes(MAX_LICENSE_BYTES + 1)))


@given(st.sampled_from([Put, Get, Exists, ReportBad, Delete]), st.integers(1, 65535), st.binary(max_size=64))
def test_a_batch_of_empty_keys_is_refused(kind: Any, count: int, rest: bytes) -> None:
    head = count.to_bytes(2, "little") + b"\0" + b"\x01" * (kind.HEAD.size - 3)
    with pytest.raises(RemoteProtocolError):
        kind.unpack(memoryview(head + rest))
    with pytest.raises(RemoteProtocolError):
        kind.unpack(memoryview(head))


def test_empty_batches_are_legal() -> None:
    for request_ in (Put([], 0, 1), Get([], 1), Exists([], 3), ReportBad([]), Delete([])):
        assert type(request_).unpack(memoryview(request_.pack())) == request_
        assert request_.reply(memoryview(b"")) == []


# -- replies


@given(PUTS, st.data())
def test_put_replies(put: Put, data: st.DataObject) -> None:
    statuses = data.draw(st.lists(st.sampled_from(Status), min_size=len(put.items), max_size=len(put.items)))
    assert put.reply(memoryview(bytes(statuses))) == statuses
    with pytest.raises(RemoteProtocolError):
        put.reply(memoryview(bytes(statuses) + b"\0"))


@given(GETS, st.data())
def test_get_replies(get: Get, data: st.DataObject) -> None:
    result = st.builds(GetResult, st.sampled_from(Status), U8, U64, U64)
    results = data.draw(st.lists(result, min_size=len(get.items), max_size=len(get.items)))
    body = Get.pack_reply(results)
    assert get.reply(memoryview(body)) == results
    if body:
        with pytest.raises(RemoteProtocolError):
            get.reply(memoryview(body[:-1]))


@given(PUTS)
def test_a_put_in_columns_is_what_its_items_say(put: Put) -> None:
    columns = PutColumns.unpack(memoryview(put.pack()))
    rows = zip(
        columns.keys, columns.checksums, columns.layouts, columns.regions, columns.offsets, columns.lengths, strict=True
    )
    assert [PutItem(key, checksum, layout, Extent(*extent)) for key, checksum, layout, *extent in rows] == put.items
    assert (columns.algorithm, columns.timeout_ms, columns.eager) == (put.algorithm, put.timeout_ms, put.eager)


@given(GETS)
def test_a_get_in_columns_is_what_its_items_say(get: Get) -> None:
    columns = GetColumns.unpack(memoryview(get.pack()))
    rows = zip(columns.keys, columns.layouts, columns.regions, columns.offsets, columns.lengths, strict=True)
    assert [GetItem(key, layout, Extent(*extent)) for key, layout, *extent in rows] == get.items
    assert (columns.timeout_ms, columns.eager) == (get.timeout_ms, get.eager)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 128, 200])
def test_columns_of_any_length_come_in_the_order_of_the_batch(count: int) -> None:
    items = [PutItem(n.to_bytes(9, "big"), n + 1, n + 2, Extent(n + 3, n + 4, n + 5)) for n in range(count)]
    columns = PutColumns.unpack(memoryview(Put(items, 1, 2).pack()))
    assert list(columns.checksums) == [item.checksum for item in items]
    assert list(columns.keys) == [item.key for item in items]
    assert list(columns.lengths) == [item.extent.length for item in items]
    numbers = list(range(count))
    body = pack_get_reply(bytes(n % 14 for n in numbers), [n % 256 for n in numbers], numbers, numbers)
    results = [GetResult(Status(n % 14), n % 256, n, n) for n in numbers]
    assert body == Get.pack_reply(results)


@given(st.one_of(PUTS, GETS), st.data())
def test_columns_that_are_cut_or_longer_are_refused(request_: Put | Get, data: st.DataObject) -> None:
    kind: Any = PutColumns if isinstance(request_, Put) else GetColumns
    body = request_.pack()
    for spoilt in (body[: data.draw(st.integers(0, len(body) - 1))], body + b"\0"):
        with pytest.raises(RemoteProtocolError):
            kind.unpack(memoryview(spoilt))


def test_an_unknown_status_is_a_failure_never_a_success() -> None:
    key = bytes(8)
    for value in range(256):
        expected = Status(value) if value <= max(Status) else Status.FAILED
        body = memoryview(bytes([value]))
        assert Put([PutItem(key, 0, 0, Extent(1, 0, 1))], 0, 1).reply(body) == [expected]
        assert Delete([key]).reply(body) == [expected]
        (got,) = Get([GetItem(key, 0, Extent(1, 0, 1))], 1).reply(memoryview(bytes([value]) + bytes(17)))
        assert got.status is expected


@given(st.integers(1, 70), st.lists(st.binary(min_size=4, max_size=4), max_size=10), st.data())
def test_exists_says_yes_only_for_every_shard(shards: int, prefixes: list[bytes], data: st.DataObject) -> None:
    rows = [data.draw(st.lists(st.booleans(), min_size=shards, max_size=shards)) for _ in prefixes]
    exists = Exists(prefixes, shards)
    body = b"".join(sum(bit << i for i, bit in enumerate(row)).to_bytes(exists.row_bytes, "little") for row in rows)
    assert exists.reply(memoryview(body)) == [all(row) for row in rows]
    full = ((1 << shards) - 1).to_bytes(exists.row_bytes, "little")
    assert exists.reply(memoryview(full * len(prefixes))) == [True] * len(prefixes)


@given(
    MANIFESTS, st.lists(st.builds(ManifestEntry, DIGESTS, st.binary(max_size=50)), max_size=5), st.binary(max_size=90)
)
def test_manifest_replies(manifest: Manifest, siblings: list[ManifestEntry], noise: bytes) -> None:
    body = Manifest.pack_reply(siblings)
    assert manifest.reply(memoryview(body)) == siblings
    for wrong in (body[:-1], body + b"\0"):
        with pytest.raises(RemoteProtocolError):
            manifest.reply(memoryview(wrong))
    try:
        manifest.reply(memoryview(noise))
    except RemoteProtocolError:
        pass


def test_empty_replies() -> None:
    for request_ in (Ping(), Bye(), Fence(SessionId(bytes(16))), Register(1, MemoryKind.HOST, 1)):
        assert request_.reply(memoryview(b"")) is None
        with pytest.raises(RemoteProtocolError):
            request_.reply(memoryview(b"\0"))


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_json_replies(value: dict[str, Any]) -> None:
    body = memoryview(Admin(value).pack())
    assert Stat().reply(body) == Admin({}).reply(body) == value


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000, b'{"a":' * 100_000])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    for parse in (Stat().reply, Admin.unpack):
        with pytest.raises(RemoteProtocolError):
            parse(memoryview(body))


# -- error replies and headers


@given(st.sampled_from(ErrorCode), st.text(max_size=2000))
def test_error_replies(code: ErrorCode, text: str) -> None:
    packed = ErrorReply(code, text).pack()
    assert len(packed) <= 1026
    parsed = ErrorReply.unpack(memoryview(packed))
    assert parsed.code is code
    assert parsed.text.isprintable()  # it is shown on terminals and in logs, whoever wrote it
    printable = "".join(char if char.isprintable() else "\ufffd" for char in text)
    assert parsed.text[:-1] == printable[: max(0, len(parsed.text) - 1)]
    assert isinstance(parsed.to_exception(), StoreError)


@given(st.binary(max_size=2000))
def test_any_error_reply_parses_or_is_the_peers_fault(body: bytes) -> None:
    try:
        assert len(ErrorReply.unpack(memoryview(body)).text) <= 1024
    except RemoteProtocolError:
        assert len(body) < 2


@given(
    st.builds(Header, U8, st.sampled_from(MessageType), st.sampled_from([Flags(i) for i in range(4)]), U64, U32, U64)
)
def test_headers_round_trip(header: Header) -> None:
    packed = pack_header(header)
    assert len(packed) == HEADER_BYTES
    assert unpack_header(packed) == header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), st.booleans())
def test_random_headers_parse_or_are_the_peers_fault(data: bytes, right_magic: bool) -> None:
    try:
        header = unpack_header(b"mKV1" + data[4:] if right_magic else data)
    except RemoteProtocolError:
        return
    assert pack_header(header)[4:] == data[4:]


# -- what we may not send


@pytest.mark.parametrize("count", [1, 2, 255, 256, 257, 600])
@pytest.mark.parametrize("key_bytes", [1, 67, 255])
def test_keys_come_out_as_they_went_in_whatever_their_number(count: int, key_bytes: int) -> None:
    keys = [bytes([number % 256]) * key_bytes for number in range(count)]
    assert Exists.unpack(memoryview(Exists(keys, 3).pack())) == Exists(keys, 3)
    assert Delete.unpack(memoryview(Delete(keys).pack())) == Delete(keys)
    for wrong in (b"x", b""):
        body = Delete(keys).pack()
        with pytest.raises(RemoteProtocolError):
            Delete.unpack(memoryview(body + wrong if wrong else body[:-1]))


def test_keys_of_one_batch_have_one_length() -> None:
    for keys in ([b"a", b"bb"], [b""], [b"x" * 256]):
        with pytest.raises(LocalProtocolError):
            Delete(keys).pack()
    with pytest.raises(StoreError, match="65536"):
        Delete([b"k"] * 65536).pack()


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 128, 200])
def test_a_batch_of_any_size_is_packed_as_its_items_one_by_one(count: int) -> None:
    """Columns are packed many at once, and the batch's end need not be the end of such a block."""
    puts = [PutItem(bytes([n]) * 9, n, n + 1, Extent(n + 2, n + 3, n + 4)) for n in range(count)]
    rows: list[tuple[Any, ...]] = [(key, checksum, layout, *extent) for key, checksum, layout, extent in puts]
    head = Put.HEAD.pack(count, 9 if count else 0, 2, 3)
    assert Put(puts, 2, 3).pack() == head + codec.pack_items(Put.ITEM, 9, rows)
    gets = [GetItem(item.key, item.layout, item.extent) for item in puts]
    rows = [(key, layout, *extent) for key, layout, extent in gets]
    assert Get(gets, 3).pack() == Get.HEAD.pack(count, 9 if count else 0, 0, 3) + codec.pack_items(Get.ITEM, 9, rows)

"""The tokens of CONNECT and REGISTER: what is sent arrives, and nothing else is taken for it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memkv_vllm.errors import MemkvError, RemoteProtocolError, StoreError
from memkv_vllm.transports.verbs.endpoints import (
    LANDING_BYTES,
    MAX_QUEUE_PAIRS,
    MTUS,
    VERSION,
    Endpoint,
    QueuePairEnd,
    RegionToken,
)

GID = bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 1])
LANDING = RegionToken(0x7F00_1234_5000, 0x89AB)
PLAIN = Endpoint(GID, 0, 4096, 16, (QueuePairEnd(0x123456, 0xFEDCBA), QueuePairEnd(17, 0)), LANDING)

numbers = st.integers(0, (1 << 24) - 1)
endpoints = st.builds(
    Endpoint,
    gid=st.binary(min_size=16, max_size=16).filter(any),
    lid=st.integers(0, 65535),
    mtu=st.sampled_from(MTUS),
    max_reads=st.integers(1, 255),
    queue_pairs=st.lists(st.builds(QueuePairEnd, numbers, numbers), min_size=1, max_size=MAX_QUEUE_PAIRS).map(tuple),
    landing=st.builds(RegionToken, st.integers(0, (1 << 64) - LANDING_BYTES), st.integers(0, (1 << 32) - 1)),
)


@settings(deadline=None)
@given(endpoints)
def test_an_endpoint_arrives_as_it_was_sent(endpoint: Endpoint) -> None:
    assert Endpoint.unpack(endpoint.pack()) == endpoint


def test_the_bytes_of_an_endpoint() -> None:
    """Both releases of a rolling update must read them alike."""
    assert PLAIN.pack() == (
        b"\x02" + GID + b"\x00\x00" + b"\x00\x10" + b"\x10" + b"\x02"
        + b"\x00\x50\x34\x12\x00\x7f\x00\x00" + b"\xab\x89\x00\x00"
        + b"\x56\x34\x12\x00" + b"\xba\xdc\xfe\x00" + b"\x11\x00\x00\x00" + bytes(4)
    )  # fmt: skip


def test_more_reads_than_a_byte_says_are_255() -> None:
    assert Endpoint.unpack(dataclasses.replace(PLAIN, max_reads=1000).pack()).max_reads == 255


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queue_pairs": ()}, "0 queue pairs; a session has 1 to 8"),
        ({"queue_pairs": PLAIN.queue_pairs * 5}, "10 queue pairs"),
        ({"mtu": 1500}, "MTU of 1500"),
        ({"mtu": 0}, "MTU of 0"),
        ({"max_reads": 0}, "answers no RDMA READ"),
        ({"gid": bytes(16)}, "without a GID"),
        ({"queue_pairs": (QueuePairEnd(1 << 24, 0),)}, "24 bits"),
        ({"queue_pairs": (QueuePairEnd(0, 1 << 24),)}, "24 bits"),
        ({"landing": RegionToken((1 << 64) - 8191, 1)}, "a landing of 8192 bytes at 0xffffffffffffe001"),
    ],
)
def test_an_endpoint_that_nobody_can_use_is_refused(change: dict[str, object], message: str) -> None:
    token = dataclasses.replace(PLAIN, **change).pack()  # type: ignore[arg-type]
    with pytest.raises(RemoteProtocolError, match=message) as caught:
        Endpoint.unpack(token)
    assert caught.value.kind == "token"


@pytest.mark.parametrize("version", [1, VERSION + 1])
def test_another_version_is_no_attack_but_another_release(version: int) -> None:
    """Version 1 had no landing."""
    token = bytes([version]) + PLAIN.pack()[1:]
    with pytest.raises(
        StoreError, match=f"version {version} of the verbs data path, this one 2: run the same release"
    ) as caught:
        Endpoint.unpack(token)
    assert caught.value.code == "data_path"


@settings(deadline=None)
@given(st.binary(max_size=120))
def test_any_bytes_are_an_endpoint_or_a_clean_error(token: bytes) -> None:
    try:
        Endpoint.unpack(token)
    except MemkvError:
        pass


@settings(deadline=None)
@given(endpoints, st.integers(0, 200), st.integers(0, 7))
def test_one_wrong_bit_is_another_endpoint_or_a_clean_error(endpoint: Endpoint, at: int, bit: int) -> None:
    token = bytearray(endpoint.pack())
    token[at % len(token)] ^= 1 << bit
    try:
        assert Endpoint.unpack(bytes(token)) != endpoint
    except MemkvError:
        pass


@settings(deadline=None)
@given(st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 32) - 1))
def test_a_regions_token_arrives_as_it_was_sent(address: int, rkey: int) -> None:
    assert RegionToken.parse(RegionToken(address, rkey).pack(), 1 << 40) == (address, rkey)


def test_a_region_ends_inside_the_address_space() -> None:
    last = RegionToken((1 << 64) - 4096, 7)
    assert RegionToken.parse(last.pack(), 4096) == last
    with pytest.raises(RemoteProtocolError, match="4097 bytes at 0xfffffffffffff000"):
        RegionToken.parse(last.pack(), 4097)
    for size in (0, 11, 13):
        with pytest.raises(RemoteProtocolError, match=f"of {size} bytes; 12 are needed"):
            RegionToken.parse(bytes(size), 1)

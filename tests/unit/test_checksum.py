"""The checksum's definition, held by golden values and by a second, naive implementation."""

from __future__ import annotations

import random
import struct
import threading
import time

import numpy as np
import pytest
import xxhash

from memkv_vllm.protocol.checksum import LEAF_BYTES, ChecksumAlgorithm, digest, leaf_digest

LENGTHS = (0, 1, 65535, 65536, 65537, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1, 3 * LEAF_BYTES + 7)
GOLDEN = {
    0: 0xC77B3ABB6F87ACD9,
    1: 0x87BC669437310826,
    65535: 0x7CC753A415A4B63D,
    65536: 0x18698882271371DA,
    65537: 0x1112CFA2F65E7384,
    1048575: 0xDC85A029F33CB15E,
    1048576: 0x88E8560D5BEE4F01,
    1048577: 0x1D109C1F25804A66,
    3145735: 0xA5E1FB610870117F,
}


def pattern(length: int) -> bytes:
    return (b"".join(struct.pack("<I", number) for number in range(length // 4 + 1)))[:length]


@pytest.mark.parametrize("length", LENGTHS)
def test_golden(length: int) -> None:
    """These stand in stored values' headers: a change here makes every old value unreadable."""
    assert digest(pattern(length)) == GOLDEN[length]


@pytest.mark.parametrize("length", LENGTHS)
def test_tree_as_specified(length: int) -> None:
    data = pattern(length)
    leaves = [data[start : start + 2**20] for start in range(0, length, 2**20)]
    root = b"".join(xxhash.xxh3_64_intdigest(leaf).to_bytes(8, "little") for leaf in leaves)
    assert digest(data) == xxhash.xxh3_64_intdigest(root + length.to_bytes(8, "little"))


@pytest.mark.parametrize("length", LENGTHS)
def test_same_bytes_same_checksum_whatever_holds_them(length: int) -> None:
    data = pattern(length)
    expected = digest(data)
    assert digest(memoryview(data)) == digest(bytearray(data)) == expected
    assert digest(np.frombuffer(data, np.uint8).data) == expected
    if length and length % 8 == 0:
        assert digest(np.frombuffer(data, np.uint64).reshape(2, -1).data) == expected
    assert digest(memoryview(b"xx" + data)[2:]) == expected, "alignment does not matter"


def test_not_contiguous_is_refused() -> None:
    with pytest.raises((TypeError, ValueError, BufferError)):
        digest(np.zeros((4, 4), np.uint8)[:, ::2].data)


def test_every_single_bit_flip_is_found() -> None:
    rng = random.Random(7)
    data = bytearray(rng.randbytes(2 * LEAF_BYTES + 4097))
    good = digest(data)
    for _ in range(1000):
        bit = rng.randrange(len(data) * 8)
        data[bit // 8] ^= 1 << bit % 8
        assert digest(data) != good
        data[bit // 8] ^= 1 << bit % 8
    assert digest(data) == good


def test_swapped_leaves_and_lost_tails_are_found() -> None:
    first, second = b"a" * LEAF_BYTES, b"b" * LEAF_BYTES
    assert digest(first + second) != digest(second + first)
    assert len({digest(bytes(length)) for length in (0, 1, 2, LEAF_BYTES, 2 * LEAF_BYTES)}) == 5


def test_algorithm_ids() -> None:
    assert ChecksumAlgorithm(1).label == "xxh3-64-tree-1m"
    assert leaf_digest(memoryview(b"abc")) == xxhash.xxh3_64_intdigest(b"abc")


def test_other_threads_run_while_a_leaf_is_hashed() -> None:
    """With the interpreter lock held, this thread would get it back only every switch interval (5 ms)."""
    data = bytes(4 * LEAF_BYTES)
    stop = threading.Event()

    def hash_on() -> None:
        while not stop.is_set():
            digest(data)

    thread = threading.Thread(target=hash_on)
    thread.start()
    try:
        ends = time.perf_counter() + 0.5
        handovers = 0
        while time.perf_counter() < ends:
            time.sleep(0)  # lets go of the lock for a moment, as a kernel launch does
            handovers += 1
    finally:
        stop.set()
        thread.join()
    assert handovers > 1000, "some 100 (5 ms each) when hashing holds the lock"

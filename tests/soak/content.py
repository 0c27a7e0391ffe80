"""The bytes and the length of every value, as a function of its key alone. Pure.

So whoever loads a value knows what it must be, without having stored it and without the product's checksum. A value is
a stretch of one long random pattern, every 8 bytes of it combined with a word made of the key: two keys differ in all
their words, so a value of another key, a shifted one and a single damaged bit are all seen.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

__all__ = ["MAX_BYTES", "MIN_BYTES", "content", "first_difference", "length_of"]

MIN_BYTES, MAX_BYTES = 4 << 10, 8 << 20
_SHIFTS = 509
_PATTERN = np.random.default_rng(20260101).integers(0, 2**63, MAX_BYTES // 8 + _SHIFTS + 1, dtype=np.uint64)


def length_of(key: bytes) -> int:
    """Length in bytes: between 4 KiB and 8 MiB, small ones and large ones alike, mostly not a multiple of anything."""
    dice = int.from_bytes(hashlib.blake2b(b"length" + key, digest_size=8).digest(), "big")
    exponent = math.log2(MIN_BYTES) + dice % 1_000_003 / 1_000_003 * math.log2(MAX_BYTES / MIN_BYTES)
    length = int(2**exponent)
    return length - length % 4096 if dice % 4 == 0 else length


def _stretch(key: bytes, num_words: int) -> npt.NDArray[np.uint64]:
    digest = hashlib.blake2b(key, digest_size=16).digest()
    word, shift = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little") % _SHIFTS
    made: npt.NDArray[np.uint64] = _PATTERN[shift : shift + num_words] ^ np.uint64(word)
    return made


def content(key: bytes, length: int) -> npt.NDArray[np.uint8]:
    """The ``length`` bytes of the value under ``key``; ``length`` is at most 8 MiB."""
    return _stretch(key, -(-length // 8)).view(np.uint8)[:length]


def first_difference(key: bytes, value: npt.NDArray[np.uint8]) -> int | None:
    """Offset of the first byte of ``value`` that is not what ``key`` demands; None when all are right."""
    expected = content(key, len(value))
    if np.array_equal(expected, value):
        return None
    return int(np.flatnonzero(expected != value)[0])

"""The checksum of a value: 64 bits, a tree, so that its leaves can be hashed in parallel. Pure.

A value is cut into leaves of 1 MiB (the last may be shorter; an empty value has none). Each leaf is hashed with
XXH3-64. The root is XXH3-64 over the leaf digests, 8 bytes little-endian each, followed by the value's total length,
8 bytes little-endian. Both engine and store import this module; the policy (how much is verified) is the engine's.

Why 1 MiB, and why not the one-shot functions: xxhash lets go of the interpreter lock only for pieces above 64 KiB, and
before 4.0 only in ``update``. A thread that hashes while it holds the lock keeps it for a whole switch interval (5 ms)
each time that vLLM's model runner lets go of it for a moment, which slows a runner that launches kernels by a factor of
hundreds. With 1 MiB a leaf takes some 40 us without the lock, and getting it back costs one hand-over per MiB.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["LEAF_BYTES", "ChecksumAlgorithm", "digest", "leaf_digest", "root_digest"]

LEAF_BYTES = 1024 * 1024


class ChecksumAlgorithm(IntEnum):
    """Algorithm ids as they stand on the wire and in a value's header."""

    NONE = 0
    """No checksum was computed; nothing can be verified."""
    XXH3_64_TREE_1M = 1
    """``xxh3-64-tree-1m``: what :func:`digest` computes."""

    @property
    def label(self) -> str:
        """Name for log lines and reports, for example ``xxh3-64-tree-1m``."""
        return self.name.lower().replace("_", "-")


def leaf_digest(leaf: memoryview) -> int:
    """Hash one leaf.

    Args:
        leaf: contiguous bytes, at most ``LEAF_BYTES`` of them.

    Returns:
        An unsigned 64-bit integer.
    """
    state = xxhash.xxh3_64()
    state.update(leaf)
    return state.intdigest()


def root_digest(leaves: Sequence[int], length: int) -> int:
    """The checksum of a value of ``length`` bytes whose leaves hash to ``leaves``, for one that is read in pieces.

    Returns:
        An unsigned 64-bit integer.
    """
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(leaves) + 1}Q", *leaves, length))


def digest(value: Buffer) -> int:
    """Compute the checksum (``ChecksumAlgorithm.XXH3_64_TREE_1M``) of a value.

    Meant for a worker thread: it runs at memory speed (some 25 GB/s a core) and mostly without the interpreter lock.

    Args:
        value: any C-contiguous buffer (memoryview, bytes, bytearray, numpy array); only its bytes count.

    Returns:
        An unsigned 64-bit integer.

    Raises:
        TypeError: ``value`` is no buffer or not C-contiguous.
    """
    view = memoryview(value)
    length = view.nbytes
    flat = view.cast("B") if length else memoryview(b"")
    leaves = [leaf_digest(flat[start : start + LEAF_BYTES]) for start in range(0, length, LEAF_BYTES)]
    return root_digest(leaves, length)

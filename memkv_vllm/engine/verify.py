"""How much of a loaded value is verified, and what a mismatch means. The hash itself is ``protocol.checksum``."""

from __future__ import annotations

from collections.abc import Callable

from memkv_vllm.protocol.checksum import ChecksumAlgorithm
from memkv_vllm.types import LossReason, VerifyMode

__all__ = ["SAMPLE_ONE_IN", "should_verify", "verify"]

SAMPLE_ONE_IN = 16
"""Share of loads that ``sampled`` verifies."""


def should_verify(mode: VerifyMode, checksum_seed: int) -> bool:
    """Decide whether one loaded value is verified. Deterministic: the same arguments give the same answer.

    Args:
        mode: the setting ``memkv_verify``.
        checksum_seed: what selects the sample under ``SAMPLED``. A counter of loads gives exactly one in 16 and reaches
            every value in time; a value's own checksum gives the same values each time.

    Returns:
        Always true for ``FULL``, never for ``OFF``, for one seed in 16 under ``SAMPLED``.
    """
    if mode is VerifyMode.SAMPLED:
        return checksum_seed % SAMPLE_ONE_IN == 0
    return mode is VerifyMode.FULL


def verify(arrived: Callable[[], int], checksum: int, algorithm: int) -> LossReason | None:
    """Compare a value's bytes with the checksum that came with it. Runs at memory speed; for a worker thread.

    Args:
        arrived: computes the checksum of the bytes that arrived; called only where the algorithm is known.
        checksum: the checksum that the value was stored with, unsigned 64 bits.
        algorithm: its algorithm id. One that this version cannot compute counts as a mismatch: bytes that cannot be
            verified are not used.

    Returns:
        ``None`` when the bytes agree, else ``LossReason.CHECKSUM``.
    """
    if algorithm == ChecksumAlgorithm.XXH3_64_TREE_1M and arrived() == checksum:
        return None
    return LossReason.CHECKSUM

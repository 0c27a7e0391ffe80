"""How much is verified, and that what cannot be verified is not used."""

from __future__ import annotations

from functools import partial

import pytest

from memkv_vllm.engine.verify import should_verify, verify
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.types import LossReason, VerifyMode

TREE = ChecksumAlgorithm.XXH3_64_TREE_1M


@pytest.mark.parametrize(("mode", "share"), [(VerifyMode.OFF, 0), (VerifyMode.SAMPLED, 16), (VerifyMode.FULL, 256)])
def test_share_of_values_verified(mode: VerifyMode, share: int) -> None:
    chosen = [should_verify(mode, seed) for seed in range(256)]
    assert sum(chosen) == share
    assert chosen == [should_verify(mode, seed) for seed in range(256)]


def test_match_mismatch_and_unknown_algorithm() -> None:
    assert verify(partial(digest, b"bytes"), digest(b"bytes"), TREE) is None
    assert verify(partial(digest, b"bytez"), digest(b"bytes"), TREE) is LossReason.CHECKSUM
    for algorithm in (ChecksumAlgorithm.NONE, 99):
        assert verify(pytest.fail, digest(b"bytes"), algorithm) is LossReason.CHECKSUM, "nothing is computed"

"""Block hashes come from vLLM and are taken as they are: what vLLM tells apart, our keys tell apart (P005, P006)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from memkv_vllm.integration.compat import split_offload_key
from memkv_vllm.keys import block_prefix, store_key

pytestmark = pytest.mark.vllm

TOKENS = list(range(100, 164))
BLOCK_TOKENS = 16
NAMESPACE = bytes(32)


def keys_of(**request: Any) -> set[bytes]:
    """Store keys of one request's blocks, by vLLM's own hash functions."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_offload.base import make_offload_key
    from vllm.v1.request import Request

    init_none_hash(sha256)
    made = Request(
        "request",
        TOKENS,
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
        **request,
    )
    parts = [split_offload_key(make_offload_key(block_hash, 0)) for block_hash in made.block_hashes]
    keys = {store_key(block_prefix(NAMESPACE, *part), 0) for part in parts}
    assert len(keys) == len(TOKENS) // BLOCK_TOKENS
    return keys


def adapter(name: str, number: int) -> Any:
    """A LoRA adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, f"/adapters/{name}")


def test_the_same_request_has_the_same_keys() -> None:
    assert keys_of() == keys_of()


def test_two_adapters_share_no_block_with_each_other_or_the_base_model() -> None:
    """P005: adapter B must never be served adapter A's KV."""
    base, a, b = keys_of(), keys_of(lora_request=adapter("a", 1)), keys_of(lora_request=adapter("b", 2))
    assert not base & a
    assert not base & b
    assert not a & b


def test_a_cache_salt_separates_tenants() -> None:
    assert not keys_of(cache_salt="one") & keys_of(cache_salt="two")

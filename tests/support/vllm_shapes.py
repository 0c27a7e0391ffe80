"""Recorded shapes of what vLLM's releases hand to a spec: plain values, no vLLM needed.

``CONFIGS`` holds one spec-like object per generation of the API, as ``EngineFacts.from_spec`` meets it after vLLM's
own ``OffloadingSpec.__init__``, all for one engine: a tiny Llama, block 32, float32, TP 2, rank 1.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

EXTRA = {"spec_name": "MemKVOffloadingSpec", "spec_module_path": "memkv_vllm.spec"}
BYTES_PER_BLOCK = 131_072


def vllm_config(*, algorithm: str = "sha256", policy: str = "fail", revision: str | None = None, **extra: Any) -> Any:
    """The parts of ``VllmConfig`` that are read, the same in all releases."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="/models/tiny", revision=revision, dtype="torch.float32", hf_config=SimpleNamespace(_commit_hash=None)
        ),
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm, cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            rank=1,
            world_size=2,
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        kv_transfer_config=SimpleNamespace(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config=EXTRA | extra,
        ),
    )


def _common(extra: dict[str, Any]) -> dict[str, Any]:
    events = SimpleNamespace(enable_kv_cache_events=False, self_describing_kv_events=False)
    return {"extra_config": EXTRA | extra, "kv_events_config": events, "offload_prompt_only": True}


def spec_0_25(**extra: Any) -> Any:
    """0.25: the spec keeps the whole configuration."""
    tensors = [SimpleNamespace(size=BYTES_PER_BLOCK // 4 * 100) for _ in range(4)]
    return SimpleNamespace(
        **_common(extra),
        vllm_config=vllm_config(**extra),
        kv_cache_config=SimpleNamespace(num_blocks=100, kv_cache_tensors=tensors),
        gpu_block_size=(32,),
        hash_block_size=32,
        block_size_factor=int(extra.get("block_size", 32)) // 32,
    )


def _offloading_config(**fields: Any) -> Any:
    parallel = SimpleNamespace(
        rank=1,
        world_size=2,
        tp_size=2,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        is_parallelism_agnostic=True,
    )
    return SimpleNamespace(
        model=SimpleNamespace(name="/models/tiny", dtype="float32"),
        worker_kv_bytes_per_block=BYTES_PER_BLOCK,
        parallel=parallel,
        engine_id="engine",
        **fields,
    )


def spec_0_26(**extra: Any) -> Any:
    """0.26: an excerpt, without the layout's name."""
    return SimpleNamespace(
        **_common(extra),
        config=_offloading_config(),
        tokens_per_block=(32,),
        tokens_per_hash=32,
        blocks_per_chunk=int(extra.get("blocks_per_chunk", 1)),
    )


def spec_0_32(**extra: Any) -> Any:
    """0.27 and later: layouts have names."""
    canonical = bool(extra.get("canonical_layout", False))
    config = _offloading_config(kv_cache_layout="LBHNC", canonical_layout=canonical, replicated_layout=False)
    return SimpleNamespace(
        **_common(extra),
        config=config,
        tokens_per_block=(32,),
        tokens_per_hash=32,
        blocks_per_chunk=int(extra.get("blocks_per_chunk", 1)),
        replicated_layout=False,
    )


SPECS = {"0.25": spec_0_25, "0.26": spec_0_26, "0.32": spec_0_32}

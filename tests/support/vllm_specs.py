"""Specs as the installed vLLM makes them, without an engine. Needs vLLM."""

from __future__ import annotations

from typing import Any

from memkv_vllm.spec import MemKVOffloadingSpec
from tests.support.vllm_shapes import EXTRA, vllm_config


def offloading_config(rank: int = 0, groups: int = 1, blocks_per_chunk: int = 1, **extra: Any) -> Any:
    """The installed release's ``OffloadingConfig``."""
    from vllm.v1.kv_offload import config

    mapping = EXTRA | extra
    group = config.OffloadingGroupConfig(tokens_per_block=32, layer_names=("a", "b"), group_id=0)
    parallel = config.OffloadingParallelConfig(
        rank=rank,
        world_size=2,
        tp_size=2,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=True,
    )
    return config.OffloadingConfig(
        groups=(group,) * groups,
        worker_kv_bytes_per_block=2048,
        enable_kv_cache_events=False,
        extra_config=mapping,
        engine_id="engine",
        model=config.OffloadingModelConfig(name="/models/tiny", dtype="float32"),
        cache=config.OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=blocks_per_chunk),
        parallel=parallel,
        kv_cache_layout="LBHNC",
    )


def build(config: Any, policy: str = "recompute") -> MemKVOffloadingSpec:
    """As the connector builds it: ``vllm_config`` is a local of a vLLM module that calls."""
    scope: dict[str, Any] = {"__name__": "vllm.fake_connector"}
    # The name of the module is what is looked at; a real module of that name cannot be made here.
    exec("def connector(vllm_config, spec, config):\n    return spec(config)", scope)  # noqa: S102
    made: MemKVOffloadingSpec = scope["connector"](vllm_config(policy=policy), MemKVOffloadingSpec, config)
    return made

"""What vLLM's configuration says, release by release, as one frozen value; and the namespace made of it.

The manager and the workers build their spec in different processes. Both derive the same namespace, because
everything in it comes from the configuration and nothing from live objects. Where each fact comes from:

======================  ======================================  ==========================================
fact                    0.25                                    0.26 to 0.33
======================  ======================================  ==========================================
model, dtype            model_config.model, cache dtype         ``config.model.name``, ``.dtype``
tokens per block        ``spec.gpu_block_size``                 ``spec.tokens_per_block``
blocks per key          ``spec.block_size_factor``              ``spec.blocks_per_chunk``
bytes per block         kv_cache_tensors / num_blocks           ``config.worker_kv_bytes_per_block``
ranks and shape         parallel_config                         ``config.parallel``
layout name             none                                    ``config.kv_cache_layout`` (0.27+)
revision, hash          model_config.revision and cache_config.prefix_caching_hash_algo of the
algorithm, commit       ``VllmConfig`` (all releases; see ``compat.find_vllm_config``)
model configuration     ``VllmConfig`` (all releases; see ``weights.config_fingerprint``)
hash seed               ``PYTHONHASHSEED``; where that is not set: random (to 0.28, and always with
                        xxhash), a constant of vLLM's (0.29+ with sha256)
======================  ======================================  ==========================================
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from memkv_vllm.config import python_hash_seed
from memkv_vllm.errors import GeometryError
from memkv_vllm.integration import compat
from memkv_vllm.integration.weights import config_fingerprint, weights_fingerprint
from memkv_vllm.keys import MAX_SHARDS, NamespaceManifest

logger = logging.getLogger("memkv.integration.facts")

RANDOM_SEED = "random"


@dataclass(frozen=True)
class EngineFacts:
    """vLLM's configuration as far as it matters here. Sizes in bytes; the same on the scheduler and on every rank,
    except ``rank``."""

    model: str
    revision: str
    commit: str | None
    model_config: str
    """Digest of the effective model configuration; ``unknown`` where vLLM hides it."""
    runtime_kv_scales: bool
    """vLLM derives the scales of a quantized KV cache from its first batch (``--calculate-kv-scales``)."""
    kv_dtype: str
    tokens_per_block: tuple[int, ...]
    """Per KV cache group."""
    blocks_per_key: int
    bytes_per_block: int
    """One block on one worker, all groups; 0 where the pipeline stages differ."""
    rank: int
    """0 on the scheduler side."""
    world_size: int
    tensor_parallel: int
    pipeline_parallel: int
    prefill_context_parallel: int
    decode_context_parallel: int
    hash_algorithm: str
    hash_seed: str
    kv_layout: str
    canonical_layout: bool
    kv_events: bool
    extra_config: Mapping[str, Any]

    @classmethod
    def from_spec(cls, spec: Any, vllm_config: Any | None) -> EngineFacts:
        """Read an initialised ``OffloadingSpec`` of any supported release.

        Args:
            spec: after ``OffloadingSpec.__init__``.
            vllm_config: what ``compat.find_vllm_config`` found.
        """
        config = getattr(spec, "config", None)
        excerpt = _from_vllm_config(spec) if config is None else _from_offloading_config(config)
        model_config = getattr(vllm_config, "model_config", None)
        cache_config = getattr(vllm_config, "cache_config", None)
        algorithm = str(getattr(cache_config, "prefix_caching_hash_algo", "") or "unknown")
        if vllm_config is None:
            logger.warning(
                "event=no_vllm_config: vLLM %s hides its configuration from the spec; the namespace is made without "
                "the model's revision and configuration and the prefix hash algorithm",
                compat.release(),
            )
        commit = getattr(getattr(model_config, "hf_config", None), "_commit_hash", None)
        tokens: Any = getattr(spec, "tokens_per_block", None) or getattr(spec, "gpu_block_size", ())
        blocks: Any = getattr(spec, "blocks_per_chunk", None) or getattr(spec, "block_size_factor", 0)
        return cls(
            **excerpt,
            revision=str(getattr(model_config, "revision", None) or ""),
            commit=None if commit is None else str(commit),
            model_config=config_fingerprint(model_config, cache_config),
            runtime_kv_scales=bool(getattr(cache_config, "calculate_kv_scales", False)),
            tokens_per_block=tuple(int(value) for value in tokens),
            blocks_per_key=int(blocks),
            hash_algorithm=algorithm,
            hash_seed=hash_seed(algorithm),
            kv_events=bool(spec.kv_events_config.enable_kv_cache_events),
            extra_config=dict(spec.extra_config),
        )

    def check(self) -> None:
        """Refuse what this version does not serve. Called on the scheduler side and on every rank.

        Raises:
            GeometryError: says what was found, what is served and what to change.
        """
        if len(self.tokens_per_block) != 1:
            raise GeometryError(
                f"the model has {len(self.tokens_per_block)} KV cache groups (tokens per block "
                f"{list(self.tokens_per_block)}); for now memkv-vllm serves models with one. Hybrid models need "
                "--disable-hybrid-kv-cache-manager, where vLLM can run them so"
            )
        if self.blocks_per_key != 1 or "block_size" in self.extra_config:
            raise GeometryError(
                f"kv_connector_extra_config asks for {self.blocks_per_key} GPU blocks of {self.tokens_per_block[0]} "
                "tokens per offload key (block_size or blocks_per_chunk): a value holds exactly one block, so that "
                "one lost block costs one block. Remove the setting; larger values come from vLLM's own --block-size"
            )
        if self.canonical_layout:
            raise GeometryError(
                "canonical_layout is set in kv_connector_extra_config: pages are stored as they are allocated, not "
                "in the canonical layout. Remove it"
            )
        if self.runtime_kv_scales and self.kv_dtype.startswith("fp8"):
            raise GeometryError(
                f"calculate_kv_scales is on with the KV cache in {self.kv_dtype}: the scales come from each process's "
                "first batch, so that stored bytes mean something else after a restart. Remove --calculate-kv-scales; "
                "use a checkpoint with scales, or the default scale of 1"
            )
        if not 1 <= self.world_size <= MAX_SHARDS or not 0 <= self.rank < self.world_size:
            raise GeometryError(f"rank {self.rank} of {self.world_size}; 1 to {MAX_SHARDS} ranks are served")

    def namespace(self, prefix: str) -> NamespaceManifest:
        """The namespace of direct mode for these facts and the operator's salt."""
        return NamespaceManifest(
            mode="direct",
            prefix=prefix,
            model=self.model,
            revision=self.revision,
            weights=weights_fingerprint(self.model, self.commit),
            model_config=self.model_config,
            kv_dtype=self.kv_dtype,
            tokens_per_block=self.tokens_per_block,
            bytes_per_block=self.bytes_per_block,
            world_size=self.world_size,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            prefill_context_parallel=self.prefill_context_parallel,
            decode_context_parallel=self.decode_context_parallel,
            hash_algorithm=self.hash_algorithm,
            hash_seed=self.hash_seed,
            kv_layout=self.kv_layout,
        )

    def seed_advice(self) -> str | None:
        """What to do about a hash chain that no other process can repeat; None when it is fine."""
        if self.hash_seed != RANDOM_SEED:
            return None
        return (
            f"vLLM seeds its block hashes at random in every process (hash algorithm {self.hash_algorithm}, "
            "PYTHONHASHSEED not set): nothing stored now is found again after a restart or by another engine. Set "
            "PYTHONHASHSEED=0 in the environment of every engine that shall share"
        )


def hash_seed(algorithm: str) -> str:
    """What seeds vLLM's hash chain in this process, for the manifest and the log.

    The seed is no secret of ours: sharing requires that it be equal everywhere, and the manifest is how a difference
    is found. For ``xxhash`` algorithms it is shown as a digest, so that it does not lie about in logs; that hides a
    long random text, while a small number is soon guessed from it (every value can be tried). Who depends on
    collisions not being made on purpose uses a ``sha256`` algorithm, whose strength does not rest on the seed.

    Args:
        algorithm: ``cache_config.prefix_caching_hash_algo``.

    Returns:
        ``PYTHONHASHSEED=<value>``, for ``xxhash`` algorithms a digest of the value, ``default`` for vLLM's own
        constant, or ``random``.
    """
    value = python_hash_seed()
    cryptographic = algorithm.startswith("sha")
    if value is not None:
        if cryptographic:
            return f"PYTHONHASHSEED={value}"
        return f"PYTHONHASHSEED#{hashlib.sha256(value.encode()).hexdigest()[:16]}"
    return "default" if cryptographic and compat.has_fixed_hash_seed() else RANDOM_SEED


def _from_offloading_config(config: Any) -> dict[str, Any]:
    """0.26 and later: the frozen excerpt that the connector made."""
    parallel = config.parallel
    return {
        "model": str(config.model.name),
        "kv_dtype": str(config.model.dtype),
        "bytes_per_block": _one_number(int(config.worker_kv_bytes_per_block), parallel.pp_size),
        "rank": int(parallel.rank),
        "world_size": int(parallel.world_size),
        "tensor_parallel": int(parallel.tp_size),
        "pipeline_parallel": int(parallel.pp_size),
        "prefill_context_parallel": int(parallel.pcp_size),
        "decode_context_parallel": int(parallel.dcp_size),
        "kv_layout": str(getattr(config, "kv_cache_layout", None) or ""),
        "canonical_layout": bool(getattr(config, "canonical_layout", False)),
    }


def _from_vllm_config(spec: Any) -> dict[str, Any]:
    """0.25: the whole configuration."""
    vllm_config, kv_cache_config = spec.vllm_config, spec.kv_cache_config
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    dtype = vllm_config.model_config.dtype if cache.cache_dtype == "auto" else cache.cache_dtype
    total = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
    return {
        "model": str(vllm_config.model_config.model),
        "kv_dtype": str(dtype).removeprefix("torch."),
        "bytes_per_block": _one_number(total // max(1, kv_cache_config.num_blocks), parallel.pipeline_parallel_size),
        "rank": int(parallel.rank),
        "world_size": int(parallel.world_size),
        "tensor_parallel": int(parallel.tensor_parallel_size),
        "pipeline_parallel": int(parallel.pipeline_parallel_size),
        "prefill_context_parallel": int(parallel.prefill_context_parallel_size),
        "decode_context_parallel": int(parallel.decode_context_parallel_size),
        "kv_layout": "",
        "canonical_layout": False,
    }


def _one_number(bytes_per_block: int, pipeline_parallel: int) -> int:
    """Stages of a pipeline may hold different numbers of layers, and the scheduler sees those of the first only."""
    return bytes_per_block if pipeline_parallel == 1 else 0

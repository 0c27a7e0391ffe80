"""The only door to vLLM's names, for releases 0.25 to 0.33.

Gates look at features (attributes, signatures, abstract methods), never at version strings: nightly builds and
vendor branches carry any number. What varies between the releases and how it is handled:

========================  =============================================================================
what                      how
========================  =============================================================================
spec constructor          0.25 gets ``(vllm_config, kv_cache_config)``, 0.26+ one frozen ``OffloadingConfig``;
                          ``facts.py`` turns either into :class:`~memkv_vllm.integration.facts.EngineFacts`
``LoadStoreSpec.medium``  abstract in 0.25, gone since: :class:`MemKVLoadStoreSpec` always has it
``expedited``             keyword of ``submit_load`` since 0.33: our worker always takes it
manager's ``lock``        0.33: the default (none) is right, no thread of ours touches the manager's state
event medium              ``str`` until 0.26, enum since 0.27: :func:`make_event`
load-error hook           not wired for ``OffloadingConnector`` in any of them: :func:`install_load_error_hook`
vLLM's whole config       0.25 passes it; since 0.26 :func:`find_vllm_config` looks for it
========================  =============================================================================
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from memkv_vllm.config import shown_extra_config
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.integration.releases import SUPPORTED

logger = logging.getLogger("memkv.integration.compat")


def _release() -> str:
    try:
        from vllm.version import __version__
    except ImportError:
        return "unknown"
    return str(__version__)


def _refuse(why: str) -> EnvironmentFault:
    return EnvironmentFault(
        f"vLLM {_release()}: {why}. memkv-vllm works with vLLM {SUPPORTED}; install one of these, or the memkv-vllm "
        "release that names yours"
    )


try:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
        LookupResult,
        OffloadingEvent,
        OffloadingManager,
        OffloadingSpec,
        OffloadingWorker,
        OffloadKey,
        PrepareStoreOutput,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
        TransferResult,
    )
except ImportError as error:
    raise _refuse(f"its KV offloading API is another one ({error})") from error

__all__ = [
    "SUPPORTED",
    "CanonicalKVCaches",
    "GPULoadStoreSpec",
    "LoadStoreSpec",
    "LookupResult",
    "MemKVLoadStoreSpec",
    "OffloadKey",
    "OffloadingEvent",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingWorker",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "TransferResult",
    "failure_policy_advice",
    "find_vllm_config",
    "gpu_memory_utilization",
    "has_fixed_hash_seed",
    "install_load_error_hook",
    "join_vllm_logging",
    "make_event",
    "new_stats",
    "release",
    "require_supported",
    "split_offload_key",
]

_KNOWN_ABSTRACT: dict[type, frozenset[str]] = {
    OffloadingManager: frozenset({"lookup", "prepare_load", "prepare_store", "on_new_request"}),
    OffloadingWorker: frozenset({"submit_store", "submit_load", "get_finished", "wait"}),
    OffloadingSpec: frozenset({"get_manager", "get_worker"}),
}

_GROUP_BYTES = 4
"""vLLM's offload key is the block hash and the group index as 4 big-endian bytes."""


def release() -> str:
    """vLLM's version string. For messages only; nothing is decided by it."""
    return _release()


def require_supported() -> None:
    """Refuse a vLLM whose offloading API asks for methods that we do not have.

    Raises:
        EnvironmentFault: names the supported range and what is unknown.
    """
    for base, known in _KNOWN_ABSTRACT.items():
        unknown = sorted(getattr(base, "__abstractmethods__", frozenset()) - known)
        if unknown:
            raise _refuse(f"{base.__name__} asks for {', '.join(unknown)}, which this release does not know")


def split_offload_key(key: bytes) -> tuple[bytes, int]:
    """An offload key as vLLM's block hash (all of it) and the KV cache group index."""
    return key[:-_GROUP_BYTES], int.from_bytes(key[-_GROUP_BYTES:], "big")


class MemKVLoadStoreSpec(LoadStoreSpec):
    """What travels from the manager to every worker for one job: the blocks, by namespace and offload key.

    Pickled inside vLLM's scheduler output: plain bytes, and the namespace once. Workers follow this namespace,
    not one of their own, so that a reset moves all ranks at the same step.

    Attributes:
        namespace: 32-byte digest.
        keys: vLLM's offload keys, in the order of the job's GPU block ids.
    """

    def __init__(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        self.namespace = namespace
        self.keys = tuple(bytes(key) for key in keys)

    @staticmethod
    def medium() -> str:
        """The medium's name; asked for by 0.25 only."""
        return "MEMKV"

    def __repr__(self) -> str:
        return f"<MemKVLoadStoreSpec {len(self.keys)} blocks in {self.namespace.hex()[:12]}>"


# ---------------------------------------------------------------- vLLM's configuration


def find_vllm_config(arguments: Sequence[object] = ()) -> Any | None:
    """The ``VllmConfig`` of the engine that builds the spec, or None.

    0.25 passes it to the spec. Since 0.26 the spec gets an excerpt that lacks the model's revision, the prefix
    hash algorithm and ``kv_load_failure_policy``, and the scheduler side builds the spec outside of any
    ``set_current_vllm_config`` block. The connector's constructor, which is always among our callers, has it as
    its argument ``vllm_config``; looking there is the same on both sides and in all releases. Outside of a
    connector (tests) vLLM's own current configuration is taken where one is set.
    """
    for argument in arguments:
        if _is_vllm_config(argument):
            return argument
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        candidate = frame.f_locals.get("vllm_config")
        if str(frame.f_globals.get("__name__", "")).startswith("vllm.") and _is_vllm_config(candidate):
            return candidate
        frame = frame.f_back
    return _current_vllm_config()


def _is_vllm_config(value: object) -> bool:
    return all(
        hasattr(value, name) for name in ("model_config", "cache_config", "parallel_config", "kv_transfer_config")
    )


def _current_vllm_config() -> Any | None:
    try:
        from vllm.config import get_current_vllm_config_or_none
    except ImportError:
        return None
    return get_current_vllm_config_or_none()


def gpu_memory_utilization(vllm_config: Any | None) -> float | None:
    """The share of the GPU that vLLM takes for weights, KV cache and activations; None where it is not known.

    Not known either under ``--kv-cache-memory-bytes``, which sizes the KV cache without it.
    """
    cache = getattr(vllm_config, "cache_config", None)
    share = getattr(cache, "gpu_memory_utilization", None)
    if not isinstance(share, int | float) or getattr(cache, "kv_cache_memory_bytes", None) is not None:
        return None
    return float(share)


def has_fixed_hash_seed() -> bool:
    """Whether this release seeds the hash chain with a constant where ``PYTHONHASHSEED`` is not set (0.29+)."""
    try:
        from vllm.v1.core import kv_cache_utils
    except ImportError:
        return False
    return hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")


def failure_policy_advice(vllm_config: Any | None) -> str | None:
    """What to tell the operator about ``kv_load_failure_policy``; None when it is ``recompute``.

    With vLLM's default, ``fail``, one lost block ends the request with an error instead of being recomputed.
    The message holds the complete argument to use, made from the one in use; values that might be secret are ``...``.
    """
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    policy = getattr(transfer, "kv_load_failure_policy", None)
    if policy == "recompute":
        return None
    if transfer is None or policy is None:
        return (
            "kv_load_failure_policy cannot be read in this vLLM; make sure that --kv-transfer-config contains "
            '"kv_load_failure_policy":"recompute", or a lost block ends its request with an error'
        )
    line = {
        "kv_connector": transfer.kv_connector,
        "kv_role": transfer.kv_role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": shown_extra_config(transfer.kv_connector_extra_config),
    }
    text = json.dumps(line, separators=(",", ":"), default=lambda _: "...")
    return (
        f"kv_load_failure_policy is {policy!r} (vLLM's default): a block that cannot be restored ends its request "
        f"with an error. Start with: --kv-transfer-config '{text}'"
    )


def join_vllm_logging() -> None:
    """Let our lines appear beside vLLM's: without this an operator sees nothing below WARNING.

    vLLM gives handlers to its own logger alone. Ours gets the same handlers and level, unless the process has an
    opinion about logging already (handlers on the root or on ``memkv``, or a level of ``memkv``).
    """
    ours, vllms = logging.getLogger("memkv"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET or logging.getLogger().handlers or not vllms.handlers:
        return
    ours.setLevel(vllms.level)
    for handler in vllms.handlers:
        ours.addHandler(handler)
    ours.propagate = False


# ---------------------------------------------------------------- the load-error hook

_HOOK_MARK = "_memkv_load_errors"


def install_load_error_hook() -> bool:
    """Make ``OffloadingConnector`` report our worker's lost blocks; True when this call installed it.

    vLLM's model runner polls ``get_block_ids_with_load_errors`` right after ``get_finished`` and the base
    scheduler recomputes what it names, but no release up to 0.33 has it wired for this connector. The hook adds
    what our worker took out of its finished loads to whatever the connector itself answers, so that it is right
    with a release that wires its own, and leaves other offloading workers alone. Installing twice does nothing.

    Raises:
        EnvironmentFault: the release has no such poll, so that a lost block could not be reported: refused,
            because the alternative is wrong output.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    original = getattr(OffloadingConnector, "get_block_ids_with_load_errors", None)
    if original is None:
        raise _refuse("it has no way to report blocks that could not be loaded (get_block_ids_with_load_errors)")
    if getattr(original, _HOOK_MARK, False):
        return False
    OffloadingConnector.get_block_ids_with_load_errors = _with_our_errors(original)
    logger.debug("event=load_error_hook_installed")
    return True


def _with_our_errors(original: Callable[[Any], set[int]]) -> Callable[[Any], set[int]]:
    @functools.wraps(original)
    def get_block_ids_with_load_errors(self: Any) -> set[int]:
        errors = original(self)
        worker = getattr(getattr(self, "connector_worker", None), "worker", None)
        take = getattr(worker, "take_load_errors", None)
        return errors if take is None else set(errors) | take()

    setattr(get_block_ids_with_load_errors, _HOOK_MARK, True)
    return get_block_ids_with_load_errors


# ---------------------------------------------------------------- events and statistics


def make_event(keys: list[bytes], removed: bool) -> OffloadingEvent:
    """A KV event about blocks in remote storage, in the release's own form."""
    names = {field.name for field in dataclasses.fields(OffloadingEvent)}
    return OffloadingEvent(
        keys=keys, medium=_storage_medium(), removed=removed, **({"locality": _remote()} if "locality" in names else {})
    )


def _storage_medium() -> Any:
    from vllm.v1.kv_offload import base

    return base.Medium.STORAGE if hasattr(base, "Medium") else "STORAGE"


def _remote() -> Any:
    from vllm.v1.kv_offload import base

    return base.Locality.REMOTE if hasattr(base, "Locality") else None


def new_stats() -> Any:
    """An empty ``OffloadingConnectorStats``."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

    return OffloadingConnectorStats()

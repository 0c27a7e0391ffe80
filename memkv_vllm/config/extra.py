"""Settings that vLLM carries for us: ``kv_connector_extra_config`` (direct mode) and the tier's entry.

Each mapping is parsed once, at the edge. Only keys that start with ``memkv_`` are ours in the first; vLLM ignores
unknown keys there, so that a typo of ours would go unnoticed unless we look for it.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError, ValidationInfo, field_validator

from memkv_vllm.config.client import ClientConfig
from memkv_vllm.config.fields import Count, Kind, Seconds, SecondsOrOff, Settings, Whole
from memkv_vllm.config.problems import Problem, Reject, did_you_mean, problems_of, redact
from memkv_vllm.errors import ConfigError
from memkv_vllm.types import VerifyMode

logger = logging.getLogger("memkv.config")

EXTRA_CONFIG_SOURCE = "kv_connector_extra_config"
TIER_SOURCE = "memkv tier entry"
PREFIX = "memkv_"
VLLM_KEYS = ("spec_name", "spec_module_path", "offload_prompt_only", "self_describing_kv_events")
"""Keys of vLLM's own in ``kv_connector_extra_config`` that are right beside ours and hold no secret."""

Lanes = Annotated[Whole, Field(ge=0, le=64)]
Threads = Annotated[Count, Field(le=64)]


def _short_prefix(value: str) -> str:
    if len(value.encode()) > 256:
        raise Reject("expected at most 256 bytes of UTF-8")
    return value


NamespaceSalt = Annotated[str, AfterValidator(_short_prefix), Kind("text")]
"""It goes into the namespace digest; the bound is for the manifest, which shows it."""


class DirectConfig(Settings):
    """Direct mode. In vLLM's mapping every key has the prefix ``memkv_``."""

    scratch_medium: Literal["host", "gpu", "auto"] = "host"
    """Where the staging slots live: `host` pinned RAM; `gpu` HBM (refuses with the numbers when it does not fit);
    `auto` `gpu` on ranks whose NIC shares the GPU's PCIe switch and where it fits, else `host`. `host` because HBM
    taken for staging is KV cache lost."""

    num_threads: Threads = 4
    """Concurrent transfer lanes of a rank (the name and the 4 are kept from the system we follow; a lane is a task, not
    a thread)."""

    scratch_mb_per_thread: Annotated[Count, Field(le=65_536)] = 128
    """Staging budget per lane, MiB. 4 lanes of 128 MiB are never more than 512 MiB a rank for any value up to
    128 MiB."""

    load_threads: Lanes = 0
    """With `memkv_store_threads`: lanes and staging of their own for loads. 0 and 0: one shared pool of which at least
    a quarter is kept for loads."""

    store_threads: Lanes = 0
    """See `memkv_load_threads`: both above 0, or both 0."""

    max_store_backlog_mb: Count = 16384
    """Stores of a rank waiting beyond this many MiB are shed and counted; loads never are. What waits holds no staging,
    only GPU blocks that vLLM can take back at any time. 16 GiB is a prompt of 128 k tokens of an 8B model (TP 1, bf16):
    less would cut the tail of a single long prompt."""

    wait_timeout_s: Seconds = 120.0
    """Deadline of one transfer job from its submission; past it the job is abandoned and fails, and vLLM is told which
    blocks are bad. 120 s is four server transfer deadlines: a job of several chunks ends by itself first."""

    lookup_timeout_s: Seconds = 1.0
    """Past it an unanswered existence probe is a miss. The request waits meanwhile: 1 s is about what recomputing a
    long prefix takes."""

    lookup_hit_ttl: SecondsOrOff = 30.0
    """Seconds for which the answer "present" is trusted; 0: for one request only. A wrong one costs one lost load."""

    lookup_miss_ttl: SecondsOrOff = 30.0
    """Seconds for which the answer "absent" is trusted; 0: for one request only. A wrong one costs a recomputation."""

    spec_prefix: NamespaceSalt = ""
    """Namespace salt: a new one starts cold, the old one finds its values again."""

    verify: VerifyMode = VerifyMode.FULL
    """Checksum of loaded bytes: `full`, `sampled` or `off`. `full` is the only one under which wrong bytes are never
    used; the other two are stated exceptions for measurements."""

    @field_validator("store_threads")
    @classmethod
    def _both_or_neither(cls, value: int, info: ValidationInfo) -> int:
        loads = info.data.get("load_threads")
        if loads is not None and (loads > 0) != (value > 0):
            fix = "set both above 0, or leave both out for the shared pool"
            raise Reject(f"expected memkv_load_threads (here {loads}) and this both above 0 or both 0", fix)
        return value


class TierConfig(Settings):
    """The entry of ``secondary_tiers`` in tier mode."""

    type: Literal["memkv"]
    """Selects this tier."""

    prefix: NamespaceSalt = ""
    """Namespace salt: a new one starts cold, the old one finds its values again."""

    n_read_threads: Threads = 8
    """Loads in flight. 8 of 8 blocks each are 64 MiB at 1 MiB a block: 2.7 ms of a 25 GB/s rail."""

    n_write_threads: Threads = 8
    """Stores in flight; as many as loads, for a load passes stores by anyway."""

    blocks_per_op: Annotated[Count, Field(le=64)] = 8
    """Blocks that one request moves."""

    load_failure_grace_s: SecondsOrOff = 60.0
    """How long a failed load holds its pool slots where nothing proves at once that no late write can come; 0 = off.
    60 s is two server transfer deadlines."""

    max_store_backlog_mb: Count = 2048
    """Stores waiting beyond this many MiB are shed and counted; loads never are. 2 GiB is about a second of one rail
    at a tenth of its rate."""

    lookup_timeout_s: Seconds = 5.0
    """Past it a lookup's answer is a miss. vLLM asks again on each step until then, so it may be longer than in direct
    mode."""


_M = TypeVar("_M", bound=Settings)


def _checked(
    model: type[_M], values: Mapping[str, Any], source: str, problems: list[Problem], key: Callable[[str], str] = str
) -> _M:
    try:
        config = model.model_validate(values)
    except ValidationError as error:
        problems = problems + problems_of(error, model, key)
    if problems:
        raise ConfigError(source, [problem.line() for problem in problems])
    return config


def _block_problems(mapping: Mapping[str, Any]) -> list[Problem]:
    why = "one offload key stands for one GPU block"
    problems = []
    if "block_size" in mapping:
        fix = "remove it; the engine's own --block-size is used"
        problems.append(Problem("block_size", f"must be absent: {why}", fix, mapping["block_size"]))
    chunk = mapping.get("blocks_per_chunk", 1)
    if chunk != 1 or isinstance(chunk, bool):
        problems.append(Problem("blocks_per_chunk", f"expected 1: {why}", "remove it", chunk))
    return problems


def _connection_setting(key: str, name: str) -> Problem:
    fix = f"move it to the yaml named by MEMKV_CONFIG (key {name}) or to MEMKV_{name.upper()}"
    return Problem(key, "connection settings do not belong here, where every log of vLLM's arguments shows them", fix)


def _misspelt(key: str) -> Problem:
    valid = [PREFIX + name for name in DirectConfig.model_fields]
    near = did_you_mean(key, valid)
    return Problem(key, "unknown setting", f"did you mean {near}?" if near else f"valid here: {', '.join(valid)}")


def _warn_if_near(key: str) -> None:
    # A typo inside the prefix makes the key look like one of vLLM's, which nobody checks.
    near = did_you_mean(key, [PREFIX + name for name in DirectConfig.model_fields], cutoff=0.9)
    if near is not None:
        logger.warning("key is not memkv's and is ignored: key=%s did you mean %s?", key, near)


def parse_extra_config(mapping: Mapping[str, Any]) -> DirectConfig:
    """Our part of vLLM's ``kv_connector_extra_config``.

    Raises:
        ConfigError: With every problem; unknown ``memkv_*`` keys are problems, and so are names of connection
            settings, with and without the prefix, whose values are never shown. vLLM's own keys are not looked at
            except ``block_size`` and ``blocks_per_chunk``.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(EXTRA_CONFIG_SOURCE, ["expected a mapping of settings; write it as a JSON object"])
    problems = _block_problems(mapping)
    ours: dict[str, Any] = {}
    for key, value in mapping.items():
        # With our prefix or bare: nobody would read it, and vLLM's own log would show a key.
        name = str(key).lower().replace("-", "_").removeprefix(PREFIX)
        if name in ClientConfig.model_fields:
            problems.append(_connection_setting(str(key), name))
        elif str(key).startswith(PREFIX):
            ours[str(key).removeprefix(PREFIX)] = value
        elif str(key).lower().startswith("memkv"):
            problems.append(_misspelt(str(key)))
        else:
            _warn_if_near(str(key))
    return _checked(DirectConfig, ours, EXTRA_CONFIG_SOURCE, problems, lambda name: PREFIX + name)


def shown_extra_config(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """``mapping`` as it may stand in a log: values of our settings and of vLLM's known keys, all others as ``...``.

    Nothing here is trusted to be checked already; an unknown key may be a secret with its name mistyped.
    """
    known = {*VLLM_KEYS, *(PREFIX + name for name in DirectConfig.model_fields)}
    return {redact(str(key)): _shown_value(value) if key in known else "..." for key, value in mapping.items()}


def _shown_value(value: object) -> object:
    if isinstance(value, str):
        return redact(value)
    return value if value is None or isinstance(value, bool | int | float) else "..."


def parse_tier_entry(mapping: Mapping[str, Any]) -> TierConfig:
    """The tier's entry of ``secondary_tiers``.

    Raises:
        ConfigError: With every problem.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(TIER_SOURCE, ['expected a mapping of settings; write it as {"type": "memkv"}'])
    connection = [str(key) for key in mapping if key in ClientConfig.model_fields]
    problems = [_connection_setting(key, key) for key in connection]
    rest = {key: value for key, value in mapping.items() if key not in connection}
    return _checked(TierConfig, rest, TIER_SOURCE, problems)

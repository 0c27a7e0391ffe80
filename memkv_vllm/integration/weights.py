"""Cheap fingerprints of a model: its weights, and the configuration that it runs with.

Two checkpoints, or one under two configurations, must never share KV by their name alone; and the same must come out
in every process of every engine that serves the same. Both cost milliseconds: no weight is read.

The weights, in order of preference:

1. the commit of a Hugging Face snapshot, from the path (``.../snapshots/<commit>``) or from vLLM's model config;
2. for a local folder, a digest over ``config.json`` and, per weight file, its name, its size and (safetensors) its
   header, which holds every tensor's name, dtype, shape and place;
3. ``unknown:<name>``, for a hub id that is not on this disk.

The second cannot see new values in old shapes; the operator's ``memkv_spec_prefix`` or a cache reset does that.

The configuration: vLLM's live HF config is no stable source. Models write to it while they are built (``rope_type``,
``rope_theta``, ``partial_rotary_factor`` ...), so that a worker, the scheduler of an in-process executor and that of
another process see different states of it, and it grows with every release of transformers. What is digested is where
it comes from: the configuration files (or the commit, with the weights), the overrides as given, vLLM's own settings.
Where that does not tell everything (an override that is a function, files that are nowhere on this disk), the
effective rope parameters and sizes are added. The dictionaries of an override are the live ones, which a few models
write to; of those writes the one of the DeepSeek family is undone (:func:`_same_rope_type`). Another costs sharing
between an in-process executor and one with processes, never a wrong value; jobs carry the scheduler's namespace.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

logger = logging.getLogger("memkv.integration.weights")

_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The safetensors format's own limit."""

_CONFIG_FILES = ("config.json", "params.json", "hf_quant_config.json")
"""Hugging Face's, Mistral's, ModelOpt's."""

_SETTINGS = (
    "config_format", "disable_sliding_window", "dtype", "hf_overrides", "override_attention_dtype", "quantization",
    "quantization_config", "rope_scaling", "rope_theta",
)  # fmt: skip
"""Of ``ModelConfig``, as vLLM resolved them before it started any process."""

_EFFECTIVE = (
    "attention_bias", "attention_chunk_size", "head_dim", "hidden_act", "hidden_size", "intermediate_size",
    "kv_lora_rank", "layer_norm_eps", "model_type", "num_attention_heads", "num_experts_per_tok", "num_hidden_layers",
    "num_key_value_heads", "partial_rotary_factor", "qk_rope_head_dim", "rms_norm_eps", "rope_parameters",
    "rope_scaling", "rope_theta", "sliding_window", "v_head_dim", "vocab_size",
)  # fmt: skip
"""Of the HF text config, where its source does not tell everything."""


def weights_fingerprint(model: str, commit: str | None = None) -> str:
    """The fingerprint of the weights behind ``model``.

    Args:
        model: the model path or hub id, as given to vLLM.
        commit: the hub commit that vLLM resolved, where its model config carries one.

    Returns:
        ``commit:<40 hex>``, ``files:<64 hex>`` or ``unknown:<model>``.
    """
    found = _COMMIT.search(model.replace("\\", "/"))
    if found:
        return f"commit:{found.group(1)}"
    if commit:
        return f"commit:{commit}"
    folder = Path(model)
    try:
        if folder.is_dir():
            return f"files:{_folder_digest(folder)}"
        if folder.is_file():
            return f"files:{_digest([folder])}"
    except OSError as error:
        logger.warning(
            "event=weights_unreadable model=%s reason=%r: the namespace goes by the name alone", model, str(error)
        )
    return f"unknown:{model}"


def config_fingerprint(model_config: Any | None, cache_config: Any | None) -> str:
    """The fingerprint of the configuration that the model runs with: see the module.

    Args:
        model_config: vLLM's ``ModelConfig``; parts that a release lacks are left out.
        cache_config: vLLM's ``CacheConfig``.

    Returns:
        64 hexadecimal characters, or ``unknown`` without a model config.
    """
    if model_config is None:
        return "unknown"
    files = _config_files(model_config)
    text_config = getattr(model_config, "hf_text_config", None) or getattr(model_config, "hf_config", None)
    facts: dict[str, Any] = {
        "files": files,
        "elsewhere": None if files else getattr(model_config, "hf_config_path", None),
        "settings": {name: getattr(model_config, name, None) for name in _SETTINGS},
        "calculate_kv_scales": bool(getattr(cache_config, "calculate_kv_scales", False)),
    }
    commit = getattr(getattr(model_config, "hf_config", None), "_commit_hash", None)
    if callable(getattr(model_config, "hf_overrides", None)) or not (files or commit):
        facts["effective"] = {name: getattr(text_config, name, None) for name in _EFFECTIVE}
    plain = _plain(facts)
    if getattr(text_config, "qk_rope_head_dim", None):
        plain = _same_rope_type(plain)
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _config_files(model_config: Any) -> Mapping[str, str]:
    """Digests of the files that the configuration was read from, by name; empty when they are on no local path."""
    source = str(getattr(model_config, "hf_config_path", None) or getattr(model_config, "model", ""))
    try:
        files = [path for path in (Path(source) / name for name in _CONFIG_FILES) if path.is_file()]
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    except OSError as error:
        logger.warning("event=config_unreadable path=%s reason=%r: vLLM's own view stands for it", source, str(error))
        return {}


def _same_rope_type(value: Any) -> Any:
    """Models with DeepSeek's attention rewrite every rope type but ``default`` to one of their own, in place."""
    if isinstance(value, list):
        return [_same_rope_type(item) for item in value]
    if not isinstance(value, dict):
        return value
    scaled = {key: "scaled" for key in ("rope_type", "type") if value.get(key, "default") != "default"}
    return {key: scaled.get(key) or _same_rope_type(item) for key, item in value.items()}


def _plain(value: Any) -> Any:
    """``value`` for canonical JSON: nothing of its identity, address or order of a set remains."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(item), sort_keys=True) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if callable(getattr(value, "model_dump", None)):
        return _plain(value.model_dump())
    if type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    # A function (hf_overrides may be one) goes by its name; what it did is among the effective values.
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _folder_digest(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES and path.is_file())
    return _digest([path for path in (folder / "config.json",) if path.is_file()] + files)


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        for part in _identity(path):
            # Length first: two different lists of parts never make one stream of bytes.
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
    return digest.hexdigest()


def _identity(path: Path) -> Iterator[bytes]:
    yield path.name.encode()
    yield path.stat().st_size.to_bytes(8, "big")
    if path.name == "config.json":
        yield path.read_bytes()
    elif path.suffix == ".safetensors":
        yield _safetensors_header(path)


def _safetensors_header(path: Path) -> bytes:
    """The JSON header as it stands in the file; empty when the file is no safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return file.read(length) if length <= _MAX_HEADER_BYTES else b""

"""A cheap fingerprint of a model's weights, so that two checkpoints never share KV by their name alone.

It must be the same in every process of every engine that serves the same weights, and must cost milliseconds:
no weight is read. In order of preference:

1. the commit of a Hugging Face snapshot, from the path (``.../snapshots/<commit>``) or from vLLM's model config;
2. for a local folder, a digest over ``config.json`` and, per weight file, its name, its size and (safetensors) its
   header, which holds every tensor's name, dtype, shape and place;
3. ``unknown:<name>``, for a hub id that is not on this disk.

The second cannot see new values in old shapes; the operator's ``memkv_spec_prefix`` or a cache reset does that.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("memkv.integration.weights")

_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")
_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
_MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The safetensors format's own limit."""


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

"""What vLLM's own process must have: a version that is known, and hashes that others can repeat (P001, P096). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from memkv_vllm.doctor.facts import Facts
from memkv_vllm.doctor.findings import Finding, ok, warn

__all__ = ["check_hash_seed", "check_vllm"]

FIXED_SEED_SINCE = (0, 29)
"""From this release on vLLM seeds its sha256 hashes with a constant where PYTHONHASHSEED is not set."""


def release(version: str) -> tuple[int, int] | None:
    """Major and minor of a version such as ``0.32.0`` or ``0.33.1rc1.dev5+gabc``; None if it has none."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def check_vllm(facts: Facts) -> Iterator[Finding]:
    """The installed vLLM against the range that this release was tested with."""
    if facts.vllm is None:
        fix = "on a host that runs vLLM: install memkv-vllm into vLLM's own environment, and run memkv from there"
        yield warn("vllm", f"not installed beside this memkv; {facts.supported_vllm} is supported", fix)
        return
    bounds = [release(part) for part in facts.supported_vllm.split(" to ")]
    found = release(facts.vllm)
    lowest, highest = (bounds[0], bounds[-1]) if bounds else (None, None)
    if found is None or lowest is None or highest is None:
        fix = f"features decide at its start; {facts.supported_vllm} is tested"
        yield warn("vllm", f"version {facts.vllm} says nothing", fix)
    elif not lowest <= found <= highest:
        fix = "install one of these, or the memkv-vllm release that names yours; its start says what is missing"
        yield warn("vllm", f"{facts.vllm} is not in the tested range {facts.supported_vllm}", fix)
    else:
        yield ok("vllm", f"{facts.vllm} (tested: {facts.supported_vllm})")


def check_hash_seed(facts: Facts) -> Iterator[Finding]:
    """Two engines share only under one seed. The value is not shown: with xxhash it is not for everybody's eyes."""
    if facts.hash_seed is not None and facts.hash_seed != "random":
        yield ok("hash seed", "PYTHONHASHSEED is set; every engine that shall share needs the same value")
        return
    found = None if facts.vllm is None else release(facts.vllm)
    if facts.hash_seed is None and found is not None and found >= FIXED_SEED_SINCE:
        yield ok(
            "hash seed", f"PYTHONHASHSEED is not set: vLLM {facts.vllm} has a seed of its own (but not with xxhash)"
        )
        return
    yield warn(
        "hash seed",
        "PYTHONHASHSEED is random or not set here: no engine finds what another stored, or itself before a restart",
        "set PYTHONHASHSEED=0 in the environment of every engine that shall share",
    )

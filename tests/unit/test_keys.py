"""Store keys and namespaces: faults P001-P006, P007, P010, P014-P018 as far as keys go."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_vllm.keys import (
    KEY_FORMAT,
    MANIFEST_FIELDS,
    NAMESPACE_BYTES,
    NamespaceManifest,
    block_prefix,
    impossible_sharing,
    namespace_of,
    store_key,
)

MANIFEST = NamespaceManifest(
    mode="direct",
    prefix="",
    model="meta-llama/Llama-3.1-8B",
    revision="main",
    weights="commit:0123",
    model_config="c" * 64,
    kv_dtype="bfloat16",
    tokens_per_block=(16,),
    bytes_per_block=262_144,
    world_size=8,
    tensor_parallel=8,
    pipeline_parallel=1,
    prefill_context_parallel=1,
    decode_context_parallel=1,
    hash_algorithm="sha256",
    hash_seed="0",
    kv_layout="LBHNC",
)


def _other(value: object) -> object:
    """Another value of the same type."""
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, int):
        return value + 1
    return (*value, ("a", "b")) if value == () else (17,)


@pytest.mark.parametrize("name", MANIFEST_FIELDS)
def test_every_field_of_the_manifest_changes_the_namespace(name: str) -> None:
    """P003, P006, P024: dtype, layout, weights, prefix ... each makes another namespace, and is named as differing."""
    change: dict[str, Any] = {name: _other(getattr(MANIFEST, name))}
    changed = dataclasses.replace(MANIFEST, **change)
    assert changed.digest != MANIFEST.digest
    assert changed.differing_fields(MANIFEST.to_json()) == (name,)


def test_two_models_with_one_base_name_stay_apart() -> None:
    """P014."""
    a, b = (dataclasses.replace(MANIFEST, model=path) for path in ("/a/Qwen3-8B", "/b/Qwen3-8B"))
    assert a.digest != b.digest
    assert a.family != b.family


def test_a_long_model_name_does_not_lengthen_the_key() -> None:
    """P017: the readable name lives in the manifest; keys have one length."""
    long = dataclasses.replace(MANIFEST, model="m" * 4096)
    assert len(block_prefix(long.digest, b"h" * 32, 0)) == len(block_prefix(MANIFEST.digest, b"h" * 32, 0)) == 67


def test_keys_are_the_same_in_every_process() -> None:
    """P002: five interpreters with different hash seeds make the same bytes, nested extra facts included."""
    code = (
        "from memkv_vllm.keys import *; m = NamespaceManifest('direct','p','m','r','w','c','bf16',(16,32),1,2,2,1,1,1,"
        "'sha256','None','L',(('a','None'),('b','(1, None)'))); "
        "print(store_key(block_prefix(m.digest, bytes(range(32)), 3), 258).hex(), m.family.hex())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("0", "1", "7", "42", "random")
    }
    assert len(seen) == 1
    assert seen.pop().split()[0].endswith("0003" + "0102")


def test_the_key_layout_is_what_the_documentation_says() -> None:
    """A golden value: the format may change only together with ``KEY_FORMAT``."""
    key = store_key(block_prefix(bytes(range(32)), b"\xaa" * 16, 5), 2)
    assert key.hex() == "01" + bytes(range(32)).hex() + "aa" * 16 + "0005" + "0002"
    assert key[0] == KEY_FORMAT
    assert namespace_of(key) == bytes(range(32))


def test_the_golden_namespace_digest() -> None:
    """P018: a digest that changes with a release turns every hit into a miss; then KEY_FORMAT must change too."""
    assert MANIFEST.digest.hex() == "7de17035f50c86bbabd321c2dc86c484f0acb0eeb3360923a1fbd27c499b9573"
    assert json.loads(MANIFEST.to_json())["key_format"] == KEY_FORMAT


def test_an_older_key_format_is_found_and_named() -> None:
    """P018: a store that holds keys of another format is reported with that very field."""
    older = dataclasses.replace(MANIFEST, key_format=0)
    differing = MANIFEST.differing_fields(older.to_json())
    assert differing == ("key_format",)
    assert impossible_sharing(differing)
    assert MANIFEST.family == older.family


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"hash_seed": "7"}, True),
        ({"hash_algorithm": "xxhash", "hash_seed": "random"}, True),
        ({"tensor_parallel": 4, "world_size": 4, "bytes_per_block": 1}, False),
        ({"hash_seed": "7", "kv_dtype": "fp8"}, False),
        ({"weights": "commit:4567"}, False),
        ({"model_config": "d" * 64}, False),
        ({}, False),
    ],
)
def test_only_a_difference_that_breaks_intended_sharing_is_a_mismatch(changes: dict[str, Any], warned: bool) -> None:
    """P001: another seed alone is the silent miss; another TP or model is normal."""
    other = dataclasses.replace(MANIFEST, **changes)
    assert impossible_sharing(MANIFEST.differing_fields(other.to_json())) is warned


def test_unknown_fields_of_a_newer_release_count_as_differing() -> None:
    """A sibling written by a newer version must not look identical."""
    newer = {**json.loads(MANIFEST.to_json()), "future": 1}
    assert MANIFEST.differing_fields(json.dumps(newer).encode()) == ("future",)


@pytest.mark.parametrize("text", [b"[]", b"nonsense", b"1", b"\xff"])
def test_a_broken_manifest_is_a_value_error(text: bytes) -> None:
    """It comes from another program; it must not do more harm than a warning."""
    with pytest.raises(ValueError):
        MANIFEST.differing_fields(text)


@given(
    st.lists(
        st.tuples(st.binary(min_size=32, max_size=32), st.integers(0, 65535), st.integers(0, 65535)),
        unique=True,
        max_size=40,
    )
)
def test_keys_never_collide(parts: list[tuple[bytes, int, int]]) -> None:
    """P007, P010: hash, group and shard are all in the key, in full."""
    keys = {store_key(block_prefix(MANIFEST.digest, block_hash, group), shard) for block_hash, group, shard in parts}
    assert len(keys) == len(parts)


@pytest.mark.parametrize("length", [0, 8, 15, 129])
def test_a_short_or_overlong_hash_is_refused(length: int) -> None:
    """P007: nothing under 128 bits."""
    with pytest.raises(ValueError, match="block hash"):
        block_prefix(MANIFEST.digest, b"h" * length, 0)


def test_a_namespace_of_another_length_is_refused() -> None:
    """A cut digest would make two namespaces one."""
    with pytest.raises(ValueError, match=str(NAMESPACE_BYTES)):
        block_prefix(MANIFEST.digest[:16], b"h" * 32, 0)

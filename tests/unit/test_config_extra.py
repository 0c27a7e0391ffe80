"""What vLLM carries for us: kv_connector_extra_config and the tier's entry."""

from __future__ import annotations

from typing import Any

import pytest

from memkv_vllm.config import ClientConfig, DirectConfig, parse_extra_config, parse_tier_entry
from memkv_vllm.errors import ConfigError
from memkv_vllm.types import VerifyMode

KEY = "ab" * 32


def problem(mapping: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_extra_config(mapping)
    assert caught.value.source == "kv_connector_extra_config"
    assert KEY not in str(caught.value)
    return str(caught.value)


def test_the_defaults_are_those_of_the_spec() -> None:
    assert parse_extra_config({}).model_dump() == {
        "scratch_medium": "host",
        "num_threads": 4,
        "scratch_mb_per_thread": 128,
        "load_threads": 0,
        "store_threads": 0,
        "max_store_backlog_mb": 16384,
        "wait_timeout_s": 120.0,
        "lookup_timeout_s": 1.0,
        "lookup_hit_ttl": 30.0,
        "lookup_miss_ttl": 30.0,
        "spec_prefix": "",
        "verify": VerifyMode.FULL,
    }


def test_our_keys_are_read_and_vllms_are_not_looked_at() -> None:
    config = parse_extra_config(
        {
            "spec_name": "MemKVOffloadingSpec",
            "spec_module_path": "memkv_vllm.spec",
            "cpu_bytes_to_use": object(),
            "eviction_policy": "lru",
            "blocks_per_chunk": 1,
            "memkv_scratch_medium": "gpu",
            "memkv_load_threads": 2,
            "memkv_store_threads": 3,
            "memkv_verify": "sampled",
            "memkv_lookup_hit_ttl": 0,
            "memkv_spec_prefix": "v2",
        }
    )
    assert (config.scratch_medium, config.load_threads, config.store_threads) == ("gpu", 2, 3)
    assert (config.verify, config.lookup_hit_ttl, config.spec_prefix) == (VerifyMode.SAMPLED, 0.0, "v2")


@pytest.mark.parametrize(
    ("mapping", "text"),
    [
        ({"memkv_num_thread": 4}, "memkv_num_thread: unknown setting; did you mean memkv_num_threads?"),
        ({"memkv_zzz": 4}, "memkv_zzz: unknown setting; remove it; valid here: memkv_load_threads"),
        ({"MEMKV_NUM_THREADS": 4}, "MEMKV_NUM_THREADS: unknown setting; did you mean memkv_num_threads?"),
        ({"memkv-num-threads": 4}, "memkv-num-threads: unknown setting; did you mean memkv_num_threads?"),
        ({"memkv_num_threads": 0}, "memkv_num_threads = 0: expected greater than or equal to 1"),
        ({"memkv_num_threads": True}, "memkv_num_threads = True: expected a number"),
        ({"memkv_num_threads": 1.5}, "memkv_num_threads = 1.5: expected a valid integer"),
        ({"memkv_num_threads": None}, "memkv_num_threads = nothing: expected a valid integer"),
        ({"memkv_wait_timeout_s": 0}, "memkv_wait_timeout_s = 0: expected"),
        ({"memkv_scratch_medium": "cpu"}, "memkv_scratch_medium = 'cpu': expected 'host', 'gpu' or 'auto'"),
        ({"memkv_verify": "none"}, "memkv_verify = 'none': expected 'off', 'sampled' or 'full'"),
        ({"memkv_load_threads": 2}, "memkv_store_threads = 0: expected memkv_load_threads (here 2) and this both"),
        ({"memkv_store_threads": 2}, "memkv_store_threads = 2: expected memkv_load_threads (here 0) and this both"),
        ({"memkv_spec_prefix": "x" * 257}, "expected at most 256 bytes"),
        ({"block_size": 16}, "block_size = 16: must be absent: one offload key stands for one GPU block"),
        ({"block_size": None}, "block_size = nothing: must be absent"),
        ({"blocks_per_chunk": 2}, "blocks_per_chunk = 2: expected 1: one offload key stands for one GPU block"),
        ({"blocks_per_chunk": "1"}, "blocks_per_chunk = '1': expected 1"),
        ([], "expected a mapping of settings"),
    ],
)
def test_wrong_settings(mapping: object, text: str) -> None:
    assert text in problem(mapping)


def test_the_default_stands_in_the_next_step() -> None:
    assert "correct it or leave it out (default 4)" in problem({"memkv_num_threads": -1})


@pytest.mark.parametrize("name", list(ClientConfig.model_fields))
def test_connection_settings_are_refused_and_their_place_is_named(name: str) -> None:
    for key in (f"memkv_{name}", f"MEMKV_{name.upper()}"):
        text = problem({key: KEY})
        assert f"{key}: connection settings do not belong here" in text
        assert f"MEMKV_CONFIG (key {name}) or to MEMKV_{name.upper()}" in text


def test_all_problems_at_once() -> None:
    text = problem({"memkv_num_threads": "x", "memkv_servers": "a", "block_size": 1, "memkv_wait_timeout_s": -1})
    assert "4 problems" in text


def test_a_typo_in_the_prefix_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_extra_config({"mekv_num_threads": 9}) == DirectConfig()
    assert "did you mean memkv_num_threads?" in caplog.text


def test_tier_defaults() -> None:
    assert parse_tier_entry({"type": "memkv"}).model_dump() == {
        "type": "memkv",
        "prefix": "",
        "n_read_threads": 8,
        "n_write_threads": 8,
        "blocks_per_op": 8,
        "load_failure_grace_s": 60.0,
        "max_store_backlog_mb": 2048,
        "lookup_timeout_s": 5.0,
    }


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({}, "type: missing"),
        ({"type": "fs"}, "type = 'fs': expected 'memkv'"),
        ({"type": "memkv", "blocks": 1}, "blocks: unknown setting; did you mean blocks_per_op?"),
        ({"type": "memkv", "auth_key": KEY}, "auth_key: connection settings do not belong here"),
        ({"type": "memkv", "lookup_timeout_s": 0}, "lookup_timeout_s = 0: expected"),
        ("memkv", "expected a mapping"),
    ],
)
def test_wrong_tier_entries(entry: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_tier_entry(entry)
    assert text in str(caught.value)
    assert KEY not in str(caught.value)


def test_no_grace_is_allowed() -> None:
    assert parse_tier_entry({"type": "memkv", "load_failure_grace_s": 0}).load_failure_grace_s == 0


@pytest.mark.parametrize("name", ClientConfig.model_fields)
@pytest.mark.parametrize("form", ["{}", "MEMKV_{}", "memkv_{}"])
def test_connection_settings_are_refused_under_any_name(name: str, form: str) -> None:
    """vLLM prints its arguments; a key that nobody reads there must not stay there."""
    key = form.format(name)
    text = problem({key: KEY})
    assert key in text and "yaml named by MEMKV_CONFIG" in text and f"MEMKV_{name.upper()}" in text


@pytest.mark.parametrize("key", ["AUTH_KEY", "auth-key", "License"])
def test_their_spelling_does_not_matter(key: str) -> None:
    assert "secret-value" not in problem({key: "secret-value"})

"""The door to vLLM: gates on features, the configuration by release, the load-error hook."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from memkv_vllm.demo.model import TinyLlama, write_tiny_llama
from memkv_vllm.errors import EnvironmentFault, GeometryError
from memkv_vllm.integration import compat
from memkv_vllm.integration.facts import EngineFacts, hash_seed
from memkv_vllm.integration.weights import config_fingerprint
from tests.support.vllm_shapes import BYTES_PER_BLOCK, SPECS, spec_0_32, vllm_config

pytestmark = pytest.mark.vllm


# ---------------------------------------------------------------- the supported range


def test_the_installed_release_is_supported() -> None:
    compat.require_supported()


def test_a_release_that_asks_for_more_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.OffloadingWorker, "__abstractmethods__", frozenset({"wait", "submit_both"}))
    with pytest.raises(EnvironmentFault, match=r"OffloadingWorker asks for submit_both.*0\.25 to 0\.33"):
        compat.require_supported()


# ---------------------------------------------------------------- what travels


def test_the_load_store_spec_survives_the_way_to_a_worker() -> None:
    spec = compat.MemKVLoadStoreSpec(b"n" * 32, [b"a" * 36, b"b" * 36])
    made = pickle.loads(pickle.dumps(spec))  # noqa: S301 - vLLM pickles its scheduler output
    assert (made.namespace, made.keys) == (b"n" * 32, (b"a" * 36, b"b" * 36))
    assert made.medium() == "MEMKV"


def test_a_thousand_blocks_travel_in_forty_kilobytes() -> None:
    keys = [number.to_bytes(36, "big") for number in range(1000)]
    assert len(pickle.dumps(compat.MemKVLoadStoreSpec(b"n" * 32, keys))) < 42_000


def test_an_offload_key_is_taken_apart_as_vllm_made_it() -> None:
    from vllm.v1.kv_offload.base import make_offload_key

    assert compat.split_offload_key(make_offload_key(b"h" * 32, 3)) == (b"h" * 32, 3)


# ---------------------------------------------------------------- the configuration


@pytest.mark.parametrize("release", SPECS)
def test_every_release_gives_the_same_facts(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P096: the shapes of several vLLM releases, recorded; one that is not known is refused by name (above)."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    facts = EngineFacts.from_spec(SPECS[release](), vllm_config(revision="main"))
    facts.check()
    assert (facts.model, facts.revision, facts.kv_dtype) == ("/models/tiny", "main", "float32")
    assert (facts.tokens_per_block, facts.blocks_per_key, facts.bytes_per_block) == ((32,), 1, BYTES_PER_BLOCK)
    assert (facts.rank, facts.world_size, facts.tensor_parallel) == (1, 2, 2)
    assert (facts.hash_algorithm, facts.hash_seed) == ("sha256", "PYTHONHASHSEED=0")
    assert facts.kv_layout == ("LBHNC" if release == "0.32" else "")


def test_the_namespace_is_the_same_on_the_scheduler_and_on_every_rank() -> None:
    specs = [spec_0_32() for _ in range(3)]
    for rank, spec in enumerate(specs):
        spec.config.parallel.rank = min(rank, 1)
    digests = {EngineFacts.from_spec(spec, vllm_config()).namespace("salt").digest for spec in specs}
    assert len(digests) == 1


def test_pipeline_stages_of_different_depth_share_a_namespace() -> None:
    first, second = spec_0_32(), spec_0_32()
    for spec, size in ((first, 1000), (second, 800)):
        spec.config.parallel.pp_size = 2
        spec.config.worker_kv_bytes_per_block = size
    one, other = (EngineFacts.from_spec(spec, vllm_config()).namespace("") for spec in (first, second))
    assert one.digest == other.digest


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: setattr(spec.config.model, "name", "/other/tiny"),
        lambda spec: setattr(spec.config.model, "dtype", "fp8"),
        lambda spec: setattr(spec.config, "worker_kv_bytes_per_block", 1),
        lambda spec: setattr(spec.config, "kv_cache_layout", "BLHNC"),
        lambda spec: setattr(spec, "tokens_per_block", (16,)),
        lambda spec: setattr(spec.config.parallel, "world_size", 4),
        lambda spec: setattr(spec.config.parallel, "tp_size", 1),
        lambda spec: setattr(spec.config.parallel, "pcp_size", 2),
        lambda spec: setattr(spec.config.parallel, "dcp_size", 2),
    ],
    ids=["model path", "dtype", "bytes", "layout", "block size", "world", "tp", "pcp", "dcp"],
)
def test_what_makes_bytes_differ_makes_the_namespace_differ(change: Any) -> None:
    changed = spec_0_32()
    change(changed)
    plain = EngineFacts.from_spec(spec_0_32(), vllm_config()).namespace("")
    assert EngineFacts.from_spec(changed, vllm_config()).namespace("").digest != plain.digest


def changed_config(**changes: Any) -> Any:
    config = vllm_config()
    for name, value in changes.items():
        section = config.cache_config if name == "calculate_kv_scales" else config.model_config
        setattr(section, name, value)
    return config


@pytest.mark.parametrize(
    "change",
    [
        {"hf_overrides": {"rope_parameters": {"rope_theta": 1e6}}},
        {"quantization": "fp8"},
        {"dtype": "torch.bfloat16"},
        {"calculate_kv_scales": True},
        {"disable_sliding_window": True},
        {"hf_text_config": SimpleNamespace(rope_parameters={"rope_theta": 1e6})},
        {"hf_text_config": SimpleNamespace(rope_parameters={"full_attention": {"factor": 8.0}})},
        {"hf_text_config": SimpleNamespace(sliding_window=128)},
        {"hf_config_path": "elsewhere"},
    ],
    ids=lambda change: "-".join(f"{name}" for name in change),
)
def test_what_the_block_hashes_do_not_cover_is_in_the_namespace(change: dict[str, Any]) -> None:
    """P003, P004, P014: under one KV dtype and one name, these make other bytes."""
    plain = EngineFacts.from_spec(spec_0_32(), vllm_config()).namespace("")
    other = EngineFacts.from_spec(spec_0_32(), changed_config(**change)).namespace("")
    assert plain.differing_fields(other.to_json()) == ("model_config",)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_scales_from_the_first_batch_are_refused(dtype: str) -> None:
    """P003: every process would read the same stored bytes as other numbers."""
    spec = spec_0_32()
    spec.config.model.dtype = dtype
    facts = EngineFacts.from_spec(spec, changed_config(calculate_kv_scales=True))
    with pytest.raises(GeometryError, match=f"calculate_kv_scales is on with the KV cache in {dtype}"):
        facts.check()
    EngineFacts.from_spec(spec, changed_config(calculate_kv_scales=False)).check()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("model"), TinyLlama()))


def real_config(folder: str, **settings: Any) -> Any:
    """The installed release's ``ModelConfig`` inside the parts of ``VllmConfig`` that are read."""
    from vllm.config import ModelConfig

    config = vllm_config()
    config.model_config = ModelConfig(model=folder, skip_tokenizer_init=True, **{"dtype": "float32", **settings})
    return config


def digest_of(config: Any) -> bytes:
    return EngineFacts.from_spec(spec_0_32(), config).namespace("").digest


def slower(config: Any) -> Any:
    if hasattr(config, "rope_parameters"):  # vLLM also calls it with a bare config
        config.rope_parameters = {**config.rope_parameters, "rope_theta": 77.0}
    return config


def test_real_configurations_that_differ_stay_apart(model_folder: str) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}},
        {"hf_overrides": {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}}},
        {"hf_overrides": slower},
        {"dtype": "bfloat16"},
    ]
    assert len({digest_of(real_config(model_folder, **each)) for each in settings}) == len(settings)


@pytest.mark.parametrize("overrides", [{}, {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, slower])
def test_a_real_configuration_gives_one_digest_wherever_it_is_asked(model_folder: str, overrides: Any) -> None:
    """Made again (a restart), and pickled to a worker."""
    first = real_config(model_folder, hf_overrides=overrides)
    worker = pickle.loads(pickle.dumps(first))  # noqa: S301 - as vLLM sends it to a worker
    again = real_config(model_folder, hf_overrides=copy.deepcopy(overrides))
    assert len({digest_of(config) for config in (first, worker, again)}) == 1


def test_what_models_write_to_the_live_configuration_does_not_matter(model_folder: str) -> None:
    """DeepSeek, Bailing, MiniMax and others do, in their constructors: after the scheduler got its copy."""
    config = real_config(model_folder)
    before = digest_of(config)
    text_config = config.model_config.hf_text_config
    text_config.rope_parameters |= {"rope_type": "deepseek_yarn", "partial_rotary_factor": 0.5, "rope_dim": 64}
    text_config.architectures = ["Other"]
    text_config.transformers_version = "0"
    assert digest_of(config) == before


def test_deepseeks_rope_type_is_the_same_before_and_after_the_model_was_built(model_folder: str) -> None:
    """An override's dictionary is the very one that the model rewrites."""
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 512}
    config = real_config(model_folder, hf_overrides={"rope_parameters": rope})
    model_config = config.model_config
    model_config.hf_text_config.qk_rope_head_dim = 64
    assert model_config.hf_text_config.rope_parameters is model_config.hf_overrides["rope_parameters"]
    before = digest_of(config)
    model_config.hf_text_config.rope_parameters["rope_type"] = "deepseek_yarn"
    assert digest_of(config) == before
    model_config.hf_text_config.rope_parameters["factor"] = 2.0
    assert digest_of(config) != before


def test_another_interpreter_derives_the_same_digest(model_folder: str) -> None:
    """No address, no order of a set, nothing of the process."""
    code = (
        "import sys; from types import SimpleNamespace as N; from memkv_vllm.integration.weights import *; "
        "print(config_fingerprint(N(model=sys.argv[1], hf_overrides={'b': {3, 1, 2}, 'a': {'x', 'y', 'z'}}, "
        "quantization_config=N(), dtype='bfloat16'), None))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code, model_folder],
            env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True, timeout=60,
        ).stdout
        for seed in ("0", "1", "2")
    }  # fmt: skip
    assert len(seen) == 1


def test_an_edited_configuration_file_makes_another_namespace(tmp_path: Path) -> None:
    """Under a commit too, whose files somebody may have changed."""
    folder = write_tiny_llama(tmp_path / "snapshots" / ("c" * 40), TinyLlama())
    config = vllm_config()
    config.model_config.model = str(folder)
    before = config_fingerprint(config.model_config, None)
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert config_fingerprint(config.model_config, None) != before


def test_revision_algorithm_and_commit_come_from_the_whole_configuration() -> None:
    config = vllm_config(algorithm="sha256_cbor", revision="v2")
    config.model_config.hf_config._commit_hash = "c" * 40
    manifest = EngineFacts.from_spec(spec_0_32(), config).namespace("")
    assert (manifest.revision, manifest.hash_algorithm, manifest.weights) == ("v2", "sha256_cbor", "commit:" + "c" * 40)


def test_a_hidden_configuration_is_said(caplog: pytest.LogCaptureFixture) -> None:
    facts = EngineFacts.from_spec(spec_0_32(), None)
    assert (facts.revision, facts.hash_algorithm, facts.model_config) == ("", "unknown", "unknown")
    assert "event=no_vllm_config" in caplog.text


@pytest.mark.parametrize(
    ("algorithm", "value", "fixed", "expected"),
    [
        ("sha256", "0", True, "PYTHONHASHSEED=0"),
        ("sha256_cbor", "7", False, "PYTHONHASHSEED=7"),
        ("sha256", None, True, "default"),
        ("sha256", None, False, "random"),
        ("xxhash", None, True, "random"),
        ("unknown", None, True, "random"),
    ],
)
def test_the_seed_of_the_hash_chain_by_release(
    algorithm: str, value: str | None, fixed: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if value is not None:
        monkeypatch.setenv("PYTHONHASHSEED", value)
    monkeypatch.setattr(compat, "has_fixed_hash_seed", lambda: fixed)
    assert hash_seed(algorithm) == expected


def test_the_seed_of_a_keyed_hash_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "4242")
    seed = hash_seed("xxhash_cbor")
    assert "4242" not in seed
    monkeypatch.setenv("PYTHONHASHSEED", "4243")
    assert hash_seed("xxhash_cbor") != seed


def test_a_random_seed_is_advised_against(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    advice = EngineFacts.from_spec(spec_0_32(), vllm_config(algorithm="xxhash")).seed_advice()
    assert advice is not None and "PYTHONHASHSEED=0" in advice
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert EngineFacts.from_spec(spec_0_32(), vllm_config()).seed_advice() is None


def test_this_release_seeds_as_its_source_says() -> None:
    from vllm.v1.core import kv_cache_utils

    assert compat.has_fixed_hash_seed() == hasattr(kv_cache_utils, "resolve_none_hash_seed")


# ---------------------------------------------------------------- geometry


@pytest.mark.parametrize("release", SPECS)
def test_larger_chunks_are_refused_with_the_reason(release: str) -> None:
    setting = {"block_size": 64} if release == "0.25" else {"blocks_per_chunk": 2}
    facts = EngineFacts.from_spec(SPECS[release](**setting), vllm_config())
    with pytest.raises(GeometryError, match="2 GPU blocks of 32 tokens per offload key.*one lost block costs one"):
        facts.check()


def test_block_size_must_be_absent_even_when_it_changes_nothing() -> None:
    with pytest.raises(GeometryError, match="block_size"):
        EngineFacts.from_spec(spec_0_32(block_size=32), vllm_config()).check()


def test_several_groups_are_refused_for_now() -> None:
    spec = spec_0_32()
    spec.tokens_per_block = (16, 64)
    with pytest.raises(GeometryError, match=r"2 KV cache groups \(tokens per block \[16, 64\]\); for now"):
        EngineFacts.from_spec(spec, vllm_config()).check()


@pytest.mark.parametrize("blocks_per_key", [1, 2, 4, 7])
@pytest.mark.parametrize("groups", [(), (16,), (32,), (64,), (128,), (16, 16), (16, 64), (32, 32, 128)], ids=str)
def test_every_geometry_is_served_or_refused_with_its_numbers(groups: tuple[int, ...], blocks_per_key: int) -> None:
    """P044: tokens per block x KV cache groups x GPU blocks per offload key; at the start, never by an assertion."""
    spec = spec_0_32()
    spec.tokens_per_block, spec.blocks_per_chunk = groups, blocks_per_key
    facts = EngineFacts.from_spec(spec, vllm_config())
    if len(groups) == 1 and blocks_per_key == 1:
        facts.check()
        return
    with pytest.raises(GeometryError) as refusal:
        facts.check()
    message = str(refusal.value)
    if len(groups) != 1:
        assert f"{len(groups)} KV cache groups (tokens per block {list(groups)})" in message
    else:
        assert f"{blocks_per_key} GPU blocks of {groups[0]} tokens per offload key" in message


def test_the_canonical_layout_is_refused() -> None:
    with pytest.raises(GeometryError, match="canonical_layout"):
        EngineFacts.from_spec(spec_0_32(canonical_layout=True), vllm_config()).check()


def test_a_rank_outside_of_its_world_is_refused() -> None:
    spec = spec_0_32()
    spec.config.parallel.rank = 2
    with pytest.raises(GeometryError, match="rank 2 of 2"):
        EngineFacts.from_spec(spec, vllm_config()).check()


# ---------------------------------------------------------------- finding VllmConfig


def caller(module: str) -> Any:
    """A function of another module that has a local ``vllm_config`` and calls back."""
    scope: dict[str, Any] = {"__name__": module}
    exec("def connector(vllm_config, build):\n    return build()", scope)  # noqa: S102
    return scope["connector"]


def test_the_configuration_is_an_argument_in_0_25() -> None:
    config = vllm_config()
    assert compat.find_vllm_config((config, object())) is config


def test_the_configuration_is_found_at_the_connector() -> None:
    config = vllm_config()
    assert caller("vllm.distributed.offloading_connector")(config, compat.find_vllm_config) is config


def test_locals_of_other_packages_are_not_looked_at() -> None:
    assert caller("elsewhere")(vllm_config(), compat.find_vllm_config) is None


def test_something_else_under_that_name_is_not_taken() -> None:
    assert caller("vllm.somewhere")("no configuration", compat.find_vllm_config) is None


# ---------------------------------------------------------------- the failure policy


def test_recompute_needs_no_advice() -> None:
    assert compat.failure_policy_advice(vllm_config(policy="recompute")) is None


def test_the_default_policy_is_advised_against_with_the_exact_argument() -> None:
    advice = compat.failure_policy_advice(vllm_config(memkv_num_threads=2))
    assert advice is not None and "'fail'" in advice
    line = json.loads(advice.split("--kv-transfer-config '")[1].rstrip("'"))
    assert line == {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "MemKVOffloadingSpec",
            "spec_module_path": "memkv_vllm.spec",
            "memkv_num_threads": 2,
        },
    }


def test_the_advice_shows_no_value_that_may_be_a_secret() -> None:
    secret = "5ec12e7" * 5
    extra: dict[str, Any] = {
        "auth_key": secret,
        "license": "short-secret",
        "auht_key": "plain",
        "memkv_spec_prefix": f"v2-{'ab' * 32}",
        "memkv_num_threads": {"auth_key": "inner"},
        "nested": {"auth_key": "deeper"},
        "offload_prompt_only": True,
        "ab" * 32: 1,
    }
    advice = compat.failure_policy_advice(vllm_config(**extra))
    assert advice is not None
    for hidden in (secret, "short-secret", "plain", "inner", "deeper", "ab" * 16):
        assert hidden not in advice
    shown = json.loads(advice.split("--kv-transfer-config '")[1].rstrip("'"))["kv_connector_extra_config"]
    assert (shown["auth_key"], shown["license"], shown["memkv_spec_prefix"]) == ("...", "...", "v2-***")
    assert shown["offload_prompt_only"] is True


def test_a_policy_that_cannot_be_read_is_advised_about() -> None:
    advice = compat.failure_policy_advice(None)
    assert advice is not None and '"kv_load_failure_policy":"recompute"' in advice


# ---------------------------------------------------------------- the load-error hook


@pytest.fixture
def connector(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's connector class, with whatever this test does to it undone."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

    original = OffloadingConnector.get_block_ids_with_load_errors
    monkeypatch.setattr(OffloadingConnector, "get_block_ids_with_load_errors", original)
    return OffloadingConnector


def with_worker(worker: Any) -> Any:
    return SimpleNamespace(connector_worker=SimpleNamespace(worker=worker))


def test_without_the_hook_the_connector_reports_nothing(connector: Any) -> None:
    # When this fails, a release wired it: look at what it does, and at what our hook adds to it.
    ours = with_worker(SimpleNamespace(take_load_errors=lambda: {3}))
    original = getattr(
        connector.get_block_ids_with_load_errors, "__wrapped__", connector.get_block_ids_with_load_errors
    )
    assert original(ours) == set()


def test_the_hook_reports_our_workers_lost_blocks(connector: Any) -> None:
    compat.install_load_error_hook()
    ours = with_worker(SimpleNamespace(take_load_errors=lambda: {3}))
    assert connector.get_block_ids_with_load_errors(ours) == {3}


def test_other_workers_and_the_scheduler_side_are_left_alone(connector: Any) -> None:
    compat.install_load_error_hook()
    for other in (with_worker(object()), with_worker(None), SimpleNamespace(connector_worker=None)):
        assert connector.get_block_ids_with_load_errors(other) == set()


def test_installing_twice_wraps_once(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def native(self: Any) -> set[int]:
        return {1}

    monkeypatch.setattr(connector, "get_block_ids_with_load_errors", native)
    assert compat.install_load_error_hook() is True
    assert compat.install_load_error_hook() is False
    assert connector.get_block_ids_with_load_errors.__wrapped__ is native


def test_a_release_that_wires_its_own_keeps_it(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector, "get_block_ids_with_load_errors", lambda self: {1})
    compat.install_load_error_hook()
    assert connector.get_block_ids_with_load_errors(with_worker(object())) == {1}
    ours = with_worker(SimpleNamespace(take_load_errors=lambda: {2}))
    assert connector.get_block_ids_with_load_errors(ours) == {1, 2}


def test_a_release_without_the_poll_is_refused(connector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for base in connector.__mro__:
        if "get_block_ids_with_load_errors" in vars(base):
            monkeypatch.delattr(base, "get_block_ids_with_load_errors")
    with pytest.raises(EnvironmentFault, match="no way to report"):
        compat.install_load_error_hook()


# ---------------------------------------------------------------- events


def test_an_event_has_the_release_s_own_medium() -> None:
    event = compat.make_event([b"k"], removed=False)
    assert event.keys == [b"k"] and event.removed is False
    assert getattr(event.medium, "value", event.medium) == "STORAGE"

"""The spec with vLLM's own base class: settings, refusals, and a start with all servers down."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")
import torch

from memkv_vllm.errors import ConfigError, EnvironmentFault, GeometryError
from memkv_vllm.integration.compat import LookupResult, MemKVLoadStoreSpec
from memkv_vllm.spec import MemKVOffloadingSpec
from tests.support.vllm_specs import build, offloading_config

pytestmark = pytest.mark.vllm


def kv_caches(num_groups: int = 1) -> Any:
    tensors = [SimpleNamespace(tensor=torch.zeros(8, 1024, dtype=torch.int8), page_size_bytes=1024) for _ in range(2)]
    refs = [SimpleNamespace(tensor_idx=index, page_size_bytes=1024) for index in range(2)]
    return SimpleNamespace(tensors=tensors, group_data_refs=[refs] * num_groups)


@pytest.fixture(autouse=True)
def _nobody_serves(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MEMKV_SERVERS", "127.0.0.1:1")
    monkeypatch.setenv("MEMKV_AUTH_KEY", "ab" * 32)
    monkeypatch.setenv("MEMKV_TRANSPORT", "loopback")
    monkeypatch.setenv("MEMKV_CONNECT_TIMEOUT_S", "0.5")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    yield


def test_both_sides_and_all_ranks_derive_one_namespace() -> None:
    # The scheduler's spec has rank 0, as the connector makes it.
    specs = [build(offloading_config(rank=rank)) for rank in (0, 0, 1)]
    assert len({spec._manifest.digest for spec in specs}) == 1
    assert specs[0]._manifest.hash_algorithm == "sha256"


def test_the_front_end_gets_the_metrics() -> None:
    definitions = MemKVOffloadingSpec.build_metric_definitions({})
    assert "vllm:memkv_lookup_hits" in definitions


@pytest.mark.timeout(60)
def test_importing_the_spec_needs_no_server_and_no_device() -> None:
    code = (
        "import sys, memkv_vllm.spec; bad = [name for name in ('pyverbs', 'triton', 'memkv_vllm.engine.engine', "
        "'memkv_vllm.transports.loopback') if name in sys.modules]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": ""}, timeout=60)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"memkv_num_thread": 4}, "memkv_num_thread"),
        ({"memkv_num_threads": 0}, "memkv_num_threads"),
        ({"block_size": 64}, "block_size"),
        ({"memkv_servers": "a:1"}, "MEMKV_SERVERS"),
        ({"auth_key": "ab" * 32}, "MEMKV_AUTH_KEY"),
    ],
)
def test_a_wrong_setting_is_a_clear_start_error(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(offloading_config(**extra))


def test_missing_servers_are_a_clear_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMKV_SERVERS")
    with pytest.raises(ConfigError, match="MEMKV_SERVERS"):
        build(offloading_config())


def test_tcp_is_refused_in_direct_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMKV_TRANSPORT", "tcp")
    with pytest.raises(ConfigError, match="never runs over TCP"):
        build(offloading_config())


def test_direct_mode_without_a_nic_is_refused_and_said_on_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P072, P073: verbs is what direct mode runs; nothing else is used in its place, and vLLM ends with the reason."""
    monkeypatch.delenv("MEMKV_TRANSPORT")
    monkeypatch.setenv("MEMKV_RDMA_DEVICES", "mlx5_77")
    spec = build(offloading_config(rank=1, memkv_scratch_mb_per_thread=1))
    with pytest.raises(EnvironmentFault) as caught:
        spec.get_worker(kv_caches())
    (line,) = [record.getMessage() for record in caplog.records if "event=start_refused" in record.getMessage()]
    assert "rank=1" in line and str(caught.value) in line and "\n" not in line


def test_several_groups_are_refused_on_both_sides() -> None:
    with pytest.raises(GeometryError, match="2 KV cache groups"):
        build(offloading_config(groups=2))
    spec = build(offloading_config())
    with pytest.raises(GeometryError, match="2 KV cache groups"):
        spec.get_worker(kv_caches(num_groups=2))


@pytest.mark.parametrize("side", ["get_manager", "get_worker"])
def test_geometry_is_checked_again_by_each_side(side: str) -> None:
    import dataclasses

    spec = build(offloading_config())
    spec._facts = dataclasses.replace(spec._facts, blocks_per_key=2)
    with pytest.raises(GeometryError, match="2 GPU blocks"):
        getattr(spec, side)(*([kv_caches()] if side == "get_worker" else []))


def test_gpu_staging_is_refused_where_the_transport_cannot() -> None:
    spec = build(offloading_config(memkv_scratch_medium="gpu"))
    with pytest.raises(EnvironmentFault, match="transport loopback cannot reach GPU memory"):
        spec.get_worker(kv_caches())


def test_auto_staging_says_what_it_chose(caplog: pytest.LogCaptureFixture) -> None:
    spec = build(offloading_config(memkv_scratch_medium="auto", memkv_scratch_mb_per_thread=1))
    with caplog.at_level(logging.INFO, "memkv.integration"):
        worker = spec.get_worker(kv_caches())
    worker.shutdown()
    assert "wanted=auto chosen=host: transport loopback cannot reach GPU memory" in caplog.text


def test_it_starts_with_all_servers_down(caplog: pytest.LogCaptureFixture) -> None:
    spec = build(offloading_config(rank=1, memkv_scratch_mb_per_thread=1))
    with caplog.at_level(logging.INFO, "memkv.integration"):
        manager, worker = spec.get_manager(), spec.get_worker(kv_caches())
    try:
        assert "rank=1 tensors=2 layers/block=2 value=0.002MiB threads=4 chunk=64 scratch=0.5MiB" in caplog.text
        assert "transport=loopback servers=127.0.0.1:1" in caplog.text
        assert worker._engine._core.client._settings.rail == 1, "each rank prefers a rail of its own"
        key, ctx = bytes(36), SimpleNamespace(req_id="a")
        answer = LookupResult.RETRY
        while answer is LookupResult.RETRY:
            answer = manager.lookup(key, ctx)
            manager.on_schedule_end(SimpleNamespace(new_req_ids=(), preempted_req_ids=()))
            time.sleep(0.005)
        assert answer is LookupResult.MISS
        ours, gpu = MemKVLoadStoreSpec(manager.namespace, [key]), SimpleNamespace(block_ids=[3])
        assert worker.submit_store(1, gpu, ours) and worker.submit_load(2, ours, gpu)
        results: list[Any] = []
        while len(results) < 2:
            results += worker.get_finished()
            time.sleep(0.005)
        assert all(result.success for result in results)
        assert worker.take_load_errors() == {3}
    finally:
        manager.shutdown()
        worker.shutdown()


def test_advice_is_given_at_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("PYTHONHASHSEED")
    spec = build(offloading_config(), policy="fail")
    manager = spec.get_manager()
    manager.shutdown()
    assert '"kv_load_failure_policy":"recompute"' in caplog.text
    assert ("PYTHONHASHSEED=0" in caplog.text) == (spec._facts.hash_seed == "random")


def test_a_good_configuration_is_given_none(caplog: pytest.LogCaptureFixture) -> None:
    manager = build(offloading_config()).get_manager()
    manager.shutdown()
    assert "event=start_advice" not in caplog.text


def test_settings_that_nothing_reads_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEMKV_SERVERS", "a=127.0.0.1:1|127.0.0.2:1")
    monkeypatch.setenv("MEMKV_RDMA_DEVICES", "mlx5_0")
    spec = build(offloading_config(memkv_scratch_mb_per_thread=1))
    spec.get_worker(kv_caches()).shutdown()
    assert "event=unused_settings" not in caplog.text
    spec.get_manager().shutdown()
    (line,) = [record.getMessage() for record in caplog.records if "event=unused_settings" in record.getMessage()]
    assert "rdma_devices (for verbs only; transport is loopback)" in line and "rails" not in line


def test_a_lean_configuration_has_no_unused_settings(caplog: pytest.LogCaptureFixture) -> None:
    build(offloading_config()).get_manager().shutdown()
    assert "event=unused_settings" not in caplog.text

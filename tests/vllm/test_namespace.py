"""Two engines that were meant to share and cannot: said at start, counted, never suffered (P001)."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

pytest.importorskip("vllm")

from memkv_vllm.pytest_plugin import LoopbackServer
from tests.support.vllm_specs import build, offloading_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(60)]

MISMATCHES = "vllm:memkv_namespace_mismatches"


class Fleet:
    """Managers against one store, one after the other."""

    def __init__(self, store: LoopbackServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        for name, value in store.environ.items():
            monkeypatch.setenv(name, value)

    def join(self, seed: str, **extra: Any) -> dict[str, Any]:
        """What a manager with this seed counts once it is connected and has greeted the store."""
        self._monkeypatch.setenv("PYTHONHASHSEED", seed)
        manager = build(offloading_config(**extra)).get_manager()
        try:
            end = time.monotonic() + 20
            while manager._prober.statistics().servers_ready < 1:
                assert time.monotonic() < end
                time.sleep(0.01)
            time.sleep(0.2)
            stats: dict[str, Any] = manager.get_stats().reduce()
            return stats
        finally:
            manager.shutdown()


@pytest.fixture
def fleet(memkv_loopback: LoopbackServer, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(memkv_loopback, monkeypatch)


def test_another_hash_seed_is_warned_about_and_counted(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.join("0")
    with caplog.at_level(logging.WARNING, "memkv"):
        stats = fleet.join("7")
    assert stats[MISMATCHES] == 1
    (line,) = [record.getMessage() for record in caplog.records if "namespace_mismatch" in record.getMessage()]
    assert "differs_in=hash_seed" in line and "PYTHONHASHSEED" in line


def test_the_same_seed_is_no_matter(fleet: Fleet) -> None:
    fleet.join("0")
    assert MISMATCHES not in fleet.join("0")


def test_another_salt_is_information(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    fleet.join("0")
    with caplog.at_level(logging.WARNING, "memkv"):
        assert MISMATCHES not in fleet.join("7", memkv_spec_prefix="mine")
    assert caplog.records == []

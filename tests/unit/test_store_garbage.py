"""The collector and the entries of a large store."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from memkv_vllm.store.garbage import STEP_ENTRIES, Freezer, collection_paused


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


def test_a_freeze_comes_with_every_step_and_takes_all_that_is_there() -> None:
    freezer = Freezer()
    assert not freezer.poll(STEP_ENTRIES - 1)
    assert gc.get_freeze_count() == 0
    assert freezer.poll(STEP_ENTRIES)
    frozen = gc.get_freeze_count()
    assert frozen > 1000
    assert not freezer.poll(2 * STEP_ENTRIES - 1)
    kept = [[] for _ in range(5000)]  # type: ignore[var-annotated]
    assert freezer.poll(2 * STEP_ENTRIES)
    assert gc.get_freeze_count() >= frozen + len(kept)
    freezer.close()
    assert gc.get_freeze_count() == 0


def test_garbage_is_collected_before_it_would_be_frozen() -> None:
    class Node:
        other: object = None

    ended: list[int] = []
    node = Node()
    node.other = node
    gc.callbacks.append(callback := lambda phase, info: ended.append(info["collected"]) if phase == "stop" else None)
    try:
        del node
        Freezer().poll(STEP_ENTRIES)
    finally:
        gc.callbacks.remove(callback)
    assert sum(ended) >= 1


def test_a_server_that_froze_nothing_touches_nothing() -> None:
    gc.freeze()
    Freezer().close()
    assert gc.get_freeze_count() > 0


@pytest.mark.parametrize("enabled", [True, False])
def test_a_pause_ends_as_it_began(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled() is enabled

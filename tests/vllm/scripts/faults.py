"""One engine through every way in which its store can go away, and back again.

Each step asks a prompt whose answer is known and records what came, how long it took and what was lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.vllm.scripts.common import (
    LogLines,
    StoreProcess,
    ask,
    make_engine,
    manager_of,
    metrics,
    run_scenario,
    settle,
    until,
    worker_of,
)
from tests.vllm.scripts.reference import PROMPTS


class Story:
    """The engine, its store, and what happened so far."""

    def __init__(self, folder: Path, store: StoreProcess) -> None:
        self.log = LogLines()
        self.store = store
        self.llm = make_engine(folder, extra={"memkv_lookup_hit_ttl": 600})
        self.steps: dict[str, Any] = {}

    def ask(self, name: str, prompt: int) -> None:
        """Ask one prompt with nothing in vLLM's own cache."""
        self.llm.reset_prefix_cache()
        before, lost_before = metrics(self.llm).get("memkv_load_blocks", 0), dict(self.lost())
        start = time.monotonic()
        (answer,) = ask(self.llm, [PROMPTS[prompt]])
        self.steps[name] = {
            "answer": answer,
            "prompt": prompt,
            "seconds": time.monotonic() - start,
            "settled": settle(self.llm),
            "load_blocks": metrics(self.llm).get("memkv_load_blocks", 0) - before,
            "lost": {key: count - lost_before.get(key, 0) for key, count in self.lost().items()},
        }

    def lost(self) -> dict[str, int]:
        """Blocks lost so far, by direction and reason."""
        return {f"{key[0].value}_{key[1].value}": count for key, count in worker_of(self.llm)._losses.totals.items()}

    def start_store(self) -> None:
        """Start it, empty, and wait until both sides of the engine have it again."""
        self.store.start()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until both sides are connected."""
        manager, worker = manager_of(self.llm), worker_of(self.llm)

        def ready() -> bool:
            return manager._prober.statistics().servers_ready == 1 and worker._engine.statistics().servers_ready == 1

        assert until(ready, 30), "the engine does not come back to its store"
        # "Its server is down" is trusted for a second.
        time.sleep(1.1)

    def meanwhile(self, when: Callable[[], bool], name: str, prompt: int) -> None:
        """Ask a prompt, and kill the store as soon as ``when`` is true."""

        def killer() -> None:
            if until(when, 20):
                self.store.kill()

        thread = threading.Thread(target=killer)
        thread.start()
        self.ask(name, prompt)
        thread.join()


def scenario(folder: Path) -> dict[str, Any]:
    """See the step names."""
    store = StoreProcess()
    store.start()
    store.kill()
    import os

    os.environ.update(store.environ)
    story = Story(folder, store)
    store_goes_and_comes(story)
    store_dies_in_the_middle(story)
    values_cannot_be_read(story)
    store.kill()
    return {"steps": story.steps, "metrics": metrics(story.llm), "log": story.log.lines}


def store_goes_and_comes(story: Story) -> None:
    """Down at the start, up later; gone between lookup and load; back, empty."""
    story.ask("no store at the start", 0)
    story.start_store()
    story.ask("first with the store", 0)
    story.ask("hits without a restart", 0)

    manager = manager_of(story.llm)
    prepare_load = manager.prepare_load

    def too_late(*arguments: Any) -> Any:
        manager.prepare_load = prepare_load
        story.store.kill()
        return prepare_load(*arguments)

    manager.prepare_load = too_late
    story.ask("killed between lookup and load", 0)
    story.ask("still down", 1)
    story.start_store()
    story.ask("store came back empty", 1)
    story.ask("hits come back", 1)


def store_dies_in_the_middle(story: Story) -> None:
    """Killed while it pulls, and while it pushes."""
    story.store.fault("pull", "Delay", {"seconds": 1.0})
    story.meanwhile(lambda: story.store.statistics()["table"]["reserved"] > 0, "killed during a store", 2)
    story.start_store()
    story.ask("stored again", 2)
    story.store.fault("push", "Delay", {"seconds": 1.0})
    story.meanwhile(lambda: story.store.statistics()["table"]["pinned"] > 0, "killed during a load", 2)
    story.start_store()


def values_cannot_be_read(story: Story) -> None:
    """They exist, and no load brings them: no request may try for ever."""
    story.ask("stored for reading", 3)
    story.store.fault("push", "Fail")
    story.ask("every block fails", 3)
    story.ask("every block fails again", 3)
    story.store.clear_faults()
    story.ask("readable again", 3)
    story.store.fault("push", "BitFlip", {"offset": 77}, nth=1)
    story.ask("first block corrupted", 3)
    story.store.clear_faults()
    story.ask("after the corruption", 3)
    story.store.fault("push", "BitFlip", {"offset": 77}, nth=9)
    story.ask("ninth block corrupted", 3)
    story.store.clear_faults()


if __name__ == "__main__":
    run_scenario(scenario)

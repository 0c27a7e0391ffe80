"""Dependents first, each once, failures last: whatever the order of closing."""

from __future__ import annotations

import errno
import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from memkv_vllm.transports.verbs.ownership import Ledger, Owned, same_provider
from memkv_vllm.transports.verbs.provider import VerbsError

ROOT = Path(__file__).resolve().parents[2]


class Thing(Owned):
    """Writes down that it was destroyed."""

    def __init__(self, log: list[str], name: str, rank: int, ledger: Ledger, *parents: Owned) -> None:
        self.log, self.name, self.rank = log, name, rank
        self.refuses = False
        super().__init__(ledger, *parents)

    def _destroy(self) -> None:
        self.log.append(self.name)
        if self.refuses:
            raise VerbsError(self.name, errno.EBUSY)


class Tree:
    """A device with all kinds of objects, made in an order that is not the one of closing."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.ledger = Ledger()
        self.device = Thing(self.log, "device", 0, self.ledger)
        self.queue = Thing(self.log, "queue", 2, self.ledger, self.device)
        self.domain = Thing(self.log, "domain", 3, self.ledger, self.device)
        self.region = Thing(self.log, "region", 1, self.ledger, self.domain)
        self.pair = Thing(self.log, "pair", 0, self.ledger, self.domain, self.queue)


def test_a_device_closes_everything_in_order() -> None:
    tree = Tree()
    assert tree.ledger.num_live() == 5
    tree.device.close()
    assert tree.log == ["pair", "queue", "region", "domain", "device"]
    assert tree.ledger.num_live() == 0


def test_each_is_destroyed_once() -> None:
    tree = Tree()
    for thing in (tree.pair, tree.domain, tree.queue, tree.device, tree.region, tree.pair, tree.device):
        thing.close()
    assert tree.log == ["pair", "region", "domain", "queue", "device"]


def test_a_refusal_does_not_stop_the_others_and_is_raised_at_the_end() -> None:
    """Its object counts on: it is a leak that a gauge has to show."""
    tree = Tree()
    tree.region.refuses = tree.domain.refuses = True
    with pytest.raises(VerbsError) as caught:
        tree.device.close()
    assert caught.value.call == "region"
    assert tree.log == ["pair", "queue", "region", "domain", "device"]
    assert tree.ledger.num_live() == 2
    tree.device.close()
    tree.region.close()
    assert tree.log == ["pair", "queue", "region", "domain", "device"], "never tried again"


@pytest.mark.parametrize("closed", ["device", "domain", "queue"])
def test_nothing_is_made_on_what_is_closed(closed: str) -> None:
    tree = Tree()
    getattr(tree, closed).close()
    live = tree.ledger.num_live()
    tree.log.clear()
    with pytest.raises(VerbsError) as caught:
        Thing(tree.log, "late", 0, tree.ledger, tree.domain, tree.queue)
    assert caught.value.errno == errno.EBADF
    assert tree.log == ["late"], "what the library had made is destroyed"
    assert tree.ledger.num_live() == live
    tree.device.close()
    assert tree.log.count("late") == 1


def test_what_is_open_is_not_collected_and_what_is_closed_is() -> None:
    tree = Tree()
    ledger, log = tree.ledger, tree.log
    watched = [weakref.ref(thing) for thing in (tree.device, tree.domain, tree.pair)]
    domain = tree.domain
    del tree
    gc.collect()
    assert ledger.num_live() == 5 and log == []
    domain._parents[0].close()
    del domain
    gc.collect()
    assert [reference() for reference in watched] == [None] * 3


def test_a_second_close_waits_for_the_first() -> None:
    """Whoever returns from close() may rely on it, also if another thread was first."""
    entered, go_on = threading.Event(), threading.Event()

    class Slow(Owned):
        def _destroy(self) -> None:
            entered.set()
            go_on.wait(10)

    ledger = Ledger()
    slow = Slow(ledger)
    threads = [threading.Thread(target=slow.close) for _ in range(2)]
    threads[0].start()
    assert entered.wait(10)
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive()
    go_on.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert ledger.num_live() == 0


def test_objects_of_another_kind() -> None:
    ledger = Ledger()
    thing = Thing([], "thing", 0, ledger)
    assert same_provider(Thing, thing, "ibv_create_qp") is thing
    with pytest.raises(VerbsError, match="a dict is not of this provider"):
        same_provider(Thing, {}, "ibv_create_qp")
    thing.close()
    with pytest.raises(VerbsError) as caught:
        same_provider(Thing, thing, "ibv_create_qp")
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("forget", [False, True])
def test_the_end_of_the_interpreter_frees_nothing_that_is_open(forget: bool) -> None:
    """Whoever holds it by then, and in whatever order it is forgotten: pyverbs' destructors would abort."""
    command = [sys.executable, "-m", "tests.support.open_at_exit", "none", *(["forget"] if forget else [])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False, cwd=ROOT)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "open\n", "")

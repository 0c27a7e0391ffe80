"""What the soak's two kinds of client have in common: their orders, their heartbeat, their findings, their end.

A client is a process ``python -m tests.soak.ledger_client ORDERS`` (or ``engine_client``); ORDERS is the path of a JSON
file. Every second it prints one JSON line, :class:`Heartbeat`, the last one when SIGTERM ends it. A wrong byte or a
value that must not be there is a *finding*: it is kept, printed, and the client goes on.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["HEARTBEAT_S", "Findings", "Heartbeat", "Journal", "Orders", "begin"]

HEARTBEAT_S = 1.0
MAX_FINDINGS = 20


@dataclass(frozen=True)
class Orders:
    """What a client is to do."""

    name: str
    life: int
    """How often this client was started before."""
    seed: int
    environ: dict[str, str]
    """``MEMKV_*`` variables: where the servers are, and how to reach them."""
    mode: str
    """``direct`` or ``tier``: what the settings are read for."""
    journal: str
    """File to which it writes which keys are dead."""
    options: dict[str, Any]
    """Of its kind."""

    def write(self, path: Path) -> None:
        """As a file for :meth:`read`."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> Orders:
        """From the file that the command line names."""
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


@dataclass
class Heartbeat:
    """One line of a client's output."""

    operations: int = 0
    """Finished ones, whatever came of them; while this does not grow, the client hangs."""
    counts: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    final: bool = False

    def line(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def last_of(cls, path: Path) -> Heartbeat | None:
        """The last whole line of a client's output; None before the first one."""
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 65536))
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:
            return None
        return cls(**json.loads(lines[-1])) if lines else None


class Findings:
    """Counts, and what must not have happened. Any thread may add to it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.ending = threading.Event()
        """Set by SIGTERM."""
        self._operations = 0
        self._found: list[str] = []
        self._lock = threading.Lock()

    def operation(self) -> None:
        """One more has ended."""
        self._operations += 1

    def wrong(self, text: str) -> None:
        """Something that a store must never do."""
        with self._lock:
            self.counts["findings"] += 1
            if len(self._found) < MAX_FINDINGS:
                self._found.append(text)

    def beat(self, *, final: bool = False) -> None:
        """Print a heartbeat."""
        with self._lock:
            line = Heartbeat(self._operations, dict(self.counts), list(self._found), final).line()
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


class Journal:
    """A file that survives this process: each line says that a key is dead from now on, or no longer is."""

    def __init__(self, path: str) -> None:
        self._path = path

    def dead(self, server: str, keys: list[bytes]) -> None:
        """These must not be found on ``server`` (all servers: ``*``) any more."""
        self._write("dead", server, keys)

    def alive(self, server: str, keys: list[bytes]) -> None:
        """Nothing is claimed about these any more."""
        self._write("alive", server, keys)

    def _write(self, word: str, server: str, keys: list[bytes]) -> None:
        with open(self._path, "a", encoding="ascii") as file:
            file.write("".join(f"{word} {server} {key.hex()}\n" for key in keys))

    @staticmethod
    def read(path: Path) -> set[tuple[str, bytes]]:
        """The (server, key) pairs that are dead at the end of a journal; a torn last line counts for nothing."""
        dead: set[tuple[str, bytes]] = set()
        if not path.exists():
            return dead
        for line in path.read_text(encoding="ascii").split("\n")[:-1]:
            word, server, key = line.split(" ")
            pair = (server, bytes.fromhex(key))
            if word == "dead":
                dead.add(pair)
            else:
                dead.discard(pair)
        return dead


def begin() -> tuple[Orders, Findings]:
    """What every client does first: read its orders, log to stderr, beat, mind SIGTERM, say where it is on SIGUSR1."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO, stream=sys.stderr)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    findings = Findings()
    # From a thread: the main one may hold the event's own lock when the signal comes, and would wait for itself.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=findings.ending.set).start())
    threading.Thread(target=_beat, args=(findings,), daemon=True, name="heartbeat").start()
    return Orders.read(sys.argv[1]), findings


def _beat(findings: Findings) -> None:
    last = time.monotonic()
    while not findings.ending.wait(max(0.0, last + HEARTBEAT_S - time.monotonic())):
        last = time.monotonic()
        findings.beat()

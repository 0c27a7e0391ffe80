"""Processes that tests start, break and start again, store servers above all; and what a process holds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

__all__ = ["END_S", "READY_S", "Actor", "Growth", "Held", "ServerActor", "damage"]

ROOT = Path(__file__).resolve().parents[2]
READY_S, END_S = 90.0, 60.0
"""How long a process may take to begin and to end; generous, for the machine may be busy."""


class Held(NamedTuple):
    """What a process holds; ``private_kib`` is memory of its own, without arenas and staging (those are shared)."""

    fds: int
    threads: int
    private_kib: int

    @classmethod
    def of(cls, pid: int) -> Held | None:
        """Count; None when there is no such process any more."""
        try:
            with open(f"/proc/{pid}/status", encoding="ascii") as file:
                status = dict(line.split(":", 1) for line in file)
            return cls(len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]), int(status["RssAnon"].split()[0]))
        except (OSError, KeyError, ValueError):
            return None


class Growth(NamedTuple):
    """How much more than before a process may hold at the end."""

    fds: int = 4
    threads: int = 4
    share: float = 0.25
    kib: int = 32 << 10
    """Private memory: this much, or ``share`` of what it was, whichever is more."""

    def problems(self, before: Held, after: Held) -> list[str]:
        """What has grown beyond that."""
        kib = before.private_kib + max(self.kib, int(self.share * before.private_kib))
        allowed = Held(before.fds + self.fds, before.threads + self.threads, kib)
        return [
            f"{name} grew from {was} to {now} (allowed {most})"
            for name, was, now, most in zip(Held._fields, before, after, allowed, strict=True)
            if now > most
        ]


@dataclass
class Actor:
    """A process under a name, in one life after the other.

    Args:
        name: of the server or client.
        folder: for its output (one file a life) and log (one file).
    """

    name: str
    folder: Path
    life: int = -1
    samples: list[tuple[float, Held]] = field(default_factory=list)
    """Of this life."""
    process: subprocess.Popen[bytes] | None = None
    frozen: bool = False
    expected_end: bool = False

    @property
    def log(self) -> Path:
        """What it wrote to stderr, in all lives."""
        return self.folder / f"{self.name}.log"

    @property
    def output(self) -> Path:
        """What it wrote to stdout in this life."""
        return self.folder / f"{self.name}.{self.life}.out"

    def command(self) -> Sequence[str]:
        """How the next life is started."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin the next life."""
        self.life += 1
        self.samples, self.frozen, self.expected_end = [], False, False
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MEMKV_")}
        with self.log.open("ab") as log, self.output.open("wb") as output:
            log.write(f"--- life {self.life}\n".encode())
            log.flush()
            self.process = subprocess.Popen(self.command(), cwd=ROOT, stdout=output, stderr=log, env=environ)

    @property
    def pid(self) -> int:
        """Of this life."""
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there (frozen or not)."""
        return self.process is not None and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it is there."""
        if self.running:
            os.kill(self.pid, number)

    @property
    def ready(self) -> bool:
        """Whether it is up."""
        return self.running

    def freeze(self) -> None:
        """SIGSTOP."""
        self.signal(signal.SIGSTOP)
        self.frozen = True

    def thaw(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)
        self.frozen = False

    def kill(self) -> None:
        """SIGKILL, and wait for the end; frozen or not."""
        self.expected_end = True
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def ask_to_end(self) -> None:
        """SIGTERM; it may take a while."""
        self.expected_end = True
        self.thaw()
        self.signal(signal.SIGTERM)

    def end(self, timeout_s: float = END_S) -> str | None:
        """SIGTERM, and wait for the end; returns what was wrong with it."""
        self.ask_to_end()
        assert self.process is not None
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGUSR1)  # clients show where they are; it ends a server, which is lost anyway
            time.sleep(0.5)
            self.kill()
            return f"{self.name} did not end within {timeout_s:g} s of SIGTERM"
        return self.how_ended(code)

    def how_ended(self, code: int) -> str | None:
        """What is wrong with an exit code after SIGTERM."""
        return None if code == 0 else f"{self.name} ended with exit code {code} after SIGTERM"

    def sample(self, now: float) -> None:
        """Note what it holds."""
        held = Held.of(self.pid) if self.running else None
        if held is not None:
            self.samples.append((now, held))

    def tail(self, lines: int = 25) -> str:
        """The end of its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


@dataclass
class ServerActor(Actor):
    """A store server: ``memkv start --config FILE``, or a module that starts another one.

    Attributes:
        config: its yaml.
        medium: the file that is its disk, if it has one.
        module: what to run instead of the command, before the name of the yaml.
    """

    config: Path = Path()
    medium: Path | None = None
    module: Sequence[str] = ()

    def command(self) -> Sequence[str]:
        """As an operator starts it."""
        if self.module:
            return [sys.executable, "-m", *self.module, str(self.config)]
        return [sys.executable, "-m", "memkv_vllm", "start", "--config", str(self.config)]

    @property
    def ready(self) -> bool:
        """Whether it has said that clients may come."""
        return self.running and b"ready address=" in self.output.read_bytes()

    def wait_ready(self) -> None:
        """Return once it says that clients may come.

        Raises:
            RuntimeError: it ended, or did not say so in time; with the end of its log.
        """
        end = time.monotonic() + READY_S
        while not self.ready:
            if not self.running or time.monotonic() > end:
                what = "does not start in time" if self.running else "ended at once"
                raise RuntimeError(f"server {self.name} {what}:\n{self.tail()}")
            time.sleep(0.02)


def damage(medium: Path, begin: int, share: float, places: int = 6) -> list[int]:
    """Invert a bit each at ``places`` offsets of a file; returns them.

    Args:
        medium: the file; nobody has it open.
        begin: nothing before this is touched.
        share: where from ``begin`` to its end (0 to 1) the first place is; the others follow evenly, around the end.
        places: how many.
    """
    span = medium.stat().st_size - begin
    offsets = [begin + int((share + number / places) % 1 * span) for number in range(places)]
    with medium.open("r+b", buffering=0) as file:
        for offset in offsets:
            file.seek(offset)
            (value,) = file.read(1)
            file.seek(offset)
            file.write(bytes([value ^ 0x10]))
        os.fsync(file.fileno())
    return offsets

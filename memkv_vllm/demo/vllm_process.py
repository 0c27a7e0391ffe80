"""A vLLM process as the demo sees it: it is started, tells what it does and found, and is gone afterwards."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memkv_vllm.demo.generate import ENVIRONMENT
from memkv_vllm.demo.report import Progress
from memkv_vllm.errors import EnvironmentFault

TIME_LIMIT_S = 480.0
"""For one result; on two busy cores one takes about a minute."""
LAST_WORDS = 40


class VllmProcess:
    """One vLLM process; :meth:`results` yields what it reports until it ends or waits."""

    def __init__(self, role: str, folder: Path, settings: Mapping[str, str], progress: Progress) -> None:
        self._log_path = folder / f"vllm-{role}.log"
        self._progress = progress
        self._role = role
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "memkv_vllm.demo.generate", str(folder / "model"), role],
                env={**os.environ, **ENVIRONMENT, **settings},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def result(self, name: str) -> dict[str, Any]:
        """Waits for the result called ``name``, saying meanwhile what happens.

        Raises:
            EnvironmentFault: The process ended before, or takes too long; with its last words.
        """
        assert self._process.stdout is not None
        end = time.monotonic() + TIME_LIMIT_S
        for line in self._lines(end):
            message = json.loads(line)
            if message["event"] == "note":
                self._progress.say(f"vLLM process {self.pid}: {message['text']}")
            elif message["event"] == name:
                run: dict[str, Any] = message["run"]
                return run
        self.kill()
        tail = "\n".join(self._log_path.read_text(errors="replace").splitlines()[-LAST_WORDS:])
        raise EnvironmentFault(f"the {self._role} vLLM process gave no result {name!r}; its last words:\n{tail}")

    def go_on(self) -> None:
        """Lets a process that waits continue."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go on\n")
        self._process.stdin.flush()

    def wait(self) -> int:
        """Waits for its end; its exit status."""
        while self._process.poll() is None:
            self._progress.pulse()
            time.sleep(0.2)
        return self._process.returncode

    def kill(self) -> None:
        """Ends it at once, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _lines(self, end: float) -> Iterator[bytes]:
        assert self._process.stdout is not None
        fd, rest = self._process.stdout.fileno(), b""
        with selectors.DefaultSelector() as selector:
            selector.register(fd, selectors.EVENT_READ)
            while time.monotonic() < end:
                self._progress.pulse()
                if not selector.select(1.0):
                    continue
                data = os.read(fd, 1 << 16)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                yield from lines


@contextmanager
def running(role: str, folder: Path, settings: Mapping[str, str], progress: Progress) -> Iterator[VllmProcess]:
    """A vLLM process that is gone afterwards, whatever happens."""
    process = VllmProcess(role, folder, settings, progress)
    try:
        yield process
    finally:
        process.kill()

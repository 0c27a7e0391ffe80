"""A server that is killed with SIGKILL at any moment, again and again, on the same drives.

``--soak-rounds N`` sets the number of rounds.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memkv_vllm.config import StorageConfig
from tests.support.log_writer import DRIVE_BYTES, number_of
from tests.support.logs import opened, payload_of, storage

pytestmark = [pytest.mark.anyio, pytest.mark.fault, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
NUMBERS_OF_A_ROUND = 100_000


def killed_writer(paths: list[Path], sync: str, seed: int, first: int) -> list[tuple[str, int]]:
    """Runs the writer for a random moment, kills it, returns what it said."""
    command = [sys.executable, "-m", "tests.support.log_writer", sync, str(seed), str(first), *map(str, paths)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said: list[tuple[str, int]] = []
        try:
            assert process.stdout.readline() == "ready\n", "the writer did not start"
            deadline = time.monotonic() + random.Random(seed).uniform(0.0, 0.6)
            while time.monotonic() < deadline and (line := process.stdout.readline()):
                said.append(parsed(line))
        finally:
            process.kill()
        # What it wrote into the pipe before it died was acknowledged as well; the last line may be cut.
        said += [parsed(line) for line in process.stdout if line.endswith("\n")]
    return said


def parsed(line: str) -> tuple[str, int]:
    word, number = line.split()
    return word, int(number)


async def check(config: StorageConfig, acknowledged: set[int], gone: set[int]) -> set[int]:
    """Opens the drives: everything acknowledged is there and whole, nothing that is gone came back."""
    found = set()
    async with opened(config) as held:
        for value in held.values:
            data = await held.get(value.record, value.location)
            number = number_of(value.record.key)
            assert data is not None, f"{number} is there and cannot be read"
            assert data == payload_of(number, len(data)), f"wrong bytes of {number}"
            found.add(number)
        health = held.log.health()
    assert not found & gone, f"came back: {sorted(found & gone)[:5]}"
    assert acknowledged <= found, f"lost: {sorted(acknowledged - found)[:5]}"
    assert health == []
    return found


@pytest.fixture
def soak_rounds(request: pytest.FixtureRequest) -> int:
    """Rounds of the tests that kill: 10 unless the command line says otherwise."""
    return int(request.config.getoption("--soak-rounds"))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("sync", ["none", "batch"])
async def test_a_killed_server_keeps_what_it_logged(tmp_path: Path, sync: str, soak_rounds: int) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    config = storage(paths, DRIVE_BYTES, sync=sync, segment_size="1 MiB")
    alive: set[int] = set()
    gone: set[int] = set()
    counts = dict.fromkeys("wxfgr", 0)
    for number in range(max(1, soak_rounds // 2)):
        first = 1 + number * NUMBERS_OF_A_ROUND
        said = killed_writer(paths, sync, number + 1000 * len(sync), first)
        words = {word: {n for w, n in said if w == word} for word in counts}
        counts = {word: count + len(words[word]) for word, count in counts.items()}
        # Values of earlier rounds may be reclaimed without a word: this writer does not know them.
        found = await check(config, words["w"] - words["x"] - words["g"], gone | words["f"])
        assert found <= alive | set(range(first, first + NUMBERS_OF_A_ROUND)), "what was absent came back"
        gone, alive = gone | words["f"], found
    print(f"sync={sync}: {counts}")  # noqa: T201
    assert counts["w"] > 0

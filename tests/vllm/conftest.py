"""Scenarios run once per session, each in a process of its own; the tests look at what they wrote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.scripts.common import ENVIRONMENT, StoreProcess

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0

Scenario = Callable[..., dict[str, Any]]


def run_scenario_process(
    module: str,
    folder: Path,
    name: str,
    environ: Mapping[str, str],
    timeout_s: float = TIMEOUT_S,
    arguments: Sequence[str] = (),
) -> dict[str, Any]:
    """Run a scenario script and return what it wrote; its output is shown when it fails.

    Args:
        module: to run, as ``python -m`` names it; gets ``folder``, a file for its result, and ``arguments``.
        folder: for the model, the result and the output.
        name: of these files.
        environ: over the environment that all scenarios have.
        timeout_s: after which it is killed.
        arguments: more of them.
    """
    out, log = folder / f"{name}.json", folder / f"{name}.log"
    environment = {**os.environ, **ENVIRONMENT, **environ}
    start = time.monotonic()
    with log.open("w") as file:
        command = [sys.executable, "-m", module, str(folder), str(out), *arguments]
        code = _run_in_a_group(command, environment, file, timeout_s)
    text = log.read_text(errors="replace")
    assert code == 0, f"{name} ended with {code}:\n{text[-6000:]}"
    result: dict[str, Any] = json.loads(out.read_text())
    return result | {"output": text, "seconds": time.monotonic() - start}


def _run_in_a_group(command: list[str], environment: Mapping[str, str], output: IO[str], timeout_s: float) -> int | str:
    """Run a script in a session of its own and leave no process of it behind, whatever became of it."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(environment), stdout=output, stderr=output, start_new_session=True
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return f"no result after {timeout_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the model and the results."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def run_script(workplace: Path) -> Scenario:
    """Runs a scenario of ``tests/vllm/scripts`` and returns what it wrote."""

    def run(name: str, environ: Mapping[str, str]) -> dict[str, Any]:
        return run_scenario_process(f"tests.vllm.scripts.{name}", workplace, name, environ)

    return run


@pytest.fixture(scope="session")
def store() -> Iterator[StoreProcess]:
    """The store that the reference, restore and TP scenarios share."""
    process = StoreProcess()
    process.start()
    yield process
    process.kill()


@pytest.fixture(scope="session")
def reference(run_script: Scenario, store: StoreProcess) -> dict[str, Any]:
    """vLLM alone, then storing."""
    return run_script("reference", store.environ)


@pytest.fixture(scope="session")
def restored(reference: dict[str, Any], run_script: Scenario, store: StoreProcess) -> dict[str, Any]:
    """A second process on the same store."""
    del reference
    return run_script("restore", store.environ)

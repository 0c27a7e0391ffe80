"""A process ends with open verbs objects, which no order of the interpreter's end may turn into a crash."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("forget", [False, True])
@pytest.mark.parametrize("provider", ["libibverbs", "pyverbs"])
@pytest.mark.timeout(60)
def test_a_process_ends_with_open_objects(provider: str, forget: bool) -> None:
    """pyverbs' destructors at that moment: "free(): invalid pointer", and SIGABRT."""
    command = [sys.executable, "-m", "tests.support.open_at_exit", provider, *(["forget"] if forget else [])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "open\n", "")

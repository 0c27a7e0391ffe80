"""A minute of kills and freezes over verbs: real servers at one end of a cable, clients at the other.

The soak of ``tests/soak`` with its clients and its judgement; ``python -m tests.soak --transport verbs`` on the machine
that ``make test-rdma`` boots runs it for longer.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.soak.cluster import Options
from tests.soak.controller import run_soak
from tests.support.cable import A, B, Cable

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(300)]

NOT_SHOWN = ("is 0: nothing was shown about it", "no server evicted anything")
"""One slow CPU does not get around to everything in a minute."""


def test_a_minute_of_kills_and_freezes(tmp_path: Path, cable: Cable) -> None:
    """P027, P036, P039, P041, P065, P067, P080: no wrong byte, nothing risen, nothing left behind; hits happen."""
    options = Options(
        secrets.randbelow(1 << 32),
        60.0,
        "verbs",
        modes=("memory", "memory"),
        clients=("ledger-a", "ledger-b", "rank-b"),
        host=A.address,
        devices=(A.device, B.device),
    )
    report = run_soak(options, tmp_path)
    problems = [problem for problem in report.problems if not any(words in problem for words in NOT_SHOWN)]
    assert not problems, report.summary()
    # Not of the engine: the plan may end it each time before its first load, for its start takes seconds there.
    assert report.counts["get_ok"], report.summary()

"""A soak of a minute passes; one with a store that does something wrong fails, and says what.

``make soak`` runs half an hour of it.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from tests.soak.cluster import Options
from tests.soak.controller import run_soak

pytestmark = [pytest.mark.slow, pytest.mark.fault]


@pytest.mark.timeout(240)
def test_a_minute_of_kills_freezes_and_damage(tmp_path: Path) -> None:
    """P022, P026, P027, P029, P036, P064, P065, P080, P085, M08: no wrong byte, nothing risen, nothing left behind."""
    report = run_soak(Options(secrets.randbelow(1 << 32), 60.0), tmp_path)
    assert report.passed, report.summary()
    assert report.hit_ratio > 0.05, report.summary()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        ("wrong-byte", ["wrong bytes were served"]),
        ("risen-value", ["a removed value"]),
        ("leaks", ["server.sessions is", "fds grew"]),
        ("no-hits", ["get_ok is 0"]),
    ],
)
def test_a_store_that_does_wrong_is_found_out(tmp_path: Path, spoil: str, expected: list[str]) -> None:
    """What a soak looks for, it finds; so a soak that passes has shown something."""
    clients = ("ledger-a", "rank-a")
    report = run_soak(Options(7, 5.0, modes=("memory",), spoil=spoil, rest_s=2.0, clients=clients), tmp_path)
    assert not report.passed
    assert all(any(words in problem for problem in report.problems) for words in expected), report.summary()
    summary = report.summary()
    assert "seed 7" in summary and "FAILED" in summary and str(tmp_path) in summary
    assert all(line in summary for line in report.plan)

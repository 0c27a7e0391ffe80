"""The benchmark of the server's own cost: every case runs, over verbs too, and its ratio is that to its echo."""

from __future__ import annotations

import anyio
import pytest

from benchmarks import bench_server_cost
from benchmarks.bench_server_cost import Bench, summary


@pytest.mark.parametrize("path", ["none", "verbs"])
def test_every_case_is_answered_rightly_and_stands_beside_its_echo(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own check of every answer raises where a value was not stored or found."""
    monkeypatch.setattr(bench_server_cost, "ARENA_BYTES", 2 << 20)
    monkeypatch.setattr(bench_server_cost, "ROOMY_ARENA_BYTES", 64 << 20)
    rows: list[dict[str, object]] = []
    anyio.run(Bench(batch=8, calls=4, emit=rows.append).round, 1, bench_server_cost.OPS, [path])
    seen = [(row["peer"], row["op"], row["concurrency"]) for row in rows]
    for op in bench_server_cost.OPS:
        for window in bench_server_cost.WINDOWS:
            assert (f"memkv-server-{path}", op, window) in seen
            assert (f"limit-echo-{op}", "exists", window) in seen
    assert all(float(str(row["cpu_us_per_key"])) > 0 for row in rows)
    assert f"memkv-server-{path} put-full 4 " in summary(rows)


def test_the_ratio_is_to_the_echo_of_the_same_round() -> None:
    def row(peer: str, op: str, round: int, cpu: float) -> dict[str, object]:
        return {"peer": peer, "op": op, "concurrency": 1, "round": round, "cpu_us_per_key": cpu}

    rows = [row("limit-echo-get", "exists", n, cpu) for n, cpu in ((1, 1.0), (2, 2.0), (3, 4.0))]
    rows += [row("memkv-server-none", "get", n, cpu) for n, cpu in ((1, 5.0), (2, 20.0), (3, 12.0))]
    last = summary(rows).splitlines()[-1]
    assert last == "memkv-server-none get 1 12.00 (5.00-20.00) 83 5.00 (3.00-10.00)"

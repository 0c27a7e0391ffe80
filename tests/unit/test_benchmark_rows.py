"""The benchmarks' rows and report: names that others join on, arithmetic, pairing by round, and what failed."""

from __future__ import annotations

import io
import json
import os
import time

import pytest

from benchmarks.bench_control import summary
from benchmarks.bench_loopback import measure_case
from benchmarks.geometry import MIN_WORKING_SET_BYTES, SIZES, KeyRing, Shape
from benchmarks.report import BASELINE, group, medians, ratios, report
from benchmarks.rows import (
    Case,
    CpuClock,
    Measurement,
    Stopwatch,
    make_error_row,
    make_row,
    percentile,
    read_rows,
    write_row,
)

JOINED = ["peer", "op", "value_bytes", "batch", "concurrency"]
FIGURES = ["gbps", "p50_us", "p99_us", "cpu_s_per_gb", "calls", "wall_s", "kops", "cpu_us_per_key"]
CONDITIONS = ["cpu_client_s", "cpu_server_s", "load1", "round", "unit"]


def case(peer: str = "ours", op: str = "put", round: int = 1, batch: int = 10) -> Case:
    return Case(peer, op, 1_000_000, batch, 4, "full", round)


def seen(wall_s: float = 2.0, calls: int = 100) -> Measurement:
    return Measurement([1_000 * (index + 1) for index in range(calls)], wall_s, 3.0, 1.0)


def row(peer: str, round: int, wall_s: float, op: str = "put") -> dict[str, object]:
    return make_row(case(peer, op, round), seen(wall_s), 0.5)


def test_a_row_has_the_names_of_the_comparisons() -> None:
    made = make_row(case(), seen(), 0.5)
    assert set(made) == {*JOINED, *FIGURES, *CONDITIONS, "verify"}


def test_the_figures_of_a_row() -> None:
    made = make_row(case(), seen(), 0.5)
    assert made["gbps"] == pytest.approx(0.5)  # 100 calls of 10 values of 1e6 bytes in 2 s
    assert made["kops"] == pytest.approx(0.5)
    assert made["cpu_s_per_gb"] == pytest.approx(4.0)
    assert made["cpu_us_per_key"] == pytest.approx(4000)
    assert (made["p50_us"], made["p99_us"]) == (51, 100)
    assert (made["calls"], made["load1"], made["round"], made["unit"]) == (100, 0.5, 1, "GB/s")


def test_probes_have_no_payload() -> None:
    made = make_row(case(op="exists"), seen(), 0.5)
    assert made["gbps"] == 0 and made["cpu_s_per_gb"] is None and made["cpu_us_per_key"] == pytest.approx(4000)


def test_a_case_without_calls_is_a_row_too() -> None:
    made = make_row(case(), Measurement(), 0.5)
    assert (
        made["gbps"] == made["kops"] == made["p50_us"] == 0 and made["cpu_s_per_gb"] is made["cpu_us_per_key"] is None
    )


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1), (0.5, 3), (0.99, 4), (1.0, 4)])
def test_percentile(share: float, expected: float) -> None:
    assert percentile([1, 2, 3, 4], share) == expected
    assert percentile([], share) == 0


def test_rows_survive_a_file_and_noise_is_left_out() -> None:
    stream = io.StringIO()
    write_row(row("ours", 1, 2.0), stream)
    stream.write("a peer's log line\n[1, 2]\n{}\n")
    write_row(row("theirs", 1, 2.0), stream)
    rows = list(read_rows(stream.getvalue().splitlines()))
    assert [each["peer"] for each in rows] == ["ours", "theirs"]
    assert rows[0] == json.loads(json.dumps(row("ours", 1, 2.0)))


def test_cpu_clocks_count_this_process_and_another() -> None:
    clock = CpuClock(os.getpid())
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    client, server = clock.seconds()
    assert 0.05 <= client < 5 and server == pytest.approx(client, abs=0.05)
    assert CpuClock().seconds()[1] == 0
    with pytest.raises(OSError, match="CPU clock"):
        CpuClock(4_194_305)  # above the largest process id


def test_a_stopwatch_fills_in_its_measurement() -> None:
    with Stopwatch() as measured:
        time.sleep(0.01)
    assert measured.wall_s >= 0.01 and measured.server_cpu_s == 0


def test_a_case_that_fails_is_a_row_with_its_reason() -> None:
    def fail() -> Measurement:
        raise RuntimeError("no server")

    made = measure_case(case(), fail)
    assert made["error"] == "RuntimeError('no server')" and set(JOINED) < set(made)
    assert "error" not in measure_case(case(), seen)


def test_the_report_pairs_ratios_by_round() -> None:
    rows = [row("ours", 1, 2.0), row("ours", 2, 8.0), row("ours", 3, 1.0), row(BASELINE, 1, 1.0), row(BASELINE, 2, 2.0)]
    groups = group(rows)
    ours = next(key for key in groups if key.peer == "ours")
    spread = ratios(groups, ours)
    assert spread is not None
    assert spread.low == pytest.approx(0.25) and spread.high == pytest.approx(0.5)


def test_the_report_says_median_spread_load_and_failures() -> None:
    rows = [row("ours", 1, 1.0), row("ours", 2, 2.0), row("ours", 3, 4.0), row("ours", 1, 1.0, "exists")]
    text = report([*rows, make_error_row(case("broken"), RuntimeError("why"))])
    assert "put, values of 976.562 KiB" in text
    assert "0.50 [0.25-1.00]" in text
    assert "failed: broken put: RuntimeError('why')" in text
    assert "load average while measuring: 0.5 [0.5-0.5]" in text
    assert len([line for line in text.splitlines() if line.startswith("| ours")]) == 2


def test_rows_of_other_systems_need_no_verify_field() -> None:
    theirs = {name: value for name, value in row("theirs", 1, 1.0).items() if name != "verify"}
    assert "| theirs |" in report([theirs, row("ours", 1, 1.0)])


@pytest.mark.parametrize("value_bytes", SIZES)
@pytest.mark.parametrize("batch", [1, 64])
def test_a_working_set_is_larger_than_the_cache(value_bytes: int, batch: int) -> None:
    shape = Shape(value_bytes, batch, 1)
    assert shape.batches_per_worker >= 2
    assert shape.batches_per_worker * shape.batch_bytes >= MIN_WORKING_SET_BYTES


def test_a_key_ring_gives_fresh_keys_and_then_the_newest_again() -> None:
    ring = KeyRing("test", Shape(MIN_WORKING_SET_BYTES // 2, 2, 1))  # a working set of two batches
    first, second, third = ring.fresh(), ring.fresh(), ring.fresh()
    assert len({*first, *second, *third}) == 6
    assert ring.working_set() == [second, third]
    assert [ring.stored(index) for index in range(3)] == [second, third, second]


def test_a_key_ring_that_put_too_little_names_what_is_missing() -> None:
    ring = KeyRing("test", Shape(MIN_WORKING_SET_BYTES // 2, 2, 1))
    first = ring.fresh()
    missing = ring.working_set()
    assert missing[0] == first and ring.stored(1) == missing[1]
    assert ring.fresh() not in missing


def test_key_rings_of_different_names_share_no_key() -> None:
    first = KeyRing("test", Shape(1, 2, 1)).fresh()
    assert not {*KeyRing("other", Shape(1, 2, 1)).fresh()} & {*first}


def test_medians_keep_one_row_per_case_that_is_a_row_again() -> None:
    rounds = [row("ours", 1, 1.0), row("ours", 2, 2.0), row("ours", 3, 4.0)]
    rounds += [row(BASELINE, number, 0.5) for number in (1, 2, 3)]
    baseline, ours = medians(rounds)
    assert (ours["peer"], baseline["peer"]) == ("ours", BASELINE)
    assert (ours["gbps"], ours["gbps_min"], ours["gbps_max"]) == pytest.approx((0.5, 0.25, 1.0))
    assert (ours["rounds"], ours["verify"], ours["unit"]) == (3, "full", "GB/s")
    assert (ours["x_memcpy"], baseline["x_memcpy"]) == (0.25, None)
    assert {*JOINED, *FIGURES} <= set(ours)
    stream = io.StringIO()
    write_row(ours, stream)
    (again,) = read_rows(stream.getvalue().splitlines())
    assert again == ours
    assert "0.25" in report([baseline, ours]), "the report reads them as well"


def test_the_control_summary_divides_by_the_echo_of_the_same_round() -> None:
    def made(peer: str, number: int, latency_us: int) -> dict[str, object]:
        measured = Measurement([latency_us * 1000] * 10, 1.0, 0.001, 0.002)
        return make_row(Case(peer, "exists", 0, 64, 1, "off", number), measured, 0.5)

    latencies = {1: (10, 40), 2: (20, 40), 3: (10, 50)}
    rows = [made("limit-echo", number, echo) for number, (echo, _) in latencies.items()]
    rows += [made("ours", number, ours) for number, (_, ours) in latencies.items()]
    _, echo, ours = summary(rows).splitlines()
    assert echo.endswith("1.00 (1.00-1.00)")
    assert ours.startswith("ours exists 1 40.0 40.0 ")
    assert ours.endswith(" 4.00 (2.00-5.00)")

"""The table of metrics: complete, bounded, never decreasing, and documented as it is."""

from __future__ import annotations

import copy
import importlib.util
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.store.admin.collector import MetricsPage
from memkv_vllm.store.admin.families import FAMILIES, KNOWN, MAX_EVENTS, classify
from memkv_vllm.transports.verbs.statuses import outcome_of
from memkv_vllm.types import Status
from tests.support.store import Rig

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "memkv_vllm"
SERVER_SIDE = [*PACKAGE.glob("store/**/*.py"), *PACKAGE.glob("transports/**/*.py"), *PACKAGE.glob("protocol/*.py")]


@pytest.fixture
def statistics() -> dict[str, Any]:
    """What a server without clients has."""
    with Rig() as rig:
        admin = {
            "version": "1", "ready": 1, "healthy": 0, "reasons": ["disk", "disk"], "lag_s": 0.5,
            "responses": {"200": 3}, "connections_refused": 1, "clamped": 0,
        }  # fmt: skip
        return {**rig.handler.statistics(), "admin": admin}


def page_of(statistics: dict[str, Any]) -> str:
    return MetricsPage(lambda: statistics).render().decode()


def values_of(page: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


# ---------------------------------------------------------------------------------------------------- names


def test_names_follow_the_rules() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert re.fullmatch(r"memkv_[a-z][a-z0-9_]*", family.name)
        assert (family.kind == "counter") == family.name.endswith("_total"), family.name
        assert family.help.endswith(".")
        assert not re.search(r"_(ms|us|mb|gb|kib|mib|percent)(_|$)", family.name), "base units"
        assert bool(family.labels) == bool(family.values), family.name


def test_every_family_is_on_the_page_with_its_help(statistics: dict[str, Any]) -> None:
    page = page_of(statistics)
    for family in FAMILIES:
        assert f"# HELP {family.name} " in page
        assert f"# TYPE {family.name} {family.kind}" in page


def test_duplicate_reasons_are_one_series(statistics: dict[str, Any]) -> None:
    assert page_of(statistics).count('memkv_degraded{reason="disk"} 1.0') == 1


def literals(pattern: str) -> set[str]:
    """Everything that ``pattern``'s first group finds in the server's side of the package."""
    return {found for path in SERVER_SIDE for found in re.findall(pattern, path.read_text(encoding="utf-8"))}


def counted_names() -> set[str]:
    """Names that the code counts under, where they stand as such in it."""
    names = literals(r"""_counters\["([a-z_]+)"\]""") | literals(r"""counted\("([a-z_]+)"\)""")
    names |= literals(r"""_note\("([a-z_]+)\"""") | literals(r"""problem = "([a-z_]+)\"""")
    return names | {f"cut_{kind}" for kind in literals(r"""RemoteProtocolError\(\s*"([a-z_]+)\"""")}


def test_what_the_code_counts_is_there_from_the_start() -> None:
    """P094: a reason that appears with its first count has no increase, and an alert on it misses the first time."""
    names = counted_names()
    assert {"leaked_reservations", "refused_sessions", "auth_failed", "cut_mac", "bulk_error"} <= names
    missing = [
        f"{name}: add {label!r} to KNOWN[{family!r}] in store/admin/families.py"
        for name in sorted(names)
        for family, label in [classify(name)]
        if family in KNOWN and label not in KNOWN[family]
    ]
    assert not missing, "\n".join(missing)


def test_what_is_known_is_what_the_code_counts() -> None:
    """The other way round: a name that nothing counts any more would be a series that is 0 for ever."""
    names = counted_names()
    source = "\n".join(path.read_text(encoding="utf-8") for path in SERVER_SIDE)
    computed = {f"{kind}_{end}" for kind in ("put", "get") for end in re.findall(r"""\}_([a-z_]+)"\]""", source)}
    for family in ("memkv_refusals_total", "memkv_connections_cut_total", "memkv_faults_total"):
        for label in KNOWN[family]:
            assert label in names | computed or f"cut_{label}" in names, f"{family}: {label}"


def test_every_failure_over_rdma_is_there_from_the_start() -> None:
    """P094: the reasons of completions, and those that stand as such in the transport."""
    told = {outcome_of(status).reason for status in range(1, 24)} | {"unknown"}
    assert set(KNOWN["memkv_rdma_failures_total"]) == told | {"probe_failed", "refused", "completion", "not_destroyed"}


def test_sessions_are_shown_by_data_path(statistics: dict[str, Any]) -> None:
    statistics["server"]["sessions_by_path"] = {"verbs": 3, "another": 1}
    values = values_of(page_of(statistics))
    paths = {"loopback": 0, "tcp": 0, "verbs": 3, "another": 1}
    assert {path: values[f'memkv_sessions_by_data_path{{data_path="{path}"}}'] for path in paths} == paths


@pytest.mark.parametrize(
    ("counter", "family", "label"),
    [
        ("requests_put", "memkv_requests_total", "put"),
        ("requests_refused", "memkv_requests_refused_total", "requests_refused"),
        ("put_bytes", "memkv_put_bytes_total", "put_bytes"),
        ("put_no_space", "memkv_put_values_total", "no_space"),
        ("put_no_turn", "memkv_refusals_total", "put_no_turn"),
        ("get_absent", "memkv_get_values_total", "absent"),
        ("get_given_up", "memkv_events_total", "get_given_up"),
        ("cut_mac", "memkv_connections_cut_total", "mac"),
        ("refused_batch", "memkv_refusals_total", "refused_batch"),
        ("exists_denied", "memkv_refusals_total", "exists_denied"),
        ("bulk_error", "memkv_faults_total", "bulk_error"),
        ("rdma_retries", "memkv_rdma_failures_total", "retries"),
        ("something_new", "memkv_events_total", "something_new"),
    ],
)
def test_counters_are_sorted_into_families(counter: str, family: str, label: str) -> None:
    assert classify(counter) == (family, label)


@given(st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=40))
def test_every_counter_has_one_family_that_exists(counter: str) -> None:
    family, _ = classify(counter)
    (found,) = [other for other in FAMILIES if other.name == family]
    assert found.kind == "counter"


def test_every_result_of_a_value_is_known() -> None:
    for status in Status:
        for kind in ("put", "get"):
            family, label = classify(f"{kind}_{status.name.lower()}")
            assert label in KNOWN[family], status
    for type_ in MessageType:
        assert classify(f"requests_{type_.name.lower()}")[0] == "memkv_requests_total"


# ---------------------------------------------------------------------------------------------------- numbers


def test_the_numbers_are_the_statistics(statistics: dict[str, Any]) -> None:
    statistics["counters"] = Counter(put_ok=3, put_bytes=12, refused_batch=1, sessions=2, something_new=9)
    statistics["table"]["oldest_reservation"] = None
    statistics["latency"] = {"put": {"counts": [1, 2] + [0] * 15 + [1], "sum_s": 31.5, "num": 4}}
    values = values_of(page_of(statistics))
    assert values['memkv_put_values_total{result="ok"}'] == 3
    assert values['memkv_put_values_total{result="exists"}'] == 0
    assert values["memkv_put_bytes_total"] == 12
    assert values["memkv_get_bytes_total"] == 0
    assert values['memkv_refusals_total{reason="refused_batch"}'] == 1
    assert values["memkv_sessions_opened_total"] == 2
    assert values['memkv_events_total{event="something_new"}'] == 9
    assert values["memkv_oldest_reservation_seconds"] == 0
    assert values['memkv_admin_requests_total{code="200"}'] == 3
    assert values['memkv_request_duration_seconds_bucket{le="0.0001",type="put"}'] == 1
    assert values['memkv_request_duration_seconds_bucket{le="30.0",type="put"}'] == 3
    assert values['memkv_request_duration_seconds_bucket{le="+Inf",type="put"}'] == 4
    assert values['memkv_request_duration_seconds_count{type="put"}'] == 4
    assert values['memkv_request_duration_seconds_sum{type="put"}'] == 31.5


def test_series_are_bounded_whatever_is_counted(statistics: dict[str, Any]) -> None:
    statistics["counters"] = Counter({f"event_{number}": 1 for number in range(5 * MAX_EVENTS)})
    page = page_of(statistics)
    series = [line for line in page.splitlines() if line.startswith("memkv_events_total{")]
    assert len(series) <= MAX_EVENTS + 1
    assert sum(float(line.rpartition(" ")[2]) for line in series) == 5 * MAX_EVENTS


@given(
    st.lists(st.dictionaries(st.sampled_from(["put_ok", "get_ok", "put_bytes", "x"]), st.integers(0, 9)), max_size=8)
)
def test_a_counter_is_never_shown_lower_than_before(steps: list[dict[str, int]]) -> None:
    """P095: a counter that went back is shown as it was, and that is counted."""
    base = {
        "server": {"server_id": "", "boot_id": ""}, "table": {"counters": {}}, "counters": {},
        "admin": {"version": "", "reasons": [], "responses": {}, "connections_refused": 0, "clamped": 0},
    }  # fmt: skip
    now = copy.deepcopy(base)
    page = MetricsPage(lambda: now)
    before: dict[str, float] = {}
    for step in steps:
        now["counters"] = step
        shown = {name: value for name, value in values_of(page.render().decode()).items() if "_total" in name}
        for name, value in before.items():
            assert shown[name] >= value if name in shown else True, name
        before.update(shown)
    decreased = any(
        step.get(name, 0) < max((earlier.get(name, 0) for earlier in steps[:at]), default=0)
        for at, step in enumerate(steps)
        for name in ("put_ok", "get_ok", "put_bytes")
    )
    assert bool(page.clamped) >= decreased


def test_a_page_is_cheap_to_make_twice_in_one_process(statistics: dict[str, Any]) -> None:
    """Two servers in one process (tests, embedders) have a registry each, and nothing is in the global one."""
    first, second = MetricsPage(lambda: statistics), MetricsPage(lambda: statistics)
    assert first.render() and second.render()
    from prometheus_client import REGISTRY

    assert not [metric.name for metric in REGISTRY.collect() if metric.name.startswith("memkv")]


# ---------------------------------------------------------------------------------------------------- the page of docs


def test_the_metrics_page_of_the_docs_is_up_to_date() -> None:
    """P087."""
    path = ROOT / "scripts" / "gen_metrics_docs.py"
    spec = importlib.util.spec_from_file_location("gen_metrics_docs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert page == module.render(), "run scripts/gen_metrics_docs.py"
    for family in FAMILIES:
        assert f"| `{family.name}` |" in page

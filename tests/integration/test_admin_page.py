"""The status page in a real browser (headless Chromium) against a real server: what a person gets to see."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from urllib.request import urlopen

import pytest

from memkv_vllm.store.admin.health import Reason
from memkv_vllm.store.admin.routes import HEADERS
from tests.support.admin import AdminThread, admin_config, admin_threads
from tests.support.store import NAMESPACE, VALUE, make_key

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

PAGE = files("memkv_vllm.store.admin") / "page"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    # Nothing but this machine can be reached: what the page asked of anybody else would fail, and be seen to.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip

Browse = Callable[..., str]


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Opens a page, lets its clock run for some seconds, and returns its document as it then is."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.fail("chromium is not installed: apt-get install chromium (Debian's package of that name)")

    def browse(url: str, seconds: float = 5, width: int = 1280) -> str:
        command = [chromium, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1400"]
        command += [f"--virtual-time-budget={int(seconds * 1000)}", "--enable-logging=stderr", "--dump-dom", url]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line and "127.0.0.1" in line]
        browse.complaints = complaints  # type: ignore[attr-defined]
        return done.stdout

    return browse


class Text(HTMLParser):
    """The text of a document, and of each element that has an id."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.by_id: dict[str, str] = {}
        self.attributes: dict[str, dict[str, str | None]] = {}
        self._open: list[tuple[str, str | None]] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if found.get("id"):
            self.attributes[str(found["id"])] = found
        if tag not in ("meta", "link", "br"):
            self._open.append((tag, found.get("id")))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for _, name in self._open:
            if name:
                self.by_id[name] = self.by_id.get(name, "") + data + " "


def fill(server: AdminThread, count: int, namespace: bytes = NAMESPACE) -> None:
    handler = server.server.handler

    def put() -> None:
        for number in range(count):
            key = make_key(number, namespace=namespace)
            result = handler._table.reserve(key, VALUE, 0, 0, 0, "test", handler._clock())
            handler._table.commit(key, result.generation)

    server.call(put)


def test_a_person_sees_the_state_the_numbers_and_the_charts(browse: Browse) -> None:
    with admin_threads(admin_config()) as (server,):
        fill(server, 7)
        text = Text(browse(f"http://{server.address}/"))
        assert text.by_id["state"].strip() == "ok"
        assert server.address in text.by_id["where"]
        assert "Values 7" in text.by_id["tiles"]
        assert "of 8.00 MiB" in text.by_id["tiles"]
        assert NAMESPACE.hex() in text.by_id["namespaces"]
        assert "no session is open" in text.by_id["sessions"]
        assert "arena" in text.by_id["fill-legend"]
        assert text.by_id["fill"].count("%") == 3, "the axis"
        assert "hidden" not in text.attributes["content"]
        assert browse.complaints == []  # type: ignore[attr-defined]


def test_what_is_wrong_stands_on_top_with_the_next_step(browse: Browse) -> None:
    with admin_threads(admin_config()) as (server,):
        server.server.arena_slow = True
        text = Text(browse(f"http://{server.address}/"))
        assert text.attributes["state"]["data-state"] == "degraded"
        assert "arena_not_populated" in text.by_id["state"]
        assert "run Linux 5.14 or newer" in text.by_id["notices"]


def test_a_server_that_is_gone_is_said_to_be(browse: Browse, tmp_path: Path) -> None:
    """The page itself stands in a file here: its server does not answer from the start."""
    text = Text(browse(f"file://{write_page(tmp_path)}"))
    assert text.by_id["state"].strip() == "server unreachable"
    assert "tries again by itself" in text.by_id["notices"]
    assert text.attributes["content"]["class"] == "old"


def write_page(folder: Path, first: str = "") -> Path:
    """The page as files; ``first`` comes before its script."""
    for name in ("index.html", "page.css", "page.js"):
        text = (PAGE / name).read_text(encoding="utf-8").replace('"/page.', '"page.')
        (folder / name).write_text(text.replace("<script ", f"{first}<script ", 1), encoding="utf-8")
    return folder / "index.html"


def test_what_a_peer_says_of_itself_is_shown_as_text(browse: Browse, monkeypatch: pytest.MonkeyPatch) -> None:
    """A label, a key id, an event: none becomes markup or runs."""
    evil = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    with admin_threads(admin_config()) as (server,):
        handler = server.server.handler
        plain = handler.statistics

        def statistics() -> dict[str, object]:
            session = {
                "peer": evil, "key_id": evil, "kind": evil, "inflight": 0, "requests": 1, "put_bytes": 0,
                "get_bytes": 0,
            }  # fmt: skip
            return {**plain(), "sessions": [session], "counters": {f"cut_{evil}": 1}}

        monkeypatch.setattr(handler, "statistics", statistics)
        document = browse(f"http://{server.address}/")
        text = Text(document)
        assert "<title>memkv</title>" in document
        assert "<img" not in document
        assert text.by_id["sessions"].count("onerror") == 3
        assert "onerror" in text.by_id["events"]


def test_every_server_of_the_cluster_has_a_row(browse: Browse) -> None:
    with admin_threads(admin_config(max_size="16MiB")) as (other,):
        peers = f"{other.address}, 127.0.0.1:1"
        with admin_threads(admin_config(network={"admin_peers": peers})) as (server,):
            fill(server, 7)
            fill(other, 3)
            text = Text(browse(f"http://{server.address}/"))
    first, second, third = server.address, other.address, "127.0.0.1:1"
    row = text.by_id["servers"]
    assert re.search(rf"{first} \(this one\) +ok +\d+ s +7 .* of 8.00 MiB .*{second} +ok +\d+ s +3 .* of 16.0 MiB", row)
    assert re.search(rf"{third} +unreachable: Connection refused +–", row)
    assert text.by_id["servers-note"].strip() == "2 of 3 ok"
    assert text.by_id["state"].strip() == "ok", "the page is about its own server"
    assert browse.complaints == []  # type: ignore[attr-defined]


def test_what_another_server_says_is_shown_as_text(browse: Browse, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "<img src=x onerror=\"document.title='owned'\">"
    with admin_threads(admin_config()) as (other,):
        with admin_threads(admin_config(network={"admin_peers": other.address})) as (server,):
            reasons = [Reason(evil, "detail", "step")]
            monkeypatch.setattr("memkv_vllm.store.admin.server.degraded", lambda facts: reasons)
            document = browse(f"http://{server.address}/")
    assert Text(document).by_id["servers"].count("degraded: <img src=x onerror=") == 2
    assert "<title>owned</title>" not in document
    assert "<img" not in document


@pytest.mark.parametrize("width", [1280, 360])
def test_it_fits_a_screen_and_a_phone(browse: Browse, tmp_path: Path, width: int) -> None:
    """Nothing sticks out to the right, with real answers: the page in a frame as wide as the device, from files."""
    with admin_threads(admin_config()) as (server,):
        fill(server, 3)
        paths = ("/v1/status", "/v1/history", "/v1/namespaces", "/v1/servers")
        answers = {path: json.load(urlopen(f"http://{server.address}{path}")) for path in paths}
    answers["/v1/status"]["sessions"] = [
        {"peer": "loopback client (pid 4194304)", "key_id": "k" * 32, "kind": "engine", "inflight": 9,
         "requests": 10**9, "put_bytes": 10**15, "get_bytes": 10**15},
    ]  # fmt: skip
    lost = {"address": f"{'h' * 60}:65535", "is_this": False, "state": "unreachable", "reason": "x" * 160}
    answers["/v1/servers"]["servers"].append({**answers["/v1/servers"]["servers"][0], **lost})
    stand_in = (
        f"<script>const answers = {json.dumps(answers)};"
        """
        window.fetch = async (path) => ({ok: true, json: async () => answers[path]});
        setTimeout(() => parent.postMessage([document.documentElement.scrollWidth, innerWidth,
            document.getElementById("state").textContent], "*"), 2500);</script>"""
    )
    write_page(tmp_path, stand_in)
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"""<p id="said"></p><iframe src="index.html" width="{width}" height="1000"></iframe>
        <script>addEventListener("message", (event) => {{ said.textContent = event.data.join(" "); }});</script>""",
        encoding="utf-8",
    )
    text = Text(browse(f"file://{frame}", width=1400))
    needed, given, *state = text.by_id["said"].split()
    assert state == ["ok"]
    assert int(given) >= width - 20
    assert int(needed) <= int(given), "something is wider than the screen"


def test_it_asks_nobody_else_and_runs_nothing_inline() -> None:
    sources = {name: (PAGE / name).read_text(encoding="utf-8") for name in ("index.html", "page.css", "page.js")}
    for name, source in sources.items():
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", source), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", source), (
            name
        )
    assert not re.search(r"<script>|<style|\son\w+=|\sstyle=", sources["index.html"])
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy

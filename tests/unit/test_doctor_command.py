"""``memkv doctor`` as it is run: against real servers, without any, and where something hangs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner, Result

from memkv_vllm import __version__
from memkv_vllm.cli import main
from memkv_vllm.doctor import gathering, looking, resolving
from memkv_vllm.doctor.facts import DeviceFiles, Need, Side
from memkv_vllm.doctor.gathering import gather
from memkv_vllm.doctor.looking import look_at_files, look_at_server_side
from memkv_vllm.doctor.patience import within
from memkv_vllm.doctor.settings import Settings, client_settings, default_staging_bytes, server_settings
from memkv_vllm.errors import StoreError
from memkv_vllm.pytest_plugin import LoopbackServer
from memkv_vllm.transports.choosing import offered_in, refuse_connect
from tests.support.sysfs import MACHINES

KEY = "5a" * 32


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


def findings(*arguments: str) -> dict[str, list[tuple[str, str, str]]]:
    """What ``--json`` says, by check: level, seen, fix."""
    result = doctor("--json", *arguments)
    told = json.loads(result.stdout)
    assert told["status"] == result.exit_code
    found: dict[str, list[tuple[str, str, str]]] = {}
    for row in told["findings"]:
        found.setdefault(row["check"], []).append((row["level"], row["seen"], row["fix"]))
    return found


# ---------------------------------------------------------------------------------------------------- bare machines


def test_nothing_at_all_is_configured(tmp_path: Path) -> None:
    """P076: in a bare container every line is there, and there is no traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "memkv_vllm", "doctor"],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr + done.stdout
    assert "FAIL  settings" in done.stdout
    assert "MEMKV_SERVERS" in done.stdout
    if not Path("/dev/infiniband").is_dir():
        assert "/dev/infiniband is absent" in done.stdout
        assert "docker: docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(" ok")


def test_gathering_in_a_bare_container(tmp_path: Path) -> None:
    """P076: an empty tree is a container that hides everything."""
    facts = gather(Settings(Side.CLIENT, Need.REQUIRED), root=tmp_path)
    assert facts.files == DeviceFiles(has_folder=False, has_uverbs=False)
    assert facts.host.nics == ()
    assert facts.servers == ()


def test_without_rdma_in_the_settings_no_library_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P072: devices are there, the transport is loopback: the verbs library is not even looked for."""

    def load(*_: object) -> object:
        raise AssertionError("the verbs library was loaded")

    monkeypatch.setattr(gathering, "look_at_library", load)
    root = MACHINES["rail_optimised"](tmp_path)
    facts = gather(Settings(Side.CLIENT, Need.NONE, "loopback"), root=root)
    assert (facts.library, facts.unanswered) == (None, ())
    assert gather(Settings(Side.CLIENT, Need.WANTED, "auto"), root=root).unanswered != ()


# ---------------------------------------------------------------------------------------------------- servers


@pytest.fixture
def settings(memkv_loopback: LoopbackServer, monkeypatch: pytest.MonkeyPatch) -> LoopbackServer:
    """A running server, and the environment of a client of it."""
    for name, value in memkv_loopback.environ.items():
        monkeypatch.setenv(name, value)
    return memkv_loopback


def test_a_server_that_is_well(settings: LoopbackServer) -> None:
    found = findings()
    (level, seen, _), *_ = found["server"]
    assert (level, f"version {__version__}" in seen) == ("ok", True)
    assert found["clock"][0][0] == "ok"
    assert "differs by" in found["clock"][0][1]
    assert found["rdma"] == [("ok", "transport is loopback: RDMA is not used, and was not looked at", "")]


def test_asking_leaves_nothing_behind(settings: LoopbackServer) -> None:
    before = settings.statistics()["counters"]
    findings()
    # The server hears of the end a moment after this side has gone.
    ended = time.monotonic() + 10
    while settings.statistics()["server"]["sessions"] and time.monotonic() < ended:
        time.sleep(0.01)
    statistics = settings.statistics()
    assert statistics["server"]["sessions"] == 0
    changed = {name for name, count in statistics["counters"].items() if count != before.get(name, 0)}
    assert not {name for name in changed if name.startswith(("cut", "protocol"))}, changed


def test_a_server_that_is_down(settings: LoopbackServer) -> None:
    settings.stop()
    (level, seen, fix), *_ = findings()["server"]
    assert (level, "refused" in seen.lower()) == ("fail", True)
    assert "memkv start" in fix


def test_a_wrong_key(settings: LoopbackServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMKV_AUTH_KEY_FILE")
    monkeypatch.setenv("MEMKV_AUTH_KEY", KEY)
    result = doctor()
    assert result.exit_code == 2
    assert "auth_key_file (MEMKV_AUTH_KEY_FILE)" in result.output
    assert KEY not in result.output + result.stderr


def test_server_option_replaces_the_configured_ones(settings: LoopbackServer) -> None:
    (level, seen, _), *_ = findings("--server", "127.0.0.1:1")["server"]
    assert (level, seen.startswith("127.0.0.1:1: ")) == ("fail", True)


def test_without_a_key_only_tcp_is_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        (level, seen, fix), *_ = findings("--server", f"127.0.0.1:{port}")["server"]
    assert (level, "takes TCP connections; no key is configured here" in seen) == ("fail", True)
    assert "MEMKV_AUTH_KEY_FILE" in fix


@pytest.fixture
def silent() -> Iterator[int]:
    """A port on which connections are accepted and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_silent_server_is_not_waited_for_beyond_its_deadline(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMKV_AUTH_KEY", KEY)
    monkeypatch.setenv("MEMKV_SERVERS", f"127.0.0.1:{silent}")
    monkeypatch.setenv("MEMKV_TRANSPORT", "tcp")
    monkeypatch.setenv("MEMKV_CONNECT_TIMEOUT_S", "0.3")
    (level, seen, _), *_ = findings()["server"]
    assert (level, "did not answer by the deadline" in seen) == ("fail", True)


@pytest.mark.parametrize("word", ["secret", KEY])
def test_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    for transport in ("tcp", "loopback", "nonsense"):
        monkeypatch.setenv("MEMKV_AUTH_KEY", KEY)
        monkeypatch.setenv("MEMKV_LICENSE", "eyJhbGciOiJIUzI1NiJ9.secret.secret")
        monkeypatch.setenv("MEMKV_SERVERS", "127.0.0.1:1,,")
        monkeypatch.setenv("MEMKV_TRANSPORT", transport)
        for arguments in ([], ["--json"]):
            result = doctor(*arguments)
            assert word not in result.output + result.stderr


# ---------------------------------------------------------------------------------------------------- what hangs


def test_a_resolver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def hang(*_: object, **__: object) -> list[Any]:
        asked.wait(10)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    started = time.monotonic()
    found = anyio.run(resolving.resolve, ["store1", "10.0.0.1"], 0.2)
    asked.set()
    assert found == {"store1": "", "10.0.0.1": "10.0.0.1"}
    assert time.monotonic() - started < 5


def test_a_library_that_hangs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(gathering, "LOOK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(gathering, "look_at_library", lambda _: released.wait(10))
    facts = gather(Settings(Side.CLIENT, Need.REQUIRED), root=tmp_path)
    released.set()
    assert facts.library is None
    assert facts.unanswered == ("the verbs library did not answer in time",)


def test_a_look_that_breaks_costs_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> object:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(gathering, "look_at_files", broken)
    facts = gather(Settings(Side.CLIENT, Need.NONE), root=tmp_path)
    assert facts.unanswered == ("/dev/infiniband could not be looked at: ZeroDivisionError: odd",)
    assert facts.vllm is not None or facts.version


def test_a_server_that_breaks_the_doctor_costs_one_line(
    settings: LoopbackServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> object:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(gathering, "ask", broken)
    (level, seen, _), *_ = findings()["server"]
    assert (level, "could not be asked: ZeroDivisionError: odd" in seen) == ("fail", True)


def test_a_thread_that_never_ends_does_not_hold_up_the_process() -> None:
    code = """
import anyio, time
from memkv_vllm.doctor.patience import within
async def main():
    try:
        await within(0.1, lambda: time.sleep(3600))
    except TimeoutError:
        print("gave up")
anyio.run(main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=15, check=False)
    assert (done.returncode, done.stdout) == (0, "gave up\n")


@pytest.mark.anyio
async def test_within_hands_on_results_and_errors() -> None:
    assert await within(5, lambda: 7) == 7

    def refuse() -> None:
        raise PermissionError("no")

    with pytest.raises(PermissionError, match="no"):
        await within(5, refuse)


# ---------------------------------------------------------------------------------------------------- the server side


def write_yaml(tmp_path: Path, port: int, **sections: object) -> Path:
    path = tmp_path / "server.yaml"
    network = {"address": f"127.0.0.1:{port}", "admin_address": "127.0.0.1:0", "auth_key": KEY}
    path.write_text(json.dumps({"network": network, "memory": {"max_size": "8MiB"}, **sections}))
    path.chmod(0o600)
    return path


def test_a_storage_host_without_rdma(tmp_path: Path, free_port: int) -> None:
    path = write_yaml(tmp_path, free_port)
    result = doctor("--side", "server", "--config", str(path))
    assert result.exit_code in (0, 1), result.output  # a small limit of descriptors is a warning
    assert "rdma.devices names none" in result.output
    assert f"127.0.0.1:{free_port} is free" in result.output
    assert "FAIL" not in result.output


def test_a_storage_host_with_rdma_devices_that_are_not_there(tmp_path: Path, free_port: int) -> None:
    """P073, P076."""
    path = write_yaml(tmp_path, free_port, rdma={"devices": ["mlx5_77"]})
    found = findings("--side", "server", "--config", str(path))
    assert found["nic"][0][0] == "fail"
    assert "8 MiB, on each of 1 device" in found["memlock"][0][1]


def test_a_running_server_is_asked_with_its_own_key(tmp_path: Path, free_port: int) -> None:
    path = write_yaml(tmp_path, free_port)
    process = subprocess.Popen(
        [sys.executable, "-m", "memkv_vllm", "start", "--config", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready ")
        found = findings("--side", "server", "--config", str(path))
    finally:
        process.kill()
        process.communicate()
    assert found["address"] == [("ok", f"something listens on 127.0.0.1:{free_port} already", "")]
    assert f"127.0.0.1:{free_port} answers (id " in found["server"][0][1]
    assert "a server runs" in found["arena"][0][1]


def test_drives_of_a_yaml(tmp_path: Path, free_port: int) -> None:
    there, absent = tmp_path / "drive0.dat", tmp_path / "no/such/drive1.dat"
    drives = [{"media": str(there), "max_size": "2GiB"}, {"media": str(absent), "max_size": "2GiB"}]
    path = write_yaml(tmp_path, free_port, storage={"mode": "file", "drives": drives})
    config = server_settings(path, ()).server
    assert config is not None
    one, other = look_at_server_side(config).drives
    assert (one.exists, one.size, one.is_block_device, one.free > 0) == (True, 0, False, True)
    assert other.exists is False


def test_a_drive_that_cannot_be_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An I/O error of a dying drive is a finding, not an end."""

    def broken(_: object) -> object:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "statvfs", broken)
    assert looking._drive(tmp_path / "d", 1).problem == "Input/output error"


def test_wrong_yaml_is_told_and_the_rest_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("network: {adress: x}\n")
    result = doctor("--side", "server", "--config", str(path))
    assert result.exit_code == 2
    assert "adress" in result.output
    assert "device files" in result.output


def test_config_belongs_to_the_server_side(tmp_path: Path) -> None:
    result = doctor("--config", str(tmp_path / "x"))
    assert (result.exit_code, "MEMKV_CONFIG" in result.output) == (2, True)


@pytest.mark.parametrize("arguments", [("--server", "http://x"), ("--staging", "12 apples")])
def test_wrong_options(arguments: tuple[str, str]) -> None:
    result = doctor(*arguments)
    assert (result.exit_code, "Usage" in result.output) == (2, True)


@pytest.fixture
def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


# ---------------------------------------------------------------------------------------------------- small parts


def test_staging_is_the_settings_own_default() -> None:
    assert default_staging_bytes() == 512 << 20


def test_what_is_pinned_counts_every_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """P074: each server has a registration of its own."""
    monkeypatch.setenv("MEMKV_AUTH_KEY", KEY)
    monkeypatch.setenv("MEMKV_SERVERS", "a=10.0.0.1|10.0.1.1,10.0.0.2")
    settings = client_settings((), 1 << 20)
    assert settings.pinned_bytes == 2 << 20
    assert [name for name, _ in settings.servers] == ["a", "a", "10.0.0.2:9900"]


@pytest.mark.parametrize(
    ("transport", "need"), [("verbs", Need.REQUIRED), ("auto", Need.WANTED), ("tcp", Need.NONE), ("", Need.REQUIRED)]
)
def test_need_of_a_transport(monkeypatch: pytest.MonkeyPatch, transport: str, need: Need) -> None:
    monkeypatch.setenv("MEMKV_AUTH_KEY", KEY)
    monkeypatch.setenv("MEMKV_SERVERS", "10.0.0.2")
    monkeypatch.setenv("MEMKV_TRANSPORT", transport)
    assert client_settings((), 1).need is need


def test_device_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P076: the file's mode, and a container's device list, which a mode does not show."""
    folder, names = tmp_path / "dev/infiniband", tmp_path / "sys/class/infiniband_verbs"
    for number in range(3):
        (names / f"uverbs{number}").mkdir(parents=True)
        (names / f"uverbs{number}/ibdev").write_text(f"mlx5_{number}\n")
    folder.mkdir(parents=True)
    for name in ("uverbs0", "uverbs1", "rdma_cm", "umad0"):
        (folder / name).touch()
    (folder / "uverbs2").mkdir()
    really = os.open

    def guarded(path: Any, *arguments: Any, **others: Any) -> int:
        if str(path).endswith("uverbs1"):
            raise PermissionError(1, "Operation not permitted")
        return really(path, *arguments, **others)

    monkeypatch.setattr(os, "open", guarded)
    files = look_at_files(tmp_path)
    assert [(node.name, node.device, bool(node.problem), node.is_denied) for node in files.nodes] == [
        ("uverbs0", "mlx5_0", False, False),
        ("uverbs1", "mlx5_1", True, True),
        ("uverbs2", "mlx5_2", True, False),
    ]


def refusal(offered: list[str]) -> str:
    with pytest.raises(StoreError) as caught:
        refuse_connect("?", offered)
    return str(caught.value)


@pytest.mark.parametrize("offered", [[], ["verbs"], ["next", "verbs"]])
def test_a_refusal_says_what_there_is(offered: list[str]) -> None:
    assert offered_in(refusal(offered)) == tuple(offered)
    assert offered_in("something else") is None


def test_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    output = CliRunner().invoke(main, ["--help"]).output
    assert "doctor" in output
    assert "net" in output

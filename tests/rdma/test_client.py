"""The verbs client on soft-RoCE: which rail it takes, and every reason for which an engine refuses to start.

Engines are processes (``tests.support.engine_start``), over the stores and devices of this machine. Fault kinds P070,
P073, P074, P076, P078.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.cable import A, B, Cable, End
from tests.support.cable_store import cable_store
from tests.support.engine_start import REFUSED

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]
KEY = "ab" * 32
EXIT_S = 5.0
"""The product's promise, from the start of the engine on."""
IMPORT_S = 1.5
"""What importing takes in the VM when nothing else runs on its machine. Where it takes longer, so may everything."""
RAILS = {"rxe0": "10.77.0.1", "rxe1": "10.78.0.1"}


class Outcome(NamedTuple):
    """What came of an engine's start."""

    status: int
    seconds: float
    """Of the start, as on a machine that does nothing else."""
    servers_ready: int
    refused: str
    log: str


def start(servers: str, *arguments: int, prefix: tuple[str, ...] = (), **settings: Any) -> Outcome:
    """Start an engine in a process; ``settings`` are ``MEMKV_*`` in lower case."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MEMKV_")}
    given = {"servers": servers, "auth_key": KEY, **settings}
    environ |= {f"MEMKV_{name.upper()}": str(value) for name, value in given.items()}
    command = [*prefix, sys.executable, "-m", "tests.support.engine_start", *map(str, arguments)]
    begun = time.monotonic()
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout, done.stderr
    said = json.loads(done.stdout.splitlines()[0])
    print(f"{time.monotonic() - begun:.1f} s in all, {said}")  # noqa: T201 - for whoever reads a failure
    seconds = said["seconds"] / max(1.0, said["import_seconds"] / IMPORT_S)
    return Outcome(done.returncode, seconds, said.get("servers_ready", -1), said.get("refused", ""), done.stderr)


def refusal(servers: str, *arguments: int, prefix: tuple[str, ...] = (), **settings: Any) -> str:
    """Why it refused, in time and on one line."""
    outcome = start(servers, *arguments, prefix=prefix, **settings)
    assert outcome.status == REFUSED, outcome
    assert outcome.seconds < EXIT_S
    assert "\n" not in outcome.refused
    assert "Traceback" not in outcome.log
    return outcome.refused


@contextmanager
def store(folder: Path, *devices: str, port: int) -> Iterator[None]:
    """A server on all addresses of this machine that serves verbs on ``devices``."""
    config = {
        "network": {"address": f"0.0.0.0:{port}", "admin_address": f"127.0.0.1:{port + 50}", "auth_key": KEY},
        "memory": {"max_size": "64MiB"},
        **({"rdma": {"devices": list(devices)}} if devices else {}),
    }
    file = folder / f"server{port}.json"  # JSON is yaml
    file.write_text(json.dumps(config))
    file.chmod(0o600)
    log = folder / f"server{port}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "memkv_vllm", "start", "--config", str(file)], cwd=ROOT, stdout=out, stderr=out
        )
        try:
            _await_port(port, process, log)
            yield
        finally:
            process.terminate()
            process.wait(20)


def _await_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 30
    while True:
        assert process.poll() is None and time.monotonic() < end, log.read_text()
        try:
            socket.create_connection(("10.77.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a store on both rails."""
    with store(tmp_path_factory.mktemp("store"), *RAILS, port=9910):
        yield 9910


# -- it starts


@pytest.mark.parametrize("device", sorted(RAILS))
def test_values_go_over_the_rail_of_the_servers_address(served: int, device: str) -> None:
    """P070, P078: which NIC it is, is said."""
    outcome = start(f"{RAILS[device]}:{served}")
    assert (outcome.status, outcome.servers_ready) == (0, 1), outcome
    assert f"event=rail rank=0 device={device} port=1 gid={RAILS[device]}" in outcome.log
    assert "rate=unknown" in outcome.log, "soft-RoCE's nominal rate is fiction"


def test_two_rails_of_one_server(served: int) -> None:
    outcome = start(f"a={RAILS['rxe0']}:{served}|{RAILS['rxe1']}:{served}")
    assert (outcome.status, outcome.servers_ready) == (0, 1), outcome
    assert "device=rxe0 port=1" in outcome.log and "device=rxe1 port=1" in outcome.log


def test_a_name_is_paired_by_its_address(served: int, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{RAILS['rxe1']} store-1\n")
    prefix = ("unshare", "-m", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh")
    outcome = start(f"store-1:{served}", prefix=prefix)
    assert (outcome.status, outcome.servers_ready) == (0, 1), outcome
    assert "event=rail rank=0 device=rxe1" in outcome.log


def test_a_server_that_is_not_there_is_no_reason_not_to_start(served: int) -> None:
    outcome = start(f"{RAILS['rxe0']}:{served},{RAILS['rxe1']}:9977")
    assert (outcome.status, outcome.servers_ready) == (0, 1), outcome
    assert "event=server_down" in outcome.log


# -- facts of this host


def test_a_named_device_is_missing(served: int) -> None:
    """P073: rxe0 would do, and is not taken."""
    reason = refusal(f"{RAILS['rxe0']}:{served}", rdma_devices="mlx5_0")
    assert "RDMA device mlx5_0 is not on this host: found rxe0:1, rxe1:1" in reason


def test_the_named_device_is_on_another_rail(served: int) -> None:
    """P070."""
    reason = refusal(f"{RAILS['rxe0']}:{served}", rdma_devices="rxe1")
    assert "no RDMA port reaches 10.77.0.1" in reason and "10.78.0.0/24" in reason


def test_no_rail_has_the_servers_subnet(served: int) -> None:
    """P070."""
    reason = refusal(f"far=10.99.0.1:{served}")
    for part in ("server far cannot be reached over RDMA", "10.99.0.1", "10.77.0.0/24", "10.78.0.0/24"):
        assert part in reason


def test_a_gid_index_without_a_gid(served: int) -> None:
    assert "has no GID at index 77" in refusal(f"{RAILS['rxe0']}:{served}", gid_index=77)


@contextmanager
def command(do: str, undo: str) -> Iterator[None]:
    """Something done to this machine, for a time."""
    subprocess.run(do.split(), check=True)
    try:
        yield
    finally:
        subprocess.run(undo.split(), check=True)


def test_an_mtu_that_the_interface_does_not_carry(tmp_path: Path) -> None:
    with command("ip link set rail1 mtu 1500", "ip link set rail1 mtu 9000"):
        reason = refusal("10.78.0.1:9977", mtu=4096)
    assert "mtu is 4096, but rxe1:1 carries at most 1024" in reason and "set mtu: 1024" in reason


def test_no_port_is_up() -> None:
    # Only what the test names counts: rxe0 stays up, and is not allowed.
    with command("ip link set rail1 down", "ip link set rail1 up"):
        reason = refusal("10.78.0.1:9977", rdma_devices="rxe1")
    assert "no RDMA port can be used" in reason and "rxe1:1" in reason
    subprocess.run("ip route replace 10.78.0.0/24 dev rail1 src 10.78.0.1".split(), check=False)


def test_a_memlock_that_is_too_small() -> None:
    """P074: nobody, with the 64 KiB of old distributions, and 16 MiB to register."""
    reason = refusal("10.77.0.1:9977", 65534, 64 << 10)
    for part in (
        "memlock is too small",
        "the limit is 0.1 MiB",
        "needs 16.0 MiB",
        "ulimit -l",
        "LimitMEMLOCK",
        "docker",
    ):
        assert part in reason


@pytest.mark.parametrize(
    ("hidden", "says"),
    [
        ("/dev/infiniband", "there is no /dev/infiniband"),
        ("/sys/class/infiniband", "no RDMA device: found an empty /sys/class/infiniband"),
    ],
)
def test_a_container_that_shows_no_devices(hidden: str, says: str) -> None:
    """P076: it names what is not there, and the lines for docker and kubernetes."""
    # A directory cannot be taken away from one process only; /dev/infiniband is hidden by what stands above it.
    hide = f"mount -t tmpfs none {hidden}" if hidden.startswith("/sys") else "mount -t tmpfs none /dev"
    reason = refusal("10.77.0.1:9977", prefix=("unshare", "-m", "sh", "-c", f'{hide} && exec "$@"', "sh"))
    assert says in reason
    for part in ("--device=/dev/infiniband", "IPC_LOCK", "kubernetes"):
        assert part in reason


# -- what servers say


def test_a_server_that_serves_no_verbs(served: int, tmp_path: Path) -> None:
    with store(tmp_path, port=9911):
        reason = refusal(f"good=10.77.0.1:{served},bad=10.77.0.1:9911")
    assert "1 of 2 servers answer but cannot reach this host's memory" in reason
    assert "server bad:" in reason and "rdma.devices" in reason and "server good:" not in reason


def test_a_server_that_does_not_serve_this_rail(tmp_path: Path) -> None:
    with store(tmp_path, "rxe0", port=9912):
        reason = refusal("10.78.0.1:9912")
    assert "10.78.0.1" in reason and "rxe0:1" in reason


@pytest.mark.parametrize(
    ("sender", "says"),
    [(A, "4096 bytes from the server to the client do not arrive"), (B, "from the client to the server do not arrive")],
    ids=["from the server", "from the client"],
)
def test_a_path_that_loses_large_packets(tmp_path: Path, cable: Cable, sender: End, says: str) -> None:
    """P078, the black hole: connections and small packets pass, what a value is made of does not, in one direction."""
    with cable_store(tmp_path) as on_cable:
        cable.narrow(sender, 1500)
        key = on_cable.config.auth_key.get_secret_value()
        reason = refusal(f"{A.address}:{on_cable.port}", auth_key=key.hex(), rdma_devices=B.device)
    for part in ("answers, but does not reach this host's memory over RDMA", A.address, B.address, "MTU", says):
        assert part in reason

"""What the VM promises to whoever runs a command in it. Starts VMs, so this runs on the host, in ``make test-rdma``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.rdma.vm import kernel

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not kernel.cached().exists(), reason="the VM's kernel is built by: make test-rdma"),
]

LAUNCHER = [sys.executable, "-m", "tests.rdma.vm", "--mem", "512"]
SMALL = [*LAUNCHER, "--rails", "0", "--"]


def run(*command: str, launcher: list[str] = SMALL, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A command in a VM of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=100, cwd=cwd, env=environment)


def vm_processes(mark: str) -> list[int]:
    """Processes of the machine whose command line or environment has ``mark``: the launcher's own and the VM's."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@contextmanager
def started(mark: str, folder: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher whose command has written its first byte; its processes have ``mark`` in their environment."""
    environment = {**os.environ, "VM_TEST_MARK": mark, "TMPDIR": str(folder)}
    process = subprocess.Popen([*SMALL, *command], stdout=subprocess.PIPE, cwd=ROOT, env=environment)
    assert process.stdout is not None
    try:
        assert process.stdout.read(1), "the command wrote something"
        assert len(vm_processes(mark)) > 2, "the launcher, the VM and what runs in it"
        yield process
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def gone(mark: str) -> bool:
    """Whether all processes with ``mark`` have ended within seconds."""
    end = time.monotonic() + 10
    while vm_processes(mark):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_output_errors_and_exit_status_are_the_commands() -> None:
    done = run("bash", "-c", "echo out; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")


@pytest.mark.parametrize(("command", "status"), [("true", 0), ("kill -9 $$", 137), ("exit 125", 125), ("nowhere", 127)])
def test_every_exit_status_comes_through(command: str, status: int) -> None:
    assert run("bash", "-c", command).returncode == status


def test_a_large_output_arrives_whole() -> None:
    done = run(sys.executable, "-c", "print('0123456789abcdef' * (1 << 19))")
    assert len(done.stdout) == (8 << 20) + 1
    assert done.stdout == "0123456789abcdef" * (1 << 19) + "\n"


def test_arguments_and_environment_arrive_as_they_are() -> None:
    odd = ["two words", "a'b\"c", "$HOME `id` \\n *", "", "--", "ä\n"]
    environment = {"VM_TEST_ODD": "line\nbreak 'quoted' $x"}
    code = "import os, sys, json; print(json.dumps([sys.argv[1:], os.environ['VM_TEST_ODD'], os.environ['RDMA_VM']]))"
    done = subprocess.run(
        [*SMALL, sys.executable, "-c", code, *odd],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert json.loads(done.stdout) == [odd, environment["VM_TEST_ODD"], "1"]


def test_there_is_no_standard_input_and_no_terminal() -> None:
    code = (
        "import sys; print([stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)], sys.stdin.read() == '')"
    )
    assert run(sys.executable, "-c", code).stdout == "[False, False, False] True\n"


def test_writes_stay_where_they_are_shared_and_nowhere_else(tmp_path: Path) -> None:
    here, shared, other = (tmp_path / name for name in ("he re", "sha,red", "other"))
    for folder in (here, shared, other):
        folder.mkdir()
    (here / "old").write_text("old")
    script = (
        f"cat old; echo 1 >new; echo 2 >'{shared}/new'; echo 3 >'{other}/new'; cat '{other}/new'; echo 4 >/etc/vm-test"
    )
    launcher = [*LAUNCHER, "--rails", "0", "--share", str(shared), "--"]
    done = run("bash", "-ec", script, launcher=launcher, cwd=here)
    assert (done.returncode, done.stdout) == (0, "old3\n"), done.stderr
    assert (here / "new").read_text() == "1\n"
    assert (shared / "new").read_text() == "2\n"
    assert not list(other.iterdir())
    assert not Path("/etc/vm-test").exists()


def test_rails_are_rdma_devices_in_subnets_of_their_own() -> None:
    done = run("bash", "-c", "rdma link; ip -br -4 addr", launcher=[*LAUNCHER, "--rails", "3", "--"])
    for rail in range(3):
        assert f"link rxe{rail}/1 state ACTIVE physical_state LINK_UP netdev rail{rail}" in done.stdout
        assert f"10.{77 + rail}.0.1/24" in done.stdout
    assert "rxe3" not in done.stdout


def test_output_comes_while_the_command_runs_and_a_timeout_ends_it() -> None:
    begun = time.monotonic()
    done = run("bash", "-c", "echo early; sleep 1000", launcher=[*LAUNCHER, "--rails", "0", "--timeout", "8", "--"])
    assert (done.returncode, done.stdout) == (124, "early\n")
    assert "ended after --timeout, 8 s" in done.stderr
    assert time.monotonic() - begun < 60


def test_what_a_command_leaves_behind_does_not_hold_up_its_end() -> None:
    assert run("bash", "-c", "sleep 1000 & echo done; exit 3").returncode == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    mark = f"signal-{number}-{os.getpid()}"
    with started(mark, tmp_path, "bash", "-c", "echo up; sleep 1000") as process:
        process.send_signal(number)
        assert process.wait(20) == 128 + number
        assert gone(mark) and not list(tmp_path.iterdir())


def test_no_process_outlives_a_killed_launcher(tmp_path: Path) -> None:
    mark = f"killed-{os.getpid()}"
    with started(mark, tmp_path, "bash", "-c", "echo up; sleep 1000") as process:
        process.kill()
        process.wait(20)
        assert gone(mark)


def test_a_reader_that_goes_away_ends_it(tmp_path: Path) -> None:
    mark = f"pipe-{os.getpid()}"
    with started(mark, tmp_path, "bash", "-c", "while echo up; do :; done") as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(20) == 128 + signal.SIGPIPE
        assert gone(mark)


def test_a_command_that_takes_all_of_the_memory_is_told_what_to_do() -> None:
    done = run(sys.executable, "-c", "kept = []\nwhile True: kept.append(b'1' * (1 << 20))")
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr == "rdma-vm: the VM ran out of its 512 MiB and killed processes: give more with --mem\n"


def test_a_vm_that_does_not_start_says_why(tmp_path: Path) -> None:
    """With the kernel's own last words, not only a number."""
    cache = tmp_path / "memkv-vllm"
    cache.mkdir()
    broken = cache / kernel.cached().name
    broken.write_text("#!/bin/sh\necho no such machine; exit 1\n")
    broken.chmod(0o755)
    done = subprocess.run(
        [*SMALL, "true"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 125
    assert "rdma-vm: cannot run the VM: the VM did not start" in done.stderr and "no such machine" in done.stderr


def test_two_of_them_run_at_once() -> None:
    both = [subprocess.Popen([*SMALL, "sleep", "1"], cwd=ROOT) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]

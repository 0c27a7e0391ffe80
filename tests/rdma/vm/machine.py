"""One run of the VM: starts it, passes on what the command writes, learns its exit status, leaves nothing behind.

The VM is a process like others (User-Mode Linux), in namespaces of its own: it and whatever it started end with the
launcher, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import select
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

__all__ = ["BOOT_S", "Order", "Outcome", "run"]

GUEST = Path(__file__).with_name("guest")
BOOT_S = 60.0
"""Until the command starts: takes a second, on a busy machine several."""
LINES = ("out", "err", "status")
"""The serial lines ttyS1 to ttyS3."""
MEMORY = 'mount -n -t tmpfs -o mode=700,size="$2" memory "$1" && shift 2 && exec "$@"'
"""The VM's memory is a file that has to be on a tmpfs, executable and large enough. /dev/shm of a container is neither,
so it gets a tmpfs that no other process sees."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Order:
    """What to run, and in what machine.

    Attributes:
        command: argument list.
        memory_mb: of the VM; taken from the host as it is used.
        rails: soft-RoCE devices.
        timeout_s: from the start of the VM; None: no limit.
        shared: directories whose contents are the host's own, writes included. The current one is among them.
        directory: where the command runs.
        environment: its variables.
    """

    command: Sequence[str]
    memory_mb: int = 4096
    rails: int = 2
    timeout_s: float | None = None
    shared: Sequence[Path] = ()
    directory: Path = field(default_factory=Path.cwd)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: the command's exit status; None when it did not come to its end.
        started: whether the command was started.
        timed_out: whether the order's time ended it.
        log: what the VM's kernel said.
    """

    status: int | None
    started: bool
    timed_out: bool
    log: str


def script(order: Order) -> str:
    """What bash runs in the VM, in an empty environment."""
    # A name that is none to bash is an exported function of the caller's shell.
    names = {name: value for name, value in order.environment.items() if name.isidentifier()}
    exports = [f"export {name}={shlex.quote(value)}" for name, value in {**names, "RDMA_VM": "1"}.items()]
    return "\n".join(
        [*exports, f"cd {shlex.quote(str(order.directory))} || exit 125", f"exec {shlex.join(order.command)}", ""]
    )


def kernel_arguments(order: Order, folder: Path, console: int, lines: Mapping[str, int]) -> list[str]:
    """The kernel's own arguments: ``console`` and ``lines`` are file descriptors that it inherits."""
    serial = [f"ssl{number}=null,fd:{lines[name]}" for number, name in enumerate(LINES, 1)]
    root = ["root=host", "rootfstype=hostfs", "rootflags=/", "ro", f"init={folder}/init"]
    consoles = ["con=null", f"con0=null,fd:{console}", "ssl=null", *serial]
    return [f"mem={order.memory_mb}M", f"uml_dir={folder}", "quiet", "panic=-1", "dummy.numdummies=0", *root, *consoles]


def run(order: Order, kernel: Path) -> Outcome:
    """Run the order in a fresh VM; the command's output appears on this process's own stdout and stderr as it comes."""
    with tempfile.TemporaryDirectory(prefix="memkv-rdma-vm.") as name, _memory_file() as console:
        folder = Path(name)
        _lay_out(order, folder)
        pairs = {line: socket.socketpair() for line in LINES}
        arguments = kernel_arguments(
            order, folder, console.fileno(), {line: theirs.fileno() for line, (_, theirs) in pairs.items()}
        )
        memory = ["bash", "-c", MEMORY, "memory", str(folder / "memory"), f"{order.memory_mb + 256}m"]
        command = ["unshare", "--pid", "--mount", "--fork", "--kill-child", *memory, str(kernel), *arguments]
        with _process(command, folder, console.fileno(), [theirs.fileno() for _, theirs in pairs.values()]) as process:
            for _, theirs in pairs.values():
                theirs.close()
            try:
                listener = _Listener({line: ours for line, (ours, _) in pairs.items()}, order.timeout_s)
                listener.listen(process)
            finally:
                for ours, _ in pairs.values():
                    ours.close()
        console.seek(0)
        return Outcome(listener.status, listener.started, listener.timed_out, console.read())


def _memory_file() -> TextIO:
    """For what the VM's kernel says; need not be text."""
    return os.fdopen(os.memfd_create("console"), errors="replace")


def _lay_out(order: Order, folder: Path) -> None:
    """What ``guest/init`` expects beside it."""
    for name in ("init", "start"):
        shutil.copy(GUEST / name, folder / name)
        (folder / name).chmod(0o700)
    shared = sorted({os.path.realpath(directory) for directory in (order.directory, *order.shared)} - {"/"})
    (folder / "shared").write_text("".join(f"{directory}\n" for directory in shared))
    (folder / "rails").write_text(f"{order.rails}\n")
    (folder / "command").write_text(script(order))
    (folder / "memory").mkdir()


@contextmanager
def _process(command: list[str], folder: Path, console: int, lines: list[int]) -> Iterator[subprocess.Popen[bytes]]:
    """The VM; killed at the end, with all that it started."""
    cpus = sorted(os.sched_getaffinity(0))
    cpu = cpus[os.getpid() % len(cpus)]

    def in_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It never runs two of its processes at once; over two CPUs a system call takes five times as long.
        os.sched_setaffinity(0, {cpu})

    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=console,
        stderr=console,
        pass_fds=[console, *lines],
        env={**os.environ, "TMPDIR": str(folder / "memory")},
        start_new_session=True,
        preexec_fn=in_child,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class _Listener:
    """Reads the three lines until the end is known."""

    def __init__(self, lines: Mapping[str, socket.socket], timeout_s: float | None) -> None:
        self.status: int | None = None
        self.started = False
        self.timed_out = False
        self._words = b""
        self._begun = time.monotonic()
        self._timeout_s = timeout_s
        self._selector = selectors.DefaultSelector()
        for name, line in lines.items():
            line.setblocking(False)
            self._selector.register(line, selectors.EVENT_READ, name)

    def listen(self, process: subprocess.Popen[bytes]) -> None:
        """Until the command has ended and all that it wrote was passed on, or the VM did, or time is up."""
        with self._selector:
            while self.status is None and self._selector.get_map() and process.poll() is None:
                if self._too_late():
                    return
                self._pass_on(0.2)
            # The guest tells the status after the last byte of the others, so these are here by now.
            while self._pass_on(0.0):
                pass

    def _too_late(self) -> bool:
        elapsed_s = time.monotonic() - self._begun
        self.timed_out = self._timeout_s is not None and elapsed_s > self._timeout_s
        return self.timed_out or (not self.started and elapsed_s > BOOT_S)

    def _pass_on(self, wait_s: float) -> bool:
        """Whether there was anything."""
        events = self._selector.select(wait_s)
        for key, _ in events:
            line = key.fileobj
            assert isinstance(line, socket.socket)
            try:
                data = line.recv(1 << 16)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                data = b""
            if not data:
                self._selector.unregister(line)
            elif key.data == "status":
                self._told(data)
            else:
                _write(1 if key.data == "out" else 2, data)
        return bool(events)

    def _told(self, data: bytes) -> None:
        self._words += data
        *complete, self._words = self._words.split(b"\n")
        for word in complete:
            self.started = True
            if word.strip().isdigit():
                self.status = int(word)


def _write(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            # Whoever started us made it so; then we wait for room ourselves.
            select.select([], [descriptor], [])

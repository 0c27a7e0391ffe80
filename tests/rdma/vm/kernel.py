"""The VM's kernel: User-Mode Linux with soft-RoCE, an ordinary program, built from Debian's kernel source.

``python -m tests.rdma.vm.kernel`` builds it if it is not there and prints its path. It is kept outside of the checkout,
under a name that follows from its configuration, so that it is built once per machine and again when that changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["KernelError", "cached", "configuration", "ensure"]

CONFIG = Path(__file__).with_name("kernel.config")
SOURCE = Path("/usr/src/linux-source-6.1.tar.xz")
PCI_DEVICE_ID = "CONFIG_UML_PCI_OVER_VIRTIO_DEVICE_ID=1234"
"""Has no default; any number will do where no such device is attached."""
TOOLS = {
    "gcc": "gcc",
    "make": "make",
    "flex": "flex",
    "bison": "bison",
    "bc": "bc",
    "tar": "tar",
    "xz": "xz-utils",
    "strip": "binutils",
    "/usr/include/stdio.h": "libc6-dev",
    str(SOURCE): "linux-source-6.1",
}
"""What building takes, as a command or a file, and Debian's package for it."""
LEFT_OUT = (
    "*/Documentation/*/*", "*/arch/[a-t]*.[chS]", "*/arch/*.dts*", "*/tools/testing", "*/sound/*.[ch]",
    *(f"*/drivers/{part}/*.[ch]" for part in (
        "gpu", "media", "net/ethernet", "net/wireless", "scsi", "staging", "usb",
    )),
)  # fmt: skip
"""Half of the source, which this kernel does not use: what is not unpacked takes no time. Kconfig files stay."""
NEWS_S = 30
"""A line so often while it is built, so that nobody takes it for hung."""
SPACE_BYTES = 2 << 30


class KernelError(RuntimeError):
    """There is no kernel and none can be built; the message says what to do."""


def configuration(text: str) -> list[str]:
    """The options that ``text``, in the form of ``kernel.config``, names: ``CONFIG_...=y`` each, in order."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    return [f"CONFIG_{name}=y" for line in lines for name in line.split()]


def cached(config: Path = CONFIG) -> Path:
    """Where the kernel of a configuration is kept, whether or not it is there."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    options = "\n".join([*sorted(configuration(config.read_text(encoding="utf-8"))), PCI_DEVICE_ID, SOURCE.name])
    return base / "memkv-vllm" / f"linux-{hashlib.sha256(options.encode()).hexdigest()[:16]}"


def missing_packages(tools: dict[str, str]) -> list[str]:
    """Debian's packages of those ``tools`` (commands, or files by their path) that are not there."""
    there = {what: os.path.exists(what) if what.startswith("/") else shutil.which(what) for what in tools}
    return sorted({package for what, package in tools.items() if not there[what]})


def missing_options(wanted: Iterable[str], made: str) -> list[str]:
    """Options that ``.config`` does not have although they were asked for: their own conditions are not met."""
    lines = set(made.splitlines())
    return [option for option in wanted if option not in lines]


def ensure() -> Path:
    """The kernel, built by the first call on a machine: 3 to 6 minutes on two cores.

    Raises:
        KernelError: packages or space are missing, or the build failed; the message names them.
    """
    kernel = cached()
    if kernel.exists():
        return kernel
    if packages := missing_packages(TOOLS):
        raise KernelError(f"the VM's kernel has to be built, and that needs: apt-get install -y {' '.join(packages)}")
    kernel.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(kernel.parent).free) < SPACE_BYTES:
        raise KernelError(
            f"the VM's kernel has to be built, which takes {SPACE_BYTES >> 20} MiB for some minutes; {kernel.parent} "
            f"has {free >> 20} MiB free: make space there, or set XDG_CACHE_HOME to another place"
        )
    with _one_at_a_time(kernel.parent / "build.lock"):
        if not kernel.exists():
            _build(kernel)
    return kernel


@contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Whoever comes second waits for the first one's kernel."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(kernel: Path) -> None:
    say(f"building the VM's kernel, once for this machine and configuration (3 to 6 minutes on two cores): {kernel}")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="build.", dir=kernel.parent) as folder:
        tree = Path(folder)
        log = kernel.parent / "build.log"
        with log.open("w") as file:
            left_out = [f"--exclude={pattern}" for pattern in LEFT_OUT]
            _step(["tar", "-xf", str(SOURCE), "-C", folder, "--strip-components=1", *left_out], log, file.fileno())
            _configure(tree, log, file.fileno())
            _step(_make(tree, f"-j{os.cpu_count() or 1}", "linux"), log, file.fileno())
            _step(["strip", str(tree / "linux")], log, file.fileno())
        # In the same file system: a reader sees none of it or all of it.
        (tree / "linux").rename(kernel)
    say(f"the VM's kernel was built in {time.monotonic() - begun:.0f} s")


def _make(tree: Path, *arguments: str) -> list[str]:
    return ["make", "-s", "-C", str(tree), "ARCH=um", *arguments]


def _configure(tree: Path, log: Path, output: int) -> None:
    wanted = configuration(CONFIG.read_text(encoding="utf-8"))
    fragment = tree / "memkv.config"
    fragment.write_text("\n".join([*wanted, PCI_DEVICE_ID, ""]), encoding="utf-8")
    _step(_make(tree, f"KCONFIG_ALLCONFIG={fragment}", "allnoconfig"), log, output)
    if lost := missing_options(wanted, (tree / ".config").read_text(encoding="utf-8")):
        raise KernelError(
            f"this kernel source does not take {' '.join(lost)} of {CONFIG}: what do they depend on there?"
        )


def _step(command: list[str], log: Path, output: int) -> None:
    begun = time.monotonic()
    # LANG: the build parses what its tools print. MAKEFLAGS: `make test-rdma` must not lend its own to this make.
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")} | {
        "LC_ALL": "C"
    }
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
    ) as process:
        try:
            while not _ended(process):
                say(f"  {Path(command[0]).name} ... {time.monotonic() - begun:.0f} s")
        except BaseException:
            os.killpg(process.pid, 9)
            raise
    if process.returncode:
        last = "".join(log.read_text(errors="replace").splitlines(keepends=True)[-30:])
        raise KernelError(f"building the VM's kernel failed at `{' '.join(command)[:200]}`; the end of {log}:\n{last}")


def _ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(NEWS_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def say(text: str) -> None:
    """A line for whoever waits."""
    print(f"rdma-vm: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Builds the kernel if need be and prints its path; 1 and a reason if it cannot."""
    try:
        print(ensure())
    except KernelError as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

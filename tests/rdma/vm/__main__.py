"""Runs a command on a kernel with RDMA, in a throw-away VM: ``python -m tests.rdma.vm [OPTIONS] -- COMMAND...``

The VM's root is the host's own: the command sees the same files, environments and current directory. What it writes
is dropped at the end, except below the current directory and each --share. /dev, /proc, /sys, /run and /dev/shm are
the VM's; its networks are loopback and the rails: rxe0 on 10.77.0.1, rxe1 on 10.78.0.1 and so on, soft-RoCE devices
that reach themselves. The command has the caller's environment with RDMA_VM=1, and no standard input.

Exit status: the command's own; 124 when --timeout passed; 125 when the VM could not run the command to its end (why is
on stderr); 129, 130, 143 on SIGHUP, SIGINT, SIGTERM. Nothing is left running, however this ends; only after SIGKILL a
small directory memkv-rdma-vm.* stays in the temporary folder. Needs root.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tests.rdma.vm import kernel, machine, preflight
from tests.rdma.vm.kernel import say

TIMED_OUT, NOT_RUN = 124, 125
OUT_OF_MEMORY = "Out of memory: Killed process"
"""What its kernel says then."""


def parse(arguments: Sequence[str]) -> machine.Order:
    """The order that the command line gives; says what is wrong with it and ends otherwise (status 2)."""
    parser = argparse.ArgumentParser("python -m tests.rdma.vm", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--mem", type=_positive, default=4096, metavar="MB", help="memory of the VM (4096)")
    parser.add_argument("--rails", type=_rails, default=2, help="soft-RoCE devices (2)")
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="seconds until it is ended (no limit)")
    parser.add_argument("--share", type=_directory, action="append", default=[], help="a directory shared read-write")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    own, dashes, command = _split(arguments)
    given = parser.parse_args([*own, *(["--", *command] if dashes else [])])
    return machine.Order(given.command, given.mem, given.rails, given.timeout, tuple(given.share))


def _split(arguments: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Options, whether there is a ``--``, and what follows the first."""
    if "--" not in arguments:
        return list(arguments), False, []
    at = list(arguments).index("--")
    return list(arguments[:at]), True, list(arguments[at + 1 :])


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text}")
    return number


def _rails(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 16:
        raise argparse.ArgumentTypeError(f"expected 0 to 16, got {text}")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"expected seconds above 0, got {text}")
    return number


def _directory(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir() or "\n" in text:
        raise argparse.ArgumentTypeError(f"expected a directory, got {text}")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the VM; returns the exit status."""
    order = parse(sys.argv[1:] if arguments is None else arguments)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    reason = preflight.problem(order.memory_mb, os.geteuid() == 0)
    reason = reason or preflight.namespace_problem() or preflight.raise_map_count()
    if reason:
        return _failed(reason)
    try:
        built = kernel.ensure()
    except kernel.KernelError as error:
        return _failed(str(error))
    try:
        return status_of(machine.run(order, built), order)
    except BrokenPipeError:
        # Whoever read our output has gone, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE


def _end(number: int, _frame: object) -> NoReturn:
    sys.exit(128 + number)


def status_of(outcome: machine.Outcome, order: machine.Order) -> int:
    """The exit status that an outcome stands for; says on stderr what went wrong."""
    if OUT_OF_MEMORY in outcome.log:
        say(f"the VM ran out of its {order.memory_mb} MiB and killed processes: give more with --mem")
    if outcome.status is not None:
        return outcome.status
    if outcome.timed_out:
        say(f"ended after --timeout, {order.timeout_s:g} s" + ("" if outcome.started else ", before the command began"))
        return TIMED_OUT
    what = "the VM died before the command ended" if outcome.started else "the VM did not start"
    return _failed(f"{what}; its kernel said (the last lines):\n{os.linesep.join(outcome.log.splitlines()[-40:])}")


def _failed(reason: str) -> int:
    say(f"cannot run the VM: {reason}")
    return NOT_RUN


if __name__ == "__main__":
    sys.exit(main())

"""Networks for tests: namespaces with links between them that can be slowed, made lossy, cut, taken down.

::

    with network() as net:
        client, server = net.namespace("client"), net.namespace("server")
        link = net.link(client, server)
        with server.inside():
            process = subprocess.Popen(...)         # listens on link.there
        with client.inside():
            ...                                     # this thread, and threads and processes that it starts, are there
            link.shape(loss=0.01)
            link.shape(cut=True)                    # silence, without a FIN
            link.down(); link.up()                  # the interface itself

Needs root, iproute2 and /dev/net/tun; without them :func:`network` raises and says what to do. Nothing of the machine's
own network is touched, and everything is gone afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.wire import Shape

__all__ = ["Link", "Namespace", "Network", "NetworkUnavailable", "network"]

ROOT = Path(__file__).resolve().parents[2]
TUN = "/dev/net/tun"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_ALLOW = "for a container add --cap-add NET_ADMIN --cap-add SYS_ADMIN, or --privileged"
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count(1)


class NetworkUnavailable(RuntimeError):
    """This machine cannot make network namespaces; the message says what to install or to allow."""


def check() -> None:
    """Raise :class:`NetworkUnavailable` unless what namespaces and links need is here."""
    if os.geteuid() != 0:
        raise NetworkUnavailable("network namespaces need root: run these tests as root (sudo), as CI does")
    if shutil.which("ip") is None:
        raise NetworkUnavailable("the command `ip` is missing: apt-get install iproute2")
    if not os.path.exists(TUN):
        raise NetworkUnavailable(f"{TUN} is missing: modprobe tun; for a container add --device {TUN}")


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip()
        hint = f"; {_ALLOW}" if "not permitted" in said.lower() else ""
        raise NetworkUnavailable(f"`ip {' '.join(arguments)}` failed: {said}{hint}")


@dataclass(frozen=True)
class Namespace:
    """A network of its own, with nothing but a loopback interface and its ends of links."""

    name: str

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread is in this network meanwhile, and so is what it starts: threads, processes, sockets."""
        with open("/proc/thread-self/ns/net", "rb") as home, open(f"/run/netns/{self.name}", "rb") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")


@dataclass
class Link:
    """Two ends in two namespaces, and what lies between.

    Attributes:
        here, there: IPv4 addresses of its ends.
        devices: names of its interfaces.
        lost: packets that it had lost when :meth:`shape` was last called.
    """

    first: Namespace
    second: Namespace
    here: str
    there: str
    devices: tuple[str, str]
    lost: int
    _wire: subprocess.Popen[bytes]

    def shape(self, **changes: Any) -> None:
        """Behave so from now on, see :class:`tests.support.wire.Shape`; what is not named is as at the start."""
        assert self._wire.stdin is not None and self._wire.stdout is not None
        self._wire.stdin.write(json.dumps(Shape(**changes)._asdict()).encode() + b"\n")
        self._wire.stdin.flush()
        answer = self._wire.stdout.readline().split()
        assert answer, "the wire has ended"
        self.lost = int(answer[1])

    def down(self) -> None:
        """Take both interfaces down: routes vanish, and a local send fails at once."""
        for namespace, device in zip((self.first, self.second), self.devices, strict=True):
            _ip("-n", namespace.name, "link", "set", device, "down")

    def up(self) -> None:
        """And up again."""
        for namespace, device in zip((self.first, self.second), self.devices, strict=True):
            _ip("-n", namespace.name, "link", "set", device, "up")


@dataclass
class Network:
    """Namespaces and links; made by :func:`network`."""

    _stack: contextlib.ExitStack
    _links: int = 0
    _label: str = field(default_factory=lambda: f"mkv{os.getpid()}n{next(_numbers)}")

    def namespace(self, name: str) -> Namespace:
        """A new namespace; ``name`` is for people."""
        made = Namespace(f"{self._label}-{name}")
        _ip("netns", "add", made.name)
        self._stack.callback(_ip, "netns", "del", made.name)
        _ip("-n", made.name, "link", "set", "lo", "up")
        return made

    def link(self, first: Namespace, second: Namespace) -> Link:
        """A link with a subnet of its own."""
        self._links += 1
        here, there = (f"10.77.{self._links}.{end}" for end in (1, 2))
        one, two = (self._device(side, address) for side, address in ((first, here), (second, there)))
        command = [sys.executable, "-m", "tests.support.wire", str(one[1]), str(two[1])]
        wire = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(one[1], two[1])
        )
        for descriptor in (one[1], two[1]):
            os.close(descriptor)  # the devices live as long as the wire
        self._stack.callback(_end, wire)
        link = Link(first, second, here, there, (one[0], two[0]), 0, wire)
        link.shape()
        return link

    def _device(self, namespace: Namespace, address: str) -> tuple[str, int]:
        """A TUN device in a namespace: its name and its other side."""
        name = f"mkv{next(_numbers)}p{os.getpid()}"[:15]
        descriptor = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
        _ip("link", "set", name, "netns", namespace.name)
        _ip("-n", namespace.name, "address", "add", f"{address}/24", "dev", name)
        _ip("-n", namespace.name, "link", "set", name, "up")
        return name, descriptor


def _end(wire: subprocess.Popen[bytes]) -> None:
    wire.kill()
    wire.communicate()


@contextmanager
def network() -> Iterator[Network]:
    """An empty network, gone afterwards; processes inside are the caller's to end.

    Raises:
        NetworkUnavailable: this machine lacks something; the message says what.
    """
    check()
    with contextlib.ExitStack() as stack:
        yield Network(stack)

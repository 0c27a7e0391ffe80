"""The links that the network tests break: what they do to packets, alone and between two namespaces."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.netns import Link, Namespace, NetworkUnavailable, network
from tests.support.wire import Lane, Shape


def lane(**changes: object) -> Lane:
    made = Lane(random.Random(1))
    made.change(0.0, Shape(**changes))  # type: ignore[arg-type]
    return made


# ------------------------------------------------------------------------------------------------ alone


def test_a_plain_link_hands_everything_on_in_order() -> None:
    plain = lane()
    packets = [bytes([n]) * 9 for n in range(20)]
    assert all(plain.send(1.0, data) for data in packets)
    assert list(plain.arrived(1.0)) == packets
    assert plain.next_at() is None


def test_delay_and_rate() -> None:
    slow = lane(delay_s=0.5, rate_bytes_per_s=1000)
    slow.send(1.0, bytes(100))
    slow.send(1.0, bytes(200))
    assert slow.next_at() == pytest.approx(1.6)
    assert list(slow.arrived(1.59)) == []
    assert len(list(slow.arrived(1.61))) == 1
    assert slow.next_at() == pytest.approx(1.8)


def test_a_full_queue_loses() -> None:
    slow = lane(rate_bytes_per_s=1000, queue_bytes=500)
    taken = sum(slow.send(0.0, bytes(100)) for _ in range(50))
    assert taken == 6


def test_loss_is_as_asked() -> None:
    lossy = lane(loss=0.1)
    kept = sum(lossy.send(0.0, b"x") for _ in range(10_000))
    assert 8800 < kept < 9200
    assert (lossy.sent, lossy.lost) == (10_000, 10_000 - kept)


def test_a_cut_takes_what_is_under_way() -> None:
    line = lane(delay_s=1.0)
    line.send(0.0, b"x")
    line.change(0.5, Shape(cut=True))
    assert line.next_at() is None
    assert not line.send(0.6, b"y")


# ------------------------------------------------------------------------------------------------ between namespaces


@pytest.fixture
def pair() -> Iterator[tuple[Namespace, Namespace, Link]]:
    with network() as net:
        near, far = net.namespace("near"), net.namespace("far")
        yield near, far, net.link(near, far)


def connected(near: Namespace, far: Namespace, link: Link) -> tuple[socket.socket, socket.socket]:
    with far.inside():
        listener = socket.create_server((link.there, 9900))
    with listener:
        with near.inside():
            client = socket.create_connection((link.there, 9900), timeout=10)
        server, _ = listener.accept()
    server.settimeout(10)
    return client, server


def test_bytes_travel_through_loss_and_delay(pair: tuple[Namespace, Namespace, Link]) -> None:
    client, server = connected(*pair)
    with client, server:
        pair[2].shape(loss=0.02, delay_s=0.002)
        data = os.urandom(300_000)
        client.settimeout(15)
        got = bytearray()
        sent = 0
        while len(got) < len(data):
            sent += client.send(data[sent : sent + 8192])
            got += server.recv(65_536)
        assert bytes(got) == data
        pair[2].shape()
        assert pair[2].lost > 0


def test_a_cut_is_silent_and_heals(pair: tuple[Namespace, Namespace, Link]) -> None:
    client, server = connected(*pair)
    with client, server:
        pair[2].shape(cut=True)
        client.sendall(b"lost for a while")
        server.settimeout(0.3)
        with pytest.raises(TimeoutError):
            server.recv(100)
        pair[2].shape()
        server.settimeout(15)
        assert server.recv(100) == b"lost for a while", "the kernel sends it again"


def test_an_interface_goes_down_and_up(pair: tuple[Namespace, Namespace, Link]) -> None:
    near, _, link = pair
    link.down()
    with near.inside(), socket.socket() as probe:
        probe.settimeout(5)
        with pytest.raises(OSError, match=r"unreachable|timed out"):
            probe.connect((link.there, 9900))
    link.up()
    client, server = connected(*pair)
    client.close()
    server.close()


def test_the_machines_own_network_is_elsewhere(pair: tuple[Namespace, Namespace, Link]) -> None:
    def interfaces() -> set[str]:
        return {name for _, name in socket.if_nameindex()}

    before = interfaces()
    with pair[0].inside():
        assert interfaces() == {"lo", pair[2].devices[0]}
    assert interfaces() == before
    assert not before & set(pair[2].devices)


def test_nothing_is_left_behind() -> None:
    before = set(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else set()
    with network() as net:
        net.link(net.namespace("x"), net.namespace("y"))
    assert set(os.listdir("/run/netns")) == before


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        (("os.geteuid", lambda: 1000), "as root"),
        (("shutil.which", lambda _: None), "apt-get install iproute2"),
        (("TUN", "/dev/net/absent"), "--device /dev/net/absent"),
    ],
)
def test_a_machine_that_cannot_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, patch: tuple[str, object], said: str
) -> None:
    """A test that needs a network fails with the reason; it is never skipped in silence."""
    monkeypatch.setattr(f"tests.support.netns.{patch[0]}", patch[1])
    with pytest.raises(NetworkUnavailable, match=said), network():
        pass


def test_entering_is_per_thread_and_undone_on_an_error(pair: tuple[Namespace, Namespace, Link]) -> None:
    home = os.readlink("/proc/thread-self/ns/net")
    with pytest.raises(ZeroDivisionError), pair[0].inside():
        assert os.readlink("/proc/thread-self/ns/net") != home
        raise ZeroDivisionError
    assert os.readlink("/proc/thread-self/ns/net") == home


def test_a_machine_that_does_not_allow_it_says_what_to_allow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusing = tmp_path / "ip"
    refusing.write_text(
        "#!/bin/sh\necho 'mount --make-shared /run/netns failed: Operation not permitted' >&2; exit 1\n"
    )
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with network() as net, pytest.raises(NetworkUnavailable, match="--cap-add NET_ADMIN"):
        net.namespace("x")

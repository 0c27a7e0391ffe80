"""What a server says of its ports: an address that clients will not reach, a port that went down and came back."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address

import pytest

from memkv_vllm.topology import Rail
from memkv_vllm.transports.verbs.provider import AsyncEvent
from memkv_vllm.transports.verbs.watching import PortWatch, doubtful_address

RAIL = Rail(
    device="mlx5_0", port=1, gid_index=3, gid=bytes(16), address=ip_address("10.77.0.1"), netdev="ens0", mtu=4096,
    rate_bytes_per_s=50e9, reason="named",
)  # fmt: skip
OTHER = replace(RAIL, device="mlx5_1", port=2, address=ip_address("10.78.0.1"), netdev="ens1")
PORT_ACTIVE, PORT_ERR, DEVICE_FATAL = (
    AsyncEvent(9, "port_active", 1), AsyncEvent(10, "port_err", 1), AsyncEvent(8, "device_fatal", 0),
)  # fmt: skip


@pytest.mark.parametrize("listen", ["", "0.0.0.0", "::", "10.77.0.1", "store.example"])
def test_an_address_that_clients_can_come_to(listen: str) -> None:
    assert doubtful_address(RAIL, listen) == ""


@pytest.mark.parametrize("listen", ["127.0.0.1", "10.78.0.1", "::1"])
def test_a_server_that_listens_elsewhere(listen: str) -> None:
    text = doubtful_address(RAIL, listen)
    assert text.startswith(f"network.address is {listen}, so no client can come to 10.77.0.1: ")
    assert "0.0.0.0:PORT" in text and "leave mlx5_0:1 out of rdma.devices" in text


def test_a_port_without_a_real_address() -> None:
    """P071: its interface got no address, or gets one later."""
    text = doubtful_address(replace(RAIL, address=ip_address("fe80::1")), "0.0.0.0")
    assert text.startswith("fe80::1 is a link-local address, ens0 had no better one")
    assert "restart this server" in text
    assert doubtful_address(replace(RAIL, address=None), "127.0.0.1") == "", "InfiniBand's GID holds no address"


def test_a_port_that_goes_down_and_comes_back() -> None:
    """P070: named for as long as it lasts, with the fix; the other port of the server is not."""
    watch = PortWatch([RAIL, OTHER])
    assert watch.health() == []
    text = watch.note("mlx5_0", PORT_ERR)
    assert text.startswith("RDMA port mlx5_0:1 (10.77.0.1) is down: ") and "ip link set ens0 up" in text
    assert watch.health() == [text]
    assert watch.note("mlx5_0", PORT_ERR) == text
    assert watch.health() == [text], "once, however often it is told"
    assert watch.note("mlx5_0", PORT_ACTIVE) == ""
    assert watch.health() == []


def test_ports_that_are_not_served_on_do_not_matter() -> None:
    """The other port of the device, another device, and events of queue pairs with a port's number."""
    watch = PortWatch([RAIL, OTHER])
    events = [("mlx5_0", AsyncEvent(10, "port_err", 2)), ("mlx5_2", PORT_ERR), ("mlx5_0", AsyncEvent(1, "qp_fatal", 1))]
    assert [watch.note(device, event) for device, event in events] == ["", "", ""]
    assert watch.health() == []


def test_a_device_that_has_failed_stays_so() -> None:
    watch = PortWatch([RAIL, OTHER])
    text = watch.note("mlx5_1", DEVICE_FATAL)
    assert "mlx5_1 has failed: see dmesg" in text
    assert watch.health() == [text]
    assert watch.lost("mlx5_0", "errno 5").startswith("RDMA device mlx5_0 is gone (errno 5): ")
    assert len(watch.health()) == 2

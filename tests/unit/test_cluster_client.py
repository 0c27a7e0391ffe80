"""From settings to links: which rails, in which order, and what every link is given."""

from __future__ import annotations

import hashlib

import pytest

from memkv_vllm.config import load_client_config
from memkv_vllm.engine.client import ClusterClient, ClusterSettings
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.loopback import LoopbackClientTransport
from memkv_vllm.transports.registry import Transports

ENVIRON = {
    "MEMKV_SERVERS": "one=10.0.0.1|10.0.1.1,two=10.0.0.2:99|10.0.1.2|10.0.2.2,10.0.0.3",
    "MEMKV_AUTH_KEY": "a" * 64,
    "MEMKV_TRANSPORT": "loopback",
    "MEMKV_NUM_CONNECTIONS": "7",
}


def client_of(settings: ClusterSettings) -> ClusterClient:
    return ClusterClient(settings, Transports(["loopback"], lambda _: LoopbackClientTransport()), PeerKind.ENGINE)


def rails(client: ClusterClient) -> dict[str, list[str]]:
    """Addresses by server, best first."""
    return {name: [f"{way.host}:{way.port}" for way in link._routes.all] for name, link in client.links.items()}


@pytest.mark.parametrize(
    ("rank", "one", "two"),
    [
        (0, ["10.0.0.1:9900", "10.0.1.1:9900"], ["10.0.0.2:99", "10.0.1.2:9900", "10.0.2.2:9900"]),
        (1, ["10.0.1.1:9900", "10.0.0.1:9900"], ["10.0.1.2:9900", "10.0.2.2:9900", "10.0.0.2:99"]),
        (5, ["10.0.1.1:9900", "10.0.0.1:9900"], ["10.0.2.2:9900", "10.0.0.2:99", "10.0.1.2:9900"]),
    ],
)
def test_each_rank_prefers_its_own_rail_of_every_server(rank: int, one: list[str], two: list[str]) -> None:
    settings = ClusterSettings.from_config(load_client_config(ENVIRON), "direct").on_rail(rank)
    assert rails(client_of(settings)) == {"one": one, "two": two, "10.0.0.3:9900": ["10.0.0.3:9900"]}


def test_the_rail_does_not_decide_which_server_holds_a_block() -> None:
    """Placement hashes names: all ranks of all hosts must agree."""
    settings = ClusterSettings.from_config(load_client_config(ENVIRON), "direct")
    clients = [client_of(settings.on_rail(rank)) for rank in range(3)]
    for number in range(200):
        prefix = hashlib.sha256(number.to_bytes(4, "big")).digest()
        assert len({client.owner(prefix).name for client in clients}) == 1


def test_the_settings_reach_the_client() -> None:
    settings = ClusterSettings.from_config(load_client_config(ENVIRON), "direct")
    assert (settings.num_connections, settings.connect_timeout_s, settings.op_timeout_s) == (7, 5.0, 30.0)
    assert settings.transports().names == ("loopback",)


def test_nothing_is_connected_yet_and_says_so() -> None:
    client = client_of(ClusterSettings.from_config(load_client_config(ENVIRON), "direct"))
    assert (client.num_ready, client.connects) == (0, {})
    assert repr(client.owner(b"x")).startswith("<ServerLink ")
    assert all("down" in repr(link) for link in client.links.values())

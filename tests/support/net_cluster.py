"""Store servers, each in a network namespace of its own, and a namespace for clients, with links to break between."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from memkv_vllm.config import load_client_config
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.engine.placement import Placement
from tests.support.actors import ServerActor
from tests.support.auditor import Auditor
from tests.support.netns import Link, Namespace, Network, network
from tests.support.ranks import prefix_of

__all__ = ["NetCluster", "net_cluster"]

PORT = 9900


@dataclass
class NetServer:
    """A server in its namespace, and the links to it, one per rail."""

    actor: ServerActor
    namespace: Namespace
    links: list[Link]


@dataclass
class NetCluster:
    """Made by :func:`net_cluster`.

    Attributes:
        client: where clients are to run.
        servers: by name.
        folder: for settings, keys and logs.
    """

    net: Network
    client: Namespace
    servers: dict[str, NetServer]
    folder: Path

    def link(self, name: str, rail: int = 0) -> Link:
        """The link to a server."""
        return self.servers[name].links[rail]

    def environ(self, **more: str) -> dict[str, str]:
        """What a client on :attr:`client` sets."""
        servers = [
            f"{name}=" + "|".join(f"{link.there}:{PORT}" for link in server.links)
            for name, server in self.servers.items()
        ]
        return {
            "MEMKV_SERVERS": ",".join(servers),
            "MEMKV_AUTH_KEY_FILE": str(self.folder / "key"),
            "MEMKV_TRANSPORT": "tcp",
            "MEMKV_CONNECT_TIMEOUT_S": "2",
            **more,
        }

    def settings(self, **more: str) -> ClusterSettings:
        """The same, read as the product reads it."""
        return ClusterSettings.from_config(load_client_config(self.environ(**more)), "tier")

    def statistics(self, name: str) -> dict[str, Any]:
        """STAT of a server, asked from inside of its namespace, so that no link matters."""
        environ = self.environ(MEMKV_SERVERS=f"{name}=127.0.0.1:{PORT}")
        with self.servers[name].namespace.inside():
            return Auditor(load_client_config(environ), "tcp").statistics(name)

    def pinned(self, name: str) -> int:
        """Values of a server that are being read."""
        return int(self.statistics(name)["table"]["pinned"])

    def owned_by(self, name: str, numbers: Sequence[int]) -> list[int]:
        """Those of the blocks that ``name`` holds."""
        placement = Placement(list(self.servers))
        return [number for number in numbers if placement.owner(prefix_of(number)) == name]


@contextmanager
def net_cluster(
    folder: Path,
    names: Sequence[str] = ("a", "b", "c"),
    *,
    rails: int = 1,
    max_size: str = "64MiB",
    module: Sequence[str] = (),
    **settings: Any,
) -> Iterator[NetCluster]:
    """Start servers, and end everything on exit.

    Args:
        folder: for settings, keys and logs.
        names: of the servers.
        rails: links to each.
        max_size: of each arena.
        module: what to run instead of the command, see ``ServerActor``.
        settings: more sections of the server yaml.
    """
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32) + "\n", encoding="ascii")
    with network() as net, contextlib.ExitStack() as stack:
        cluster = NetCluster(net, net.namespace("client"), {}, folder)
        for name in names:
            config = folder / f"{name}.yaml"
            sections: dict[str, Any] = {
                "network": {"address": f"0.0.0.0:{PORT}", "auth_key_file": str(key)},
                "memory": {"max_size": max_size, "hugepages": "off"},
                **settings,
            }
            config.write_text(yaml.safe_dump(sections), encoding="utf-8")
            namespace = net.namespace(name)
            links = [net.link(cluster.client, namespace) for _ in range(rails)]
            actor = ServerActor(name, folder, config=config, module=module)
            cluster.servers[name] = NetServer(actor, namespace, links)
            stack.callback(actor.kill)
            with namespace.inside():
                actor.start()
        for server in cluster.servers.values():
            server.actor.wait_ready()
        yield cluster

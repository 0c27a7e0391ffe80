"""The ways to one server, best first, and which of them to try next. Pure: ``now`` is monotonic seconds.

A way is a transport and a rail. With ``transport: auto`` every rail is first tried over verbs and then over tcp; with
any other setting there is one transport. The rails are turned so that each process begins with its own: the ranks of
a host share out the rails between them.

A way that failed rests. While it does, the others come first; afterwards it is tried again, next to the connection in
use, and when it works the server is moved over to it. When all ways rest, the server is likely down as a whole, and
they are tried in order of preference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from memkv_vllm.config import ServerAddress

__all__ = ["REST_S", "Route", "Routes", "routes_of"]

REST_S = 60.0
"""How long a way that failed is left alone while another works: long enough that probing costs nothing (a connect per
server, process and minute), short enough that a repaired link is in use again before anybody asks."""


class Route(NamedTuple):
    """One way to a server: ``rail`` counts from 0 as the settings list them."""

    transport: str
    rail: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.transport} {self.address}"

    @property
    def address(self) -> str:
        """Host and port as settings write them: IPv6 in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def routes_of(server: ServerAddress, transports: Sequence[str], preferred_rail: int) -> tuple[Route, ...]:
    """All ways to ``server``, best first.

    Args:
        server: its rails.
        transports: names, best first; a better transport over any rail goes before a worse one.
        preferred_rail: any number from 0; taken modulo the number of rails.
    """
    count = len(server.rails)
    turned = [(preferred_rail + index) % count for index in range(count)]
    return tuple(
        Route(transport, rail, server.rails[rail].host, server.rails[rail].port)
        for transport in transports
        for rail in turned
    )


class Routes:
    """Which ways to one server failed lately.

    Args:
        routes: at least one, best first.
        rng: source of jitter, floats in [0, 1): clients that lost a rail together do not come back together.
        rest_s: seconds that a failed way rests, give or take a quarter.
    """

    __slots__ = ("_rest_s", "_rested_at", "_rng", "_routes")

    def __init__(self, routes: Sequence[Route], rng: Callable[[], float], rest_s: float | None = None) -> None:
        if not routes:
            raise ValueError("a server needs at least one way to it")
        self._routes = tuple(routes)
        self._rng = rng
        self._rest_s = REST_S if rest_s is None else rest_s
        self._rested_at: dict[Route, float] = {}

    @property
    def all(self) -> tuple[Route, ...]:
        """Every way, best first."""
        return self._routes

    def order(self, now: float) -> list[Route]:
        """In which order to try them when none is in use: those that rest come last."""
        return sorted(self._routes, key=lambda route: self._rested_at.get(route, now) > now)

    def failed(self, route: Route, now: float) -> None:
        """No connection could be made over ``route``, or the one that was stopped answering."""
        self._rested_at[route] = now + self._rest_s * (0.75 + 0.5 * self._rng())

    def worked(self, route: Route) -> None:
        """A connection over ``route`` is ready."""
        self._rested_at.pop(route, None)

    def better(self, than: Route, now: float) -> list[Route]:
        """Ways that are preferred to ``than`` and have rested, best first."""
        return [route for route in self.above(than) if self._rested_at.get(route, now) <= now]

    def next_probe(self, than: Route) -> float | None:
        """When the first way that is preferred to ``than`` has rested; None when there is no better one."""
        return min((self._rested_at.get(route, 0.0) for route in self.above(than)), default=None)

    def above(self, route: Route) -> tuple[Route, ...]:
        """Ways that are preferred to ``route``, best first."""
        return self._routes[: self._routes.index(route)]

    def __repr__(self) -> str:
        return f"Routes({', '.join(map(str, self._routes))}; {len(self._rested_at)} rest)"

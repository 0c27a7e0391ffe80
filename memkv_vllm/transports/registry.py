"""Names to transports: the one place where a string becomes an implementation, imported on use.

What is configured is what runs: of a named transport nothing but itself is even imported. Only ``auto`` (the tier's
default) stands for several; then each is made when it is first tried, and what this host cannot run is logged once.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.transports.base import ClientTransport

__all__ = ["AUTO", "AUTO_NAME", "Transports", "client_transport", "client_transports"]

logger = logging.getLogger("memkv.transports")

AUTO_NAME = "auto"
AUTO = ("verbs", "tcp")
"""What ``auto`` stands for, best first."""

_CLIENTS = {
    "loopback": ("memkv_vllm.transports.loopback", "LoopbackClientTransport"),
    "verbs": ("memkv_vllm.transports.verbs", "VerbsClientTransport"),
    "tcp": ("memkv_vllm.transports.tcp", "TcpClientTransport"),
}


def client_transport(name: str, **options: Any) -> ClientTransport:
    """The client transport called ``name``, or the class at a dotted path ``package.module:Class``.

    Raises:
        EnvironmentFault: unknown, or not part of this version; never another transport instead.
    """
    module_name, _, class_name = name.partition(":")
    if not class_name:
        if name not in _CLIENTS:
            raise EnvironmentFault(f"no transport is called {name!r}; known: {', '.join(sorted(_CLIENTS))}")
        module_name, class_name = _CLIENTS[name]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise EnvironmentFault(f"transport {name!r} needs the Python package {error.name!r}") from error
        raise EnvironmentFault(
            f"transport {name!r} is not part of this version; for one machine set transport: loopback "
            f"(MEMKV_TRANSPORT=loopback). It is never replaced by another transport silently"
        ) from error
    made: ClientTransport = getattr(module, class_name)(**options)
    return made


class Transports:
    """The client transports that one setting allows, best first. Belongs to one event loop.

    Args:
        names: of the transports.
        make: makes one by its name; raises EnvironmentFault where this host cannot run it.
    """

    def __init__(self, names: Sequence[str], make: Callable[[str], ClientTransport]) -> None:
        self.names = tuple(names)
        self._make = make
        self._made: dict[str, ClientTransport] = {}
        self._said: set[str] = set()

    def get(self, name: str) -> ClientTransport:
        """The transport ``name`` of :attr:`names`, made by the first call that succeeds.

        Raises:
            EnvironmentFault: this host cannot run it now; logged once per reason where there are others.
        """
        if name not in self._made:
            try:
                self._made[name] = self._make(name)
            except EnvironmentFault as error:
                self._say(name, str(error))
                raise
        return self._made[name]

    def _say(self, name: str, reason: str) -> None:
        others = [other for other in self.names if other != name]
        if not others or reason in self._said:
            return
        self._said.add(reason)
        logger.warning(
            "event=transport_unavailable transport=%s reason=%r: transport is auto, so servers are reached over %s "
            "until it can be had; to run over one transport and nothing else, name it in transport",
            name,
            reason,
            ", ".join(others),
        )

    async def aclose(self) -> None:
        """Close those that were made; their connections are closed before."""
        for transport in self._made.values():
            await transport.aclose()


def client_transports(setting: str, options: Mapping[str, Mapping[str, Any]] | None = None) -> Transports:
    """What the setting ``transport`` allows.

    Args:
        setting: ``auto``, or what :func:`client_transport` takes: that one is made at once, ``auto``'s when tried.
        options: keyword options of a transport's class, by name of the transport.

    Raises:
        EnvironmentFault: the named transport cannot run on this host.
    """
    known = options or {}

    def make(name: str) -> ClientTransport:
        return client_transport(name, **known.get(name, {}))

    if setting == AUTO_NAME:
        return Transports(AUTO, make)
    transports = Transports((setting,), make)
    transports.get(setting)
    return transports

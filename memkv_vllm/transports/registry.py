"""Names to transports: the one place where a string becomes an implementation, imported on use."""

from __future__ import annotations

import importlib
from typing import Any

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.transports.base import ClientTransport

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

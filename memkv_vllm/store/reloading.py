"""What a running server takes over on SIGHUP: the keys of its yaml, and the certificate that it serves with.

Everything else needs a restart; where it changed in the yaml too, the log names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from memkv_vllm.config import NetworkConfig, ServerConfig
from memkv_vllm.errors import ConfigError
from memkv_vllm.store.handler import StoreHandler
from memkv_vllm.transports.base import ServerTransport

__all__ = ["KeyReloader", "settings_not_taken"]

logger = logging.getLogger("memkv.store")

_KEYS = frozenset({"auth_key", "auth_key_file", "auth_keys"})


class KeyReloader:
    """Reads the settings again and puts their keys in force.

    Args:
        running: the settings that the server was started with.
        load: reads them again, None where there is no file to read (``--dev``).
        transports: those that serve; they read their certificates again.
    """

    def __init__(
        self,
        running: ServerConfig,
        load: Callable[[], ServerConfig] | None,
        transports: Sequence[ServerTransport] = (),
    ) -> None:
        self._running = running
        self._load = load
        self._transports = transports

    def reload(self, handler: StoreHandler) -> bool:
        """Once. A file that is missing or wrong changes nothing: the keys and certificates in force stay.

        Returns:
            whether what the files hold is in force now.
        """
        if self._load is None:
            logger.warning("reload.ignored reason='this server was started without a yaml'")
            return False
        try:
            config = self._load()
            # Certificates first: where one cannot be used, the keys stay as well.
            for transport in self._transports:
                transport.reload()
        except ConfigError as error:
            handler.counted("key_reload_failed")
            for problem in error.problems:
                logger.error(
                    "reload.failed source=%s problem=%r: keys and certificates stay as they were", error.source, problem
                )
            return False
        handler.replace_keys(config.network.keys)
        if ignored := settings_not_taken(self._running, config):
            logger.warning("reload.partial settings=%s: they changed too, and need a restart", ",".join(ignored))
        return True


def settings_not_taken(running: ServerConfig, read: ServerConfig) -> list[str]:
    """Names of the settings other than keys that differ between two configurations; no values."""
    names = [
        f"network.{name}"
        for name in NetworkConfig.model_fields
        if name not in _KEYS and getattr(running.network, name) != getattr(read.network, name)
    ]
    sections = [name for name in ServerConfig.model_fields if name != "network"]
    return names + [name for name in sections if getattr(running, name) != getattr(read, name)]

"""Who may come in and who may stay: keys and licenses, when a session opens, while it lasts, and when they change."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from memkv_vllm.config import KeyEntry, ServerConfig
from memkv_vllm.errors import LicenseError, RemoteProtocolError, StoreError
from memkv_vllm.store.keyring import Access, KeyChange, KeyRing
from memkv_vllm.store.license import LicenseVerifier
from memkv_vllm.store.sessions import StoreSession

__all__ = ["Admission"]

logger = logging.getLogger("memkv.store")


class Admission:
    """The rules of one server.

    Args:
        config: keys, and whether licenses are asked for.
        counters: counts by reason are added here.
        wall_clock: seconds since the epoch, which is what a license's dates mean.

    Raises:
        ConfigError: the public key of licenses cannot be used.
    """

    def __init__(
        self, config: ServerConfig, counters: Counter[str], wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._keys = KeyRing(config.network.keys)
        self._license = LicenseVerifier(config.license) if config.license.public_key_file is not None else None
        self._counters = counters
        self._wall_clock = wall_clock

    @property
    def asks_license(self) -> bool:
        """Whether a session must present a license."""
        return self._license is not None

    def find_key(self, key_id: str) -> bytes:
        """The 32-byte key to prove; for an unknown id one that nobody holds, see :meth:`KeyRing.find`."""
        return self._keys.find(key_id)

    def unproven(self, key_id: str) -> None:
        """Tells the operator what no stranger is told: that the key id is not known here."""
        if key_id not in self._keys:
            self._counters["auth_unknown_key"] += 1
            logger.info("auth.unknown_key key=%r", key_id)

    def access(self, key_id: str) -> Access:
        """What a session under ``key_id`` may do.

        Raises:
            StoreError: the id is not known (any more).
        """
        access = self._keys.access(key_id)
        if access is None:
            raise StoreError(f"the key id {key_id!r} is not known here")
        return access

    def licensed(self, session: StoreSession, token: str) -> None:
        """The session presents its license.

        Raises:
            LicenseError: it is not valid; says why.
        """
        if self._license is None:
            raise LicenseError("this server asks for no license")
        try:
            session.license_ends_s = self._license.verify(token, self._wall_clock())
        except LicenseError as error:
            self._counters["license_refused"] += 1
            logger.warning("license.refused peer=%s reason=%r", session.peer.label, str(error))
            raise
        self._counters["license_accepted"] += 1

    async def watch(self, session: StoreSession) -> None:
        """Runs until the session may not go on; see :meth:`StoreSession.watch`."""
        await session.watch(self._wall_clock)

    def replace_keys(self, keys: Mapping[str, KeyEntry], sessions: Iterable[StoreSession]) -> KeyChange:
        """Puts ``keys`` in place of all keys, now: other rights hold from the next request on.

        ``sessions`` are those that are open. One whose key is gone is condemned: its driver cuts and fences it.
        """
        change = self._keys.replace(keys)
        ended = 0
        for session in sessions:
            key_id = session.peer.established.key_id
            if key_id in change.removed:
                verdict = RemoteProtocolError(
                    "key_removed", f"the key {key_id!r} was removed or replaced on this server"
                )
                session.condemn(verdict)
                ended += 1
            elif key_id in change.changed:
                session.access = self.access(key_id)
        self._counters["key_reloads"] += 1
        logger.warning(
            "keys.reloaded added=%s removed=%s changed=%s sessions_ended=%d",
            *(",".join(ids) or "none" for ids in change),
            ended,
        )
        return change

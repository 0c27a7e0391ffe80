"""The keys that clients may use, by id, and what each allows. Replaced as a whole while the server runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from memkv_vllm.config import KeyEntry, Right
from memkv_vllm.keys import KEY_FORMAT

__all__ = ["Access", "KeyChange", "KeyRing"]

_KEY_BYTES = 32


class Access(NamedTuple):
    """What a key id may do, and with which store keys."""

    rights: frozenset[Right]
    prefix: bytes

    @classmethod
    def of(cls, entry: KeyEntry) -> Access:
        """The access that a key of the configuration gives."""
        return cls(frozenset(entry.rights), entry.prefix)

    def may(self, right: Right, key: bytes) -> bool:
        """Whether ``right`` holds for the store key (or block prefix) ``key``."""
        return right in self.rights and key.startswith(self.prefix)

    def may_namespace(self, right: Right, namespace: bytes) -> bool:
        """Whether ``right`` holds for every key of the namespace: all of them begin with the format and its digest."""
        return right in self.rights and (bytes([KEY_FORMAT]) + namespace).startswith(self.prefix)

    @property
    def sees_everything(self) -> bool:
        """Whether the server's own state, which is about all clients, may be shown: ``admin`` over all keys."""
        return self.may_namespace(Right.ADMIN, b"")


class KeyChange(NamedTuple):
    """What a replacement of the keys did, as sorted ids; none of them is a secret."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    """The id is gone, or stands for another key now: whoever proved the old one has no right to stay."""
    changed: tuple[str, ...]
    """The same key with other rights or another prefix."""


class KeyRing:
    """Keys by id.

    Args:
        entries: the keys of the configuration.
    """

    def __init__(self, entries: Mapping[str, KeyEntry]) -> None:
        self._entries = dict(entries)

    def __repr__(self) -> str:
        return f"<KeyRing {sorted(self._entries)}>"

    def __contains__(self, key_id: str) -> bool:
        return key_id in self._entries

    def find(self, key_id: str) -> bytes:
        """The 32-byte key of ``key_id``.

        For an unknown id these are fresh random bytes, which nobody can prove: the handshake then goes as with a
        wrong key, in content and in time, so that a stranger cannot find out which ids exist.
        """
        entry = self._entries.get(key_id)
        return os.urandom(_KEY_BYTES) if entry is None else entry.key.get_secret_value()

    def access(self, key_id: str) -> Access | None:
        """What ``key_id`` may do; None when it is not known."""
        entry = self._entries.get(key_id)
        return None if entry is None else Access.of(entry)

    def replace(self, entries: Mapping[str, KeyEntry]) -> KeyChange:
        """Puts ``entries`` in place of all keys; returns what that changed."""
        before, self._entries = self._entries, dict(entries)
        common = before.keys() & entries.keys()
        other_key = {name for name in common if before[name].key != entries[name].key}
        changed = {name for name in common - other_key if Access.of(before[name]) != Access.of(entries[name])}
        return KeyChange(
            added=tuple(sorted((entries.keys() - before.keys()) | other_key)),
            removed=tuple(sorted((before.keys() - entries.keys()) | other_key)),
            changed=tuple(sorted(changed)),
        )

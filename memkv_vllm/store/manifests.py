"""Directory of namespaces: which configurations have written into this store. Pure, never evicted.

A family (digest of the prefix and the model's label) holds one manifest per namespace digest. Engines add
theirs on connecting and get the others of their family back, so that a mismatch is found and named instead of
ending as a hit rate of zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from memkv_vllm.errors import StoreError

__all__ = ["DIGEST_BYTES", "ManifestDirectory", "ManifestStatistics"]

DIGEST_BYTES = 32
"""Length of a family and of a namespace digest."""
ENTRY_BYTES = DIGEST_BYTES + 4
"""What one manifest takes in an answer beside its own bytes."""


class ManifestStatistics(NamedTuple):
    """State of a :class:`ManifestDirectory`."""

    families: int
    manifests: int
    bytes: int
    """Bytes of all manifests, without their digests."""


class ManifestDirectory:
    """Family -> namespace digest -> manifest, bounded by count and by bytes of one manifest.

    Args:
        max_manifests: most manifests over all families.
        max_manifest_bytes: most bytes of one manifest.
        max_family_bytes: most bytes of one family's manifests with :data:`ENTRY_BYTES` each, which bounds the answer
            of :meth:`add`.
    """

    def __init__(
        self, max_manifests: int = 4096, max_manifest_bytes: int = 64 << 10, max_family_bytes: int = 2 << 20
    ) -> None:
        self.max_manifests = max_manifests
        self.max_manifest_bytes = max_manifest_bytes
        self.max_family_bytes = max_family_bytes
        self.on_added: Callable[[bytes, bytes, bytes], None] = lambda family, digest, manifest: None
        """Called for each manifest that was not there before."""
        self._families: dict[bytes, dict[bytes, bytes]] = {}
        self._used: dict[tuple[bytes, bytes], float] = {}
        self._count = 0
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<ManifestDirectory {self._count} manifests in {len(self._families)} families>"

    def add(self, family: bytes, digest: bytes, manifest: bytes, now: float) -> list[tuple[bytes, bytes]]:
        """Adds a manifest, once, and returns its siblings.

        Adding a digest that is there already changes nothing: a digest stands for its manifest.

        Args:
            family: 32 bytes.
            digest: 32 bytes, the namespace digest.
            manifest: opaque bytes.
            now: seconds, for :meth:`uses`.

        Returns:
            ``(digest, manifest)`` of every other namespace of the family, in the order in which they came.

        Raises:
            StoreError: a digest has the wrong length, the manifest is too long, or the directory is full; the
                message names the limit. Nothing was added.
        """
        if len(family) != DIGEST_BYTES or len(digest) != DIGEST_BYTES:
            raise StoreError(f"manifest: family and digest must have {DIGEST_BYTES} bytes each")
        members = self._families.get(family, {})
        if digest not in members:
            self._check_room(members, manifest)
            self._families.setdefault(family, members)[digest] = bytes(manifest)
            self._count += 1
            self._bytes += len(manifest)
            self.on_added(family, digest, bytes(manifest))
        self._used[family, digest] = now
        return self.siblings(family, digest)

    def siblings(self, family: bytes, digest: bytes) -> list[tuple[bytes, bytes]]:
        """What :meth:`add` returns, without adding anything."""
        return [(other, value) for other, value in self._families.get(family, {}).items() if other != digest]

    def uses(self) -> list[tuple[bytes, bytes, float]]:
        """``(family, digest, seconds)`` of every manifest: when it was last added, though it was there already."""
        return [(family, digest, used) for (family, digest), used in self._used.items()]

    def families(self) -> dict[bytes, list[tuple[bytes, bytes]]]:
        """A copy of the whole directory, for the admin's listing."""
        return {family: list(members.items()) for family, members in self._families.items()}

    def statistics(self) -> ManifestStatistics:
        """Numbers of families, manifests and bytes."""
        return ManifestStatistics(len(self._families), self._count, self._bytes)

    def _check_room(self, members: dict[bytes, bytes], manifest: bytes) -> None:
        if len(manifest) > self.max_manifest_bytes:
            raise StoreError(
                f"manifest of {len(manifest)} bytes is over the limit max_manifest_bytes = {self.max_manifest_bytes}"
            )
        if self._count >= self.max_manifests:
            raise StoreError(f"manifest directory is full: max_manifests = {self.max_manifests}")
        family_bytes = sum(ENTRY_BYTES + len(value) for value in (*members.values(), manifest))
        if family_bytes > self.max_family_bytes:
            raise StoreError(f"this family's manifests are full: max_family_bytes = {self.max_family_bytes}")

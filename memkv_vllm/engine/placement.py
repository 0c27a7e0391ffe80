"""Which server holds a block: rendezvous hashing over server names. Pure and stateless.

The name is hashed, never an address or a rail, so that a server keeps its blocks when its rails change. The block
prefix is hashed, not the shard, so that one probe answers for all ranks' shards of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

__all__ = ["Placement"]


class Placement:
    """Highest-random-weight placement: a change of one server of N moves about 1/N of the blocks."""

    __slots__ = ("_names", "_seeds")

    def __init__(self, names: Iterable[str]) -> None:
        """Take the server names; their order does not matter.

        Raises:
            ValueError: there is no name, or one stands there twice.
        """
        self._names = tuple(sorted(names))
        if not self._names:
            raise ValueError("placement needs at least one server name")
        if len(set(self._names)) != len(self._names):
            raise ValueError(f"server names must differ: {', '.join(self._names)}")
        # In order of name, so that the (never seen) tie of two scores falls the same way everywhere.
        self._seeds = tuple((xxhash.xxh3_64_intdigest(name.encode()), name) for name in self._names)

    @property
    def names(self) -> tuple[str, ...]:
        """All server names, sorted."""
        return self._names

    def owner(self, block_prefix: bytes) -> str:
        """Name of the server that holds the block with this key prefix (namespace, hash, group)."""
        score = xxhash.xxh3_64_intdigest
        best, owner = -1, ""
        for seed, name in self._seeds:
            weight = score(block_prefix, seed)
            if weight > best:
                best, owner = weight, name
        return owner

    def split(self, prefixes: Sequence[bytes]) -> dict[str, list[int]]:
        """Sort a batch by server.

        Args:
            prefixes: block key prefixes.

        Returns:
            Server name to the indices of its prefixes, ascending; servers without any are left out.
        """
        shares: dict[str, list[int]] = {}
        for index, prefix in enumerate(prefixes):
            shares.setdefault(self.owner(prefix), []).append(index)
        return shares

    def __repr__(self) -> str:
        return f"Placement({list(self._names)!r})"

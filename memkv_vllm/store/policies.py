"""Which policy a store uses, and one that also keeps an order per namespace, for quotas. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from memkv_vllm.store.eviction import EvictionPolicy, LruPolicy
from memkv_vllm.store.s3fifo import S3FifoPolicy
from memkv_vllm.store.spaces import NAMESPACE

__all__ = ["POLICIES", "NamespacePolicies", "make_policy"]

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruPolicy, "s3-fifo": S3FifoPolicy}
"""By the name in ``storage.eviction.policy``."""


def make_policy(name: str, *, per_namespace: bool) -> EvictionPolicy:
    """The policy called ``name``; ``per_namespace``: with an order per namespace too, which costs each call double."""
    make = POLICIES[name]
    return NamespacePolicies(make) if per_namespace else make()


class NamespacePolicies:
    """One order over all keys and one for each namespace, made by the same policy; implements ``EvictionPolicy``.

    Args:
        make: makes an empty policy.
    """

    def __init__(self, make: Callable[[], EvictionPolicy]) -> None:
        self._make = make
        self._all = make()
        self._own: dict[bytes, EvictionPolicy] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return f"<NamespacePolicies {self._all!r} of {len(self._own)} namespaces>"

    def added(self, key: bytes) -> None:
        """A value was committed under ``key``."""
        self._all.added(key)
        namespace = key[NAMESPACE]
        own = self._own.get(namespace)
        if own is None:
            own = self._own[namespace] = self._make()
        own.added(key)

    def added_many(self, keys: Sequence[bytes]) -> None:
        """Values were committed under ``keys``."""
        for key in keys:
            self.added(key)

    def touched(self, key: bytes) -> None:
        """The value under ``key`` was used."""
        self._all.touched(key)
        self._own[key[NAMESPACE]].touched(key)

    def touched_many(self, keys: Sequence[bytes]) -> None:
        """The values under ``keys`` were used."""
        self._all.touched_many(keys)
        for key in keys:
            self._own[key[NAMESPACE]].touched(key)

    def removed(self, key: bytes) -> None:
        """The value under ``key`` has left the arena."""
        self._all.removed(key)
        namespace = key[NAMESPACE]
        own = self._own[namespace]
        own.removed(key)
        if not len(own):
            del self._own[namespace]

    def victims(self) -> Iterator[bytes]:
        """Keys in order of eviction."""
        return self._all.victims()

    def victims_of(self, namespace: bytes) -> Iterator[bytes]:
        """Keys of one namespace in order of eviction."""
        own = self._own.get(namespace)
        return iter(()) if own is None else own.victims()

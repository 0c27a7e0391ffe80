"""Store keys and namespaces. Pure; no ``hash()``, no ``repr``, no pickle: the same in every process.

A store key is binary, without separators, and of one length inside a namespace (spec, section 6)::

    bytes       field
    1           key format version
    32          namespace digest (SHA-256 of the manifest's canonical JSON)
    n           vLLM's block hash, all of it, opaque (32 with sha256, 16 with xxhash)
    2           KV cache group index, big-endian
    2           shard: the worker's rank in its engine, big-endian

Everything before the shard is the block's *prefix*: placement hashes it, so that one probe answers for the
shards of all ranks.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields

KEY_FORMAT = 1
NAMESPACE_BYTES = 32
MAX_SHARDS = 1 << 16
_NAMESPACE_SLICE = slice(1, 1 + NAMESPACE_BYTES)

SHARING_FIELDS = ("hash_algorithm", "hash_seed", "key_format")
"""A difference in one of these alone means that two engines which could share never will: a warning."""


@dataclass(frozen=True)
class NamespaceManifest:
    """What two engines must agree on to share values; its digest is part of every key.

    Only facts that the scheduler side and the worker side both derive from the configuration. Strings are
    taken as given; nothing is shortened, so two paths with one base name stay apart.
    """

    mode: str
    """``direct`` or ``tier``: the two never share keys."""
    prefix: str
    """The operator's salt (``memkv_spec_prefix``); a new one starts cold."""
    model: str
    """Model id or path, in full."""
    revision: str
    weights: str
    """Cheap fingerprint of the weights: commit id, or a digest over config, shard names, sizes and headers."""
    model_config: str
    """Digest of what turns weights and tokens into KV bytes and is in no block hash: the model's configuration with
    all overrides (rope, sliding window ...), quantization, the dtype of the computation."""
    kv_dtype: str
    tokens_per_block: tuple[int, ...]
    """Per KV cache group."""
    bytes_per_block: int
    """Bytes of one block on one worker, all groups."""
    world_size: int
    tensor_parallel: int
    pipeline_parallel: int
    prefill_context_parallel: int
    decode_context_parallel: int
    hash_algorithm: str
    hash_seed: str
    """What seeds vLLM's hash chain, as far as the release lets it be known (``random`` shares with nobody)."""
    kv_layout: str
    """vLLM's name of the cache layout, where the release has one."""
    extra: tuple[tuple[str, str], ...] = ()
    """Further facts of newer releases, by name."""
    key_format: int = KEY_FORMAT

    def to_json(self) -> bytes:
        """Canonical JSON: sorted keys, no white space, ASCII."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @property
    def digest(self) -> bytes:
        """The namespace digest: SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.to_json()).digest()

    @property
    def family(self) -> bytes:
        """Digest of prefix and model label: namespaces that an operator would expect to share."""
        return hashlib.sha256(json.dumps([self.prefix, self.model]).encode()).digest()

    def differing_fields(self, other_json: bytes) -> tuple[str, ...]:
        """Names of the fields in which another manifest (JSON) differs; unknown fields count as differing.

        Raises:
            ValueError: not the JSON of a manifest.
        """
        other = json.loads(other_json)
        if not isinstance(other, dict):
            raise ValueError("a manifest must be a JSON object")
        ours = json.loads(self.to_json())
        return tuple(sorted(name for name in ours.keys() | other.keys() if ours.get(name) != other.get(name)))


MANIFEST_FIELDS = tuple(field.name for field in fields(NamespaceManifest))


def impossible_sharing(differing: tuple[str, ...]) -> bool:
    """Whether two namespaces that differ in exactly these fields were meant to share and cannot.

    Other models, sizes or parallel shapes side by side are normal; the same everything with another hash
    seed or algorithm is the silent miss that operators report (fault P001).
    """
    return bool(differing) and all(name in SHARING_FIELDS for name in differing)


def block_prefix(namespace: bytes, block_hash: bytes, group: int) -> bytes:
    """The part of a store key that all shards of a block share.

    Args:
        namespace: the 32-byte digest.
        block_hash: vLLM's hash, at least 16 bytes (fault P007: nothing under 128 bits), at most 128.
        group: KV cache group index.
    """
    if len(namespace) != NAMESPACE_BYTES:
        raise ValueError(f"a namespace digest has {NAMESPACE_BYTES} bytes, not {len(namespace)}")
    if not 16 <= len(block_hash) <= 128:
        raise ValueError(f"a block hash of {len(block_hash)} bytes; 16 to 128 are supported")
    return b"".join((bytes((KEY_FORMAT,)), namespace, block_hash, group.to_bytes(2, "big")))


def store_key(prefix: bytes, shard: int) -> bytes:
    """The key of one rank's value of a block."""
    return prefix + shard.to_bytes(2, "big")


def namespace_of(key: bytes) -> bytes:
    """The namespace digest inside a store key or block prefix."""
    return key[_NAMESPACE_SLICE]

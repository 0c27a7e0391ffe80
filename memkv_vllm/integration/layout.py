"""The KV memory of one rank as allocated: which bytes of which tensors make the value of one block.

Everything comes from the live tensors (faults P004, P060, P062): never from a configured dtype or head size. The
value of a block is the concatenation of its pages in vLLM's order of references; layers that alias one tensor
(hybrid overlays) are in it once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import xxhash

from memkv_vllm.errors import GeometryError

if TYPE_CHECKING:
    import torch

_FINGERPRINT_VERSION = 1


@dataclass(frozen=True)
class Page:
    """One layer's bytes of a block: row ``block_id`` of a tensor, the first ``page_bytes`` of it.

    Attributes:
        tensor: the rows, int8 of shape ``(num_blocks, >= page_bytes)``, inner stride 1.
        page_bytes: bytes to move, without padding.
        row_stride: bytes from one block's row to the next.
        offset: where the page starts in the value.
    """

    tensor: torch.Tensor = field(repr=False)
    page_bytes: int
    row_stride: int
    offset: int


@dataclass(frozen=True)
class BlockLayout:
    """All pages of a block, in the order in which they stand in its value.

    Attributes:
        pages: at least one.
        num_blocks: rows of every tensor.
        num_layers: references before aliases were joined, for the start-up line.
        fingerprint: 64 bits over what a reader must agree on; in the header of every value.
    """

    pages: tuple[Page, ...]
    num_blocks: int
    num_layers: int
    fingerprint: int

    @property
    def value_bytes(self) -> int:
        """Bytes of one block over all layers."""
        last = self.pages[-1]
        return last.offset + last.page_bytes

    @property
    def device(self) -> torch.device:
        """Where the KV memory lives."""
        return self.pages[0].tensor.device

    @classmethod
    def from_caches(cls, caches: Any, kv_dtype: str) -> BlockLayout:
        """Read vLLM's ``CanonicalKVCaches``.

        Args:
            caches: tensors of rows and, per KV cache group, references to them.
            kv_dtype: element type by name; goes into the fingerprint.

        Raises:
            GeometryError: more than one group, no page, or tensors that cannot be addressed by rows; with the
                numbers that were found.
        """
        groups = list(caches.group_data_refs)
        if len(groups) != 1:
            sizes = [len(group) for group in groups]
            raise GeometryError(
                f"the worker has {len(groups)} KV cache groups (of {sizes} layers); for now memkv-vllm serves one"
            )
        pages = _pages(caches.tensors, groups[0])
        _check_tensors(pages)
        return cls(pages, int(pages[0].tensor.shape[0]), len(groups[0]), _fingerprint(groups[0], pages, kv_dtype))


def _pages(tensors: Sequence[Any], refs: Sequence[Any]) -> tuple[Page, ...]:
    sizes: dict[int, int] = {}
    for ref in refs:
        if not 0 <= ref.tensor_idx < len(tensors):
            raise GeometryError(f"a layer refers to KV tensor {ref.tensor_idx}; the worker has {len(tensors)}")
        # Aliases of one tensor may use different parts of its pages: the longest covers them all.
        sizes[ref.tensor_idx] = max(sizes.get(ref.tensor_idx, 0), int(ref.page_size_bytes))
    pages, offset = [], 0
    for index, page_bytes in sizes.items():
        tensor = tensors[index].tensor
        pages.append(Page(tensor, page_bytes, int(tensor.stride(0)) * tensor.element_size(), offset))
        offset += page_bytes
    if not pages or min(sizes.values()) <= 0:
        raise GeometryError(
            f"the KV cache has no bytes to move: {len(refs)} layers, pages of {sorted(sizes.values())} bytes"
        )
    return tuple(pages)


def _check_tensors(pages: Sequence[Page]) -> None:
    devices = sorted({str(page.tensor.device) for page in pages})
    if len(devices) != 1:
        raise GeometryError(f"the KV tensors of one rank lie on several devices ({', '.join(devices)}); one is served")
    rows = sorted({int(page.tensor.shape[0]) for page in pages})
    if len(rows) != 1 or rows[0] < 1:
        raise GeometryError(f"the KV tensors have {rows} rows; all must have one row per GPU block")
    for number, page in enumerate(pages):
        tensor = page.tensor
        if tensor.dim() != 2 or tensor.element_size() != 1 or tensor.stride(1) != 1:
            raise GeometryError(
                f"KV tensor {number} is no table of bytes: shape {tuple(tensor.shape)}, strides {tensor.stride()}, "
                f"{tensor.dtype}; rows of int8 with inner stride 1 are served"
            )
        if page.page_bytes > tensor.shape[1]:
            raise GeometryError(
                f"layer page of {page.page_bytes} bytes in KV tensor {number}, whose rows have {tensor.shape[1]}"
            )


def _fingerprint(refs: Sequence[Any], pages: Sequence[Page], kv_dtype: str) -> int:
    """Over the order of layers, what they alias, their page bytes and the element type.

    Not over the number of blocks and the row stride: those differ between engines that hold the same bytes.
    """
    first_seen = {index: position for position, index in enumerate(dict.fromkeys(ref.tensor_idx for ref in refs))}
    element = kv_dtype.encode()
    parts = [struct.pack("<BIII", _FINGERPRINT_VERSION, len(refs), len(pages), len(element)), element]
    parts += [struct.pack("<IQ", first_seen[ref.tensor_idx], int(ref.page_size_bytes)) for ref in refs]
    return xxhash.xxh3_64_intdigest(b"".join(parts))

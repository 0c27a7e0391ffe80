"""The layout that is read off the live KV tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from memkv_vllm.errors import GeometryError  # noqa: E402
from memkv_vllm.integration.layout import BlockLayout  # noqa: E402


def table(rows: int, row: int, page: int | None = None, device: str = "cpu") -> Any:
    """One canonical tensor: ``rows`` blocks, ``row`` bytes apart, ``page`` of them visible."""
    storage = torch.zeros(rows * row, dtype=torch.int8, device=device)
    return SimpleNamespace(tensor=storage.as_strided((rows, page or row), (row, 1)), page_size_bytes=page or row)


def caches(tensors: list[Any], *groups: list[tuple[int, int]]) -> Any:
    """A stand-in for vLLM's ``CanonicalKVCaches``: groups of (tensor index, page bytes)."""
    refs = [[SimpleNamespace(tensor_idx=index, page_size_bytes=size) for index, size in group] for group in groups]
    return SimpleNamespace(tensors=tensors, group_data_refs=refs)


def layout(tensors: list[Any], *groups: list[tuple[int, int]], dtype: str = "float32") -> BlockLayout:
    return BlockLayout.from_caches(caches(tensors, *groups), dtype)


def test_pages_stand_in_the_order_of_the_references() -> None:
    made = layout([table(10, 64), table(10, 32)], [(1, 32), (0, 64)])
    assert [(page.page_bytes, page.offset, page.row_stride) for page in made.pages] == [(32, 0, 32), (64, 32, 64)]
    assert (made.value_bytes, made.num_blocks, made.num_layers) == (96, 10, 2)


def test_padding_is_not_moved() -> None:
    made = layout([table(4, 128), table(4, 128)], [(0, 100), (1, 100)])
    assert made.value_bytes == 200
    assert [page.row_stride for page in made.pages] == [128, 128]


def test_layers_that_alias_a_tensor_are_in_the_value_once() -> None:
    made = layout([table(4, 64), table(4, 64)], [(0, 48), (1, 64), (0, 64)])
    assert [(page.page_bytes, page.offset) for page in made.pages] == [(64, 0), (64, 64)]
    assert (made.value_bytes, made.num_layers) == (128, 3)
    assert layout([table(4, 64)], [(0, 64), (0, 48)]).value_bytes == 64


def test_packed_blocks_are_one_page() -> None:
    made = layout([table(4, 4096)], [(0, 4096)])
    assert (made.value_bytes, len(made.pages), made.num_layers) == (4096, 1, 1)


def test_the_fingerprint_is_the_same_everywhere() -> None:
    # Stored in every value: a change of this number turns all stored values into misses.
    made = layout([table(10, 64), table(10, 32)], [(0, 64), (1, 32)])
    assert made.fingerprint == GOLDEN


GOLDEN = 495652992212669591


def test_the_fingerprint_ignores_what_is_not_in_the_bytes() -> None:
    plain = layout([table(10, 64), table(10, 32)], [(0, 64), (1, 32)])
    more_blocks = layout([table(99, 64), table(99, 32)], [(0, 64), (1, 32)])
    padded = layout([table(10, 128, 64), table(10, 32)], [(0, 64), (1, 32)])
    other_numbers = layout([table(10, 32), table(10, 64)], [(1, 64), (0, 32)])
    assert {made.fingerprint for made in (more_blocks, padded, other_numbers)} == {plain.fingerprint}


@pytest.mark.parametrize(
    "other",
    [
        lambda: layout([table(10, 64), table(10, 32)], [(1, 32), (0, 64)]),
        lambda: layout([table(10, 64), table(10, 32)], [(0, 48), (1, 32)]),
        lambda: layout([table(10, 64), table(10, 32)], [(0, 64), (1, 32), (1, 32)]),
        lambda: layout([table(10, 96)], [(0, 96)]),
        lambda: layout([table(10, 64), table(10, 32)], [(0, 64), (1, 32)], dtype="float16"),
    ],
    ids=["order", "page bytes", "alias", "packed", "element type"],
)
def test_the_fingerprint_covers_what_a_reader_must_agree_on(other: Any) -> None:
    plain = layout([table(10, 64), table(10, 32)], [(0, 64), (1, 32)])
    assert other().fingerprint != plain.fingerprint


def test_more_than_one_group_is_refused_for_now() -> None:
    with pytest.raises(GeometryError, match=r"2 KV cache groups \(of \[1, 2\] layers\).*for now"):
        layout([table(4, 64), table(4, 64)], [(0, 64)], [(1, 64), (1, 64)])


@pytest.mark.parametrize(
    ("tensors", "group", "words"),
    [
        ([table(4, 64)], [], "no bytes to move: 0 layers"),
        ([table(4, 64)], [(0, 0)], r"pages of \[0\] bytes"),
        ([table(4, 64), table(4, 64, device="meta")], [(0, 64), (1, 64)], r"several devices \(cpu, meta\)"),
        ([table(4, 64), table(5, 64)], [(0, 64), (1, 64)], r"\[4, 5\] rows"),
        ([table(4, 64)], [(0, 65)], "65 bytes in KV tensor 0, whose rows have 64"),
        ([table(4, 64)], [(1, 64)], "KV tensor 1; the worker has 1"),
        ([SimpleNamespace(tensor=torch.zeros(4, 64, dtype=torch.float32))], [(0, 64)], "no table of bytes"),
        ([SimpleNamespace(tensor=torch.zeros(4, 2, 32, dtype=torch.int8))], [(0, 32)], "no table of bytes"),
        ([SimpleNamespace(tensor=torch.zeros(64, 4, dtype=torch.int8).T)], [(0, 4)], "inner stride 1"),
    ],
)
def test_what_cannot_be_addressed_is_refused_with_the_numbers(tensors: Any, group: Any, words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        layout(tensors, group)

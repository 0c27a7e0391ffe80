"""The directory of namespaces."""

from __future__ import annotations

import pytest

from memkv_vllm.errors import StoreError
from memkv_vllm.store.manifests import ManifestDirectory

FAMILY, OTHER_FAMILY = b"F" * 32, b"G" * 32


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_the_siblings_are_the_others_of_the_family() -> None:
    directory = ManifestDirectory()
    assert directory.add(FAMILY, digest(1), b"one", 0.0) == []
    assert directory.add(OTHER_FAMILY, digest(9), b"nine", 0.0) == []
    assert directory.add(FAMILY, digest(2), b"two", 0.0) == [(digest(1), b"one")]
    assert directory.add(FAMILY, digest(3), b"three", 0.0) == [(digest(1), b"one"), (digest(2), b"two")]


def test_a_repeated_add_changes_nothing_and_still_returns_the_siblings() -> None:
    directory = ManifestDirectory()
    directory.add(FAMILY, digest(1), b"one", 0.0)
    directory.add(FAMILY, digest(2), b"two", 0.0)
    before = directory.statistics()
    assert directory.add(FAMILY, digest(1), b"changed", 0.0) == [(digest(2), b"two")]
    assert directory.add(FAMILY, digest(2), b"two", 0.0) == [(digest(1), b"one")]
    assert directory.statistics() == before == (1, 2, 6)


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"max_manifests": 2}, "max_manifests = 2"),
        ({"max_family_bytes": 2 * 36 + 6}, "max_family_bytes = 78"),
        ({"max_manifest_bytes": 3}, "max_manifest_bytes = 3"),
    ],
)
def test_a_full_directory_names_the_limit_and_keeps_what_it_has(limits: dict[str, int], name: str) -> None:
    directory = ManifestDirectory(**limits)
    directory.add(FAMILY, digest(1), b"one", 0.0)
    directory.add(FAMILY, digest(2), b"two", 0.0)
    before = directory.families()
    with pytest.raises(StoreError, match=name):
        directory.add(FAMILY, digest(3), b"three", 0.0)
    assert directory.families() == before
    assert directory.add(FAMILY, digest(1), b"one", 0.0) == [(digest(2), b"two")]


def test_a_refused_first_manifest_leaves_no_empty_family() -> None:
    directory = ManifestDirectory(max_manifest_bytes=1)
    with pytest.raises(StoreError):
        directory.add(FAMILY, digest(1), b"long", 0.0)
    assert directory.statistics() == (0, 0, 0)


def test_siblings_are_listed_without_adding() -> None:
    directory = ManifestDirectory()
    directory.add(FAMILY, digest(1), b"one", 0.0)
    assert directory.siblings(FAMILY, digest(2)) == [(digest(1), b"one")]
    assert directory.siblings(OTHER_FAMILY, digest(2)) == []
    assert directory.statistics().manifests == 1


@pytest.mark.parametrize(("family", "name"), [(b"short", digest(1)), (FAMILY, b"short")])
def test_digests_of_another_length_are_refused(family: bytes, name: bytes) -> None:
    with pytest.raises(StoreError, match="32 bytes"):
        ManifestDirectory().add(family, name, b"", 0.0)

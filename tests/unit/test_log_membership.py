"""Which drives make up a store: the decisions that need more media than a test has."""

from __future__ import annotations

from itertools import count

import pytest

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.store.log.format import MAX_DRIVES
from memkv_vllm.store.log.membership import Found, Membership, decide

SIZE = 64 << 20


def numbered():
    numbers = count(1)
    return lambda: next(numbers).to_bytes(16, "big")


def decided(found: list[Found], **options) -> Membership:
    options = {"segment_bytes": None, "missing_drives": "refuse", "new_id": numbered(), **options}
    return decide(found, **options)


def test_all_blank_media_become_one_store() -> None:
    membership = decided([Found(f"/d{number}", None, SIZE) for number in range(3)])
    blocks = [member.superblock for member in membership.members]
    assert all(member.blank and member.changed for member in membership.members)
    assert {block.server_id for block in blocks} == {membership.server_id}
    assert len({block.drive_id for block in blocks}) == 3
    assert all(block.drives == blocks[0].drives for block in blocks)
    assert len(membership.notes) == 3


def test_nothing_changes_when_nothing_changed() -> None:
    membership = decided([Found(f"/d{number}", None, SIZE) for number in range(3)])
    found = [Found(f"/e{number}", member.superblock, SIZE) for number, member in enumerate(membership.members)]
    again = decided(found[::-1])
    assert not any(member.changed for member in again.members)
    assert again.notes == ()


def test_the_newest_superblock_knows_the_drives() -> None:
    """The update of some drives may have been interrupted: any that has the new list is enough."""
    first = decided([Found("/a", None, SIZE)]).members[0].superblock
    ids = numbered()
    for _ in range(9):
        ids()
    both = decided([Found("/a", first, SIZE), Found("/b", None, SIZE)], new_id=ids)
    second = both.members[1].superblock
    again = decided([Found("/a", first, SIZE), Found("/b", second, SIZE)])
    assert [member.blank for member in again.members] == [False, False]
    assert [member.changed for member in again.members] == [True, False]
    assert again.members[0].superblock.generation == second.generation


def test_a_store_has_a_bound_of_drives() -> None:
    with pytest.raises(EnvironmentFault, match=f"193 drives; at most {MAX_DRIVES}"):
        decided([Found(f"/d{number}", None, SIZE) for number in range(MAX_DRIVES + 1)])
    assert len(decided([Found(f"/d{number}", None, SIZE) for number in range(MAX_DRIVES)]).members) == MAX_DRIVES


def test_a_damaged_copy_is_written_again() -> None:
    block = decided([Found("/a", None, SIZE)]).members[0].superblock
    (member,) = decided([Found("/a", block, SIZE, damaged=True)]).members
    assert member.changed and not member.blank and member.superblock == block

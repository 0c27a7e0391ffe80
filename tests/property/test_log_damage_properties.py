"""Any damage to a medium: a start refuses it or goes on, and whatever it then hands out is what was written."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.store.log.format import Geometry
from tests.support.log_media import FakeHost
from tests.support.logs import MIB, key_of, opened, payload_of, storage

pytestmark = [pytest.mark.fault, pytest.mark.slow, pytest.mark.timeout(120)]

DRIVE = Path("/fake/0")
CONFIG = storage([DRIVE], 7 * MIB, segment_size="1 MiB", max_drive_errors=1000)
VALUES = 24
FORGOTTEN = 3


@cache
def image_of_a_drive() -> bytes:
    """A drive with sealed segments, an open one, a reset, tombstones and a manifest."""
    host = FakeHost()

    async def write() -> None:
        async with opened(CONFIG, open_medium=host.open) as held:
            for number in range(VALUES):
                location = await held.put(key_of(number), payload_of(number, 100_000))
                assert location is not None
                if number < FORGOTTEN:
                    held.log.forget([location])
            await held.log.reset(bytes(32))
            await held.log.add_manifest(b"f" * 32, b"d" * 32, b"{}")

    anyio.run(write)
    return bytes(host.disks[DRIVE].volatile)


SIZE = 7 * MIB
GEOMETRY = Geometry.for_size(SIZE, MIB)
PLACES = st.one_of(
    st.integers(0, 8191),
    st.integers(GEOMETRY.journal_half(0), GEOMETRY.journal_half(0) + 40_000),
    st.integers(0, 5).flatmap(lambda n: st.integers(GEOMETRY.at(n, 0), GEOMETRY.at(n, 0) + 5000)),
    st.integers(0, 5).flatmap(lambda n: st.integers(GEOMETRY.at(n + 1, 0) - 3000, GEOMETRY.at(n + 1, 0) - 1)),
    st.integers(0, SIZE - 1),
)
DAMAGE = st.lists(
    st.tuples(PLACES, st.one_of(st.binary(min_size=1, max_size=64), st.just(bytes(4096)), st.just(b"\xff" * 512))),
    min_size=1,
    max_size=4,
)


async def start(image: bytes) -> set[int]:
    """Numbers of the values that were read; all of them with their bytes."""
    host = FakeHost()
    host.add_device(DRIVE, len(image))
    host.disks[DRIVE].volatile[:] = image
    found = set()
    async with opened(CONFIG, open_medium=host.open) as held:
        numbers = {key_of(number): number for number in range(VALUES)}
        for value in held.values:
            data = await held.get(value.record, value.location)
            if data is not None:
                number = numbers[value.record.key]
                assert data == payload_of(number, 100_000)
                found.add(number)
        location = await held.put(key_of(1000), b"goes on")
        assert location is not None
        assert await held.get(held.record_at(location), location) == b"goes on"
    return found


def test_without_damage_everything_is_there() -> None:
    assert anyio.run(start, image_of_a_drive()) == set(range(FORGOTTEN, VALUES))


@given(damage=DAMAGE)
@settings(max_examples=80, suppress_health_check=list(HealthCheck))
def test_no_damage_leads_to_wrong_bytes(damage: list[tuple[int, bytes]]) -> None:
    """P090. A tombstone may be damaged, so that what was forgotten comes back; then the journal's tail is cut off."""
    image = bytearray(image_of_a_drive())
    for offset, data in damage:
        image[offset : offset + len(data)] = data[: max(0, len(image) - offset)]
    try:
        found = anyio.run(start, bytes(image))
    except EnvironmentFault as fault:
        assert str(DRIVE) in str(fault)
        return
    journal = range(GEOMETRY.journal_half(0), GEOMETRY.segments_offset)
    if not any(offset + len(data) > journal.start and offset < journal.stop for offset, data in damage):
        assert not found & set(range(FORGOTTEN))
    touched = sum(-(-len(data) // 4096) + 1 for _, data in damage)
    assert len(found) >= VALUES - FORGOTTEN - 10 * touched

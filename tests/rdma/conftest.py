"""Tests in this folder need RDMA devices: they run in the VM that ``make test-rdma`` boots, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cable import Cable, lay

FOLDER = Path(__file__).parent
DEVICES = Path("/sys/class/infiniband")
ELSEWHERE = "needs the RDMA devices of a VM: make test-rdma"
"""Not even a machine with NICs will do: tests take links down and change routes."""
HARNESS = FOLDER / "test_harness.py"
"""The other way round: it starts VMs."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all tests of this folder, and skips them where there is no VM.

    Those over a cable are marked too: its two devices stay in the VM, so that they run in one of their own.
    """
    inside = bool(os.environ.get("RDMA_VM"))
    for item in items:
        if FOLDER not in item.path.parents:
            continue
        item.add_marker(pytest.mark.rdma)
        if "cable" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cable)
        if item.path == HARNESS:
            if inside:
                item.add_marker(pytest.mark.skip(reason="starts VMs, and this is one: make test-rdma"))
        elif not inside:
            item.add_marker(pytest.mark.skip(reason=ELSEWHERE))
        else:
            item.add_marker(pytest.mark.usefixtures("devices"))


@pytest.fixture(scope="session")
def devices() -> None:
    """A VM without RDMA devices is broken: its tests must fail, not end without having run."""
    found = sorted(path.name for path in DEVICES.iterdir()) if DEVICES.is_dir() else []
    assert {"rxe0", "rxe1"} <= set(found), f"this VM has {found or 'no'} RDMA devices: start it with --rails 2"


@pytest.fixture
def cable() -> Iterator[Cable]:
    """Repaired before and after."""
    cable = lay()
    cable.repair()
    yield cable
    cable.repair()

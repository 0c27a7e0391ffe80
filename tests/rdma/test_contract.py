"""The transport contract suite over soft-RoCE: what ``tests/contract`` demands of every transport, on real queue pairs.

Left out is what makes hundreds of connections: reading the GID tables of soft-RoCE, of a thousand entries each, takes a
client half a second there. Those run over the verbs library in memory, and ``test_provider.py`` counts what real ones
leave behind.
"""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.contract import test_bulk, test_fence, test_leaks
from tests.support.harness import TransportFactory, VerbsFactory

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

LEFT_OUT = {"test_200_connections_leave_nothing_behind", "test_cancelling_at_random_points_leaves_nothing_behind"}


def cases_of(module: ModuleType) -> dict[str, object]:
    """Its tests by name."""
    return {name: test for name, test in vars(module).items() if name.startswith("test_") and name not in LEFT_OUT}


for suite in (test_bulk, test_fence, test_leaks):
    globals().update(cases_of(suite))


@pytest.fixture
def factory() -> TransportFactory:
    return VerbsFactory()

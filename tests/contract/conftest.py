"""Fixtures of the transport contract suite: every test here runs over every transport in ``FACTORIES``."""

from __future__ import annotations

import pytest

from tests.support.harness import FACTORIES, TransportFactory


@pytest.fixture(params=sorted(FACTORIES))
def factory(request: pytest.FixtureRequest) -> TransportFactory:
    return FACTORIES[request.param]

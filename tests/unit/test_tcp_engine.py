"""A rank's whole engine over tcp, with a store in a process of its own."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.support.ranks import cluster_settings, rank
from tests.support.store_process import StoreProcess


@pytest.mark.parametrize("num_connections", [1, 4])
def test_blocks_go_to_the_store_and_come_back(num_connections: int) -> None:
    key = os.urandom(32)
    with StoreProcess(key) as store:
        settings = replace(cluster_settings(key, {"a": store.port}), transport="tcp", num_connections=num_connections)
        with rank(settings) as one:
            one.ready().stored(range(20))
            result = one.loaded(range(20))
            assert result.bad_block_ids == ()
            assert one.wrong(result, range(20)) == []


@pytest.mark.fault
def test_a_store_that_is_killed_costs_loads_and_nothing_else() -> None:
    """Fencing is local: no slot stays in quarantine for a server that is gone."""
    key = os.urandom(32)
    with StoreProcess(key) as store:
        settings = replace(cluster_settings(key, {"a": store.port}), transport="tcp")
        with rank(settings) as one:
            one.ready().stored(range(10))
            store.kill()
            assert len(one.loaded(range(10)).bad_block_ids) == 10
            store.start()
            one.ready().stored(range(10))
            result = one.loaded(range(10))
            assert result.bad_block_ids == ()
            assert one.wrong(result, range(10)) == []
            one.idle()

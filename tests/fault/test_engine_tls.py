"""Engines over TLS: they restore, and a server whose certificate is not accepted is a miss that is said once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from memkv_vllm.config import RailAddress, ServerAddress
from memkv_vllm.engine.client import ClusterSettings
from tests.support.authority import Authority, Pair
from tests.support.guarded import Guarded, guarded
from tests.support.ranks import eventually, rank

pytestmark = pytest.mark.fault


@contextmanager
def server(pair: Pair) -> Iterator[Guarded]:
    network = {"tls_cert": str(pair.cert), "tls_key": str(pair.key), "tls_control": True}
    with start_blocking_portal("asyncio") as portal:
        with portal.wrap_async_context_manager(guarded(network=network, over="tcp")) as site:
            yield site


def settings(site: Guarded, ca: Path | None) -> ClusterSettings:
    servers = (ServerAddress("a", (RailAddress(*site.address),)),)
    return ClusterSettings(servers, site.credentials("default"), "tcp", 5.0, 10.0, 2, ca is not None, ca)


def test_an_engine_restores_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    with server(authority.issue("127.0.0.1")) as site, rank(settings(site, authority.file)) as one:
        one.ready().stored(range(10))
        loaded = one.loaded(range(10))
        assert loaded.bad_block_ids == () and one.wrong(loaded, list(range(10))) == []


@pytest.mark.parametrize(("trusts", "reason"), [("another", "set tls_ca"), ("nothing", "set tls (MEMKV_TLS=true)")])
def test_an_engine_that_does_not_fit_its_servers_tls_misses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trusts: str, reason: str
) -> None:
    ca = Authority(tmp_path, "another").file if trusts == "another" else None
    with server(Authority(tmp_path).issue("127.0.0.1")) as site, caplog.at_level(logging.WARNING, "memkv"):
        with rank(settings(site, ca)) as one:
            assert sum(one.stored(range(3)).lost.values()) == 3
            assert len(one.loaded(range(3)).bad_block_ids) == 3
            eventually(lambda: site.count("connections") >= 2, "it tries again")
        said = [record.getMessage() for record in caplog.records if reason in record.getMessage()]
        assert len(said) == 1, said

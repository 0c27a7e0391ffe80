"""A server that asks for licenses: who gets in, what the others are told, and when a license ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memkv_vllm.errors import LicenseError, StoreError
from memkv_vllm.protocol.messages import Fence, License, Ping, Register
from memkv_vllm.protocol.session import ReplyReceived, State
from memkv_vllm.store.admission import Admission
from memkv_vllm.transports.streams import send_all
from memkv_vllm.types import MemoryKind, SessionId, Status
from tests.support.guarded import guarded, make_key, value
from tests.support.harness import LoopbackFactory, wait_until
from tests.support.licenses import Issuer
from tests.support.peers import client_session, raw_stream, shake_hands, until_closed
from tests.support.ranks import Cluster, eventually, lookups, rank

anyio_only = pytest.mark.anyio
FACTORY = LoopbackFactory()
PLACES = ("the yaml's license", "MEMKV_LICENSE", "MINIO_LICENSE", "AISTOR_LICENSE")


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture
def asked(issuer: Issuer, tmp_path: Path) -> dict[str, Any]:
    """The server's section."""
    return {"public_key_file": str(issuer.write(tmp_path))}


@anyio_only
async def test_a_licensed_client_works_and_one_without_is_told_where_it_was_looked_for(
    issuer: Issuer, asked: dict[str, Any]
) -> None:
    async with guarded(license=asked) as site:
        client = await site.connect("default", issuer.license())
        assert client.connection.established.asks_license
        assert await client.put(make_key(b"A" * 32, 1), value(1)) is Status.OK
        with pytest.raises(LicenseError, match="no license found") as caught:
            await site.connect("default")
        assert all(place in str(caught.value) for place in PLACES)
        await client.ask(Ping())
        await site.until_idle(sessions=1)
        assert (site.count("license_accepted"), site.count("refused_license")) == (1, 1)


@anyio_only
async def test_a_license_that_is_not_valid_is_refused_with_the_reason(issuer: Issuer, asked: dict[str, Any]) -> None:
    async with guarded(license=asked) as site:
        wrong = {
            issuer.license(-3600): "expired",
            Issuer().license(): "signature",
            issuer.license(nbf=time.time() + 3600): "not valid before",
            "eyJno.to.ken": "not a license token",
        }
        for token, reason in wrong.items():
            with pytest.raises(LicenseError, match=reason) as caught:
                await site.connect("default", token)
            assert token not in str(caught.value)
        await site.until_idle()
        assert site.count("license_refused") == site.count("refused_license") == len(wrong)


@anyio_only
async def test_before_its_license_a_session_gets_no_other_answer(asked: dict[str, Any]) -> None:
    """Not of the store, and not of the driver either: REGISTER and FENCE are messages too."""
    requests: list[Any] = [Ping(), Register(1, MemoryKind.GPU, 4096), Fence(SessionId(bytes(16)))]
    async with guarded(license=asked) as site:
        for number, request in enumerate(requests, 1):
            async with raw_stream(FACTORY, site.address) as stream:
                session = client_session(site.keys["default"])
                await shake_hands(stream, session)
                session.send_request(request.TYPE, request.pack())
                await send_all(stream, session.data_to_send())
                (event,) = session.receive_data(await until_closed(stream))
                assert isinstance(event, ReplyReceived) and event.error is not None
                assert event.error.text.startswith("no license found")
            await site.until_idle()
            assert site.count("refused_license") == number
        assert site.count("requests_ping") == 0


@anyio_only
async def test_requests_that_do_not_wait_for_the_answer_cut_the_session(issuer: Issuer, asked: dict[str, Any]) -> None:
    async with guarded(license=asked) as site, raw_stream(FACTORY, site.address) as stream:
        session = client_session(site.keys["default"])
        await shake_hands(stream, session)
        session.send_request(License.TYPE, License(issuer.license()).pack())
        session.send_request(Ping.TYPE, b"")
        await send_all(stream, session.data_to_send())
        assert session.receive_data(await until_closed(stream)) == []
        assert (site.count("cut_license"), site.count("requests_ping")) == (1, 0)


@anyio_only
async def test_a_session_that_presents_nothing_is_cut_in_time(asked: dict[str, Any]) -> None:
    async with guarded(license=asked, limits={"handshake_timeout_s": 0.1}) as site:
        async with raw_stream(FACTORY, site.address) as stream:
            session = client_session(site.keys["default"])
            await shake_hands(stream, session)
            assert session.state is State.READY
            await until_closed(stream)
        await site.until_idle()
        assert site.count("refused_license") == 1


@anyio_only
async def test_a_server_that_asks_for_none_never_sees_one(issuer: Issuer) -> None:
    async with guarded() as site:
        client = await site.connect("default", issuer.license())
        assert not client.connection.established.asks_license
        assert site.count("license_accepted") == 0
        with pytest.raises(Exception, match="LICENSE|closed|type"):  # and who sends one all the same is cut
            await client.ask(License(issuer.license()))
        await wait_until(lambda: client.ended, "it is cut")
        assert site.count("cut_type") == 1


@anyio_only
async def test_a_session_ends_when_its_license_does(issuer: Issuer, asked: dict[str, Any]) -> None:
    async with guarded(license={**asked, "leeway_s": 0}) as site:
        short = await site.connect("default", issuer.license(1.0))
        long = await site.connect("default", issuer.license(None))
        await short.ask(Ping())
        await wait_until(lambda: short.ended, "the session is cut")
        assert site.count("cut_license_expired") == 1
        with pytest.raises(LicenseError, match="expired"):
            await site.connect("default", issuer.license(-0.5))
        await long.ask(Ping())


@anyio_only
async def test_a_clock_that_is_set_is_noticed(monkeypatch: pytest.MonkeyPatch, issuer: Issuer, asked: Any) -> None:
    monkeypatch.setattr("memkv_vllm.store.sessions.LICENSE_CHECK_S", 0.05)
    set_by_s = 0.0
    monkeypatch.setattr(
        "memkv_vllm.store.handler.Admission",
        lambda config, counters: Admission(config, counters, lambda: time.time() + set_by_s),
    )
    async with guarded(license=asked) as site:
        client = await site.connect("default", issuer.license(3600))
        await client.ask(Ping())
        set_by_s = 7200.0
        await wait_until(lambda: client.ended, "the session is cut")
        assert site.count("cut_license_expired") == 1


# ------------------------------------------------------------------------------------------------ engines


@contextmanager
def demanding(tmp_path: Path, issuer: Issuer, **settings: Any) -> Iterator[Cluster]:
    license = {"public_key_file": str(issuer.write(tmp_path)), **settings}
    with Cluster(tmp_path, overrides={"license": license}) as cluster:
        yield cluster


@pytest.mark.fault
def test_an_engine_without_a_license_is_up_and_misses_and_says_so_once(
    tmp_path: Path, issuer: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    """Never an engine death (invariant 4), never silent (invariant 5)."""
    with demanding(tmp_path, issuer) as cluster, caplog.at_level(logging.WARNING, "memkv"):
        with rank(cluster.settings()) as one, lookups(cluster.settings()) as asking:
            stored = one.stored(range(3))
            assert sum(stored.lost.values()) == 3
            loaded = one.loaded(range(3))
            assert len(loaded.bad_block_ids) == 3
            assert asking.present(range(3)) == []
            eventually(lambda: cluster.only.statistics()["counters"].get("connections", 0) >= 4, "they try again")
        said = [record.getMessage() for record in caplog.records if "no license found" in record.getMessage()]
        assert len(said) == 2, said  # the engine's link and the prober's
        assert all(place.replace("'", "\\'") in said[0] or place in said[0] for place in PLACES)


@pytest.mark.fault
def test_an_engine_with_a_license_restores_and_its_refusal_is_a_miss(tmp_path: Path, issuer: Issuer) -> None:
    with demanding(tmp_path, issuer) as cluster:
        settings = cluster.settings()
        good = replace(settings, credentials=replace(settings.credentials, license=issuer.license()))
        bad = replace(settings, credentials=replace(settings.credentials, license=Issuer().license()))
        with rank(good) as one:
            one.ready().stored(range(4))
            assert one.loaded(range(4)).bad_block_ids == ()
            with rank(bad) as other:
                assert len(other.loaded(range(4)).bad_block_ids) == 4
            assert one.loaded(range(4)).bad_block_ids == ()


def test_a_refusal_is_an_error_that_waiting_does_not_heal() -> None:
    assert not LicenseError.retryable
    assert not issubclass(LicenseError, StoreError)

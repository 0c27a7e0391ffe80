"""An engine over verbs: when it refuses to start, when it starts all the same, and what it says of its path.

Real stores and transports over a verbs library in memory. Fault kinds P072, P078; the same with a real one stands in
``tests/rdma/test_client.py``.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from memkv_vllm.config import RailAddress, ServerAddress
from memkv_vllm.engine import engine as engine_module
from memkv_vllm.engine import pace as pace_module
from memkv_vllm.engine import routes as routes_module
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.types import LossReason
from tests.support.fake_verbs import RETRY_EXC_ERR, Trouble
from tests.support.ranks import Rank, eventually, lookups, rank
from tests.support.scripted_transport import ScriptedConnection, scripted
from tests.support.verbs_store import VerbsStores, verbs_stores
from tests.support.verbs_world import VerbsWorld, verbs_world

pytestmark = [pytest.mark.fault, pytest.mark.timeout(60)]

EXIT_S = 5.0
"""The product's promise: an engine that refuses has ended by then."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[VerbsWorld]:
    with verbs_world(tmp_path / "hosts") as made:
        yield made


@pytest.fixture
def stores(tmp_path: Path, world: VerbsWorld, monkeypatch: pytest.MonkeyPatch) -> Iterator[VerbsStores]:
    with verbs_stores(tmp_path / "keys", world, monkeypatch, "a", "b") as made:
        yield made


def check(one: Rank, numbers: range) -> None:
    """Values go round."""
    assert one.stored(numbers).lost == {}
    result = one.loaded(numbers)
    assert (result.lost, one.wrong(result, numbers)) == ({}, [])


def route(one: Rank, name: str) -> str:
    """Transport and address in use."""
    return str(one.engine._core.client.links[name].statistics().route)


# -- it starts


def test_all_servers_are_ready_when_it_has_started(stores: VerbsStores) -> None:
    started = time.monotonic()
    with rank(stores.settings()) as one:
        assert time.monotonic() - started < engine_module.START_VERDICT_S, "it waits for verdicts, not for the time"
        assert one.statistics.servers_ready == 2
        check(one, range(16))
        one.idle()
    assert stores.world.num_live == 0


def test_a_store_tells_which_sessions_move_bytes_over_rdma(stores: VerbsStores) -> None:
    """So that an operator sees at the server whether its clients use it."""
    with rank(stores.settings()), lookups(stores.settings()) as asking:
        asking.ready(2)
        told = stores.servers["a"].statistics()
    assert told["server"]["sessions_by_path"] == {"verbs": 1, "tcp": 1}
    assert {session["kind"]: session["data_path"] for session in told["sessions"]} == {
        "engine": "verbs", "manager": "tcp"
    }  # fmt: skip


def test_the_scheduler_side_asks_the_same_stores_without_a_nic(stores: VerbsStores) -> None:
    """P072: its client moves no bytes and touches no device."""
    with rank(stores.settings()) as one:
        one.stored(range(4))
    opened = stores.world.client_library.num_opened
    with lookups(stores.settings()) as asking:
        assert sorted(asking.ready(2).present(range(6))) == [0, 1, 2, 3]
    assert stores.world.client_library.num_opened == opened


def test_a_server_that_is_not_there_is_no_reason_not_to_start(stores: VerbsStores) -> None:
    """P027: nobody listens. The engine is up at once, misses that server's share, and finds the server later."""
    settings = stores.settings()
    stores.servers["b"].stop()
    with rank(settings) as one:
        assert one.statistics.servers_ready == 1
        assert set(one.loaded(range(16)).lost) >= {LossReason.BREAKER}
        stores.servers["b"].start()
        one.ready(2)
        check(one, range(16))


def test_a_silent_server_holds_up_the_start_for_a_bounded_time_only(stores: VerbsStores) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        rail = RailAddress("127.0.0.1", silent.getsockname()[1])
        settings = stores.settings(connect_timeout_s=1.0)
        started = time.monotonic()
        with rank(replace(settings, servers=(*settings.servers, ServerAddress("c", (rail,))))) as one:
            assert time.monotonic() - started < EXIT_S
            assert one.statistics.servers_ready == 2


# -- it refuses to start


def refused(stores: VerbsStores, **changes: object) -> str:
    """Why an engine does not start; it has ended in time and left nothing."""
    threads, started = set(threading.enumerate()), time.monotonic()
    with pytest.raises(EnvironmentFault) as caught, rank(replace(stores.settings(), **changes)):  # type: ignore[arg-type]
        pass
    assert time.monotonic() - started < EXIT_S
    assert stores.world.num_live == 0
    left = [
        thread for thread in threading.enumerate() if thread not in threads and thread.name.startswith("memkv-rank")
    ]
    assert not left
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_it_refuses_where_a_server_answers_without_verbs(
    tmp_path: Path, world: VerbsWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    with verbs_stores(tmp_path / "keys", world, monkeypatch, "a", "b", without=("b",)) as stores:
        reason = refused(stores)
    assert re.search(r"1 of 2 servers answer but cannot reach this host's memory.*server b: .*rdma\.devices", reason)
    assert "server a:" not in reason


def test_it_refuses_where_a_servers_probe_fails(stores: VerbsStores) -> None:
    for number in range(64):
        stores.world.server_nic.troubles.requests[number] = Trouble(RETRY_EXC_ERR)
    reason = refused(stores)
    for part in ("server a:", "server b:", "cli0:1", "127.0.0.2"):
        assert part in reason


def test_it_refuses_where_packets_vanish(stores: VerbsStores) -> None:
    """A path MTU black hole: nothing ever completes, and the server's own deadline says so in time."""
    stores.world.server_nic.troubles.silent = True
    assert "server a:" in refused(stores)


@pytest.mark.parametrize("sender", ["client", "server"])
def test_it_refuses_where_large_packets_of_one_direction_vanish(stores: VerbsStores, sender: str) -> None:
    """P078: in the other direction all is well, and so is every small packet: only gets would time out."""
    nics = {"client": stores.world.client_nic, "server": stores.world.server_nic}
    nics[sender].troubles.narrow_bytes = 1500
    receiver = "server" if sender == "client" else "client"
    reason = refused(stores)
    assert reason.count(f"packets of 4096 bytes from the {sender} to the {receiver} do not arrive") == 2
    assert f"from the {receiver} to the {sender}" not in reason
    assert "MTU 4096: check that" in reason


def test_it_refuses_without_its_named_nic_before_anything_is_connected(stores: VerbsStores) -> None:
    """P073."""
    assert "mlx5_7 is not on this host" in refused(stores, rdma_devices=("mlx5_7",))


def test_one_working_rail_of_two_is_enough(stores: VerbsStores, caplog: pytest.LogCaptureFixture) -> None:
    """The other one's problem is said, and it is tried again."""
    beside = RailAddress("127.0.0.7", 0)
    with socket.create_server((beside.host, 0)) as nobody:
        # A port at which nobody listens on that address once this is closed.
        port = nobody.getsockname()[1]
    settings = stores.settings()
    a, b = settings.servers
    both = ServerAddress("a", (RailAddress(beside.host, port), *a.rails))
    with rank(replace(settings, servers=(both, b))) as one:
        assert one.statistics.servers_ready == 2
        assert "127.0.0.1" in route(one, "a")
    assert any("event=second_choice server=a" in record.getMessage() for record in caplog.records)


# -- afterwards


def test_a_path_that_breaks_later_ends_no_engine(stores: VerbsStores, caplog: pytest.LogCaptureFixture) -> None:
    """Its servers' share is missed until the path is back; nothing goes over tcp meanwhile."""
    with rank(stores.settings()) as one:
        check(one, range(8))
        stores.world.server_nic.troubles.silent = True
        stores.servers["a"].stop()
        stores.servers["a"].start()
        eventually(lambda: one.statistics.servers_ready < 2, "server a is gone")
        eventually(
            lambda: any("does not reach this host's memory" in record.getMessage() for record in caplog.records),
            "the reason is said",
        )
        assert one.engine._core.client.connects == {"verbs": 2}
        stores.world.server_nic.troubles.silent = False
        one.ready(2)
        check(one, range(8, 16))


def test_auto_takes_tcp_where_the_data_path_fails_and_goes_back(
    stores: VerbsStores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P072: the tier's ``auto`` says once what it does without, and why; verbs is used again once it works."""
    monkeypatch.setattr(routes_module, "REST_S", 0.5)
    for number in range(400):
        stores.world.server_nic.troubles.requests[number] = Trouble(RETRY_EXC_ERR)
    with rank(stores.settings("auto")) as one:
        one.ready(2)
        assert {route(one, name).split()[0] for name in "ab"} == {"tcp"}
        check(one, range(8))
        said = [record.getMessage() for record in caplog.records if "event=second_choice" in record.getMessage()]
        assert len(said) == 2
        assert all("does not reach this host's memory over RDMA" in line and "using='tcp" in line for line in said)
        stores.world.server_nic.troubles.requests.clear()
        eventually(lambda: {route(one, name).split()[0] for name in "ab"} == {"verbs"}, "verbs is used again")
        check(one, range(8, 16))


def test_auto_without_a_nic_is_tcp_and_says_so_once(
    stores: VerbsStores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(routes_module, "REST_S", 0.1)
    with rank(replace(stores.settings("auto"), rdma_devices=("mlx5_7",))) as one:
        one.ready(2)
        check(one, range(8))
        assert one.engine._core.client.connects == {"tcp": 2}
        time.sleep(0.5)  # several more tries of verbs
    (line,) = [record.getMessage() for record in caplog.records if "event=transport_unavailable" in record.getMessage()]
    assert "mlx5_7 is not on this host" in line and "over tcp" in line


# -- pace


def test_transfers_far_below_their_rail_are_told_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P078: the path works, so nothing else would tell."""
    caplog.set_level(logging.INFO, "memkv.engine")
    monkeypatch.setattr(pace_module, "LEAST_BYTES", 8 * 4096)
    slow = threading.Event()

    async def throttled(connection: ScriptedConnection, request: object) -> None:
        if slow.is_set():
            await anyio.sleep(0.05)

    with scripted("a") as (settings, scripts):
        scripts["a"].expected_bytes_per_s = 10e6
        scripts["a"].on_get = throttled
        with rank(settings) as one:
            one.ready().stored(range(16))

            def loads_until(event: str) -> None:
                end = time.monotonic() + 20
                while not any(f"event={event}" in record.getMessage() for record in caplog.records):
                    assert time.monotonic() < end, f"no event={event}"
                    assert one.loaded(range(16)).lost == {}

            slow.set()
            loads_until("slow_path")
            assert one.statistics.slow_paths == 1
            slow.clear()
            monkeypatch.setattr(pace_module, "SLOW_SHARE", 0.0)  # a fast machine is not promised
            loads_until("path_recovered")
    (line,) = [record.getMessage() for record in caplog.records if "event=slow_path" in record.getMessage()]
    assert "server=a" in line and "expected=0.01" in line and "memkv net topo" in line

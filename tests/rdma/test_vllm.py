"""The main promise over RDMA with two rails: one vLLM stores, another one restores, and the rail that it uses dies."""

from __future__ import annotations

import json
import re
import secrets
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("vllm")

from tests.rdma.scripts.two_rails import BLOCKS, DEVICES, PROMPTS
from tests.support.actors import ServerActor
from tests.vllm.conftest import run_scenario_process
from tests.vllm.scripts.common import BLOCK_TOKENS, Answer, answers_from

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

PORT = 9900
RAILS = ("10.77.0.1", "10.78.0.1")
LIFE_S = 600.0
BLOCK_BYTES = 131_072
VALUES = len(PROMPTS) * BLOCKS
STORED_BYTES = VALUES * BLOCK_BYTES
MTU = 4096
"""Of soft-RoCE over interfaces of 9000 bytes: so many bytes of a value travel in a packet at most."""
WHOLE = [BLOCKS * BLOCK_TOKENS] * len(PROMPTS)


class Store(ServerActor):
    """``memkv start --config`` with both rails' devices."""

    def status(self) -> dict[str, Any]:
        """What its admin HTTP says."""
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT + 1}/v1/status", timeout=10) as answer:
            told: dict[str, Any] = json.load(answer)
        return told


@pytest.fixture(scope="module")
def key() -> str:
    """Shared by store and clients."""
    return secrets.token_hex(32)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, key: str) -> Iterator[Store]:
    """One store for both engines."""
    folder = tmp_path_factory.mktemp("store")
    config = folder / "server.yaml"
    settings = {
        "network": {"address": f"0.0.0.0:{PORT}", "auth_key": key},
        "memory": {"max_size": "64MiB", "hugepages": "off"},
        "rdma": {"devices": list(DEVICES)},
    }
    config.write_text(yaml.safe_dump(settings))
    config.chmod(0o600)
    server = Store("store", folder, config=config)
    server.start()
    try:
        server.wait_ready()
        yield server
        assert server.end() is None, server.tail()
    finally:
        server.kill()


@pytest.fixture(scope="module")
def environ(key: str) -> dict[str, str]:
    """What makes vLLM's processes use it."""
    return {
        "MEMKV_TRANSPORT": "verbs",
        "MEMKV_SERVERS": f"store={'|'.join(f'{address}:{PORT}' for address in RAILS)}",
        "MEMKV_RDMA_DEVICES": ",".join(DEVICES),
        "MEMKV_AUTH_KEY": key,
        # One CPU for all of them, which emulates its system calls.
        "MEMKV_CONNECT_TIMEOUT_S": "15",
        "MEMKV_OP_TIMEOUT_S": "20",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the model and results."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def stored(store: Store, environ: dict[str, str], workplace: Path) -> dict[str, Any]:
    """The first life, and the store after it."""
    result = run_scenario_process("tests.rdma.scripts.two_rails", workplace, "first", environ, LIFE_S, ("first",))
    return result | {"store": store.status()}


@pytest.fixture(scope="module")
def restored(stored: dict[str, Any], store: Store, environ: dict[str, str], workplace: Path) -> dict[str, Any]:
    """The second life, and the store after it."""
    result = run_scenario_process("tests.rdma.scripts.two_rails", workplace, "second", environ, LIFE_S, ("second",))
    return result | {"store": store.status()}


def cached(answers: list[Answer]) -> list[int]:
    """Tokens of each prompt that were not computed."""
    return [answer.cached for answer in answers]


def test_the_server_has_both_rails(stored: dict[str, Any], store: Store) -> None:
    ready = re.findall(r"event=rdma_ready device=(\w+) .*?address=([\d.]+)", store.log.read_text())
    assert dict(ready) == dict(zip(DEVICES, RAILS, strict=True))


def connections(life: dict[str, Any]) -> list[str]:
    """The rails over which connections were made, in order."""
    lines = [line for line in life["log"] if "event=connected" in line]
    return [found[1] for line in lines if (found := re.search(r"transport=verbs rail=(\d)", line))]


def test_the_engine_names_the_devices_that_it_may_use(stored: dict[str, Any]) -> None:
    """P069, P070, P078: for each address its own NIC, with the reason, GID and MTU."""
    told = [
        re.findall(r"event=rail rank=0 device=(\w+) .*mtu=4096 .*server='?([\d.]+)'? reason=", line)
        for line in stored["log"]
    ]
    assert {pair for pairs in told for pair in pairs} == set(zip(DEVICES, RAILS, strict=True))


def test_the_bytes_travelled_by_rdma_over_the_first_rail(stored: dict[str, Any], restored: dict[str, Any]) -> None:
    """P072, P078: by the kernel's own count of packets, whatever any log says."""
    least = STORED_BYTES // MTU
    for name, life in (("stored", stored), ("restored", restored)):
        used, other = (life[f"{name} packets"][device] for device in DEVICES)
        assert least <= used < 3 * least and other == 0, (name, life[f"{name} packets"])


def test_every_block_is_stored(stored: dict[str, Any]) -> None:
    assert stored["settled"]
    assert stored["store"]["table"]["complete"] == VALUES
    assert stored["store"]["counters"]["put_bytes"] == STORED_BYTES


def test_another_process_restores_all_of_them(stored: dict[str, Any], restored: dict[str, Any]) -> None:
    assert cached(answers_from(restored["restored"])) == WHOLE
    assert restored["metrics"]["external_prefix_cache_hits"] == sum(WHOLE)
    assert restored["metrics"]["kv_offload_load_bytes"] == STORED_BYTES


def test_answers_are_those_of_the_cold_run_and_of_vllms_own_cache(
    stored: dict[str, Any], restored: dict[str, Any]
) -> None:
    cold, warm, made = (answers_from(answers) for answers in (stored["cold"], stored["warm"], restored["restored"]))
    assert cached(cold) == [0] * len(PROMPTS) and cached(warm) == WHOLE
    for one, own, other in zip(cold, warm, made, strict=True):
        assert other.same_tokens(one) and other.distance(one) < 1e-4
        assert other == own  # to the last bit


def test_a_rail_that_dies_costs_no_answer(stored: dict[str, Any], restored: dict[str, Any]) -> None:
    """Its blocks are computed, or come over the other rail; the engine goes on."""
    for answers in map(answers_from, restored["losing"]):
        for made, one in zip(answers, answers_from(stored["cold"]), strict=True):
            assert made.same_tokens(one) and made.distance(one) < 1e-4


def test_after_it_everything_comes_over_the_other_rail(stored: dict[str, Any], restored: dict[str, Any]) -> None:
    made, warm = answers_from(restored["one rail"]), answers_from(stored["warm"])
    assert cached(made) == WHOLE, restored["log"]
    assert made == warm  # to the last bit
    sent = restored["one rail packets"]
    assert sent[DEVICES[1]] >= STORED_BYTES // MTU and sent[DEVICES[0]] < 100, sent
    # Of the engine and of the scheduler side; only the engine needs a NIC, and so another rail.
    assert set(connections(stored)) == {"0"} and connections(restored) == ["0", "0", "1"]


def test_nothing_is_left_on_the_server(stored: dict[str, Any], restored: dict[str, Any]) -> None:
    assert restored["store"]["server"]["sessions"] == 0
    assert restored["store"]["table"]["pinned"] == 0 and restored["store"]["table"]["reserved"] == 0

"""Which medium is chosen on which host, whether staging fits on a GPU, and the lines that say so."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from memkv_vllm.config import torch_allocator_settings
from memkv_vllm.engine.medium import HostMedium
from memkv_vllm.engine.plan import GPU_MARGIN_BYTES, MIB, GpuRoom, misfit, plan_staging
from memkv_vllm.errors import EnvironmentFault, RailError
from memkv_vllm.integration import scratch
from memkv_vllm.integration.gpu_staging import GpuMedium
from memkv_vllm.integration.scratch import NearestNic, Surroundings, decide, make_medium, nearest_nic
from memkv_vllm.topology import Affinity, Gid, GidKind, Gpu, Host, Nic, Port
from memkv_vllm.transports.base import Capabilities, Region
from memkv_vllm.types import MemoryKind
from tests.support.fake_cuda import GIB, H200, FakeDriver

NEAR, FAR = NearestNic("mlx5_0:1", Affinity.PIX), NearestNic("mlx5_4:1", Affinity.SYS)
GOOD = Surroundings(
    transport="verbs",
    reaches_gpu=True,
    device="cuda",
    gpu=H200,
    gpu_problem="",
    misfit=None,
    nic=NEAR,
    nic_problem="",
)
LLAMA_70B = plan_staging(5 * MIB // 2, tokens_per_block=64)
"""Llama-3.1-70B at TP 8, block 64: 510 MiB."""


def works() -> str:
    return "dmabuf"


def refuses() -> str:
    raise EnvironmentFault("no way to register")


def never() -> str:
    pytest.fail("a registration was tried for nothing")


# ------------------------------------------------------------------------------------------------ the decision


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reaches_gpu": False, "transport": "loopback"}, "transport loopback cannot reach GPU memory"),
        ({"device": "cpu", "gpu": None}, "a device of type 'cpu'"),
        ({"gpu": None, "gpu_problem": "the CUDA driver's library cannot be loaded"}, "cannot be loaded"),
        ({"gpu": H200._replace(rdma_supported=False)}, "VM without GPUDirect RDMA"),
        ({"gpu": H200._replace(writes_ordering=0, can_flush=False)}, "neither orders"),
        ({"misfit": "staging needs 510MiB and 3MiB is there"}, "needs 510MiB and 3MiB is there"),
    ],
)
def test_what_makes_gpu_impossible(change: dict[str, Any], words: str) -> None:
    """``gpu`` refuses, ``auto`` goes to the host and says why; a registration is not even tried."""
    where = dataclasses.replace(GOOD, **change)
    with pytest.raises(EnvironmentFault, match=words) as failure:
        decide("gpu", where, never)
    assert str(failure.value).startswith("memkv_scratch_medium is gpu, but ") and "set it to host" in str(failure.value)
    chosen = decide("auto", where, never)
    assert chosen.medium is MemoryKind.HOST and words in chosen.why
    assert chosen.warns == where.reaches_gpu, "a warning where something can be repaired"
    assert decide("host", where, never) == (MemoryKind.HOST, "", False)


@pytest.mark.parametrize("affinity", [Affinity.PIX, Affinity.PXB])
def test_auto_takes_the_gpu_below_the_switches(affinity: Affinity) -> None:
    where = dataclasses.replace(GOOD, nic=NearestNic("mlx5_0:1", affinity))
    assert decide("auto", where, works).medium is MemoryKind.GPU
    assert not decide("auto", where, works).warns


@pytest.mark.parametrize("affinity", [Affinity.PHB, Affinity.NODE, Affinity.SYS, Affinity.UNKNOWN])
def test_auto_stays_on_the_host_where_no_nic_is_near(affinity: Affinity) -> None:
    where = dataclasses.replace(GOOD, nic=NearestNic("mlx5_0:1", affinity))
    chosen = decide("auto", where, never)
    assert (chosen.medium, chosen.warns) == (MemoryKind.HOST, False)
    assert f"mlx5_0:1 ({affinity.name}, {affinity.words})" in chosen.why
    asked_for = decide("gpu", where, works)
    assert (asked_for.medium, asked_for.warns) == (MemoryKind.GPU, True), "as configured, and said"


def test_auto_stays_on_the_host_where_the_place_is_not_known() -> None:
    where = dataclasses.replace(GOOD, nic=None, nic_problem="the PCI tree shows no GPU")
    assert decide("auto", where, never) == (MemoryKind.HOST, "the PCI tree shows no GPU", False)
    assert decide("gpu", where, works).medium is MemoryKind.GPU


def test_a_registration_that_fails_sends_auto_to_the_host_with_a_warning() -> None:
    """P075: dmabuf, then peermem, then host staging, with one line of why."""
    chosen = decide("auto", GOOD, refuses)
    assert chosen == (MemoryKind.HOST, "no way to register", True)
    with pytest.raises(EnvironmentFault, match="memkv_scratch_medium is gpu, but no way to register"):
        decide("gpu", GOOD, refuses)


def test_at_host_it_is_said_where_auto_would_choose_the_gpu() -> None:
    chosen = decide("host", GOOD, never)
    assert chosen.medium is MemoryKind.HOST and "auto would choose gpu here" in chosen.why and "mlx5_0:1" in chosen.why
    assert decide("host", dataclasses.replace(GOOD, nic=FAR), never).why == ""


# ------------------------------------------------------------------------------------------------ does it fit


def room(free_gib: float, share: float | None = 0.9, total_gib: int = 140) -> GpuRoom:
    return GpuRoom(total_gib * GIB, int(free_gib * GIB), share)


def test_headroom_of_the_worked_example() -> None:
    """The product's own numbers: 510 MiB of 141 GB are 0.38 %, and 13,056 tokens."""
    plan = plan_staging(5 * MIB // 2, tokens_per_block=64, total_gpu_bytes=141 * 10**9)
    assert plan.headroom is not None and f"{100 * plan.headroom:.2f}" == "0.38"
    assert plan.tokens_lost == 204 * 64


@pytest.mark.parametrize(
    ("free_gib", "share", "room_gib"),
    [
        (14, 0.9, 13.5),  # vLLM has taken all of its share: what is free is free
        (20, 0.9, 13.5),  # 6 GiB of it are still to come
        (7, 0.9, 6.5),  # others are on this GPU too
        (0.25, 0.9, 0),
        (20, None, 19.5),  # nobody says what is to come
        (3, 1.0, 0),
    ],
)
def test_room_leaves_vllm_what_it_was_promised(free_gib: float, share: float | None, room_gib: float) -> None:
    assert room(free_gib, share).room_bytes == pytest.approx(room_gib * GIB, abs=2)


def test_what_fits_to_the_last_byte_fits() -> None:
    total = 140 * GIB
    enough = GpuRoom(total, LLAMA_70B.scratch_bytes + GPU_MARGIN_BYTES, 0.5)
    assert misfit(LLAMA_70B, enough) is None
    assert misfit(LLAMA_70B, dataclasses.replace(enough, free_bytes=enough.free_bytes - 1)) is not None


def test_a_misfit_has_all_the_numbers_and_ways_that_would_help() -> None:
    assert misfit(LLAMA_70B, room(1.5, share=0.995)) == (
        "staging needs 510MiB (threads=4 x chunk=51 x value=2.5MiB; 0.36 % of the GPU, 13056 tokens of KV cache) "
        "and 204.8MiB is there for it: 143360MiB in all, 1536MiB free, of it 819.2MiB promised to vLLM "
        "(gpu_memory_utilization=0.995) and 512MiB left for CUDA graphs and libraries; lower gpu_memory_utilization "
        "to 0.99, or set memkv_scratch_mb_per_thread to 51, or set memkv_scratch_medium: host"
    )


@pytest.mark.parametrize("free_gib", [0.0, 0.2, 0.9, 3.0, 6.0])
@pytest.mark.parametrize("share", [0.95, 0.97, 0.999])
def test_the_share_that_is_proposed_fits(share: float, free_gib: float) -> None:
    """At its next start vLLM takes so much less, whether it has taken all of its share by now or not."""
    now = room(free_gib, share)
    text = misfit(LLAMA_70B, now)
    if text is None:
        assert now.room_bytes >= LLAMA_70B.scratch_bytes
        return
    proposed = float(text.split("gpu_memory_utilization to ")[1].split(",")[0])
    assert proposed < share
    given_up = int((share - proposed) * now.total_bytes)
    assert now.free_bytes - now.promised_bytes + given_up - GPU_MARGIN_BYTES >= LLAMA_70B.scratch_bytes


def test_the_budget_that_is_proposed_fits() -> None:
    tight = GpuRoom(140 * GIB, 800 * MIB, None)
    text = misfit(LLAMA_70B, tight)
    assert text is not None
    budget = int(text.split("memkv_scratch_mb_per_thread to ")[1].split(",")[0])
    assert misfit(plan_staging(5 * MIB // 2, 4, budget, tokens_per_block=64), tight) is None
    assert "memkv_scratch_mb_per_thread" not in str(misfit(LLAMA_70B, GpuRoom(140 * GIB, 515 * MIB, None)))


# ------------------------------------------------------------------------------------------------ where the NIC is


PCI = "0000:1b:00.0"
NEIGHBOUR = ("mlx5_1", ("pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:01.0", "0000:1c:00.0"))


def host_with(*nics: tuple[str, tuple[str, ...]]) -> Host:
    """A GPU at 0000:1b:00.0 below a switch, and NICs at these places."""
    gpu = Gpu(
        0, "0000:1b:00.0", ("pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:00.0", "0000:1b:00.0"), 0, "nv"
    )
    made = tuple(Nic(name, path[-1], path, 0, "mlx5_core", (_port(name),)) for name, path in nics)
    return Host(nics=made, gpus=(gpu,), routes=())


def _port(name: str) -> Port:
    gid = Gid(3, bytes(10) + b"\xff\xff\x0a\x4d\x00\x01", GidKind.ROCE_V2, f"eth_{name}")
    return Port(name, 1, "ACTIVE", "Ethernet", 50e9, f"eth_{name}", 9000, 4096, (gid,))


def test_the_nic_below_the_same_switch_is_the_nearest() -> None:
    host = host_with(
        ("mlx5_0", ("pci0000:16", "0000:16:05.0", "0000:40:00.0")),
        NEIGHBOUR,
    )
    nic = nearest_nic(host, PCI, 0, 8, ())
    assert isinstance(nic, NearestNic) and nic.name == "mlx5_1:1" and nic.shares_switch
    only = nearest_nic(host, PCI, 0, 8, ("mlx5_0",))
    assert isinstance(only, NearestNic) and only.name == "mlx5_0:1" and not only.shares_switch


def test_cuda_and_sysfs_may_write_the_domain_differently() -> None:
    host = host_with(NEIGHBOUR)
    assert isinstance(nearest_nic(host, "00000000:1b:00.0", 0, 1, ()), NearestNic)


def test_a_gpu_that_the_pci_tree_does_not_show() -> None:
    said = nearest_nic(host_with(), "0000:99:00.0", 0, 1, ())
    assert "shows no GPU at 0000:99:00.0" in str(said)
    assert "no RDMA device" in str(nearest_nic(host_with(), "0000:1b:00.0", 0, 1, ())).replace(
        "RDMA devices", "RDMA device"
    )


# ------------------------------------------------------------------------------------------------ making it


class _Transport:
    """A transport with a NIC that takes GPU memory, or one without."""

    name = "fake"

    def __init__(self, *, reaches_gpu: bool = True, problem: str = "", no_rail: bool = False) -> None:
        self.capabilities = Capabilities(one_sided=True, gpu_memory=reaches_gpu, same_host=False)
        self.no_rail = no_rail
        self.problem = problem
        self.tried: list[Region] = []

    @property
    def devices(self) -> tuple[str, ...]:
        if self.no_rail:
            raise RailError("no RDMA port can be used", found="mlx5_1:1 DOWN", wanted="one that is up")
        return ("mlx5_1",)

    def try_registration(self, region: Region) -> str:
        self.tried.append(region)
        if self.problem:
            raise EnvironmentFault(self.problem)
        return "dmabuf"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    made = FakeDriver()
    monkeypatch.setattr(scratch, "CudaDriver", lambda ordinal: made)
    monkeypatch.setattr(scratch, "read_host", lambda: host_with(NEIGHBOUR))
    yield made


def make(wanted: str, transport: _Transport, device: str = "cuda") -> Any:
    cluster: Any = SimpleNamespace(
        transport="verbs", transports=lambda kind: SimpleNamespace(get=lambda name: transport)
    )
    layout: Any = SimpleNamespace(device=SimpleNamespace(type=device, index=0))
    return make_medium(wanted, cluster=cluster, layout=layout, plan=LLAMA_70B, rank=3, num_ranks=8, memory_share=0.9)


@pytest.mark.parametrize("wanted", ["gpu", "auto"])
def test_the_gpu_medium_is_made_after_a_trial(
    wanted: str, driver: FakeDriver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    transport = _Transport()
    with caplog.at_level(logging.INFO, "memkv.integration"):
        medium = make(wanted, transport)
    assert isinstance(medium, GpuMedium)
    (tried,) = transport.tried
    assert tried.length >= LLAMA_70B.scratch_bytes and tried.kind is MemoryKind.GPU
    assert driver.log[:3] == ["allocate", "export", "free"], "the trial's memory is given back"
    assert f"event=scratch_medium rank=3 wanted={wanted} chosen=gpu: NIC mlx5_1:1 (PIX, one PCIe switch)" in caplog.text
    assert "registered by dmabuf; takes 0.36 % of NVIDIA H200, 13056 tokens of KV cache" in caplog.text
    assert "event=expandable_segments rank=3" in caplog.text
    medium.close()
    assert driver.live == 0


def test_auto_says_why_it_went_to_the_host(driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    medium = make("auto", _Transport(problem="neither dmabuf nor peermem"))
    assert isinstance(medium, HostMedium)
    (record,) = [record for record in caplog.records if "event=scratch_medium" in record.getMessage()]
    assert record.levelno == logging.WARNING and "neither dmabuf nor peermem" in record.getMessage()
    assert driver.live == 0


def test_gpu_that_does_not_fit_refuses_with_the_numbers(driver: FakeDriver) -> None:
    driver.now = H200._replace(free_bytes=600 * MIB)
    with pytest.raises(EnvironmentFault, match=r"staging needs 510MiB .* and 88MiB is there for it"):
        make("gpu", _Transport())
    assert driver.live == 0 and "allocate" not in driver.log


def test_host_is_never_refused_for_what_the_gpu_cannot(driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    driver.fails["facts"] = 999
    with caplog.at_level(logging.INFO, "memkv.integration"):
        assert isinstance(make("host", _Transport()), HostMedium)
    assert "event=scratch_medium" not in caplog.text and driver.live == 0


@pytest.mark.parametrize("wanted", ["host", "auto"])
def test_a_host_without_a_port_stages_in_host_memory(
    wanted: str, driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "memkv.integration"):
        assert isinstance(make(wanted, _Transport(no_rail=True)), HostMedium)
    assert ("found mlx5_1:1 DOWN" in caplog.text) == (wanted == "auto")


@pytest.mark.parametrize("call", ["facts", "allocate", "free"])
def test_a_driver_that_fails_is_no_traceback(driver: FakeDriver, call: str) -> None:
    driver.fails[call] = 999
    with pytest.raises(EnvironmentFault, match=r"memkv_scratch_medium is gpu, but .*CUDA_ERROR_FAKE \(999\)"):
        make("gpu", _Transport())


def test_the_hint_at_host_costs_no_memory(driver: FakeDriver, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "memkv.integration"):
        assert isinstance(make("host", _Transport()), HostMedium)
    assert "chosen=host: as set; auto would choose gpu here" in caplog.text
    assert driver.log == ["close"]


def test_kv_memory_on_the_cpu_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "CudaDriver", lambda ordinal: pytest.fail("the driver was opened"))
    assert isinstance(make("host", _Transport(), device="cpu"), HostMedium)
    with pytest.raises(EnvironmentFault, match="a device of type 'cpu'"):
        make("gpu", _Transport(), device="cpu")


@pytest.mark.parametrize(
    ("cache", "share"),
    [
        ({"gpu_memory_utilization": 0.9}, 0.9),
        ({"gpu_memory_utilization": 0.9, "kv_cache_memory_bytes": None}, 0.9),
        ({"gpu_memory_utilization": 0.9, "kv_cache_memory_bytes": 1 << 30}, None),
        ({}, None),
    ],
)
def test_what_vllm_takes_of_the_gpu(cache: dict[str, Any], share: float | None) -> None:
    compat = pytest.importorskip("memkv_vllm.integration.compat", reason="vLLM is not installed: make setup")
    assert compat.gpu_memory_utilization(SimpleNamespace(cache_config=SimpleNamespace(**cache))) == share
    assert compat.gpu_memory_utilization(None) is None


def test_the_newer_name_of_the_allocators_settings_wins() -> None:
    assert torch_allocator_settings({}) == ""
    assert torch_allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}) == "a:1"
    assert torch_allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:2"}) == "b:2"

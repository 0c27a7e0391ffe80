"""Which memory a rank's staging slots lie in (``memkv_scratch_medium``), and making it.

``gpu`` is what was asked for, or nothing: what stands in its way refuses the start, with the numbers. ``auto`` takes
it on ranks whose NIC reaches the GPU below the PCIe switches, where it fits and a registration was tried and worked;
else host memory, with a line that says why. At ``host`` a line says where ``auto`` would choose ``gpu``.

:func:`decide` is that rule and does nothing else; :func:`make_medium` finds the facts and makes the medium.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from memkv_vllm.config import torch_allocator_settings
from memkv_vllm.engine.api import StagingMedium
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.engine.medium import HostMedium
from memkv_vllm.engine.plan import GpuRoom, StagingPlan, misfit
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.integration.cuda_driver import CudaDriver, CudaError, Driver, GpuFacts
from memkv_vllm.integration.gpu_staging import GpuMedium, obstacle, uses_expandable_segments
from memkv_vllm.integration.layout import BlockLayout
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.topology import Affinity, Host, RailError, choose, read_host
from memkv_vllm.transports.base import RegistrationTrial
from memkv_vllm.transports.registry import AUTO_NAME
from memkv_vllm.types import MemoryKind

__all__ = ["Decision", "NearestNic", "Surroundings", "decide", "make_medium", "nearest_nic"]

logger = logging.getLogger("memkv.integration.scratch")


class NearestNic(NamedTuple):
    """The NIC that a rank uses first, and what lies between it and the rank's GPU."""

    name: str
    affinity: Affinity

    @property
    def shares_switch(self) -> bool:
        """Whether transfers between the two stay below the host bridge."""
        return self.affinity <= Affinity.PXB

    def __str__(self) -> str:
        return f"{self.name} ({self.affinity.name}, {self.affinity.words})"


@dataclass(frozen=True)
class Surroundings:
    """What the decision depends on, of one rank."""

    transport: str
    reaches_gpu: bool
    """The transport can register GPU memory at all."""
    device: str
    """Type of the KV tensors' device, as torch names it."""
    gpu: GpuFacts | None
    gpu_problem: str
    """Why ``gpu`` is None, where it should not be."""
    misfit: str | None
    """Why staging does not fit on the GPU."""
    nic: NearestNic | None
    nic_problem: str
    """Why ``nic`` is None."""


class Decision(NamedTuple):
    """Where the slots go, and the line that says so; ``warns`` where somebody may have wanted it otherwise."""

    medium: MemoryKind
    why: str
    """Empty where there is nothing to say."""
    warns: bool


def _impossible(where: Surroundings) -> str | None:
    """Why staging cannot be in GPU memory; None where nothing speaks against trying it."""
    if not where.reaches_gpu:
        return f"transport {where.transport} cannot reach GPU memory"
    if where.device != "cuda":
        return f"the KV cache is on a device of type {where.device!r}, not in the memory of an NVIDIA GPU"
    if where.gpu is None:
        return where.gpu_problem
    return obstacle(where.gpu) or where.misfit


def _far(where: Surroundings) -> str | None:
    """Why ``auto`` does not choose ``gpu`` where it is possible."""
    if where.nic is None:
        return where.nic_problem
    if not where.nic.shares_switch:
        return f"no NIC that this rank may use shares a PCIe switch with its GPU; the nearest is {where.nic}"
    return None


def decide(wanted: str, where: Surroundings, try_it: Callable[[], str]) -> Decision:
    """Choose the medium.

    Args:
        wanted: ``host``, ``gpu`` or ``auto``.
        where: the facts.
        try_it: allocates, registers and frees; returns how it was registered. Called only where the medium is then
            to be used. Raises EnvironmentFault.

    Raises:
        EnvironmentFault: ``gpu`` is wanted and cannot be had.
    """
    impossible, far = _impossible(where), _far(where)
    if wanted == "host":
        if impossible is None and far is None:
            return Decision(MemoryKind.HOST, f"as set; auto would choose gpu here: NIC {where.nic}, and it fits", False)
        return Decision(MemoryKind.HOST, "", False)
    if wanted == "auto" and impossible is None and far is not None:
        return Decision(MemoryKind.HOST, far, False)
    if impossible is None:
        try:
            return Decision(MemoryKind.GPU, f"NIC {where.nic or 'unknown'}, registered by {try_it()}", far is not None)
        except EnvironmentFault as error:
            impossible = str(error)
    if wanted == "gpu":
        raise EnvironmentFault(
            f"memkv_scratch_medium is gpu, but {impossible}; set it to host, or to auto to let memkv choose"
        )
    # A transport without GPU memory is nothing to repair; all else may be.
    return Decision(MemoryKind.HOST, impossible, where.reaches_gpu)


def nearest_nic(host: Host, pci: str, rank: int, num_ranks: int, devices: Sequence[str]) -> NearestNic | str:
    """The first choice of a rank whose GPU is at ``pci``, or why there is none. Pure."""
    index = next((gpu.index for gpu in host.gpus if _same_pci(gpu.pci, pci)), None)
    if index is None:
        return f"the PCI tree shows no GPU at {pci} (a VM or container without it), so its nearest NIC is not known"
    try:
        first = choose(host, index, rank, num_ranks, devices)[0]
    except RailError as error:
        return str(error)
    return NearestNic(first.name, first.affinity)


def _same_pci(one: str, other: str) -> bool:
    """CUDA writes four digits of the domain, sysfs four or more."""
    return [int(part, 16) for part in one.replace(".", ":").split(":")] == [
        int(part, 16) for part in other.replace(".", ":").split(":")
    ]


def make_medium(
    wanted: str,
    *,
    cluster: ClusterSettings,
    layout: BlockLayout,
    plan: StagingPlan,
    rank: int,
    num_ranks: int,
    memory_share: float | None,
) -> StagingMedium:
    """The medium of a rank, by the setting and what this host has; logs one line about it.

    Args:
        wanted: ``memkv_scratch_medium``.
        cluster: names the transport and the NICs that may be used.
        layout: the KV tensors.
        plan: how much is needed.
        rank: of ``num_ranks``.
        num_ranks: of the engine.
        memory_share: what vLLM takes of the GPU (``gpu_memory_utilization``), where known.

    Raises:
        EnvironmentFault: ``gpu`` is wanted and cannot be had; says why, with the numbers.
    """
    try:
        trial = _trial(wanted, cluster, layout)
    except EnvironmentFault:
        if wanted == "host":
            return HostMedium()  # it is the engine's to say that its transport cannot run here
        raise
    driver, problem = _open_driver(layout) if trial is not None else (None, "")
    attempt = _Attempt(trial, driver, plan, memory_share)
    try:
        where = attempt.look(cluster.transport, layout.device.type, problem, rank, num_ranks)
        decision = decide(wanted, where, attempt.run)
    except BaseException:
        attempt.close()
        raise
    _say(wanted, decision, where, plan, rank)
    if decision.medium is MemoryKind.GPU and attempt.medium is not None:
        return attempt.medium
    attempt.close()
    return HostMedium()


def _trial(wanted: str, cluster: ClusterSettings, layout: BlockLayout) -> RegistrationTrial | None:
    """The transport, to try it; None where it takes no GPU memory, or where the answer could change nothing."""
    if cluster.transport == AUTO_NAME or (wanted == "host" and layout.device.type != "cuda"):
        return None
    transport = cluster.transports(PeerKind.ENGINE).get(cluster.transport)
    # The capability promises the trial.
    return cast(RegistrationTrial, transport) if transport.capabilities.gpu_memory else None


def _open_driver(layout: BlockLayout) -> tuple[Driver | None, str]:
    """The driver of the KV tensors' device; else None, and why."""
    if layout.device.type != "cuda":
        return None, ""
    try:
        return CudaDriver(layout.device.index or 0), ""
    except (CudaError, EnvironmentFault) as error:
        return None, str(error)


class _Attempt:
    """Looks at what there is; makes the medium, and a region of it for as long as it takes to register it.

    Args:
        transport: None where it takes no GPU memory.
        driver: None where there is none, or nobody to use it.
        plan: how much is needed.
        memory_share: what vLLM takes of the GPU, where known.
    """

    def __init__(
        self, transport: RegistrationTrial | None, driver: Driver | None, plan: StagingPlan, memory_share: float | None
    ) -> None:
        self.medium: GpuMedium | None = None
        self._transport = transport
        self._driver = driver
        self._plan = plan
        self._memory_share = memory_share

    def look(self, transport: str, device: str, problem: str, rank: int, num_ranks: int) -> Surroundings:
        """The facts; ``problem`` is why there is no driver."""
        facts: GpuFacts | None = None
        nic: NearestNic | str = problem
        if self._driver is not None and self._transport is not None:
            try:
                facts = self._driver.facts()
                nic = nearest_nic(read_host(), facts.pci, rank, num_ranks, self._transport.devices)
            except CudaError as error:
                problem = f"the GPU cannot be asked: {error}"
            except RailError as error:
                nic = str(error)
        return Surroundings(
            transport=transport,
            reaches_gpu=self._transport is not None,
            device=device,
            gpu=facts,
            gpu_problem=problem,
            misfit=None if facts is None else self.misfit(facts),
            nic=nic if isinstance(nic, NearestNic) else None,
            nic_problem=nic if isinstance(nic, str) else "",
        )

    def misfit(self, facts: GpuFacts) -> str | None:
        """Why staging does not fit now."""
        return misfit(self._plan, GpuRoom(facts.total_bytes, facts.free_bytes, self._memory_share))

    def run(self) -> str:
        """How it was registered. Raises EnvironmentFault."""
        assert self._driver is not None and self._transport is not None
        try:
            self.medium = GpuMedium(self._driver, self.misfit)
            region = self.medium.make_region(0, self._plan.scratch_bytes)
            try:
                return self._transport.try_registration(region)
            finally:
                self.medium.free(region)
        except CudaError as error:
            raise EnvironmentFault(f"the GPU's driver failed: {error}") from error

    def close(self) -> None:
        """The medium is not used."""
        if self.medium is not None:
            self.medium.close()
        elif self._driver is not None:
            self._driver.close()


def _say(wanted: str, decision: Decision, where: Surroundings, plan: StagingPlan, rank: int) -> None:
    if not decision.why:
        return
    why, chosen = decision.why, decision.medium
    if chosen is MemoryKind.GPU and where.gpu is not None:
        share = plan.scratch_bytes / where.gpu.total_bytes
        why += f"; takes {100 * share:.2f} % of {where.gpu.name}, {plan.tokens_lost} tokens of KV cache"
    level = logging.WARNING if decision.warns else logging.INFO
    logger.log(level, "event=scratch_medium rank=%d wanted=%s chosen=%s: %s", rank, wanted, chosen.value, why)
    if chosen is MemoryKind.GPU and uses_expandable_segments(torch_allocator_settings()):
        logger.info(
            "event=expandable_segments rank=%d: PyTorch takes its memory by cuMemCreate, which peermem cannot "
            "register; staging is allocated apart, by cuMemAlloc, and is not affected",
            rank,
        )

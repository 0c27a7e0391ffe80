"""The verbs data path of a server, which sessions choose by CONNECT; see ``memkv_vllm.transports.base.DataPath``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from memkv_vllm.config import ServerConfig
from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.topology import read_host
from memkv_vllm.transports.faults import FaultPlan
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.regions import DEFAULT_MAX_REGION_BYTES, DEFAULT_MAX_REGIONS
from memkv_vllm.transports.verbs.bulk import BulkOptions, VerbsBulk
from memkv_vllm.transports.verbs.opening import Knobs
from memkv_vllm.transports.verbs.provider import Provider
from memkv_vllm.transports.verbs.providers import load_provider
from memkv_vllm.transports.verbs.rails import Rails

__all__ = ["VerbsDataPath"]

CHOSEN = Knobs()
"""Everything is chosen from the NIC."""


class VerbsDataPath:
    """RDMA on the ports that the settings name. Opens nothing before :meth:`open`.

    Args:
        devices: names such as ``mlx5_0`` or ``mlx5_0:1``, one per rail; at least one.
        knobs: what settings fix of GID, traffic class, service level and MTU.
        max_regions: regions per session.
        max_region_bytes: bytes of all regions of one session.
        provider: the verbs library; None: the default one.
        root: where ``/sys``, ``/proc`` and ``/dev`` are.
        listen_host: the address that the server listens on, for a warning; empty: all.
        faults: what to break, in tests.
    """

    name = "verbs"

    def __init__(
        self,
        devices: Sequence[str],
        knobs: Knobs = CHOSEN,
        *,
        max_regions: int = DEFAULT_MAX_REGIONS,
        max_region_bytes: int = DEFAULT_MAX_REGION_BYTES,
        provider: Provider | None = None,
        root: Path = Path("/"),
        listen_host: str = "",
        faults: FaultPlan | None = None,
    ) -> None:
        if not devices:
            raise LocalProtocolError("a verbs data path without devices")
        self._devices = tuple(devices)
        self._knobs = knobs
        self._options = BulkOptions(max_regions, max_region_bytes, faults)
        self._provider = provider
        self._root = root
        self._listen_host = listen_host
        self._rails: Rails | None = None

    @classmethod
    def from_config(cls, config: ServerConfig) -> VerbsDataPath:
        """On the devices of ``config.rdma``, with the bounds of ``config.limits``."""
        rdma, limits = config.rdma, config.limits
        return cls(
            rdma.devices,
            Knobs(rdma.gid_index, rdma.traffic_class, rdma.service_level, rdma.mtu),
            max_regions=limits.max_regions_per_session,
            max_region_bytes=limits.max_region_bytes,
            listen_host=config.network.address.host,
        )

    async def open(self, memory: HostMemory) -> None:
        """Open the ports and register the arena; see the protocol."""
        provider = self._provider or load_provider()
        rails = self._rails = Rails(read_host(self._root), self._devices, self._knobs, memory)
        await rails.open(provider, self._root, self._listen_host)

    def make(self, local_host: str, *, cut: Callable[[], None], counted: Callable[[str], None]) -> VerbsBulk:
        """The data path of one session; see the protocol."""
        if self._rails is None:
            raise LocalProtocolError("the verbs data path was not opened")
        return VerbsBulk(self._rails, local_host, self._options, cut=cut, counted=counted)

    def health(self) -> list[str]:
        """What is wrong with the ports now; see the protocol."""
        return [] if self._rails is None else self._rails.health()

    async def aclose(self) -> None:
        """Close everything, after the last session was fenced; see the protocol."""
        rails, self._rails = self._rails, None
        if rails is not None:
            await rails.aclose()

"""The ports that a server serves on: opened and checked once, with the arena registered on each device.

A session's queue pairs are made on the port that its control connection came to: that is the client's rail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import TypeVar

import anyio

from memkv_vllm.errors import EnvironmentFault, RailError, StoreError
from memkv_vllm.topology import Host, Rail, gid_address, pair
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs.active import SCRATCH_BYTES, ActiveEnd, Nic, Scratch
from memkv_vllm.transports.verbs.endpoints import DATA_PATH, Endpoint
from memkv_vllm.transports.verbs.opening import Knobs, OpenPort, check_port, open_rail, rail_of
from memkv_vllm.transports.verbs.preflight import check_devices, memlock_problem, read_memlock
from memkv_vllm.transports.verbs.provider import Access, Device, Provider, VerbsError
from memkv_vllm.transports.verbs.threads import NicThreads
from memkv_vllm.transports.verbs.watching import PortWatch, doubtful_address

__all__ = ["Rails"]

T = TypeVar("T")

logger = logging.getLogger("memkv.transports.verbs")

_WARNED_EVENTS = ("port_err", "device_fatal", "qp_fatal", "cq_err", "gid_change", "lid_change")


class Rails:
    """See the module's text. Belongs to one event loop; made by :meth:`open`.

    Args:
        host: this host, as it was when they were opened.
        devices: names of the settings.
        knobs: what settings fix.
        memory: the arena.
    """

    def __init__(self, host: Host, devices: Sequence[str], knobs: Knobs, memory: HostMemory) -> None:
        self.ports: list[OpenPort] = []
        """What is served on, in the order of the settings."""
        self._host = host
        self._devices = tuple(devices)
        self._knobs = knobs
        self._memory = memory
        self._scratch = HostMemory.create("verbs-scratch", SCRATCH_BYTES)
        self._nics: dict[str, Nic] = {}
        self._opened: list[Device] = []
        self._watch = PortWatch(())
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="memkv-verbs")
        """Opens and closes; what sessions need is done by the threads of their NIC."""

    # -- start and end

    async def open(self, provider: Provider, root: Path, listen_host: str = "") -> None:
        """Open every port and register the arena on every device, which may take seconds per 10 GiB.

        Args:
            provider: the verbs library.
            root: where ``/proc`` and ``/dev`` are.
            listen_host: where clients' control connections can come to; empty: everywhere.

        Raises:
            EnvironmentFault: one cannot be used, or the arena not registered; says what was found and the fix.
        """
        await self._in_thread(lambda: self._open_ports(provider, root), self._executor)
        self._watch = PortWatch([port.rail for port in self.ports])
        num_bytes = self._memory.length
        for device in self._opened:
            logger.info("event=rdma_registering device=%s arena_bytes=%d", device.name, num_bytes)
            self._nics[device.name] = await self._in_thread(partial(self._register, device), self._executor)
            self._loop.add_reader(device.async_fd, self._on_event, device)
        for port in self.ports:
            rail = port.rail
            logger.info(
                "event=rdma_ready device=%s port=%d gid=%s gid_index=%d mtu=%d address=%s traffic_class=%d "
                "service_level=%d rate=%s max_reads=%d library=%s reason=%r",
                rail.device,
                rail.port,
                gid_address(rail.gid),
                rail.gid_index,
                port.mtu,
                rail.address or "",
                port.traffic_class,
                port.service_level,
                rail.rate,
                port.max_reads_initiated,
                provider.name,
                rail.reason,
            )
            if problem := doubtful_address(rail, listen_host):
                logger.warning("event=rdma_address device=%s port=%d reason=%r", rail.device, rail.port, problem)

    def health(self) -> list[str]:
        """What is wrong with the ports now, one line each."""
        return self._watch.health()

    async def aclose(self) -> None:
        """Close the devices, after the last session was fenced. A second call does nothing."""
        nics = tuple(self._nics.values())
        self._nics.clear()
        for nic in nics:
            self._loop.remove_reader(nic.device.async_fd)
        await self._in_thread(self._close, self._executor)
        for nic in nics:
            nic.threads.close()
        self._executor.shutdown()
        self._scratch.close()

    # -- sessions

    async def connect(self, local_host: str, peer: Endpoint) -> ActiveEnd:
        """Queue pairs for a session whose control connection arrived at ``local_host``.

        Raises:
            StoreError: they cannot be had (code ``data_path``); says why and what to do.
        """
        rail = self._rail_at(local_host)
        nic = self._nics[rail.device]
        try:
            return await self._in_thread(lambda: ActiveEnd.make(nic, rail, self._knobs, peer), nic.threads.making)
        except EnvironmentFault as error:
            raise StoreError(f"the server's side: {error}", DATA_PATH) from error
        except VerbsError as error:
            raise StoreError(
                f"the server's NIC {rail.name} did not connect {len(peer.queue_pairs)} queue pairs to "
                f"{gid_address(peer.gid)} (MTU {peer.mtu}): {error}; too many sessions, or no route there from "
                f"{rail.netdev or rail.name} (ip route get; ip neigh)",
                DATA_PATH,
            ) from error

    def start_ending(self, end: ActiveEnd, work: Callable[[], T]) -> asyncio.Future[T]:
        """Begin ``work``, which takes queue pairs of ``end`` down, in a thread; the future is the caller's to await."""
        return self._loop.run_in_executor(self._nics[end.port.rail.device].threads.ending, work)

    # -- inside

    async def _in_thread(self, work: Callable[[], T], executor: ThreadPoolExecutor) -> T:
        """Run a call that blocks. It is waited for whatever happens: nothing that it makes gets lost."""
        with anyio.CancelScope(shield=True):
            result = await self._loop.run_in_executor(executor, work)
        return result

    def _open_ports(self, provider: Provider, root: Path) -> None:
        check_devices(provider, self._host, self._devices, root)
        by_name: dict[str, Device] = {}
        for name in self._devices:
            rail = rail_of(self._host, name, self._knobs.gid_index)
            if rail.device in by_name:
                self.ports.append(check_port(by_name[rail.device], rail, self._knobs))
            else:
                self.ports.append(open_rail(provider, rail, self._knobs))
                by_name[rail.device] = self.ports[-1].device
                self._opened.append(self.ports[-1].device)
        needed = (self._memory.length + SCRATCH_BYTES) * len(self._opened)
        purpose = f"the arena of {self._memory.length / 2**20:.1f} MiB on {len(self._opened)} devices"
        if problem := memlock_problem(read_memlock(root), needed, purpose):
            raise EnvironmentFault(f"{problem}; or lower memory.max_size")

    def _register(self, device: Device) -> Nic:
        try:
            domain = device.protection_domain()
            arena = domain.register(self._memory.address, self._memory.length, Access.LOCAL)
            scratch = domain.register(self._scratch.address, SCRATCH_BYTES, Access.LOCAL)
        except VerbsError as error:
            raise EnvironmentFault(
                f"the arena of {self._memory.length / 2**20:.1f} MiB cannot be registered on {device.name}: {error}; "
                f"the limit of locked memory (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1), the memory "
                f"of this host, or the device's own limit (ibv_devinfo -v: max_mr_size) is too small for "
                f"memory.max_size"
            ) from error
        return Nic(device, domain, arena, self._memory, Scratch(self._scratch, scratch.lkey), NicThreads(device.name))

    def _close(self) -> None:
        for device in self._opened:
            try:
                device.close()
            except VerbsError as error:
                logger.error("event=rdma_close_failed device=%s reason=%r", device.name, str(error))

    def _rail_at(self, local_host: str) -> Rail:
        """The rail of the served port that has the address ``local_host``.

        Raises:
            StoreError: none has it.
        """
        try:
            address = ip_address(local_host)
            if isinstance(address, IPv6Address) and address.ipv4_mapped:
                address = address.ipv4_mapped
            rail = pair(self._host, address, devices=self._devices, gid_index=self._knobs.gid_index)
            port = next(port for port in self._host.ports if port.name == rail.name)
            known = {gid.address for gid in port.gids}
            # A link-local address has a scope here and none in the table.
            plain = IPv6Address(address.packed) if isinstance(address, IPv6Address) else address
            if rail.device in self._nics and (plain in known or port.link_layer == "InfiniBand"):
                return rail
        except (RailError, ValueError):
            pass  # said below, in the words of this end
        served = ", ".join(f"{port.rail.address or 'InfiniBand'} ({port.rail.name})" for port in self.ports)
        raise StoreError(
            f"this server was reached at {local_host or 'an unknown address'}, which is of none of its RDMA ports: it "
            f"serves verbs on {served}; name those addresses in servers (name=addr0|addr1), or that port's device in "
            f"the server's rdma.devices",
            DATA_PATH,
        )

    def _on_event(self, device: Device) -> None:
        try:
            events = device.async_events()
        except VerbsError as error:
            # The kernel took it away. Its descriptor stays readable: the loop would do nothing else any more.
            self._loop.remove_reader(device.async_fd)
            logger.error(
                "event=rdma_device_lost device=%s reason=%r", device.name, self._watch.lost(device.name, str(error))
            )
            return
        for event in events:
            level = logging.WARNING if event.name in _WARNED_EVENTS else logging.INFO
            text = self._watch.note(device.name, event)
            logger.log(
                level, "event=rdma_%s device=%s element=%d%s", event.name, device.name, event.element,
                f": {text}" if text else "",
            )  # fmt: skip

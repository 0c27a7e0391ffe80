"""Client side of verbs: control over TCP from the rail's own address, bytes over queue pairs that only the server uses.

A connection brings its queue pairs up when the first region is registered::

    make queue pairs -> CONNECT (both ends' numbers) -> connect them -> register the memory -> REGISTER, which the
    server answers after it has read some bytes of the region, and written some beside it, over every queue pair

so a path that does not carry packets is found there, as :class:`~memkv_vllm.errors.DataPathError`, and not by the first
value. Fencing needs nothing from the server: queue pairs destroyed, memory deregistered. It runs in a worker thread, as
everything does that calls the verbs library.

A client that moves no bytes (the scheduler's prober, tools) needs no NIC and opens no library.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Sequence
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import TypeVar

import anyio
from anyio import to_thread

from memkv_vllm.errors import (
    ConnectError,
    DataPathError,
    EnvironmentFault,
    FenceTimeout,
    LocalProtocolError,
    RailError,
    StoreError,
)
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.connect import Connect
from memkv_vllm.protocol.messages import Register, Request
from memkv_vllm.protocol.session import Established, PeerKind
from memkv_vllm.topology import Host, Rail, choose, gid_address, pair
from memkv_vllm.transports.base import Capabilities, Region, remaining
from memkv_vllm.transports.control import ChannelStatistics, ControlChannel
from memkv_vllm.transports.sockets import Address, Resolved, dial, dial_address, resolve
from memkv_vllm.transports.streams import ControlStream, SocketStream
from memkv_vllm.transports.tls import TlsStream, client_context
from memkv_vllm.transports.verbs import preflight
from memkv_vllm.transports.verbs.endpoints import DATA_PATH, MAX_QUEUE_PAIRS, Endpoint
from memkv_vllm.transports.verbs.facts import HostFacts
from memkv_vllm.transports.verbs.gpu_memory import try_registration
from memkv_vllm.transports.verbs.opening import Knobs, OpenPort
from memkv_vllm.transports.verbs.passive import PassiveEnd
from memkv_vllm.transports.verbs.preflight import ServerRails
from memkv_vllm.transports.verbs.provider import Provider, VerbsError
from memkv_vllm.transports.verbs.providers import load_provider
from memkv_vllm.types import Deadline, MemoryKind

R = TypeVar("R")
T = TypeVar("T")

_log = logging.getLogger("memkv.transports.verbs")

NAME = "verbs"
DEFAULT_NUM_QUEUE_PAIRS = 4
"""Two for puts and two for gets: two saturate the NICs that are known."""

CLOSE_S = 5.0
"""How long a connection that is closed waits for its resources; what is not released by then is tried again."""


class VerbsConnection:
    """One connection; see ``memkv_vllm.transports.base.ClientConnection``."""

    def __init__(self, channel: ControlChannel, end: PassiveEnd | None, transport: VerbsClientTransport, server: str):
        """Use ``VerbsClientTransport.connect``. ``end``: None for a connection that moves no bytes."""
        self._channel = channel
        self._end = end
        self._transport = transport
        self._server = server
        self._label = _label(server)
        self._is_up = False
        self._setting_up = anyio.Lock()

    @property
    def established(self) -> Established:
        """The handshake's outcome."""
        return self._channel.established

    @property
    def alive(self) -> bool:
        """False once the connection has ended."""
        return self._channel.alive

    @property
    def expected_bytes_per_s(self) -> float | None:
        """The port's nominal rate; unknown for soft-RoCE."""
        return None if self._end is None else self._end.rail.rate_bytes_per_s

    def statistics(self) -> ChannelStatistics:
        """What the control channel has done."""
        return self._channel.statistics()

    async def run(self) -> None:
        """Drive the connection until it ends; see the protocol."""
        await self._channel.run()

    async def register(self, region: Region, deadline: Deadline) -> None:
        """Let the server reach the region; the first one brings the queue pairs up. See the protocol."""
        end = self._end
        if end is None:
            raise StoreError("this connection was made for control messages only: it has no NIC")
        if region.kind is MemoryKind.HOST and (region.memory is None or region.memory.length != region.length):
            raise LocalProtocolError(f"region {region.id} has no host memory of {region.length} bytes")
        try:
            await self._offer(end, region, deadline)
        except DataPathError:
            self._transport.facts.forget()
            raise

    async def _offer(self, end: PassiveEnd, region: Region, deadline: Deadline) -> None:
        async with self._setting_up:
            if not self._is_up:
                await self._bring_up(end, deadline)
                self._is_up = True
            size = f"registering {region.length / 2**20:.1f} MiB with {end.rail.device}"
            token = await self._off_loop(lambda: end.register(region), deadline, size)
        try:
            await self._channel.request(Register(region.id, region.kind, region.length, token.pack()), deadline)
        except StoreError as error:
            if error.code != DATA_PATH:
                raise
            raise DataPathError(self._unreachable(end, str(error))) from error

    async def request(self, request: Request[R], deadline: Deadline) -> R:
        """Send a request and await its reply; see the protocol."""
        return await self._channel.request(request, deadline)

    async def fence(self, deadline: Deadline) -> None:
        """Destroy the queue pairs and deregister; needs nothing from the server. See the protocol.

        Raises:
            FenceTimeout: a call of the verbs library has not returned by ``deadline``, or it refused to destroy
                something.
        """
        self._channel.close()
        if self._end is not None and not await self._transport.release(self._end, deadline):
            raise FenceTimeout(
                f"{self._label}: queue pairs and registrations on {self._end.rail.name} are not released yet; "
                f"the memory stays in quarantine"
            )

    async def aclose(self) -> None:
        """End the connection; what it holds of the NIC is released too, for that needs nobody else."""
        self._channel.close()
        if self._end is not None:
            with anyio.CancelScope(shield=True):
                await self._transport.release(self._end, Deadline(time.monotonic() + CLOSE_S))

    # -- inside

    async def _bring_up(self, end: PassiveEnd, deadline: Deadline) -> None:
        ours = await self._off_loop(end.make, deadline, f"making queue pairs on {end.rail.name}")
        if end.port is not None:
            self._transport.say_rail(end.port, self._server)
        try:
            theirs = Endpoint.unpack(await self._channel.request(Connect(NAME, ours.pack()), deadline))
        except StoreError as error:
            raise DataPathError(self._unreachable(end, str(error))) from error
        await self._off_loop(lambda: end.connect(theirs), deadline, f"connecting queue pairs on {end.rail.name}")
        _log.info(
            "event=data_path_up server=%s device=%s queue_pairs=%d mtu=%d reads=%d peer_gid=%s",
            self._server,
            end.rail.name,
            len(theirs.queue_pairs),
            theirs.mtu,
            theirs.max_reads,
            gid_address(theirs.gid),
        )

    async def _off_loop(self, call: Callable[[], T], deadline: Deadline, what: str) -> T:
        """Run a call of the verbs library in a worker thread.

        Raises:
            DataPathError: it failed, or has not returned by ``deadline`` (it goes on; the fence waits for it).
        """
        try:
            with anyio.fail_after(remaining(deadline, time.monotonic())):
                return await to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._transport.limiter)
        except TimeoutError:
            raise DataPathError(f"{self._label}: {what} took longer than the deadline") from None
        except VerbsError as error:
            raise DataPathError(f"{self._label}: {what} failed: {self._transport.explain(error)}") from error
        except EnvironmentFault as error:
            raise DataPathError(f"{self._label}: {what} failed: {error}") from error

    def _unreachable(self, end: PassiveEnd, reason: str) -> str:
        here = end.port or end.rail.name
        reason = reason.removeprefix(f"{DATA_PATH}: ")
        return (
            f"{self._label} answers, but does not reach this host's memory over RDMA: {reason}; this end: {here}, "
            f"GID {gid_address(end.rail.gid)}"
        )


class VerbsClientTransport:
    """Connects to servers over RDMA; see ``memkv_vllm.transports.base.ClientTransport``.

    Args:
        devices: the only NICs that may be used, ``mlx5_0`` or ``mlx5_0:1``; none: whichever reaches the server.
        gid_index, traffic_class, service_level, mtu: settings of these names; None: chosen from the NIC.
        num_queue_pairs: of each connection.
        servers: name and addresses of those in the settings, when each of them must be reachable over RDMA.
        staging_bytes: what will be registered with each connection.
        data_path: False: only control messages are exchanged; no NIC is needed and nothing of this host is checked.
        rank: number of this process among the ``num_ranks`` of this host, which share out its NICs.
        num_ranks: see there.
        gpu: PCI address of the rank's GPU, such as ``0000:17:00.0``; empty: none, or not known.
        tls: use TLS for control connections, with ``tls_ca`` and ``tls_server_name`` as for tcp.
        provider: the verbs library; None: the default one.
        root: where ``/sys``, ``/proc`` and ``/dev`` are looked at.

    Raises:
        EnvironmentFault: this host cannot do what is configured; says what was found and the fix. Never is another
            NIC taken than a named one.
        ConfigError: ``tls_ca`` cannot be used.
    """

    name = NAME
    capabilities = Capabilities(one_sided=True, gpu_memory=True, same_host=False, separate_data_path=True)

    def __init__(
        self,
        devices: Sequence[str] = (),
        gid_index: int | None = None,
        traffic_class: int | None = None,
        service_level: int | None = None,
        mtu: int | None = None,
        num_queue_pairs: int = DEFAULT_NUM_QUEUE_PAIRS,
        *,
        servers: Sequence[tuple[str, tuple[str, ...]]] = (),
        staging_bytes: int = 0,
        data_path: bool = True,
        rank: int = 0,
        num_ranks: int = 1,
        gpu: str = "",
        tls: bool = False,
        tls_ca: Path | None = None,
        tls_server_name: str | None = None,
        provider: Provider | None = None,
        root: Path = Path("/"),
    ) -> None:
        if not 1 <= num_queue_pairs <= MAX_QUEUE_PAIRS:
            raise LocalProtocolError(f"num_queue_pairs is {num_queue_pairs}; expected 1 to {MAX_QUEUE_PAIRS}")
        self.limiter = anyio.CapacityLimiter(64)
        """Of worker threads that call the verbs library: apart from those that wait for a GPU."""
        self.facts = HostFacts(root)
        """What connections know of this host."""
        self._wanted = tuple(devices)
        self._servers = [ServerRails(*server) for server in servers]
        self._knobs = Knobs(gid_index, traffic_class, service_level, mtu)
        self._num_queue_pairs = num_queue_pairs
        self._rank, self._num_ranks, self._gpu = rank, num_ranks, gpu
        self._tls, self._tls_server_name = client_context(tls_ca) if tls else None, tls_server_name
        self._root = root
        self._said: set[str] = set()
        self._unreleased: set[PassiveEnd] = set()
        self._provider: Provider | None = None
        if data_path:
            self._provider = load_provider() if provider is None else provider
            self._check_host(self._provider, staging_bytes)

    async def connect(
        self, host: str, port: int, credentials: Credentials, kind: PeerKind, deadline: Deadline
    ) -> VerbsConnection:
        """Connect and authenticate; see the protocol. The control connection leaves from the rail's own address."""
        server = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        label = _label(server)
        rail: Rail | None = None
        if kind is PeerKind.ENGINE and self._provider is not None:
            sock, rail = await self._dial_over_rail(host, port, label, deadline)
        else:
            sock = await dial(host, port, deadline)
        inner = SocketStream(sock)
        stream: ControlStream = inner
        if self._tls is not None:
            stream = TlsStream(inner, self._tls, server_name=self._tls_server_name or host)
        channel = await ControlChannel.open(stream, credentials, kind, deadline, label=label)
        end = None
        if rail is not None and self._provider is not None:
            end = PassiveEnd(self._provider, rail, self._knobs, self._num_queue_pairs, self._root)
            self._unreleased.add(end)
        return VerbsConnection(channel, end, self, server)

    @property
    def devices(self) -> Sequence[str]:
        """The NICs that reach the servers of the settings; where none are known, the first choice of this process.

        Raises:
            RailError: there is none.
        """
        host = self.facts.get()
        rails, _ = self._rails(host)
        return list(dict.fromkeys(rail.name for rail in rails.values())) or self._preferred(host)[:1]

    def first_rail(self, hosts: Sequence[str]) -> int | None:
        """The rail of the NIC that comes first for this process; see ``memkv_vllm.transports.base.RailPreference``."""
        if self._provider is None or len(hosts) < 2:
            return None
        host = self.facts.get()
        order = self._preferred(host)
        try:
            rails, _ = preflight.check_rails(
                host, [ServerRails("", tuple(hosts))], self._wanted, order, self._knobs.gid_index
            )
        except RailError:
            return None  # none can be used now: connecting says so
        places = {name: place for place, name in enumerate(order)}
        ranked = [(places.get(rails[name].name, len(places)), at) for at, name in enumerate(hosts) if name in rails]
        return min(ranked)[1] if ranked else None

    def try_registration(self, region: Region) -> str:
        """Register ``region`` with each of :attr:`devices`; see ``memkv_vllm.transports.base.RegistrationTrial``."""
        provider = load_provider() if self._provider is None else self._provider
        return try_registration(provider, self.devices, region, root=self._root).value

    async def aclose(self) -> None:
        """Release what connections could not yet."""
        for end in tuple(self._unreleased):
            if not await self.release(end, Deadline(time.monotonic() + CLOSE_S)):
                _log.error("event=not_released device=%s: it is left to the end of this process", end.rail.name)

    # -- for its connections

    async def release(self, end: PassiveEnd, deadline: Deadline) -> bool:
        """Release a connection's end in a worker thread; whether everything of it is gone by ``deadline``."""
        end.refuse()
        if not end.is_released:
            timeout_s = remaining(deadline, time.monotonic())
            await to_thread.run_sync(end.close, timeout_s, limiter=self.limiter)
        if end.is_released:
            self._unreleased.discard(end)
        return end.is_released

    def say_rail(self, port: OpenPort, server: str) -> None:
        """Log a port that is used and why, the first time; ``server`` is what it reaches."""
        rail = port.rail
        if str(port) in self._said:
            return
        self._said.add(str(port))
        _log.info(
            "event=rail rank=%d device=%s port=%d gid=%s gid_index=%d mtu=%d rate=%s traffic_class=%d service_level=%d "
            "server=%s reason=%r",
            self._rank,
            rail.device,
            rail.port,
            gid_address(rail.gid),
            rail.gid_index,
            port.mtu,
            rail.rate,
            port.traffic_class,
            port.service_level,
            server,
            rail.reason,
        )

    def explain(self, error: VerbsError) -> str:
        """A library's error with what it means on this host."""
        return preflight.explain_refusal(error, preflight.read_memlock(self._root))

    # -- inside

    def _check_host(self, provider: Provider, staging_bytes: int) -> None:
        host = self.facts.get()
        preflight.check_devices(provider, host, self._wanted, self._root)
        rails, problems = self._rails(host)
        used = list(dict.fromkeys(rails.values()))
        ports = preflight.check_ports(provider, host, used, self._wanted, self._knobs)
        preflight.check_memlock(preflight.read_memlock(self._root), staging_bytes, len(self._servers))
        for address, problem in problems.items():
            _log.warning(
                "event=rail_unusable rank=%d address=%s reason=%r: the server is reached over its other rails only",
                self._rank,
                address,
                str(problem),
            )
        for port in ports:
            reached = [address for address, rail in rails.items() if rail == port.rail]
            self.say_rail(port, ",".join(reached) or "any")

    def _rails(self, host: Host) -> tuple[dict[str, Rail], dict[str, RailError]]:
        return preflight.check_rails(host, self._servers, self._wanted, self._preferred(host), self._knobs.gid_index)

    def _preferred(self, host: Host) -> list[str]:
        gpu = next((gpu.index for gpu in host.gpus if self._gpu and _same_pci(gpu.pci, self._gpu)), None)
        return [choice.name for choice in choose(host, gpu, self._rank, self._num_ranks, self._wanted)]

    def _rail_to(self, host: Host, address: str) -> Rail:
        target = ip_address(address.partition("%")[0])
        return pair(host, target, devices=self._wanted, prefer=self._preferred(host), gid_index=self._knobs.gid_index)

    async def _dial_over_rail(self, host: str, port: int, label: str, deadline: Deadline) -> tuple[socket.socket, Rail]:
        """A socket connected to one of the host's addresses, from the rail that reaches it."""
        found = await resolve(host, port, deadline)
        ways, no_rail = self._ways(await self._host_facts(), found)
        if no_rail:
            self.facts.forget()
            ways, no_rail = self._ways(await self._host_facts(), found)
        problems: list[str] = []
        for index, (family, address, rail) in enumerate(ways):
            share_s = remaining(deadline, time.monotonic()) / (len(ways) - index)
            try:
                source = _source(rail, family)
                return await dial_address(family, address, Deadline(time.monotonic() + share_s), source), rail
            except ConnectError as error:
                problems.append(str(error))
        self.facts.forget()
        if problems:
            raise ConnectError(f"no {label}: {'; '.join(problems)}")
        raise DataPathError(f"{label}: {'; '.join(dict.fromkeys(no_rail))}")

    def _ways(self, host: Host, found: Sequence[Resolved]) -> tuple[list[tuple[int, Address, Rail]], list[str]]:
        """Family, address and rail of each address that a rail reaches, and why none reaches the others."""
        ways: list[tuple[int, Address, Rail]] = []
        no_rail: list[str] = []
        for family, _, _, _, address in found:
            try:
                ways.append((family, address, self._rail_to(host, address[0])))
            except RailError as error:
                no_rail.append(str(error))
        return ways, no_rail

    async def _host_facts(self) -> Host:
        return await to_thread.run_sync(self.facts.get, limiter=self.limiter)


def _label(server: str) -> str:
    """How messages call it."""
    return f"verbs server {server}"


def _same_pci(one: str, other: str) -> bool:
    """CUDA writes four or eight digits of the domain, sysfs four or more."""
    numbers = [[int(part, 16) for part in text.replace(".", ":").split(":")] for text in (one, other)]
    return numbers[0] == numbers[1]


def _source(rail: Rail, family: int) -> Address | None:
    """What a control connection over ``rail`` is bound to; None where the GID says no address of that family."""
    address = rail.address
    if address is None or (address.version == 6) is not (family == socket.AF_INET6):
        return None
    if isinstance(address, IPv6Address):
        scope = socket.if_nametoindex(rail.netdev) if address.is_link_local and rail.netdev else 0
        return str(address), 0, 0, scope
    return str(address), 0

"""Choosing a port of this host and opening its device: what client and server do alike before any queue pair.

Which port is a matter of ``memkv_vllm.topology``; here the verbs library has the last word about it (is it up, which
MTU, which limits), and every way in which that fails has its own message with what was found and the fix.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from memkv_vllm.errors import EnvironmentFault, RailError
from memkv_vllm.topology import CONTAINER_STEP, Host, Rail, allowed_ports, choose_gid, pair, port_state
from memkv_vllm.transports.verbs.provider import (
    MAX_RETRY_COUNT,
    Device,
    DeviceAttributes,
    Path,
    PortAttributes,
    PortState,
    Provider,
    VerbsError,
)

__all__ = ["Knobs", "OpenPort", "check_port", "open_port", "open_rail", "rail_of"]

ACK_TIMEOUT = 14
"""Exponent: 4.096 us x 2**14 = 67 ms for an acknowledgement; with all retries half a second until a peer is dead."""

HOP_LIMIT = 64


class Knobs(NamedTuple):
    """Settings of the same names; None: chosen here."""

    gid_index: int | None = None
    traffic_class: int | None = None
    service_level: int | None = None
    mtu: int | None = None


CHOOSE_ALL = Knobs()


@dataclass(frozen=True)
class OpenPort:
    """A port of an open device, with everything that is chosen on it. Closing ``device`` is its owner's business."""

    device: Device
    rail: Rail
    attributes: DeviceAttributes
    port_attributes: PortAttributes
    mtu: int
    """Path MTU in bytes: the most that this end can."""
    traffic_class: int
    service_level: int

    @property
    def port(self) -> int:
        """Its number, from 1."""
        return self.rail.port

    @property
    def max_reads_accepted(self) -> int:
        """RDMA READs that a queue pair here answers at once, as far as a byte tells."""
        return min(255, self.attributes.max_reads_accepted)

    @property
    def max_reads_initiated(self) -> int:
        """RDMA READs that a queue pair here may have outstanding, as far as a byte tells."""
        return min(255, self.attributes.max_reads_initiated)

    def path(self, mtu: int, max_reads: int) -> Path:
        """How packets of a queue pair travel, with what both ends agreed on."""
        return Path(
            port=self.rail.port,
            gid_index=self.rail.gid_index,
            mtu=mtu,
            traffic_class=self.traffic_class,
            service_level=self.service_level,
            hop_limit=HOP_LIMIT,
            max_reads=max_reads,
            timeout=ACK_TIMEOUT,
            retry_count=MAX_RETRY_COUNT,
        )

    def __str__(self) -> str:
        """For messages: where this end is, as an operator looks for it."""
        rail = self.rail
        where = f"{rail.address} on {rail.netdev}" if rail.address is not None else "InfiniBand"
        return f"{rail.name} ({where}, GID {rail.gid_index}, MTU {self.mtu})"


def open_port(
    provider: Provider, host: Host, wanted: str | None = None, address: str | None = None, knobs: Knobs = CHOOSE_ALL
) -> OpenPort:
    """Open the device of a port: the one called ``wanted``, the one that reaches ``address``, or both in one.

    The caller closes ``device``. Opening takes milliseconds: for a worker thread, or before a loop runs.

    Args:
        provider: the verbs library.
        host: this host.
        wanted: ``mlx5_0`` (its first port that can be used) or ``mlx5_0:1``; never another.
        address: an IP address, the peer's or one of this host.
        knobs: what settings fix.

    Raises:
        EnvironmentFault: there is none, or it cannot be used so; with what was found and the fix.
    """
    devices = [wanted] if wanted else []
    if address is not None:
        rail = pair(host, address, devices=devices, gid_index=knobs.gid_index)
    else:
        rail = rail_of(host, wanted, knobs.gid_index)
    return open_rail(provider, rail, knobs)


def rail_of(host: Host, wanted: str | None, gid_index: int | None = None) -> Rail:
    """The first port that can be used, of the device or port called ``wanted`` if that is given.

    Raises:
        RailError: a named one is missing, or none can be used.
    """
    ports = allowed_ports(host, [wanted] if wanted else [])
    # A GID that is named may do where none is good by itself: then only its absence counts.
    port = next((port for port in ports if not port_state(host, port) or (port.is_up and gid_index is not None)), None)
    if port is None:
        problems = "; ".join(port_state(host, port) for port in ports) or "devices without ports"
        what = f"RDMA device {wanted} cannot be used" if wanted else "no RDMA port can be used"
        raise RailError(what, found=problems, wanted="a port that is up and has an IP address")
    chosen = choose_gid(port, gid_index)
    nic = host.nic_of(port)
    return Rail(
        device=port.device,
        port=port.number,
        gid_index=chosen.gid.index,
        gid=chosen.gid.raw,
        address=chosen.gid.address if port.link_layer != "InfiniBand" else None,
        netdev=chosen.gid.netdev or port.netdev,
        mtu=port.mtu,
        rate_bytes_per_s=None if nic.is_software else port.rate_bytes_per_s,
        reason=f"{'named' if wanted else 'first usable'}; GID {chosen.gid.index}: {chosen.reason}",
    )


def open_rail(provider: Provider, rail: Rail, knobs: Knobs) -> OpenPort:
    """Open the device of ``rail`` and ask it about the port; the caller closes ``device``.

    Raises:
        EnvironmentFault: it cannot be opened, or not used so.
    """
    try:
        device = provider.open(rail.device)
    except VerbsError as error:
        raise EnvironmentFault(_cannot_open(rail, error)) from error
    try:
        return check_port(device, rail, knobs)
    except BaseException:
        with suppress(VerbsError):  # what was wrong before says more
            device.close()
        raise


def check_port(device: Device, rail: Rail, knobs: Knobs) -> OpenPort:
    """The port of ``rail`` on its open device.

    Raises:
        EnvironmentFault: it is down, has lost its GID, answers no RDMA READ, or carries no packets of the MTU set.
    """
    try:
        attributes, port = device.attributes(), device.port(rail.port)
        gid = device.gid(rail.port, rail.gid_index)
    except VerbsError as error:
        raise EnvironmentFault(f"RDMA port {rail.name} cannot be queried: {error}; see: ibv_devinfo -v") from error
    if port.state is not PortState.ACTIVE:
        raise EnvironmentFault(
            f"RDMA port {rail.name} is {port.state.name}; expected ACTIVE: check its cable and the switch's port "
            f"(ip link set {rail.netdev or 'ITS-INTERFACE'} up; ibv_devinfo)"
        )
    if gid != rail.gid:
        raise EnvironmentFault(
            f"GID {rail.gid_index} of {rail.name} is {gid.hex()} to the verbs library and {rail.gid.hex()} in /sys: "
            f"its addresses change at this moment; try again"
        )
    if attributes.max_reads_accepted < 1 or attributes.max_reads_initiated < 1:
        raise EnvironmentFault(
            f"RDMA device {rail.device} does no RDMA READ (max_qp_rd_atom {attributes.max_reads_accepted}, "
            f"max_qp_init_rd_atom {attributes.max_reads_initiated}); another NIC is needed"
        )
    return OpenPort(
        device=device,
        rail=rail,
        attributes=attributes,
        port_attributes=port,
        mtu=_mtu(rail, port, knobs.mtu),
        traffic_class=knobs.traffic_class or 0,
        service_level=knobs.service_level or 0,
    )


def _mtu(rail: Rail, port: PortAttributes, wanted: int | None) -> int:
    most = min(port.active_mtu, rail.mtu or port.active_mtu)
    if wanted is None:
        return most
    if wanted > most:
        raise EnvironmentFault(
            f"mtu is {wanted}, but {rail.name} carries at most {most} (interface {rail.netdev or 'unknown'}): larger "
            f"packets would be dropped; set mtu: {most} (MEMKV_MTU; a server: rdma.mtu), leave it out, or raise the "
            f"interface's MTU on every host and switch of the rail (RDMA 4096 needs 4200 or more)"
        )
    return wanted


def _cannot_open(rail: Rail, error: VerbsError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        step = f"let this user read and write /dev/infiniband/uverbs* (ls -l /dev/infiniband); {CONTAINER_STEP}"
    else:
        step = f"see: ls -l /dev/infiniband, ibv_devinfo -d {rail.device}; {CONTAINER_STEP}"
    return f"RDMA device {rail.device} cannot be opened: {error}; {step}"

"""Numbers of libibverbs' public interface that both providers need. They are part of its ABI and never change."""

from __future__ import annotations

import errno
import secrets

from memkv_vllm.transports.verbs.provider import MAX_RETRY_COUNT, AsyncEvent, LinkLayer, Path, PortState, VerbsError

__all__ = [
    "ERR",
    "INIT",
    "MIN_RNR_TIMER",
    "MTU_CODES",
    "NO_DEVICES",
    "PORT_EVENTS",
    "QP_EVENTS",
    "RESET",
    "RNR_RETRY",
    "RTR",
    "RTS",
    "SEND_SIGNALED",
    "TO_ERR",
    "TO_INIT",
    "TO_RTR",
    "TO_RTS",
    "async_event",
    "check_path",
    "link_layer",
    "mtu_bytes",
    "port_state",
    "random_packet_number",
]

SEND_SIGNALED = 2
"""``IBV_SEND_SIGNALED``."""

RESET, INIT, RTR, RTS, ERR = 0, 1, 2, 3, 6
"""States of a queue pair, of ``enum ibv_qp_state``."""

MIN_RNR_TIMER, RNR_RETRY = 12, 7
"""About receives that are not ready. There are no receives, but the steps demand values."""

_STATE, _ACCESS, _PKEY, _PORT, _AV, _MTU, _TIMEOUT, _RETRY, _RNR = 1, 8, 0x10, 0x20, 0x80, 0x100, 0x200, 0x400, 0x800
_RQ_PSN, _READS, _MIN_RNR, _SQ_PSN, _READS_ACCEPTED, _DEST = 0x1000, 0x2000, 0x8000, 0x10000, 0x20000, 0x100000

TO_INIT = _STATE | _PKEY | _PORT | _ACCESS
TO_RTR = _STATE | _AV | _MTU | _DEST | _RQ_PSN | _READS_ACCEPTED | _MIN_RNR
TO_RTS = _STATE | _SQ_PSN | _TIMEOUT | _RETRY | _RNR | _READS
TO_ERR = _STATE
"""Which attributes each step of a reliable connection sets (``enum ibv_qp_attr_mask``)."""

MTU_CODES = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}
"""Bytes to ``enum ibv_mtu``."""

NO_DEVICES = (errno.ENOSYS, errno.ENOENT)
"""What listing devices fails with where the kernel has no RDMA at all."""

_EVENTS = (
    "cq_err", "qp_fatal", "qp_req_err", "qp_access_err", "comm_est", "sq_drained", "path_mig", "path_mig_err",
    "device_fatal", "port_active", "port_err", "lid_change", "pkey_change", "sm_change", "srq_err",
    "srq_limit_reached", "qp_last_wqe_reached", "client_reregister", "gid_change", "wq_fatal",
)  # fmt: skip
"""By their numbers in ``enum ibv_event_type``."""

QP_EVENTS = frozenset((1, 2, 3, 4, 5, 6, 7, 16))
PORT_EVENTS = frozenset((9, 10, 11, 12, 13, 17, 18))


def async_event(kind: int, element: int) -> AsyncEvent:
    """An event with its name; one that a newer library knows is ``event_N``."""
    return AsyncEvent(kind, _EVENTS[kind] if 0 <= kind < len(_EVENTS) else f"event_{kind}", element)


def mtu_bytes(code: int) -> int:
    """Bytes of an ``enum ibv_mtu``."""
    return 128 << code


def check_path(path: Path) -> None:
    """Refuse what a device would take and must not be given.

    Raises:
        VerbsError: EINVAL: an MTU that does not exist, or a retry count that means "for ever" (some devices, soft-RoCE
            among them, never complete a work request to a dead peer then).
    """
    if path.mtu not in MTU_CODES or not 0 <= path.retry_count <= MAX_RETRY_COUNT:
        raise VerbsError("ibv_modify_qp", errno.EINVAL)


def port_state(code: int) -> PortState:
    """One that this version does not know is ``NOP``: not usable."""
    return PortState(code) if code in PortState._value2member_map_ else PortState.NOP


def link_layer(code: int) -> LinkLayer:
    """One that this version does not know is ``UNSPECIFIED``."""
    return LinkLayer(code) if code in LinkLayer._value2member_map_ else LinkLayer.UNSPECIFIED


def random_packet_number() -> int:
    """24 bits. Random, so that packets of a connection that is gone do not fit into the next one."""
    return secrets.randbits(24)

"""Layouts of libibverbs' public structs, as far as they are read and written here; for x86-64 and other LP64 machines.

All of them are of ``<infiniband/verbs.h>`` and part of the library's stable ABI: fields were only ever added behind.
Where the library may be newer than this file and writes more, the struct ends in room to spare.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np

__all__ = [
    "COMPLETION",
    "LAYOUTS",
    "SGE",
    "WORK_REQUEST",
    "AddressHandleAttributes",
    "AsyncEventStruct",
    "Capabilities",
    "Channel",
    "Context",
    "DeviceLimits",
    "PortLimits",
    "QueuePairAttributes",
    "QueuePairInit",
    "QueuePairStruct",
    "RegionStruct",
]

_SPARE = c_uint8 * 64


class Context(ctypes.Structure):
    """``struct ibv_context``: what is inline in the header goes through its ``ops``."""

    _fields_ = [("device", c_void_p), ("ops", c_void_p * 32), ("cmd_fd", c_int), ("async_fd", c_int)]

    OP_POLL_CQ, OP_REQ_NOTIFY_CQ, OP_POST_SEND = 11, 12, 25


class DeviceLimits(ctypes.Structure):
    """``struct ibv_device_attr``."""

    _fields_ = [
        ("fw_ver", c_char * 64), ("node_guid", c_uint64), ("sys_image_guid", c_uint64), ("max_mr_size", c_uint64),
        ("page_size_cap", c_uint64), ("vendor_id", c_uint32), ("vendor_part_id", c_uint32), ("hw_ver", c_uint32),
        ("max_qp", c_int), ("max_qp_wr", c_int), ("device_cap_flags", c_uint32), ("max_sge", c_int),
        ("max_sge_rd", c_int), ("max_cq", c_int), ("max_cqe", c_int), ("max_mr", c_int), ("max_pd", c_int),
        ("max_qp_rd_atom", c_int), ("max_ee_rd_atom", c_int), ("max_res_rd_atom", c_int),
        ("max_qp_init_rd_atom", c_int), ("others", c_int * 16), ("max_pkeys", c_uint16),
        ("local_ca_ack_delay", c_uint8), ("phys_port_cnt", c_uint8), ("spare", _SPARE),
    ]  # fmt: skip


class PortLimits(ctypes.Structure):
    """``struct ibv_port_attr``. The exported ``ibv_query_port`` fills it up to and with ``flags``."""

    _fields_ = [
        ("state", c_int), ("max_mtu", c_int), ("active_mtu", c_int), ("gid_tbl_len", c_int),
        ("port_cap_flags", c_uint32), ("max_msg_sz", c_uint32), ("bad_pkey_cntr", c_uint32),
        ("qkey_viol_cntr", c_uint32), ("pkey_tbl_len", c_uint16), ("lid", c_uint16), ("sm_lid", c_uint16),
        ("lmc", c_uint8), ("max_vl_num", c_uint8), ("sm_sl", c_uint8), ("subnet_timeout", c_uint8),
        ("init_type_reply", c_uint8), ("active_width", c_uint8), ("active_speed", c_uint8), ("phys_state", c_uint8),
        ("link_layer", c_uint8), ("flags", c_uint8), ("spare", _SPARE),
    ]  # fmt: skip


class Channel(ctypes.Structure):
    """``struct ibv_comp_channel``."""

    _fields_ = [("context", c_void_p), ("fd", c_int), ("refcnt", c_int)]


class RegionStruct(ctypes.Structure):
    """``struct ibv_mr``."""

    _fields_ = [
        ("context", c_void_p), ("pd", c_void_p), ("addr", c_void_p), ("length", c_size_t), ("handle", c_uint32),
        ("lkey", c_uint32), ("rkey", c_uint32),
    ]  # fmt: skip


class Capabilities(ctypes.Structure):
    """``struct ibv_qp_cap``; the library writes what was really given."""

    _fields_ = [
        ("max_send_wr", c_uint32), ("max_recv_wr", c_uint32), ("max_send_sge", c_uint32), ("max_recv_sge", c_uint32),
        ("max_inline_data", c_uint32),
    ]  # fmt: skip


class QueuePairInit(ctypes.Structure):
    """``struct ibv_qp_init_attr``."""

    _fields_ = [
        ("qp_context", c_void_p), ("send_cq", c_void_p), ("recv_cq", c_void_p), ("srq", c_void_p),
        ("cap", Capabilities), ("qp_type", c_int), ("sq_sig_all", c_int),
    ]  # fmt: skip

    TYPE_RC = 2


class QueuePairStruct(ctypes.Structure):
    """The beginning of ``struct ibv_qp``. Its state is a copy that the library does not keep up to date: query it."""

    _fields_ = [
        ("context", c_void_p), ("qp_context", c_void_p), ("pd", c_void_p), ("send_cq", c_void_p),
        ("recv_cq", c_void_p), ("srq", c_void_p), ("handle", c_uint32), ("qp_num", c_uint32),
    ]  # fmt: skip


class AddressHandleAttributes(ctypes.Structure):
    """``struct ibv_ah_attr`` with its ``struct ibv_global_route`` in front."""

    _fields_ = [
        ("dgid", c_uint8 * 16), ("flow_label", c_uint32), ("sgid_index", c_uint8), ("hop_limit", c_uint8),
        ("traffic_class", c_uint8), ("_", c_uint8), ("dlid", c_uint16), ("sl", c_uint8), ("src_path_bits", c_uint8),
        ("static_rate", c_uint8), ("is_global", c_uint8), ("port_num", c_uint8), ("__", c_uint8),
    ]  # fmt: skip


class QueuePairAttributes(ctypes.Structure):
    """``struct ibv_qp_attr``."""

    _fields_ = [
        ("qp_state", c_int), ("cur_qp_state", c_int), ("path_mtu", c_int), ("path_mig_state", c_int),
        ("qkey", c_uint32), ("rq_psn", c_uint32), ("sq_psn", c_uint32), ("dest_qp_num", c_uint32),
        ("qp_access_flags", c_uint32), ("cap", Capabilities), ("ah_attr", AddressHandleAttributes),
        ("alt_ah_attr", AddressHandleAttributes), ("pkey_index", c_uint16), ("alt_pkey_index", c_uint16),
        ("en_sqd_async_notify", c_uint8), ("sq_draining", c_uint8), ("max_rd_atomic", c_uint8),
        ("max_dest_rd_atomic", c_uint8), ("min_rnr_timer", c_uint8), ("port_num", c_uint8), ("timeout", c_uint8),
        ("retry_cnt", c_uint8), ("rnr_retry", c_uint8), ("alt_port_num", c_uint8), ("alt_timeout", c_uint8),
        ("rate_limit", c_uint32), ("spare", _SPARE),
    ]  # fmt: skip


class AsyncEventStruct(ctypes.Structure):
    """``struct ibv_async_event``; ``element`` is a union of pointers and a port's number."""

    _fields_ = [("element", c_uint64), ("event_type", c_int), ("_", c_int)]


def _columns(size: int, **columns: tuple[str, int]) -> np.dtype[Any]:
    """A numpy record of ``size`` bytes with some fields: name=(type, offset)."""
    names = list(columns)
    return np.dtype(
        {
            "names": names,
            "formats": [columns[name][0] for name in names],
            "offsets": [columns[name][1] for name in names],
            "itemsize": size,
        }
    )


WORK_REQUEST = _columns(
    128, wr_id=("u8", 0), next=("u8", 8), sg_list=("u8", 16), num_sge=("i4", 24), opcode=("u4", 28),
    send_flags=("u4", 32), remote_addr=("u8", 40), rkey=("u4", 48),
)  # fmt: skip
"""``struct ibv_send_wr``, as RDMA READ and WRITE use it."""

SGE = _columns(16, addr=("u8", 0), length=("u4", 8), lkey=("u4", 12))
"""``struct ibv_sge``."""

COMPLETION = _columns(48, wr_id=("u8", 0), status=("u4", 8), vendor_err=("u4", 16), qp_num=("u4", 28))
"""``struct ibv_wc``."""


LAYOUTS: dict[type[ctypes.Structure], dict[str, int]] = {
    Context: {"ops": 8, "async_fd": 268},
    DeviceLimits: {"max_mr_size": 80, "max_qp_wr": 112, "max_qp_init_rd_atom": 156, "phys_port_cnt": 227},
    PortLimits: {"active_mtu": 8, "max_msg_sz": 20, "lid": 34, "link_layer": 46},
    Channel: {"fd": 8},
    RegionStruct: {"lkey": 36, "rkey": 40},
    QueuePairInit: {"cap": 32, "qp_type": 52},
    QueuePairStruct: {"qp_num": 52},
    AddressHandleAttributes: {"traffic_class": 22, "dlid": 24, "is_global": 29, "port_num": 30},
    QueuePairAttributes: {"rq_psn": 20, "ah_attr": 56, "pkey_index": 120, "max_rd_atomic": 126, "rnr_retry": 132},
    AsyncEventStruct: {"event_type": 8},
}
"""Offsets as a C compiler finds them."""


def _check() -> None:
    """Layouts that do not hold would corrupt memory: find out before the first call."""
    for struct, offsets in LAYOUTS.items():
        found = {name: getattr(struct, name).offset for name in offsets}
        if found != offsets:
            raise ImportError(f"{struct.__name__} is laid out as {found} on this machine, expected {offsets}")


_check()

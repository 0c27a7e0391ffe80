"""Where this host's NICs, GPUs and networks are, and what follows from it for RDMA.

:func:`read_host` reads ``/sys`` and ``/proc`` once; everything else is a function of what it returned::

    host = read_host()
    rail = pair(host, "10.77.0.1", devices=config.rdma_devices, prefer=[c.name for c in choose(host, 0, 0, 8)])

Failures are :class:`memkv_vllm.errors.RailError`: what was found, what was expected, how to get there.
"""

from memkv_vllm.errors import RailError
from memkv_vllm.topology.affinity import Affinity, Choice, affinity, choose
from memkv_vllm.topology.facts import describe
from memkv_vllm.topology.gids import RankedGid, choose_gid, rank_gids
from memkv_vllm.topology.marking import MTUS, dscp_of, ib_mtu, traffic_class, traffic_class_problem
from memkv_vllm.topology.model import Address, Gid, GidKind, Gpu, Host, Netdev, Network, Nic, Port, Route, gid_address
from memkv_vllm.topology.ports import CONTAINER_STEP, allowed_ports, is_usable, no_device, port_state, usable_ports
from memkv_vllm.topology.rails import Rail, pair
from memkv_vllm.topology.reading import read_host

__all__ = [
    "CONTAINER_STEP",
    "MTUS",
    "Address",
    "Affinity",
    "Choice",
    "Gid",
    "GidKind",
    "Gpu",
    "Host",
    "Netdev",
    "Network",
    "Nic",
    "Port",
    "Rail",
    "RailError",
    "RankedGid",
    "Route",
    "affinity",
    "allowed_ports",
    "choose",
    "choose_gid",
    "describe",
    "dscp_of",
    "gid_address",
    "ib_mtu",
    "is_usable",
    "no_device",
    "pair",
    "port_state",
    "rank_gids",
    "read_host",
    "traffic_class",
    "traffic_class_problem",
    "usable_ports",
]

"""RDMA verbs: one-sided transfers that the server drives, over RC queue pairs.

Control goes over TCP, as with the tcp transport and on the same listening socket of a server. A client that moves bytes
connects from the address of a NIC, brings queue pairs up through CONNECT and registers its memory; the server READs
puts out of it and WRITEs gets into it. Nothing here falls back to anything else.

A verbs library is loaded when the first device is looked for (``providers``), never by importing this package.
"""

from memkv_vllm.transports.verbs.client import VerbsClientTransport, VerbsConnection
from memkv_vllm.transports.verbs.datapath import VerbsDataPath

__all__ = ["VerbsClientTransport", "VerbsConnection", "VerbsDataPath"]

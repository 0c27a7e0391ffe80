"""Loopback: a real transport for one machine. Control over a Unix socket, bulk by copying between shared mappings.

A server on port ``p`` listens on the abstract Unix address ``\\0memkv-loopback-<p>``: like a TCP port it belongs to
the network namespace and leaves nothing behind when its process is killed. A client passes the memfd of each
region beside its REGISTER frame; the server maps it and copies in threads outside the interpreter lock.
"""

from memkv_vllm.transports.loopback.client import LoopbackClientTransport, LoopbackConnection
from memkv_vllm.transports.loopback.server import LoopbackServerTransport

__all__ = ["LoopbackClientTransport", "LoopbackConnection", "LoopbackServerTransport"]

"""TCP between hosts: control over one connection, bytes over several others that threads serve.

One-sided in software: the server says on a data connection which spans of the client's registered memory it wants or
will send, and a thread of the client answers by itself. The client's event loop touches no byte, the server's only
those of short pieces, and a whole batch costs the client one message out and one in on its control connection.

The bytes of a small put that is alone on its way follow it at once, without being asked for
(:mod:`memkv_vllm.transports.tcp.eager`).

A session is a control connection (frames of ``memkv_vllm.protocol``, as with every transport) and its data connections,
which authenticate in the same way and are then attached to it. Only commands on them are authenticated, payload is
not: on a network where others can change packets, rely on the values' checksums (``memkv_verify: full``), and where
others can read them, on encryption below TCP.
"""

from memkv_vllm.transports.tcp.client import TcpClientTransport, TcpConnection
from memkv_vllm.transports.tcp.server import TcpServerTransport

__all__ = ["TcpClientTransport", "TcpConnection", "TcpServerTransport"]

"""A relay before a loopback store that ends each connection after so many of the server's bytes."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress

from memkv_vllm.transports.loopback.address import socket_address


class Cutter:
    """Relays one connection after the other, as a context manager; descriptors are not passed on.

    Args:
        listen: its own port.
        server: the store's.
        allowances: bytes that the server may say, connection by connection; after the last, all are closed at once.
    """

    def __init__(self, listen: int, server: int, allowances: Iterable[int]) -> None:
        self.cut = 0
        """Connections ended so far."""
        self._server = server
        self._allowances = iter(allowances)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_address(listen))
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._run, name="cutter")

    def __enter__(self) -> Cutter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection in hand and accept no more; a second call does nothing."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client:
                allowance = next(self._allowances, 0)
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server, suppress(OSError):
                    server.connect(socket_address(self._server))
                    _relay(client, server, allowance)
            self.cut += 1


def _relay(client: socket.socket, server: socket.socket, allowance: int) -> None:
    """Until the server has said ``allowance`` bytes, or one side has ended."""
    while allowance:
        readable, _, _ = select.select([client, server], [], [], 10.0)
        if not readable:
            return
        for source in readable:
            data = source.recv(4096)
            if not data:
                return
            if source is client:
                server.sendall(data)
            else:
                client.sendall(data[:allowance])
                allowance -= len(data[:allowance])

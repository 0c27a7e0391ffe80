"""One server process: the store, its transports and admin HTTP, from the first socket to the last signal.

::

    admin HTTP listens ("starting") -> the store starts -> "ready", systemd is told, clients come
    SIGTERM or SIGINT -> nothing new is accepted ("draining") -> requests in flight end -> the store ends
    -> admin HTTP ends
"""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence

import anyio

from memkv_vllm.config import RailAddress, ServerConfig, notify_socket
from memkv_vllm.store.admin.server import AdminServer
from memkv_vllm.store.reloading import KeyReloader
from memkv_vllm.store.server import StoreServer
from memkv_vllm.transports.base import ServerTransport

__all__ = ["serve_until_signal", "tell_systemd"]

logger = logging.getLogger("memkv.serve")


async def serve_until_signal(
    config: ServerConfig,
    transports: Sequence[ServerTransport],
    announce: Callable[[StoreServer, RailAddress], None],
    load: Callable[[], ServerConfig] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then ends in order; SIGHUP reloads keys and certificates.

    Args:
        config: the server's settings.
        transports: what to serve on.
        announce: called with the running store and the address of admin HTTP, once clients may come.
        load: reads the settings again.

    Raises:
        MemkvError: it could not start, or a transport failed.
    """
    # The receiver is the outer one: a second signal during the orderly end must not kill the process in the middle.
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        life = _Life(AdminServer(config), KeyReloader(config, load, transports))
        async with anyio.create_task_group() as tasks:
            address = await tasks.start(life.admin.serve)
            tasks.start_soon(life.obey, signals)
            with life.start_scope:
                async with StoreServer(config, transports) as server:
                    life.started(server)
                    announce(server, address)
                    tell_systemd("READY=1")
                    await life.told_to_end.wait()
                    tell_systemd("STOPPING=1")
            tasks.cancel_scope.cancel()
    logger.info("event=stopped")


class _Life:
    """What signals do, depending on how far the server is.

    Args:
        admin: of this server.
        reloader: puts keys and certificates in force.
    """

    def __init__(self, admin: AdminServer, reloader: KeyReloader) -> None:
        self.admin = admin
        self.told_to_end = anyio.Event()
        self.start_scope = anyio.CancelScope()
        """Around the whole life of the store; cancelled only while it starts, when there is nothing to drain."""
        self._reloader = reloader
        self._server: StoreServer | None = None

    def started(self, server: StoreServer) -> None:
        """The store serves."""
        self._server = server
        self.admin.attach(server)

    async def obey(self, signals: AsyncIterator[signal.Signals]) -> None:
        """Until the first signal to end."""
        async for number in signals:
            if number != signal.SIGHUP:
                logger.info("event=stopping signal=%s", signal.Signals(number).name)
                break
            if self._server is None:
                logger.warning("event=reload_ignored reason='the server is starting'")
                continue
            self._reloader.reload(self._server.handler)
            self.admin.reload()
        self.told_to_end.set()
        if self._server is None:
            # Reading large drives takes minutes, and whoever wants it to end need not wait for that.
            self.start_scope.cancel()


def tell_systemd(state: str) -> bool:
    """Sends ``state`` to the service manager that started this process; False when there is none.

    A message that cannot be sent is logged: systemd then ends the start by its own timeout, and says so.
    """
    name = notify_socket()
    if name is None:
        return False
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            # A leading @ stands for the null byte of an abstract socket.
            sock.connect("\0" + name[1:] if name.startswith("@") else name)
            sock.sendall(state.encode())
    except OSError as error:
        logger.warning("event=systemd_not_told state=%s reason=%r", state, error.strerror)
        return False
    return True

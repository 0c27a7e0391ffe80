"""The HTTP endpoint under the routes: sockets, TLS, and bounds for strangers, who may connect as they like.

A connection costs a descriptor that a client's session may need, so their number is bounded, those in a TLS handshake
included, and each ends: one that sends no whole request within the timeout, one whose answer is not read, and any
other after :data:`MAX_LIFE_S`. Requests are parsed by aiohttp; nothing else of it (applications, routing, files) is
used.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from memkv_vllm.config import NetworkConfig, RailAddress
from memkv_vllm.errors import EnvironmentFault

__all__ = ["MAX_LIFE_S", "HttpListener", "tls_context"]

logger = logging.getLogger("memkv.admin")

MAX_LIFE_S = 600.0
"""No connection lasts longer. Scrapers and browsers connect again without anybody noticing."""
_CLOSE_TIMEOUT_S = 2.0
_BACKLOG = 64
_MAX_HEADERS = 64
_MAX_LINE_BYTES = 4096


def tls_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """What a server needs to speak TLS 1.2 or newer.

    Raises:
        EnvironmentFault: the files are no certificate and key that belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # The answer to a passphrase prompt: a server has nobody who could type one.
        context.load_cert_chain(certificate, key, password=lambda: b"")
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error.strerror or "not readable as PEM"
        text = f"network.tls_cert {certificate} and network.tls_key {key}: {reason}; "
        raise EnvironmentFault(text + "give a PEM certificate chain and its unencrypted key") from None
    return context


class _HttpLogger(logging.Logger):
    """What aiohttp says is about requests that are no HTTP: a stranger can send those without end, so it is quiet."""

    def exception(self, msg: object, *args: object, **options: Any) -> None:
        self.debug(msg, *args, exc_info=True)

    def debug(self, msg: object, *args: object, **options: Any) -> None:
        logger.debug(msg, *args, **options)


class _Connection:
    """What is known of one connection."""

    def __init__(self) -> None:
        self.has_asked = False
        """A whole request head has arrived."""
        self.ended = asyncio.Event()


class _Server(web.Server):
    """Tells when one of its connections has ended."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], timeout_s: float) -> None:
        super().__init__(
            handler,
            keepalive_timeout=timeout_s,
            lingering_time=0,
            access_log=None,
            logger=_HttpLogger("memkv.admin"),
            max_line_size=_MAX_LINE_BYTES,
            max_field_size=_MAX_LINE_BYTES,
            max_headers=_MAX_HEADERS,
            auto_decompress=False,
        )
        self.live: dict[RequestHandler, _Connection] = {}

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        if handler in self.live:
            self.live[handler].ended.set()


class HttpListener:
    """Listens and serves until cancelled.

    Args:
        network: address, bounds and TLS files.
        handle: answers a request.
    """

    def __init__(
        self, network: NetworkConfig, handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
    ) -> None:
        self._network = network
        self._handle = handle
        self._context: ssl.SSLContext | None = None
        self._connections = 0
        self.refused = 0
        """Connections beyond ``network.admin_max_connections``."""

    def __repr__(self) -> str:
        return f"<HttpListener {self._connections}/{self._network.admin_max_connections} connections>"

    async def serve(self, *, task_status: anyio.abc.TaskStatus[RailAddress] = anyio.TASK_STATUS_IGNORED) -> None:
        """Listens and serves until cancelled; ``task_status.started(address)`` once it listens.

        Raises:
            EnvironmentFault: the address cannot be used, or the TLS files cannot.
        """
        network = self._network
        self.reload()
        listener = _listen(network.admin)
        server = _Server(lambda request: self._answer(server, request), network.admin_timeout_s)
        try:
            async with anyio.create_task_group() as tasks:
                task_status.started(RailAddress(network.admin.host, listener.getsockname()[1]))
                await self._accept(listener, server, tasks)
        finally:
            listener.close()
            with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
                await server.shutdown(_CLOSE_TIMEOUT_S / 2)

    def reload(self) -> None:
        """Reads the certificate and its key again, for connections from now on.

        Raises:
            EnvironmentFault: they cannot be used; those in force stay.
        """
        certificate, key = self._network.tls_cert, self._network.tls_key
        if certificate is not None and key is not None:
            self._context = tls_context(certificate, key)

    async def _answer(self, server: _Server, request: web.BaseRequest) -> web.StreamResponse:
        live = server.live.get(request.protocol)
        if live is not None:
            live.has_asked = True
        response = await self._handle(request)
        with anyio.move_on_after(self._network.admin_timeout_s) as scope:
            try:
                await response.prepare(request)
                await response.write_eof()
            except ConnectionError:
                pass  # whoever asked has gone; aiohttp finds that out again and ends the connection
        if scope.cancelled_caught and request.transport is not None:
            request.transport.abort()
        return response

    async def _accept(self, listener: socket.socket, server: _Server, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                await anyio.wait_readable(listener)
            except OSError as error:
                # Out of descriptors: the connection waits in the backlog; others may end meanwhile.
                logger.warning("admin.accept_failed reason=%r", error.strerror)
                await anyio.sleep(0.1)
            else:
                if self._connections >= self._network.admin_max_connections:
                    self.refused += 1
                    sock.close()
                    continue
                sock.setblocking(False)
                self._connections += 1
                tasks.start_soon(self._connection, sock, server, self._context)

    async def _connection(self, sock: socket.socket, server: _Server, context: ssl.SSLContext | None) -> None:
        """The life of one connection: it is counted until its descriptor is closed."""
        transport: asyncio.Transport | None = None
        protocol = server()
        live = server.live[protocol] = _Connection()
        try:
            handshake_s = self._network.admin_timeout_s if context is not None else None
            transport, _ = await asyncio.get_running_loop().connect_accepted_socket(
                lambda: protocol, sock, ssl=context, ssl_handshake_timeout=handshake_s
            )
            with anyio.move_on_after(self._network.admin_timeout_s):
                await live.ended.wait()
            if live.has_asked:
                with anyio.move_on_after(MAX_LIFE_S):
                    await live.ended.wait()
        except (OSError, ssl.SSLError) as error:
            logger.info("admin.handshake_failed reason=%r", getattr(error, "reason", None) or type(error).__name__)
        except Exception:
            logger.exception("admin.connection_failed")
        finally:
            del server.live[protocol]
            self._connections -= 1
            if transport is not None:  # otherwise the loop has closed the socket
                transport.abort()


def _listen(address: RailAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        listener.bind((address.host, address.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        step = "set network.admin_address (memkv start --dev: --admin-address), or stop what listens there"
        raise EnvironmentFault(f"cannot serve admin HTTP on {address}: {error.strerror}; {step}") from error
    return listener

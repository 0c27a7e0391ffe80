"""Asks the other servers of the cluster for their status, for the table of servers: only while somebody looks at it.

Whom it asks stands in the settings and nowhere else, and it asks for ``/v1/status`` alone, which asks nobody in turn:
servers may name each other. A peer can be slow, wrong or hostile, so each has a deadline, an answer of bounded length
that is not unpacked, no redirect, no cookie and no proxy, and no way to fail for the others.
"""

from __future__ import annotations

import logging
import os
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import anyio

from memkv_vllm.config import NetworkConfig, RailAddress
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.store.admin.servers import NOT_MEMKV, ServerRow, parse_row, unreachable_row

__all__ = ["DEADLINE_S", "MAX_AGE_S", "MAX_STATUS_BYTES", "Peers", "trust"]

logger = logging.getLogger("memkv.admin")

DEADLINE_S = 2.0
"""For all of a peer's answer, connecting included."""
MAX_AGE_S = 2.0
"""Rows are as old as this at most: as often as the page asks, however many look at it."""
MAX_STATUS_BYTES = 1 << 20
"""A server with 1,024 sessions answers with some 300 KiB."""
_PATH = "/v1/status"


def trust(certificates: Path | None) -> ssl.SSLContext:
    """How peers' certificates are checked: signed by ``certificates`` (PEM), or by this host's authorities.

    Raises:
        EnvironmentFault: the file cannot be used.
    """
    try:
        return ssl.create_default_context(cafile=certificates)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error.strerror or "not readable as PEM"
        step = "give the PEM certificate of whoever signed the servers'"
        raise EnvironmentFault(f"network.admin_peers_ca {certificates}: {reason}; {step}") from None


class Peers:
    """The rows of the other servers, asked for when they are wanted and remembered for :data:`MAX_AGE_S`.

    Args:
        network: their addresses (``admin_peers``); with ``tls_cert`` they are asked over TLS.
        clock: seconds, monotonic.

    Raises:
        EnvironmentFault: ``admin_peers_ca`` cannot be used.
    """

    def __init__(self, network: NetworkConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._network = network
        self._addresses = network.admin_peers
        # Half of what a request may take: a peer that hangs must not make a failure of the whole answer.
        self._deadline_s = min(DEADLINE_S, network.admin_timeout_s / 2)
        self._context: ssl.SSLContext | None = None
        self.reload()
        self._clock = clock
        self._turn = anyio.Lock()
        self._rows: Sequence[ServerRow] = ()
        self._asked_at = float("-inf")

    def __repr__(self) -> str:
        return f"<Peers {len(self._addresses)}>"

    def reload(self) -> None:
        """Reads ``admin_peers_ca`` again, for questions from now on.

        Raises:
            EnvironmentFault: it cannot be used; what is in force stays.
        """
        if self._addresses and self._network.tls_cert is not None:
            self._context = trust(self._network.admin_peers_ca)

    async def rows(self) -> Sequence[ServerRow]:
        """One row for each peer, in the order of the settings; never fails."""
        if not self._addresses:
            return ()
        async with self._turn:  # one round at a time: who waited here finds its rows
            if self._clock() >= self._asked_at + MAX_AGE_S:
                self._rows = await self._ask_all()
                self._asked_at = self._clock()
            return self._rows

    async def _ask_all(self) -> list[ServerRow]:
        rows: dict[RailAddress, ServerRow] = {}
        # Of this round alone: nothing stays open while nobody looks.
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=True if self._context is None else self._context, limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity"},
                timeout=aiohttp.ClientTimeout(total=None),
                trust_env=False,
                auto_decompress=False,
            ) as session,
            anyio.create_task_group() as tasks,
        ):

            async def ask(address: RailAddress) -> None:
                rows[address] = await self._ask(session, address)

            for address in self._addresses:
                tasks.start_soon(ask, address)
        return [rows[address] for address in self._addresses]

    async def _ask(self, session: aiohttp.ClientSession, address: RailAddress) -> ServerRow:
        name = str(address)
        try:
            with anyio.move_on_after(self._deadline_s):
                return await self._read(session, name)
            return unreachable_row(name, f"no answer within {self._deadline_s:g} s")
        except aiohttp.ClientConnectorCertificateError as error:
            detail = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
            return unreachable_row(name, f"its certificate is not trusted: {detail}")
        except aiohttp.ClientSSLError:
            return unreachable_row(name, "no TLS with it")
        except aiohttp.ClientResponseError:
            return unreachable_row(name, NOT_MEMKV)
        except aiohttp.ClientPayloadError:
            return unreachable_row(name, "its answer broke off")
        except aiohttp.ServerDisconnectedError:
            return unreachable_row(name, "it ended the connection without an answer")
        except (aiohttp.ClientError, OSError) as error:
            return unreachable_row(name, _reason(error))
        except Exception:
            logger.exception("admin.peer_failed peer=%s", name)
            return unreachable_row(name, "it could not be asked; see the log of this server")

    async def _read(self, session: aiohttp.ClientSession, name: str) -> ServerRow:
        url = f"{'http' if self._context is None else 'https'}://{name}{_PATH}"
        async with session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                return unreachable_row(name, f"{NOT_MEMKV}: HTTP {response.status}")
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > MAX_STATUS_BYTES:
                    return unreachable_row(name, f"{NOT_MEMKV}: more than {MAX_STATUS_BYTES >> 20} MiB of status")
            return parse_row(name, bytes(body))


def _reason(error: Exception) -> str:
    """The system's word for it; asyncio's own text of a failed connect has the address alone."""
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

"""What each path of admin HTTP answers. Paths are looked up whole in a table: there is no file system behind them.

Reads need no token; :mod:`memkv_vllm.store.admin.commands` needs one. Every answer but the page and the metrics is
JSON, every error ``{"error", "next_step"}``. Nothing is decided by the Host header or an Origin, no answer allows
other origins, and a command must be sent as JSON with a header that no browser sends by itself.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import anyio
from aiohttp import web

from memkv_vllm.errors import StoreError
from memkv_vllm.store.admin.access import Verdict, judge
from memkv_vllm.store.admin.collector import CONTENT_TYPE
from memkv_vllm.store.admin.commands import MAX_BODY_BYTES, BadRequest, parse
from memkv_vllm.store.admin.health import Reason
from memkv_vllm.store.commands import COMMANDS
from memkv_vllm.store.handler import StoreHandler

__all__ = ["HEADERS", "Routes", "Source"]

logger = logging.getLogger("memkv.admin")

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Server": "memkv",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""On every answer. The page loads its own script and style and nothing else, and nobody frames it."""

_PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}


class Source(Protocol):
    """What the routes show; the admin server."""

    @property
    def store(self) -> StoreHandler | None:
        """The store; None before it has started."""
        ...

    def not_ready(self) -> list[Reason]:
        """Why clients may not come."""
        ...

    def degraded(self) -> list[Reason]:
        """What is wrong."""
        ...

    def status(self) -> dict[str, Any]:
        """Everything for people."""
        ...

    def history(self) -> dict[str, Any]:
        """The rows of the charts."""
        ...

    async def servers(self) -> list[dict[str, Any]]:
        """A row for each server of the cluster."""
        ...

    def metrics(self) -> bytes:
        """The metrics page."""
        ...


_Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]


class Routes:
    """Answers requests; :meth:`handle` is what the listener calls.

    Args:
        source: what to show.
        token: what a command must present; None refuses all commands.
        timeout_s: deadline of one request, reading its body included.
    """

    def __init__(self, source: Source, *, token: str | None, timeout_s: float) -> None:
        self._source = source
        self._token = token
        self._timeout_s = timeout_s
        self.responses: Counter[str] = Counter()
        """Answers by status code."""
        self._refusal_logged_at, self._refusals_unlogged = float("-inf"), 0
        folder = Path(__file__).parent / "page"
        # Read once: what is served cannot change under a running server, nor be reached by another name.
        self._page = {path: ((folder / name).read_bytes(), kind) for path, (name, kind) in _PAGE_FILES.items()}
        self._reads: dict[str, _Handler] = {
            "/v1/health": self._health,
            "/v1/ready": self._ready,
            "/v1/status": self._status,
            "/v1/history": self._history,
            "/v1/namespaces": self._namespaces,
            "/v1/servers": self._servers,
            "/v1/metrics": self._metrics,
            **dict.fromkeys(self._page, self._file),
        }

    async def handle(self, request: web.BaseRequest) -> web.Response:
        """The answer to ``request``, whatever happens."""
        try:
            with anyio.fail_after(self._timeout_s):
                response = await self._route(request)
        except BadRequest as error:
            response = _json({"error": error.error, "next_step": error.next_step}, error.status)
        except StoreError as error:
            response = _json({"error": str(error), "next_step": "see the server's log and /v1/health"}, 502)
        except TimeoutError:
            step = "try again; see /v1/health, or raise network.admin_timeout_s"
            response = _json({"error": f"not done within {self._timeout_s:g} s", "next_step": step}, 503)
        except Exception:
            logger.exception("admin.failed path=%r", request.path[:128])
            response = _json({"error": "a fault of this server", "next_step": "its log has the traceback"}, 500)
        response.headers.update(HEADERS)
        if response.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        self.responses[str(response.status)] += 1
        return response

    async def _route(self, request: web.BaseRequest) -> web.Response:
        path, method = request.path, request.method
        command = path.removeprefix("/v1/") if path.startswith("/v1/") else ""
        allowed = ("GET", "HEAD") if path in self._reads else ("POST",) if command in COMMANDS else ()
        if not allowed:
            paths = " ".join([*self._reads, *(f"/v1/{name}" for name in COMMANDS)])
            raise BadRequest("there is no such path", f"use one of: {paths}", 404)
        if method not in allowed:
            response = _json({"error": f"{method[:16]} is not for this path", "next_step": f"use {allowed[0]}"}, 405)
            response.headers["Allow"] = ", ".join(allowed)
            return response
        if path in self._reads:
            return await self._reads[path](request)
        return await self._command(command, request)

    # Reads

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return _verdict(self._source.degraded(), "ok", "degraded")

    async def _ready(self, request: web.BaseRequest) -> web.Response:
        return _verdict(self._source.not_ready(), "ready", "not ready")

    async def _status(self, request: web.BaseRequest) -> web.Response:
        return _json(self._source.status())

    async def _history(self, request: web.BaseRequest) -> web.Response:
        return _json(self._source.history())

    async def _namespaces(self, request: web.BaseRequest) -> web.Response:
        return _json({"namespaces": self._started().namespaces()})

    async def _servers(self, request: web.BaseRequest) -> web.Response:
        return _json({"servers": await self._source.servers()})

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        self._started()
        return web.Response(body=self._source.metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def _file(self, request: web.BaseRequest) -> web.Response:
        body, kind = self._page[request.path]
        return web.Response(body=body, headers={"Content-Type": kind})

    # Commands

    async def _command(self, name: str, request: web.BaseRequest) -> web.Response:
        self._authorize(name, request)
        if request.content_type != "application/json":
            # A form that somebody else's page submits cannot have this type without asking us first.
            raise BadRequest("the body must be JSON", "send the header Content-Type: application/json", 415)
        argument = parse(name, await _read(request))
        # Before it is carried out, too: what broke off in the middle must be found in the log.
        logger.warning("admin.command peer=%s command=%s argument=%s", request.remote, name, _shown(argument))
        answer = await COMMANDS[name].run(self._started(), argument)
        text = json.dumps(answer, separators=(",", ":"))[:512]
        logger.warning("admin.command_done peer=%s command=%s answer=%s", request.remote, name, text)
        return _json({"command": name, **answer})

    def _authorize(self, name: str, request: web.BaseRequest) -> None:
        verdict = judge(request.headers.get("Authorization"), self._token)
        if verdict is Verdict.ALLOWED:
            return
        self._log_refusal(name, request.remote, verdict)
        if verdict is Verdict.NO_TOKEN_CONFIGURED:
            step = "set network.admin_token_file (memkv keygen makes a token) and restart the server"
            raise BadRequest("this server has no admin token, so nobody may change anything over HTTP", step, 403)
        what = "no bearer token was sent" if verdict is Verdict.MISSING else "the token is not this server's"
        raise BadRequest(what, "send Authorization: Bearer TOKEN with the one of network.admin_token_file", 401)

    def _log_refusal(self, name: str, peer: str | None, verdict: Verdict) -> None:
        # One line a second: whoever may not change anything may not fill a disk with log lines either.
        now = time.monotonic()
        if now < self._refusal_logged_at + 1:
            self._refusals_unlogged += 1
            return
        text = "admin.refused peer=%s command=%s reason=%s and_others=%d"
        logger.warning(text, peer, name, verdict.value, self._refusals_unlogged)
        self._refusal_logged_at, self._refusals_unlogged = now, 0

    def _started(self) -> StoreHandler:
        store = self._source.store
        if store is None:
            raise BadRequest("the server is starting", "try again when /v1/ready answers 200", 503)
        return store


async def _read(request: web.BaseRequest) -> bytes:
    """The body, refused as soon as it is too long, whatever its length claims to be."""
    body = b""
    async for part in request.content.iter_any():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise BadRequest(f"the body has more than {MAX_BODY_BYTES} bytes", "send one short JSON object", 413)
    return body


def _shown(argument: object) -> str:
    return argument.hex() if isinstance(argument, bytes) else f"{argument}"


def _verdict(reasons: list[Reason], good: str, bad: str) -> web.Response:
    if not reasons:
        return _json({"status": good})
    return _json({"status": bad, "reasons": [reason._asdict() for reason in reasons]}, 503)


def _json(answer: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(
        body=json.dumps(answer, separators=(",", ":"), default=_plain).encode(),
        status=status,
        headers={"Content-Type": "application/json"},
    )


def _plain(value: object) -> object:
    """Bytes as hexadecimal; everything else that JSON does not know is a fault."""
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    raise TypeError(f"{type(value).__name__} in an answer")

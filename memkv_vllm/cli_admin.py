"""``memkv admin``: asks servers' admin HTTP, all of them at once, and tells people or scripts what each said.

Exit codes: 0 every server did as asked, 1 one of them did not (its name and the reason are printed, what the others
said too), 2 wrong settings or arguments. A server that does not answer by the deadline counts as one that did not.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import ssl

    import aiohttp

    from memkv_vllm.config import AdminTargets, RailAddress

__all__ = ["admin"]

DEFAULT_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 64 << 20
"""A store of 100,000 namespaces answers with some 20 MiB."""
TOKEN_STEP = "name a file with the token of that server's network.admin_token_file: --token-file FILE"
"""What the server says to do is for who speaks HTTP."""


@dataclass(frozen=True)
class Answer:
    """What one server said, or why it said nothing."""

    server: str
    status: int
    """HTTP status; 0 when there was no answer."""
    body: Mapping[str, Any]
    """Its JSON, or ``error`` and ``next_step``."""

    @property
    def is_ok(self) -> bool:
        """Whether the server did as asked."""
        return self.status == 200

    @property
    def problem(self) -> str:
        """Why not, and what to do, in one line."""
        reasons = self.body.get("reasons")
        if isinstance(reasons, list):
            return "; ".join(f"{reason['reason']}: {reason['detail']} ({reason['next_step']})" for reason in reasons)
        step = TOKEN_STEP if self.status == 401 else self.body.get("next_step", "see its log")
        return f"{self.body.get('error', 'an answer without a reason')}; {step}"


@dataclass(frozen=True)
class Options:
    """What every subcommand takes."""

    servers: tuple[str, ...]
    token_file: Path | None
    tls_ca: Path | None
    timeout_s: float
    as_json: bool


# ---------------------------------------------------------------------------------------------------- asking


def ask_all(options: Options, method: str, path: str, body: Mapping[str, Any] | None = None) -> list[Answer]:
    """Asks every server at once; one answer each, in the order given.

    Raises:
        ConfigError: the servers, the token or the certificate cannot be used.
    """
    import anyio

    from memkv_vllm.config import load_admin_targets

    targets = load_admin_targets(options.servers, options.token_file)
    context = None if options.tls_ca is None else _trust(options.tls_ca)
    return anyio.run(_ask_all, targets, context, options.timeout_s, method, path, body)


def _trust(certificates: Path) -> ssl.SSLContext:
    import ssl

    from memkv_vllm.errors import ConfigError

    try:
        return ssl.create_default_context(cafile=certificates)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or "not readable as PEM"
        problem = f"--tls-ca {certificates}: {reason}; give the PEM certificate of whoever signed the servers'"
        raise ConfigError("memkv admin", [problem]) from None


async def _ask_all(
    targets: AdminTargets,
    context: ssl.SSLContext | None,
    timeout_s: float,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
) -> list[Answer]:
    import aiohttp
    import anyio

    answers: dict[int, Answer] = {}
    headers = {}
    if body is not None and targets.token is not None:
        headers["Authorization"] = f"Bearer {targets.token.get_secret_value()}"
    # No proxy from the environment: a token goes to the servers and to nobody else.
    connector = aiohttp.TCPConnector(ssl=True if context is None else context, limit=0)
    async with (
        aiohttp.ClientSession(connector=connector, headers=headers, trust_env=False) as session,
        anyio.create_task_group() as tasks,
    ):

        async def ask(number: int, address: RailAddress) -> None:
            url = f"{'http' if context is None else 'https'}://{address}{path}"
            answers[number] = await _ask(session, str(address), method, url, body, timeout_s)

        for number, address in enumerate(targets.servers):
            tasks.start_soon(ask, number, address)
    return [answers[number] for number in sorted(answers)]


async def _ask(
    session: aiohttp.ClientSession,
    server: str,
    method: str,
    url: str,
    body: Mapping[str, Any] | None,
    timeout_s: float,
) -> Answer:
    import aiohttp
    import anyio

    which = "is this its admin address (by default the clients' port + 1)?"
    step = f"is it running, and {which}"
    try:
        with anyio.fail_after(timeout_s):
            async with session.request(method, url, json=body, allow_redirects=False) as response:
                text = await response.content.read(MAX_ANSWER_BYTES)
                return Answer(server, response.status, _object(text))
    except TimeoutError:
        return Answer(server, 0, {"error": f"no answer within {timeout_s:g} s", "next_step": step})
    except aiohttp.ClientConnectorCertificateError as error:
        step = "give the certificate of whoever signed it (--tls-ca), and the name that it is for (--server)"
        return Answer(
            server, 0, {"error": f"its certificate is not trusted: {error.certificate_error}", "next_step": step}
        )
    except aiohttp.ClientSSLError as error:
        step = f"if the server has no network.tls_cert, leave out --tls-ca; {which}"
        return Answer(server, 0, {"error": f"no TLS with it: {error.strerror or error}", "next_step": step})
    except aiohttp.ServerDisconnectedError:
        step = f"{which} If the server has TLS, give --tls-ca; else see its log"
        return Answer(server, 0, {"error": "it ended the connection without an answer", "next_step": step})
    except (aiohttp.ClientError, OSError) as error:
        return Answer(server, 0, {"error": f"cannot be asked: {_reason(error)}", "next_step": step})
    except ValueError:
        return Answer(server, 0, {"error": "its answer is no JSON object", "next_step": which})


def _reason(error: Exception) -> str:
    """The system's word for it; asyncio's own text of a failed connect has the address alone."""
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _object(text: bytes) -> dict[str, Any]:
    """The JSON object in ``text``; ValueError when it is something else."""
    answer = json.loads(text)
    if not isinstance(answer, dict):
        raise ValueError
    return answer


# ---------------------------------------------------------------------------------------------------- telling


def tell(answers: Sequence[Answer], options: Options, table: Callable[[Sequence[Answer]], list[list[str]]]) -> None:
    """Prints the answers and ends the command: exit status 1 when a server did not do as asked.

    Args:
        answers: one for each server.
        options: ``as_json`` prints each server's JSON as it came.
        table: rows for people, the heading first, out of the answers that are to be shown.
    """
    if options.as_json:
        shown = [{"server": answer.server, "status": answer.status, "answer": answer.body} for answer in answers]
        click.echo(json.dumps({"servers": shown}))
    else:
        for line in _aligned(table(answers)):
            click.echo(line)
    failed = [answer for answer in answers if not answer.is_ok]
    for answer in failed:
        click.echo(f"memkv: {answer.server}: {answer.problem}", err=True)
    if failed:
        sys.exit(1)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" else f"{number:.2f} {unit}"


def _rate(number: float) -> str:
    return f"{number / 1e6:.2f} MB/s" if number < 1e9 else f"{number / 1e9:.2f} GB/s"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _status_rows(answers: Sequence[Answer]) -> list[list[str]]:
    heads = [
        "server",
        "state",
        "version",
        "uptime",
        "sessions",
        "values",
        "arena",
        "of",
        "put",
        "get",
        "hits",
        "evicted",
    ]
    rows = [heads]
    for answer in answers:
        body = answer.body
        if not answer.is_ok or "server" not in body:
            state = "starting" if answer.is_ok else "no answer" if not answer.status else f"HTTP {answer.status}"
            rows.append([answer.server, state, *["-"] * (len(heads) - 2)])
            continue
        counters, arena, rates = body["table"]["counters"], body["arena"], body["rates"]
        rows.append(
            [
                answer.server,
                "ok" if body["admin"]["healthy"] else ",".join(body["admin"]["reasons"]),
                str(body["admin"]["version"]),
                f"{body['server']['uptime_s']:.0f} s",
                sessions_cell(body["server"]),
                str(body["table"]["complete"]),
                _share(arena["used"], arena["size"]),
                _size(arena["size"]),
                _rate(rates["put_bytes_per_s"]),
                _rate(rates["get_bytes_per_s"]),
                _share(counters["hits"], counters["hits"] + counters["misses"]),
                str(counters["evictions"]),
            ]
        )
    return rows


def sessions_cell(server: Mapping[str, Any]) -> str:
    """How many, and of how many the bytes go over RDMA, where there are such."""
    verbs = server.get("sessions_by_path", {}).get("verbs", 0)
    return f"{server['sessions']} ({verbs} verbs)" if verbs else str(server["sessions"])


def _verdict_rows(answers: Sequence[Answer]) -> list[list[str]]:
    return [["server", "state"], *([a.server, str(a.body.get("status", "no answer"))] for a in answers)]


def _namespace_rows(answers: Sequence[Answer]) -> list[list[str]]:
    rows = [["server", "namespace", "values", "arena", "disk", "idle"]]
    for answer in answers:
        for space in answer.body.get("namespaces", ()):
            sizes = [_size(space["arena_bytes"]), _size(space["disk_bytes"])]
            rows.append([answer.server, space["namespace"], str(space["values"]), *sizes, f"{space['idle_s']:.0f} s"])
    return rows


def _command_rows(*columns: tuple[str, Callable[[Mapping[str, Any]], str]]) -> Callable[..., list[list[str]]]:
    def rows(answers: Sequence[Answer]) -> list[list[str]]:
        done = [[a.server, "done", *(show(a.body) for _, show in columns)] for a in answers if a.is_ok]
        failed = [[a.server, "FAILED", *["-"] * len(columns)] for a in answers if not a.is_ok]
        return [["server", "result", *(name for name, _ in columns)], *done, *failed]

    return rows


# ---------------------------------------------------------------------------------------------------- commands


def _common(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that every subcommand takes, and hands them over as one object."""

    def run(
        server: tuple[str, ...],
        token_file: Path | None,
        tls_ca: Path | None,
        timeout_s: float,
        as_json: bool,
        **others: Any,
    ) -> None:
        command(Options(tuple(server), token_file, tls_ca, timeout_s, as_json), **others)

    run.__doc__, run.__name__ = command.__doc__, command.__name__
    path = click.Path(path_type=Path)
    servers = "A server's admin address, host:port; may be given several times. Left out: see `memkv admin --help`."
    ca = "Speak TLS, and trust servers whose certificate was signed by one in FILE (PEM)."
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print every server's JSON."),
        click.option(
            "--timeout", "timeout_s", type=click.FloatRange(0.1, 600), default=DEFAULT_TIMEOUT_S, show_default=True,
            metavar="SECONDS", help="Deadline of each server's answer.",
        ),
        click.option("--tls-ca", type=path, metavar="FILE", help=ca),
        click.option("--token-file", type=path, metavar="FILE", help="The servers' admin token, for commands."),
        click.option("--server", multiple=True, metavar="HOST:PORT", help=servers),
    ):  # fmt: skip
        run = option(run)
    run.__dict__.setdefault("__click_params__", []).extend(getattr(command, "__click_params__", []))
    return run


@click.group()
def admin() -> None:
    """Ask running servers how they are, and tell them what to do.

    The servers are those of --server, else of MEMKV_ADMIN_SERVERS, else the clients' (the yaml of MEMKV_CONFIG, else
    MEMKV_SERVERS): the first rail of each, with the next port, which is where admin HTTP is unless the server's yaml
    says otherwise. gc, evict and reset need the servers' admin token: --token-file, else MEMKV_ADMIN_TOKEN_FILE.

    All servers are asked at once. The exit status is 0 only if every one of them did as asked.
    """


@admin.command()
@_common
def status(options: Options) -> None:
    """Show what each server holds and does now."""
    tell(ask_all(options, "GET", "/v1/status"), options, _status_rows)


@admin.command()
@_common
def health(options: Options) -> None:
    """Say whether each server works as it should; exit status 1 when one is degraded."""
    tell(ask_all(options, "GET", "/v1/health"), options, _verdict_rows)


@admin.command()
@_common
def ready(options: Options) -> None:
    """Say whether clients may come; exit status 1 when one server is starting or draining."""
    tell(ask_all(options, "GET", "/v1/ready"), options, _verdict_rows)


@admin.command()
@_common
def namespaces(options: Options) -> None:
    """List the namespaces of each server, the most recently used first."""
    tell(ask_all(options, "GET", "/v1/namespaces"), options, _namespace_rows)


@admin.command()
@_common
@click.option(
    "--idle-s", type=click.FloatRange(0), required=True, metavar="SECONDS", help="Drop what was unused for so long."
)
def gc(options: Options, idle_s: float) -> None:
    """Drop every value of the namespaces that nobody used lately."""
    answers = ask_all(options, "POST", "/v1/gc", {"idle_s": idle_s})
    values = ("values", lambda body: str(sum(row["values"] for row in body["dropped"])))
    tell(answers, options, _command_rows(("namespaces", lambda body: str(len(body["dropped"]))), values))


@admin.command()
@_common
@click.option("--bytes", "size", required=True, metavar="SIZE", help="How much of each arena, such as 10GiB.")
def evict(options: Options, size: str) -> None:
    """Free memory of each server's arena now, the least valuable values first."""
    from memkv_vllm.config import parse_size

    try:
        num_bytes = parse_size(int(size) if size.isascii() and size.isdecimal() else size)
    except ValueError as error:
        step = getattr(error, "fix", "")
        raise click.UsageError(f"--bytes {size}: {error}{'; ' if step else ''}{step}") from None
    answers = ask_all(options, "POST", "/v1/evict", {"bytes": num_bytes})
    freed = ("freed", lambda body: _size(body["bytes"]))
    tell(answers, options, _command_rows(("values", lambda body: str(body["values"])), freed))


@admin.command()
@_common
@click.argument("namespace")
def reset(options: Options, namespace: str) -> None:
    """Make every value of NAMESPACE (64 hexadecimal characters) invisible, on every server.

    Exit status 0 only if every server confirmed it: until then a value of before may still be served.
    """
    if not re.fullmatch(r"[0-9A-Fa-f]{64}", namespace):
        seen = f"NAMESPACE {namespace[:80]}: expected 64 hexadecimal characters, got {len(namespace)} characters"
        raise click.UsageError(f"{seen}; memkv admin namespaces lists those of each server")
    answers = ask_all(options, "POST", "/v1/reset", {"namespace": namespace})
    tell(answers, options, _command_rows(("values hidden", lambda body: str(body["hidden"]))))

"""Whom ``memkv admin`` talks to, and what a service manager tells a server through the environment."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import SecretStr

from memkv_vllm.config import sources
from memkv_vllm.config.client import CONFIG_VARIABLE
from memkv_vllm.config.fields import RailAddress, parse_address, parse_servers, split_list
from memkv_vllm.config.problems import Problem, Reject
from memkv_vllm.config.server import parse_admin_token
from memkv_vllm.errors import ConfigError

ADMIN_SERVERS_VARIABLE = "MEMKV_ADMIN_SERVERS"
ADMIN_TOKEN_FILE_VARIABLE = "MEMKV_ADMIN_TOKEN_FILE"
SERVERS_VARIABLE = "MEMKV_SERVERS"
NOTIFY_VARIABLE = "NOTIFY_SOCKET"

_SOURCE = "memkv admin"


class AdminTargets(NamedTuple):
    """Servers' admin addresses, and the token for commands that change something, if there is one."""

    servers: tuple[RailAddress, ...]
    token: SecretStr | None


def notify_socket(environ: Mapping[str, str] | None = None) -> str | None:
    """Where systemd wants to hear that a service of ``Type=notify`` is ready; None when it did not start us."""
    return (os.environ if environ is None else environ).get(NOTIFY_VARIABLE) or None


def load_admin_targets(
    servers: tuple[str, ...] = (), token_file: Path | None = None, environ: Mapping[str, str] | None = None
) -> AdminTargets:
    """Addresses and token for ``memkv admin``, from its options or else from the environment.

    Args:
        servers: admin addresses ``host:port``; none: ``MEMKV_ADMIN_SERVERS``, else the clients' servers (the yaml of
            ``MEMKV_CONFIG``, else ``MEMKV_SERVERS``), first rail, next port.
        token_file: a file with the token; None: ``MEMKV_ADMIN_TOKEN_FILE``, else no token.
        environ: stands in for the process environment.

    Raises:
        ConfigError: with every problem.
    """
    environ = os.environ if environ is None else environ
    problems: list[str] = []
    addresses: tuple[RailAddress, ...] = ()
    token: SecretStr | None = None
    try:
        addresses = _addresses(servers, environ)
    except Reject as error:
        problems += [part.line() for part in error.parts]
    except ConfigError as error:
        problems += error.problems
    file = str(token_file) if token_file is not None else environ.get(ADMIN_TOKEN_FILE_VARIABLE)
    try:
        if file:
            token = parse_admin_token(sources.read_small_file(Path(file), "a file with the token"))
            sources.warn_if_readable_by_others(Path(file))
    except Reject as error:
        name = ADMIN_TOKEN_FILE_VARIABLE if token_file is None else "--token-file"
        problems.append(Problem(name, error.expected, error.fix, file).line())
    if problems:
        raise ConfigError(_SOURCE, problems)
    return AdminTargets(addresses, token)


def _addresses(servers: tuple[str, ...], environ: Mapping[str, str]) -> tuple[RailAddress, ...]:
    """The addresses; a Reject has a problem for each that cannot be used, under the name of where it stands."""
    given: object = list(servers) or split_list(environ.get(ADMIN_SERVERS_VARIABLE, ""))
    if isinstance(given, list) and given:
        return _parsed("--server" if servers else ADMIN_SERVERS_VARIABLE, given)
    path = environ.get(CONFIG_VARIABLE)
    data: object = sources.read_yaml(Path(path)).get("servers") if path else None
    name = f"servers (from {path})" if data else SERVERS_VARIABLE
    data = data or environ.get(SERVERS_VARIABLE)
    if not data:
        step = f"give --server HOST:PORT, or set {ADMIN_SERVERS_VARIABLE} or {SERVERS_VARIABLE}"
        raise Reject(parts=[Problem("servers", "no server is named", step)])
    try:
        return tuple(_next_port(server.rails[0]) for server in parse_servers(data))
    except Reject as error:
        parts = error.parts or (Problem("", error.expected, error.fix, data),)
        raise Reject(parts=[part._replace(key=name + part.key) for part in parts]) from None


def _parsed(name: str, given: Iterable[str]) -> tuple[RailAddress, ...]:
    addresses: dict[RailAddress, None] = {}
    parts = []
    for text in given:
        try:
            addresses[parse_address(text, default_port=None)] = None
        except Reject as error:
            parts.append(Problem(name, error.expected, error.fix or "give the server's admin address", text))
    if parts:
        raise Reject(parts=parts)
    return tuple(addresses)


def _next_port(address: RailAddress) -> RailAddress:
    if address.port == 65535:
        raise Reject(f"{address} has the last port", "give the admin address: --server HOST:PORT")
    return RailAddress(address.host, address.port + 1)

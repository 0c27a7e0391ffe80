"""Settings of a client: how an engine, a tier, or ``memkv admin`` and ``bench`` reach the servers.

Two sources: the yaml named by ``MEMKV_CONFIG``, then the environment. A value in the yaml wins; the environment fills
what the yaml leaves out. pydantic validates; pydantic-settings is not used, because it reads the process environment
whenever a model is made, and cannot say which variable a wrong value came from.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, SecretStr, TypeAdapter, ValidationError, ValidationInfo, field_validator

from memkv_vllm.config import sources
from memkv_vllm.config.fields import AuthKey, Count, DefaultText, DeviceNames, KeyId, Kind, RoceKnobs, Seconds, Servers
from memkv_vllm.config.problems import MISSING, Problem, Reject, problems_of, redact
from memkv_vllm.errors import ConfigError

logger = logging.getLogger("memkv.config")

CONFIG_VARIABLE = "MEMKV_CONFIG"
TORCH_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
HASH_SEED_VARIABLE = "PYTHONHASHSEED"
STATE_VARIABLE = "XDG_STATE_HOME"
LICENSE_VARIABLES = ("MEMKV_LICENSE", "MINIO_LICENSE", "AISTOR_LICENSE")
"""In the order in which they are asked, after the yaml."""

_SOURCE = "memkv client settings"
_DEVICES: TypeAdapter[tuple[str, ...]] = TypeAdapter(DeviceNames)


class TransportName(str, Enum):
    """What may stand in ``transport``."""

    VERBS = "verbs"
    LOOPBACK = "loopback"
    TCP = "tcp"
    AUTO = "auto"


Mode = Literal["direct", "tier"]


class ClientConfig(RoceKnobs):
    """Everything that a client needs to know about the servers and the network between."""

    servers: Servers
    """The servers. An entry is `host:port` (port 9900 if left out, IPv6 in brackets), or with several rails
    `name=addr0|addr1` (yaml `{name, rails: [...]}`), each address in its rail's own subnet. Placement hashes the name
    (default: the first address), so a name must be the same on every client. Each rank prefers one rail (its rank
    modulo their number), goes over to the next when that one fails, and comes back about a minute after its repair."""

    auth_key: AuthKey
    """The key shared with the servers. Exactly one of this and `auth_key_file`."""

    auth_key_file: Path | None = None
    """A file that holds the key, so that it stands in no yaml and in no environment. In the yaml it also beats
    `MEMKV_AUTH_KEY`."""

    auth_key_id: KeyId = "default"
    """Which of the server's keys this is. `default` is what a server calls its single `network.auth_key`."""

    license: Annotated[SecretStr, Kind("token text or path, secret")] | None = None
    """Presented to a server that asks for one, after it proved the key (ours asks for none unless configured to).
    Then `MINIO_LICENSE`, then `AISTOR_LICENSE` are asked."""

    rdma_devices: DeviceNames = ()
    """NICs that may be used, `mlx5_0` or `mlx5_0:1`, and never another. Left out: for each server the port in its
    subnet, near the rank's GPU where several are. verbs only."""

    transport: Annotated[TransportName | None, DefaultText("`verbs` direct, `auto` tier")] = None
    """What moves the bytes. Left out: `verbs` in direct mode, `auto` in tier mode: verbs, else tcp, for each server by
    itself; a server on tcp is tried over verbs again about once a minute. `tcp` and `auto` are for the tier only."""

    num_connections: Annotated[Count, Field(le=256)] = 4
    """Connections per server, tcp transport only: 4, because one TCP stream seldom fills a fast link. verbs has one
    control connection per server and rail."""

    tls: bool = False
    """Whether control connections over TCP use TLS 1.3; on where the servers have `network.tls_control`, and nowhere
    else. tcp and verbs. Bytes of values are not encrypted by it."""

    tls_ca: Path | None = None
    """PEM file with the certificate of whoever signed the servers' certificates. Left out: this host's authorities."""

    tls_server_name: str | None = None
    """The name that every server's certificate must be for. Left out: the host as it stands in `servers`."""

    connect_timeout_s: Seconds = 5.0
    """Deadline of connecting and authenticating. 5 s survive two lost SYNs (sent again after 1 s and 3 s); a silent
    server must not hold up an engine's start for longer."""

    op_timeout_s: Seconds = 30.0
    """Deadline of one request: 30 s, as the server's own deadline of one transfer (`limits.transfer_timeout_s`)."""

    @field_validator("tls_ca", "tls_server_name")
    @classmethod
    def _needs_tls(cls, value: object, info: ValidationInfo) -> object:
        if value is not None and info.data.get("tls") is False:
            raise Reject(f"expected tls, for {info.field_name} is given", "set tls: true, or remove it")
        return value

    @field_validator("tls_ca")
    @classmethod
    def _readable(cls, value: Path | None) -> Path | None:
        if value is not None:
            sources.read_small_file(value, "a PEM file with certificates")
        return value

    @property
    def license_text(self) -> str | None:
        """The license itself, for whoever presents it."""
        return None if self.license is None else self.license.get_secret_value()

    def transport_for(self, mode: Mode) -> TransportName:
        """The transport that runs in ``mode``.

        Raises:
            ConfigError: ``tcp`` or ``auto`` in direct mode.
        """
        if self.transport is None:
            return TransportName.VERBS if mode == "direct" else TransportName.AUTO
        if mode == "direct" and self.transport in (TransportName.TCP, TransportName.AUTO):
            raise ConfigError(_SOURCE, [_not_in_direct_mode(self.transport).line()])
        return self.transport

    def unused_with(self, transport: TransportName) -> tuple[str, ...]:
        """Settings that are given and that nothing reads where ``transport`` runs: each with the reason.

        Not errors: one yaml may be shared with hosts that run another transport. Names only, no values.
        """
        given = [name for name in type(self).model_fields if name in self.model_fields_set]
        reasons = {name: _why_unused(name, transport) for name in given if getattr(self, name) not in (None, ())}
        unused = [f"{name} ({reason})" for name, reason in reasons.items() if reason]
        return tuple(unused)


_TCP_ONLY = ("num_connections",)
_TLS = ("tls", "tls_ca", "tls_server_name")
_VERBS_ONLY = ("rdma_devices", *RoceKnobs.model_fields)


def _why_unused(name: str, transport: TransportName) -> str:
    """Why nothing reads the setting ``name`` with ``transport``; empty when something does."""
    if name in _TCP_ONLY and transport not in (TransportName.TCP, TransportName.AUTO):
        return f"for tcp only; transport is {transport.value}"
    if name in _TLS and transport is TransportName.LOOPBACK:
        return f"for tcp and verbs only; transport is {transport.value}"
    if name in _VERBS_ONLY and transport not in (TransportName.VERBS, TransportName.AUTO):
        return f"for verbs only; transport is {transport.value}"
    return ""


def _not_in_direct_mode(transport: TransportName) -> Problem:
    why = "may turn to TCP" if transport is TransportName.AUTO else "is TCP"
    return Problem(
        "transport",
        f"expected verbs or loopback in direct mode: this {why}, and direct mode never runs over TCP "
        "(what is configured is what runs)",
        "leave it out for verbs, say loopback for a server on this host, or use the tier "
        "(spec_name: TieringOffloadingSpec)",
        transport,
    )


class EnvironmentVariable(NamedTuple):
    """One variable that this package reads."""

    name: str
    setting: str | None
    """The key of the yaml that it fills, if any."""

    meaning: str


ENVIRONMENT: tuple[EnvironmentVariable, ...] = (
    EnvironmentVariable(CONFIG_VARIABLE, None, "Path of the client yaml."),
    *(EnvironmentVariable(f"MEMKV_{name.upper()}", name, "") for name in ClientConfig.model_fields),
    EnvironmentVariable(LICENSE_VARIABLES[1], "license", "Asked when neither the yaml nor `MEMKV_LICENSE` has one."),
    EnvironmentVariable(LICENSE_VARIABLES[2], "license", "Asked last."),
    EnvironmentVariable(HASH_SEED_VARIABLE, None, "Python's own; two engines' block hashes agree only under one seed."),
    EnvironmentVariable(
        TORCH_ALLOCATOR_VARIABLES[0], None, "PyTorch's own; whether it uses expandable segments is logged."
    ),
    EnvironmentVariable(TORCH_ALLOCATOR_VARIABLES[1], None, "The older name of the same."),
    EnvironmentVariable("MEMKV_ADMIN_SERVERS", None, "Comma list `host:port` for `memkv admin`; `--server` wins."),
    EnvironmentVariable("MEMKV_ADMIN_TOKEN_FILE", None, "File with the token for `memkv admin`; `--token-file` wins."),
    EnvironmentVariable(
        "NOTIFY_SOCKET", None, "systemd's own; a server says there that it is ready, and that it ends."
    ),
    EnvironmentVariable(STATE_VARIABLE, None, "`memkv start --dev` keeps its key below it (`~/.local/state`)."),
)
"""Every environment variable that is read, all of them here."""


def python_hash_seed(environ: Mapping[str, str] | None = None) -> str | None:
    """``PYTHONHASHSEED`` as it is set, None when it is not."""
    return (os.environ if environ is None else environ).get(HASH_SEED_VARIABLE) or None


def torch_allocator_settings(environ: Mapping[str, str] | None = None) -> str:
    """What PyTorch's allocator was told, ``name:value,...``; empty where nothing was."""
    variables = os.environ if environ is None else environ
    return next((variables[name] for name in TORCH_ALLOCATOR_VARIABLES if variables.get(name)), "")


def default_dev_key_file(environ: Mapping[str, str] | None = None) -> Path:
    """Where ``memkv start --dev`` keeps its key: in the user's state directory, which is not shared with anyone."""
    state = (os.environ if environ is None else environ).get(STATE_VARIABLE)
    return (Path(state) if state else Path.home() / ".local" / "state") / "memkv" / "dev.key"


def load_client_config(environ: Mapping[str, str] | None = None, servers: Sequence[str] = ()) -> ClientConfig:
    """The client's settings from the yaml named by ``MEMKV_CONFIG`` and from ``MEMKV_*``.

    Args:
        environ: Stands in for the process environment.
        servers: Stand in for those of both sources (a command's ``--server``); none: theirs.

    Raises:
        ConfigError: With every problem of both sources.
    """
    environ = os.environ if environ is None else environ
    sources.warn_unknown_variables(environ, (variable.name for variable in ENVIRONMENT))
    merge = _Merge(environ)
    merge.read_yaml()
    merge.replace_servers(servers)
    merge.resolve_key()
    merge.resolve_license()
    return merge.build()


def load_rdma_devices(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """``rdma_devices`` alone, for a tool that needs nothing else of the settings, which may not be there.

    Args:
        environ: Stands in for the process environment.

    Raises:
        ConfigError: It is not valid, or the yaml cannot be read.
    """
    environ = os.environ if environ is None else environ
    merge = _Merge(environ)
    merge.read_yaml()
    return merge.build_devices()


class _Merge:
    """The two sources becoming one mapping, with where each value came from and what was wrong on the way."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        # An empty variable is how a deployment template says "not set".
        self._environ = {name: value for name, value in environ.items() if value.strip()}
        self._values: dict[str, Any] = {}
        self._variables: dict[str, str] = {}
        self._problems: list[str] = []
        self._settled: set[str] = set()
        self._path = self._environ.get(CONFIG_VARIABLE)
        self._yaml_failed = False

    def read_yaml(self) -> None:
        """Takes the yaml, then what it leaves out from the environment."""
        if self._path is not None:
            try:
                self._values = sources.without_empty(sources.read_yaml(Path(self._path)), ClientConfig)
            except ConfigError as error:
                self._problems += [f"{self._path} (from {CONFIG_VARIABLE}): {problem}" for problem in error.problems]
                self._yaml_failed = True
        in_yaml = set(self._values)
        if in_yaml & {"auth_key", "auth_key_file"}:
            in_yaml |= {"auth_key", "auth_key_file"}
        for name in ClientConfig.model_fields:
            variable = f"MEMKV_{name.upper()}"
            if variable not in self._environ or name == "license":
                continue
            if name in in_yaml:
                logger.info("setting is in both sources, the yaml wins: variable=%s yaml=%s", variable, self._path)
            else:
                self._values[name] = self._environ[variable]
                self._variables[name] = variable

    def replace_servers(self, servers: Sequence[str]) -> None:
        """Takes these in place of those of the sources, if there are any."""
        if servers:
            self._values["servers"] = list(servers)
            self._variables["servers"] = "read from --server"

    def resolve_key(self) -> None:
        """Reads ``auth_key_file``, so that the model always holds the key itself."""
        key, file = self._values.get("auth_key"), self._values.get("auth_key_file")
        if key is not None and self._path is not None and "auth_key" not in self._variables:
            sources.warn_if_readable_by_others(Path(self._path))
        if key is not None and file is not None:
            both = Reject("expected only one of auth_key and auth_key_file", "remove one")
            self._fail(self._name("auth_key_file"), both)
        elif isinstance(file, str):
            try:
                self._values["auth_key"] = sources.read_small_file(Path(file), "a file with 64 hex characters")
                sources.warn_if_readable_by_others(Path(file))
                self._variables["auth_key"] = f"read from {file}"
            except Reject as error:
                self._fail(self._name("auth_key_file"), error)

    def resolve_license(self) -> None:
        """Takes the first license of the stated order and reads it where it is a path."""
        if "license" in self._values:
            asked = {"": self._values["license"]}
        else:
            asked = {name: self._environ[name] for name in LICENSE_VARIABLES if name in self._environ}
        for variable, value in asked.items():
            if not isinstance(value, str):
                return
            try:
                self._values["license"] = _license_text(value)
                return
            except Reject as error:
                if variable in LICENSE_VARIABLES[1:]:
                    # Another product's variable must not stop an engine whose servers may ask for no license.
                    reason = redact(error.expected)
                    logger.warning("license is not usable and is ignored: variable=%s reason='%s'", variable, reason)
                    continue
                self._fail(f"license (from {variable})" if variable else "license", error)
                self._values.pop("license", None)
                return

    def build_devices(self) -> tuple[str, ...]:
        """``rdma_devices``, or the problems with it."""
        try:
            devices: tuple[str, ...] = _DEVICES.validate_python(self._values.get("rdma_devices", ()))
        except ValidationError as error:
            problems = [str(problem["msg"]).removeprefix("Value error, ") for problem in error.errors()]
            self._problems += [f"{self._name('rdma_devices')}: {problem}" for problem in problems]
        if self._problems:
            raise ConfigError(_SOURCE, self._problems)
        return devices

    def build(self) -> ClientConfig:
        """The model, or all problems so far and the model's own."""
        try:
            config = ClientConfig.model_validate(self._values)
        except ValidationError as error:
            self._problems += [problem.line() for problem in self._model_problems(error)]
        if self._problems:
            # Raised outside of the except block: the model's error, which holds the values, is not chained.
            where = f" ({self._path}, then MEMKV_* variables)" if self._path else " (MEMKV_* variables)"
            raise ConfigError(_SOURCE + where, self._problems)
        return config

    def _model_problems(self, error: ValidationError) -> list[Problem]:
        found = []
        for problem in problems_of(error, ClientConfig, self._name):
            missing = problem.expected == MISSING
            if missing and (self._yaml_failed or problem.key in self._settled):
                continue
            found.append(problem._replace(fix=self._how_to_set(problem.key)) if missing else problem)
        return found

    def _how_to_set(self, name: str) -> str:
        yaml = self._path or f"a yaml named by {CONFIG_VARIABLE}"
        if name == "auth_key":
            variables = "MEMKV_AUTH_KEY or MEMKV_AUTH_KEY_FILE (memkv keygen makes one)"
            return f"set auth_key or auth_key_file in {yaml}, or {variables}"
        return f"set {name} in {yaml}, or MEMKV_{name.upper()}"

    def _name(self, key: str) -> str:
        variable = self._variables.get(re.split(r"[.\[]", key, maxsplit=1)[0])
        origin = "" if variable is None else f" ({variable})" if " " in variable else f" (from {variable})"
        return key + origin

    def _fail(self, name: str, error: Reject) -> None:
        self._problems.append(Problem(name, error.expected, error.fix).line())
        self._settled |= {"auth_key", "license"} if "license" not in name else {"license"}


def _license_text(value: str) -> str:
    text = value.strip()
    if not _is_token(text):
        if len(text) > 1024:
            raise Reject("expected a license token (three parts joined by dots) or the path of a file with one")
        text = sources.read_small_file(Path(text), "a file with the license token").strip()
    if not _is_token(text):
        raise Reject("expected the file to hold a license token: three base64url parts joined by dots")
    return text


def _is_token(text: str) -> bool:
    return re.fullmatch(r"eyJ[\w-]*\.[\w-]+\.[\w-]*", text, re.ASCII) is not None

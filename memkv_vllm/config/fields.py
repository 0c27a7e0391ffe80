"""Types of settings that several models share: sizes, addresses, servers, keys, bounded numbers, RoCE knobs."""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SecretBytes,
)

from memkv_vllm.config.problems import Problem, Reject, did_you_mean

DEFAULT_PORT = 9900
MTUS = (256, 512, 1024, 2048, 4096)
"""Path MTUs that InfiniBand and RoCE know."""


@dataclass(frozen=True)
class Kind:
    """Words for the type column of the settings page; no effect on validation."""

    text: str


@dataclass(frozen=True)
class DefaultText:
    """Words for the default column of the settings page where the default is computed."""

    text: str


class Settings(BaseModel):
    """Base of every model of settings: frozen, no unknown keys, documented field by field."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
        # A rule between two fields sits on the later one, so that it is reported along with all other problems; it
        # must also run when the later one is left out.
        validate_default=True,
    )


# ---------------------------------------------------------------- numbers and words


def _not_bool(value: object) -> object:
    # Pydantic would read true as 1: a silent rewrite.
    if isinstance(value, bool):
        raise Reject("expected a number, not true or false")
    return value


Number = Annotated[float, BeforeValidator(_not_bool)]
Whole = Annotated[int, BeforeValidator(_not_bool)]
Seconds = Annotated[Number, Field(gt=0, le=86_400)]
"""A length of time that must end; a day is the longest that makes sense for any wait here."""
SecondsOrOff = Annotated[Number, Field(ge=0, le=86_400)]
"""A length of time where 0 switches the thing off."""
Count = Annotated[Whole, Field(ge=1, le=1_000_000)]


def _known_mtu(value: int) -> int:
    if value not in MTUS:
        fix = "1500-byte Ethernet carries 1024, jumbo frames 4096"
        raise Reject(f"expected one of {', '.join(map(str, MTUS))}", fix)
    return value


def _key_id(value: str) -> str:
    if not re.fullmatch(r"[!-~]{1,32}", value):
        raise Reject("expected 1 to 32 printable ASCII characters without spaces")
    return value


KeyId = Annotated[str, AfterValidator(_key_id), Kind("1-32 ASCII characters")]
"""Names a key in the first frame of the handshake, which has 32 bytes for it."""


def split_list(value: object) -> object:
    """A comma list as a list of its entries; anything else as it is."""
    if not isinstance(value, str):
        return value
    return [part.strip() for part in value.split(",")] if value.strip() else []


def _device_names(value: tuple[str, ...]) -> tuple[str, ...]:
    for name in value:
        if not re.fullmatch(r"[\w.-]+(:[1-9]\d?)?", name):
            raise Reject("expected RDMA device names such as mlx5_0, or mlx5_0:1 with a port", "see: rdma link")
    if len(set(value)) != len(value):
        raise Reject("expected each device once", "remove the repeated name")
    return value


DeviceNames = Annotated[
    tuple[str, ...], BeforeValidator(split_list), AfterValidator(_device_names), Kind("list / comma list of names")
]


CHOSEN = DefaultText("chosen")


class RoceKnobs(Settings):
    """How the queue pairs mark their packets. Left out, each is chosen from the NIC, and the choice is logged."""

    gid_index: Annotated[Whole, Field(ge=0, le=255), CHOSEN] | None = None
    """Index of the GID to use on every device. Left out: RoCE v2 with an IPv4 address is preferred."""

    traffic_class: Annotated[Whole, Field(ge=0, le=255), CHOSEN] | None = None
    """Traffic class byte (DSCP << 2, lowest two bits ECN); must be what the switches classify as lossless."""

    service_level: Annotated[Whole, Field(ge=0, le=15), CHOSEN] | None = None
    """Service level; on RoCE the lossless priority of NIC and switch."""

    mtu: Annotated[Whole, AfterValidator(_known_mtu), Kind(" / ".join(map(str, MTUS))), CHOSEN] | None = None
    """Path MTU in bytes, at most the port's active MTU: too large drops every data packet. Left out: the active MTU."""


# ---------------------------------------------------------------- sizes

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS |= {f"{_letter}b": 1000**_power, f"{_letter}i": 1024**_power, f"{_letter}ib": 1024**_power}
_SIZE_EXPECTED = "expected a size in bytes such as 2097152, '2 MiB' (1024-based) or '64 MB' (1000-based)"


def parse_size(value: object) -> int:
    """Bytes from a whole number or a text with a unit; exact, so a fraction of a byte is rejected.

    Pydantic's ``ByteSize`` goes through floats, ignores trailing text and reads ``M`` as 1000-based.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else ""
    match = re.fullmatch(r"([0-9]{1,20}(?:\.[0-9]{1,18})?)\s*([a-z]*)", text)
    if match is None:
        raise Reject(_SIZE_EXPECTED)
    number, unit = match.groups()
    if unit not in _UNITS:
        ambiguous = f"{unit.upper()} may mean 1000 or 1024: " if unit in tuple("kmgtp") else ""
        raise Reject(_SIZE_EXPECTED, f"{ambiguous}use KiB, MiB, GiB, TiB, PiB or KB, MB, GB, TB, PB")
    size = Fraction(number) * _UNITS[unit]
    if size.denominator != 1:
        raise Reject("expected a whole number of bytes", "use a smaller unit")
    return size.numerator


def format_size(size_bytes: int) -> str:
    """A size with the largest 1024-based unit that shows it exactly; :func:`parse_size` reads it back."""
    for power, unit in reversed(list(enumerate(("KiB", "MiB", "GiB", "TiB", "PiB"), start=1))):
        if size_bytes and size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power} {unit}"
    return f"{size_bytes} B"


def _positive_size(value: object) -> int:
    size = parse_size(value)
    if not 0 < size < 2**60:
        raise Reject("expected a size of at least one byte and below 1 EiB")
    return size


Size = Annotated[int, PlainValidator(_positive_size), Kind("size")]

# ---------------------------------------------------------------- addresses


@dataclass(frozen=True, order=True, slots=True)
class RailAddress:
    """A host and a TCP port: of one rail of a server, or to listen on. IPv6 without its brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """One server: the name that placement hashes, and one address per rail, each in its rail's own subnet."""

    name: str
    rails: tuple[RailAddress, ...]

    def __str__(self) -> str:
        return f"{self.name}={'|'.join(map(str, self.rails))}"


def _split_port(text: str) -> tuple[str, str | None]:
    bracketed = re.fullmatch(r"\[([^\[\]]+)\](?::(.*))?", text)
    if bracketed:
        return bracketed[1], bracketed[2]
    if "://" in text:
        raise Reject("expected host:port", "leave out the scheme and any path")
    if text.count(":") > 1:
        raise Reject("expected host:port", "put an IPv6 address in brackets: [2001:db8::1]:9900")
    host, colon, port = text.partition(":")
    return host, port if colon else None


def _canonical_host(host: str, is_ipv6: bool) -> str:
    if is_ipv6 or re.fullmatch(r"[\d.]+", host):
        try:
            return str(ipaddress.IPv6Address(host) if is_ipv6 else ipaddress.IPv4Address(host))
        except ValueError:
            raise Reject(f"expected an IPv{6 if is_ipv6 else 4} address before the port") from None
    if len(host) > 253 or not re.fullmatch(r"\w([\w.-]*\w)?", host, re.ASCII):
        raise Reject("expected host:port with a plain host name or IP address", "leave out any scheme or path")
    return host.lower()


def parse_address(text: str, default_port: int | None = DEFAULT_PORT, lowest_port: int = 1) -> RailAddress:
    """``host``, ``host:port``, ``[IPv6]`` or ``[IPv6]:port``.

    The host comes back in lower case and IPv6 in its shortest form: every client must hash the same name, whichever
    way its operator wrote it.
    """
    host, port_text = _split_port(text.strip())
    if port_text is None:
        if default_port is None:
            raise Reject("expected host:port", "add the port")
        port = default_port
    elif not re.fullmatch(r"\d{1,5}", port_text, re.ASCII) or not lowest_port <= int(port_text) <= 65535:
        raise Reject(f"expected a port of {lowest_port} to 65535 after the host")
    else:
        port = int(port_text)
    return RailAddress(_canonical_host(host, text.strip().startswith("[")), port)


def _listen_address(value: object) -> RailAddress:
    if isinstance(value, RailAddress):
        return value
    if not isinstance(value, str):
        raise Reject("expected host:port, such as 0.0.0.0:9900")
    return parse_address(value, default_port=None, lowest_port=0)


ListenAddress = Annotated[RailAddress, PlainValidator(_listen_address), PlainSerializer(str), Kind("host:port")]

# ---------------------------------------------------------------- servers


def _server(name: object, rails: object) -> ServerAddress:
    rails = rails.split("|") if isinstance(rails, str) else rails
    if not isinstance(rails, list | tuple) or not rails or not all(isinstance(rail, str) for rail in rails):
        raise Reject("expected rails to be addresses host:port, one per rail")
    addresses = tuple(parse_address(rail) for rail in rails)
    if name is None and len(addresses) > 1:
        raise Reject("a server with several rails needs a name", "write name=address0|address1")
    name = str(addresses[0]) if name is None else name
    if not isinstance(name, str) or not re.fullmatch(r"[\w\[\]:%.-]{1,300}", name, re.ASCII):
        raise Reject("expected a name of letters, digits, '.', '_', ':' and '-'")
    return ServerAddress(name, addresses)


def _server_entry(entry: object) -> ServerAddress:
    if isinstance(entry, ServerAddress):
        return entry
    if isinstance(entry, str):
        name, equals, rails = entry.strip().rpartition("=")
        return _server(name.strip() if equals else None, rails)
    if not isinstance(entry, Mapping):
        raise Reject("expected host:port, name=address0|address1 or a mapping {name, rails}")
    for key in entry:
        if key not in ("name", "rails"):
            near = did_you_mean(str(key), ("name", "rails"))
            fix = f"did you mean {near}?" if near else "host:port is written without a space"
            raise Reject(f"unknown key {key!r} in a mapping {{name, rails}}", fix)
    return _server(entry.get("name"), entry.get("rails"))


def _server_or_problem(entry: object, key: str) -> ServerAddress | Problem:
    try:
        return _server_entry(entry)
    except Reject as error:
        return Problem(key, error.expected, error.fix or "correct it", entry)


def parse_servers(value: object) -> tuple[ServerAddress, ...]:
    """The ``servers`` setting: a comma list, or a list of entries. All wrong entries are reported together."""
    entries = split_list(value)
    if not isinstance(entries, list | tuple) or not entries:
        raise Reject("expected at least one server: a list, or a comma list, of host:port")
    servers: list[ServerAddress] = []
    problems: list[Problem] = []
    for index, entry in enumerate(entries):
        found = _server_or_problem(entry, f"[{index}]")
        if isinstance(found, Problem):
            problems.append(found)
        else:
            servers.append(found)
    names = [server.name for server in servers]
    addresses = [str(rail) for server in servers for rail in server.rails]
    for what, texts in (("name", names), ("address", addresses)):
        repeated = [text for text in dict.fromkeys(texts) if texts.count(text) > 1]
        problems += [Problem("", f"{what} {text} is given more than once", "keep one of them") for text in repeated]
    if problems:
        raise Reject(parts=problems)
    return tuple(servers)


Servers = Annotated[
    tuple[ServerAddress, ...],
    PlainValidator(parse_servers),
    PlainSerializer(lambda servers: [str(server) for server in servers]),
    Kind("list / comma list of servers"),
]

MAX_ADMIN_PEERS = 64
"""Servers that one page can show, and that are asked at once for it."""


def _peer_or_problem(entry: object, key: str) -> RailAddress | Problem:
    try:
        if isinstance(entry, RailAddress):
            return entry
        if not isinstance(entry, str):
            raise Reject("expected host:port")
        return parse_address(entry, default_port=None)
    except Reject as error:
        return Problem(key, error.expected, error.fix or "give the server's admin address", entry)


def _admin_peers(value: object) -> tuple[RailAddress, ...]:
    """A comma list, or a list, of admin addresses; it may be empty. All wrong entries are reported together."""
    entries = split_list(value)
    if not isinstance(entries, list | tuple) or len(entries) > MAX_ADMIN_PEERS:
        raise Reject(f"expected a list, or a comma list, of host:port, at most {MAX_ADMIN_PEERS}")
    found = [_peer_or_problem(entry, f"[{index}]") for index, entry in enumerate(entries)]
    problems = [each for each in found if isinstance(each, Problem)]
    peers = [each for each in found if isinstance(each, RailAddress)]
    repeated = [peer for peer in dict.fromkeys(peers) if peers.count(peer) > 1]
    problems += [Problem("", f"address {peer} is given more than once", "keep one of them") for peer in repeated]
    if problems:
        raise Reject(parts=problems)
    return tuple(peers)


AdminPeers = Annotated[
    tuple[RailAddress, ...],
    PlainValidator(_admin_peers),
    PlainSerializer(lambda peers: [str(peer) for peer in peers]),
    Kind("list / comma list of host:port, at most 64"),
]

# ---------------------------------------------------------------- secrets

KEY_BYTES = 32
_KEY_EXPECTED = f"expected {2 * KEY_BYTES} hexadecimal characters ({KEY_BYTES} bytes)"


def parse_auth_key(value: object) -> SecretBytes:
    """A key from its hexadecimal text, or as it is when already 32 bytes. No message shows any part of it."""
    if isinstance(value, SecretBytes):
        value = value.get_secret_value()
    if isinstance(value, bytes) and len(value) == KEY_BYTES:
        return SecretBytes(value)
    if not isinstance(value, str):
        raise Reject(_KEY_EXPECTED, "put the key in quotes")
    text = value.strip()
    if not re.fullmatch(rf"[0-9A-Fa-f]{{{2 * KEY_BYTES}}}", text):
        raise Reject(f"{_KEY_EXPECTED}, got {len(text)} characters", "make one with: memkv keygen")
    return SecretBytes(bytes.fromhex(text))


AuthKey = Annotated[SecretBytes, BeforeValidator(parse_auth_key), Kind("64 hex characters, secret")]

"""Models of the server yaml. ``server_file`` reads it."""

import os
import re
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from memkv_vllm.config.fields import (
    AdminPeers,
    AuthKey,
    Count,
    DefaultText,
    DeviceNames,
    KeyId,
    Kind,
    ListenAddress,
    Number,
    RailAddress,
    RoceKnobs,
    Seconds,
    Settings,
    Size,
    Whole,
    format_size,
)
from memkv_vllm.config.problems import Problem, Reject
from memkv_vllm.errors import ConfigError

KIB, MIB, GIB, TIB = 1024, 1024**2, 1024**3, 1024**4
DEFAULT_KEY_ID = "default"
"""What ``network.auth_key`` is called on the wire; clients send it unless ``auth_key_id`` says otherwise."""


class Right(str, Enum):
    """What a key may do. ``write`` includes reporting a value as bad; ``admin`` is for ADMIN requests."""

    READ = "read"
    WRITE = "write"
    DELETE = "delete"
    ADMIN = "admin"


def _hex_prefix(value: object) -> bytes:
    if isinstance(value, bytes) and len(value) <= 64:
        return value
    if not isinstance(value, str) or len(value) > 128:
        raise Reject("expected the first bytes of store keys in hexadecimal", "put it in quotes")
    try:
        return bytes.fromhex(value)
    except ValueError:
        raise Reject("expected the first bytes of store keys in hexadecimal, two digits a byte") from None


def _unique_rights(value: tuple[Right, ...]) -> tuple[Right, ...]:
    if not value or len(set(value)) != len(value):
        raise Reject("expected at least one right, each once", "choose of read, write, delete, admin")
    return value


Rights = Annotated[tuple[Right, ...], AfterValidator(_unique_rights), Kind("list of read / write / delete / admin")]


def parse_admin_token(value: object) -> SecretStr:
    """The token of the admin commands from its text. No message shows any part of it."""
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    if not isinstance(text, str) or not re.fullmatch(r"[!-~]{16,512}", text.strip(), re.ASCII):
        # Sixteen random characters cannot be guessed over a network; a word of four could.
        raise Reject("expected 16 to 512 printable ASCII characters without spaces", "memkv keygen makes one")
    return SecretStr(text.strip())


AdminToken = Annotated[SecretStr, BeforeValidator(parse_admin_token), Kind("16-512 ASCII characters, secret")]


class KeyEntry(Settings):
    """One key that clients may use, and what it allows. Two may overlap in time, so that keys can be rotated."""

    key: AuthKey
    """The key. Exactly one of this and `key_file`."""

    key_file: Path | None = None
    """A file that holds the key."""

    rights: Rights = tuple(Right)
    """What the key allows. All, because a single key is the common case."""

    prefix: Annotated[bytes, PlainValidator(_hex_prefix), Kind("hex, at most 64 bytes"), DefaultText('`""`')] = b""
    """The rights hold for store keys that begin with these bytes; empty: for all."""


def _overlap(one: RailAddress, other: RailAddress) -> bool:
    """Whether only one of them can be listened on: the same port, of the same host or of every one of its family."""
    if one.port != other.port or not one.port:
        return False
    every = {"0.0.0.0", "::"} & {one.host, other.host}
    return one.host == other.host or (bool(every) and (":" in one.host) == (":" in other.host))


class NetworkConfig(Settings):
    """Where the server listens, and who may connect."""

    address: ListenAddress = RailAddress("0.0.0.0", 9900)
    """Where clients connect. Every interface, for rails have an address each; nobody gets past the handshake without a
    key. Port 0 takes any free port."""

    admin_address: Annotated[ListenAddress | None, DefaultText("`address` with the next port")] = None
    """Where admin HTTP and metrics are served. Reading (status, metrics) needs no token: give an address of the
    management network, or 127.0.0.1, where that is too much."""

    admin_token: AdminToken | None = None
    """What the commands that change something (reset, gc, evict) must present. At most one of this and
    `admin_token_file`; without either these commands are refused."""

    admin_token_file: Path | None = None
    """A file that holds the token, so that it stands in no yaml."""

    admin_max_connections: Count = 64
    """Connections to admin HTTP, each closed after ten minutes at most. A scraper and a browser need a few; more
    are refused and counted, so that a flood takes no file descriptors from clients."""

    admin_timeout_s: Seconds = 10.0
    """Deadline of one admin request, and of sending it: as long as Prometheus waits for a scrape by default."""

    admin_history_s: Annotated[Number, Field(ge=10, le=3600)] = 600.0
    """How far back the charts of the status page go, in steps of 2 s: 10 minutes are 300 rows of a few numbers."""

    admin_peers: AdminPeers = ()
    """Admin addresses of the cluster's other servers, for the table of servers on the status page. They are asked while
    somebody looks at that table, and at no other time. The list may be the same everywhere: a server leaves itself
    out. Empty: the table shows this server alone."""

    admin_max_lag_s: Seconds = 1.0
    """The event loop counts as degraded when it came late by more than this within the last 30 s: requests wait so
    long. Normal are milliseconds."""

    idle_poll_us: Annotated[Whole, Field(ge=0, le=1000)] = 200
    """How long the server looks for the next event before its core may sleep, in microseconds. It does so only while
    they follow each other that closely: an idle server costs nothing, a busy one up to a core. One lookup at a time is
    then answered in two thirds of the time or less. 200 covers the pause between two calls of a client. 0: never, where
    cores are wanted elsewhere or a CPU limit (cgroup) counts what is spent looking."""

    auth_key: AuthKey | None = None
    """The key that all clients share, known to them as `default`. Exactly one of this, `auth_key_file`, `auth_keys`."""

    auth_key_file: Path | None = None
    """A file that holds the key."""

    auth_keys: dict[KeyId, KeyEntry] = Field(default_factory=dict)
    """Several keys by id."""

    tls_cert: Path | None = None
    """PEM certificate chain. Together with `tls_key`, or neither."""

    tls_key: Path | None = None
    """PEM private key."""

    admin_peers_ca: Path | None = None
    """PEM file with the certificate of whoever signed the certificates of `admin_peers`. They are asked over TLS when
    this server has `tls_cert`, else over plain HTTP. Left out: this host's authorities."""

    tls_control: bool = False
    """Whether control connections over TCP must use TLS 1.3 with that certificate; clients set `tls`. Bytes of values
    are not encrypted by it: they travel on connections of their own. Off, because every frame is authenticated anyway:
    TLS hides which keys, counts and namespaces are asked for."""

    @property
    def admin(self) -> RailAddress:
        """Where admin HTTP is served: as configured, else the next port (any free port if that of clients is 0)."""
        if self.admin_address is not None:
            return self.admin_address
        return RailAddress(self.address.host, self.address.port + 1 if self.address.port else 0)

    @property
    def keys(self) -> dict[str, KeyEntry]:
        """Every key by the id that clients send."""
        return {DEFAULT_KEY_ID: KeyEntry(key=self.auth_key)} if self.auth_key is not None else dict(self.auth_keys)

    @field_validator("admin_address")
    @classmethod
    def _another_address(cls, value: RailAddress | None, info: ValidationInfo) -> RailAddress | None:
        address = info.data.get("address")
        if address is not None and value is None and address.port == 65535:
            raise Reject("expected an address, as network.address has the last port", "set network.admin_address")
        if address is not None and value is not None and _overlap(address, value):
            raise Reject(f"expected another port than network.address ({address})", "leave it out for the next port")
        return value

    @field_validator("auth_keys")
    @classmethod
    def _one_form_of_key(cls, value: dict[str, KeyEntry], info: ValidationInfo) -> dict[str, KeyEntry]:
        if not {"auth_key", "auth_key_file"} <= info.data.keys():
            return value
        # A key read from auth_key_file stands in auth_key by now.
        if (info.data["auth_key"] is not None) == bool(value):
            what = "only one" if value else "one"
            fix = "remove the others" if value else "memkv keygen makes a key"
            raise Reject(f"expected {what} of network.auth_key, network.auth_key_file and network.auth_keys", fix)
        owner: dict[bytes, str] = {}
        for key_id, entry in value.items():
            first = owner.setdefault(entry.key.get_secret_value(), key_id)
            if first != key_id:
                same = f"{first} and {key_id} hold the same one"
                raise Reject(f"expected different keys: {same}", "memkv keygen makes a key")
        return value

    @field_validator("tls_control")
    @classmethod
    def _has_a_certificate(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("tls_cert", ...) is None:
            raise Reject("expected network.tls_cert and network.tls_key, for network.tls_control is on", "add them")
        return value

    @field_validator("admin_peers_ca")
    @classmethod
    def _for_tls(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("tls_cert", ...) is None:
            what = "expected network.tls_cert and network.tls_key: without them the peers are asked over plain HTTP"
            raise Reject(what, "add them, or remove it")
        return value

    @field_validator("tls_key")
    @classmethod
    def _both_or_neither(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if "tls_cert" in info.data and (info.data["tls_cert"] is None) != (value is None):
            raise Reject("expected network.tls_cert and network.tls_key both or neither", "add the other one")
        return value


def _page_multiple(value: int) -> int:
    if value % 4096 or value & (value - 1) or value > GIB:
        raise Reject("expected a power of two of at least 4 KiB and at most 1 GiB")
    return value


class MemoryConfig(Settings):
    """The arena: registered memory that holds the values."""

    block_size: Annotated[Size, AfterValidator(_page_multiple)] = 2 * MIB
    """Granularity of the arena. 2 MiB is the hugepage of x86-64 and arm64."""

    max_size: Size
    """Size of the arena. No default: it is what this host is for."""

    hugepages: Literal["auto", "on", "off"] = "auto"
    """`on` refuses to start without enough free hugepages; `auto` takes them where they are; `off` never."""

    @field_validator("max_size")
    @classmethod
    def _holds_a_block(cls, value: int, info: ValidationInfo) -> int:
        if value < info.data.get("block_size", 0):
            raise Reject(f"expected at least memory.block_size (here {format_size(info.data['block_size'])})")
        return value


def _segment_size(value: int | None) -> int | None:
    if value is not None and (value & (value - 1) or not MIB <= value <= GIB):
        raise Reject("expected a power of two of at least 1 MiB and at most 1 GiB")
    return value


class Drive(Settings):
    """One drive, or one file in place of one."""

    media: Path
    """Block device (`direct`) or file (`file`)."""

    max_size: Size
    """How much of it may be used."""


Part = Annotated[Number, Field(gt=0, le=1)]


class EvictionConfig(Settings):
    """When values are evicted, and which."""

    policy: Literal["lru", "s3-fifo"] = "lru"
    """Which value goes first: `lru` the least recently used; `s3-fifo` what was not used again soon, so that a scan of
    prompts that never come back does not push out those that do. Simulated, it hits a quarter to a third more often
    where half of the prompts are such, and up to an eighth less often where favourites change: hence `lru`."""

    high_watermark: Part = 0.95
    """A put that takes the arena above this part begins to free more than it needs. 5 % free absorb large values
    without a long search."""

    low_watermark: Part = 0.90
    """Until this part is in use, a few values with each put."""

    namespace_quota: Part = 1.0
    """Part of the arena that one namespace may take; above it, its own values go first. 1: no quota. Below 1, a model
    that floods the store cannot push out all of the others; each put costs a little more."""

    @field_validator("low_watermark")
    @classmethod
    def _below(cls, value: float, info: ValidationInfo) -> float:
        if value >= info.data.get("high_watermark", 2):
            raise Reject(f"expected less than storage.eviction.high_watermark (here {info.data['high_watermark']})")
        return value


class StorageConfig(Settings):
    """What stands behind the arena."""

    mode: Literal["memory", "file", "direct"] = "memory"
    """`memory`: nothing. `file`: regular files, made and grown as needed. `direct`: block devices. Both read and write
    past the page cache where the file system allows it."""

    drives: tuple[Drive, ...] = ()
    """The drives of modes `file` and `direct`."""

    sync: Literal["none", "batch"] = "none"
    """`none`: a value counts as logged once the operating system has it, and survives a crash of the server. `batch`:
    once the drive says that it is stable (fdatasync after each batch of writes), and survives a power loss. `none`,
    because a lost value is computed again."""

    max_write_behind: Size = 256 * MIB
    """Bytes of values that wait to be written; their place in the arena cannot be evicted meanwhile. Beyond it new
    values wait in a line that holds nothing (`limits.max_waiting_writes`, counter `disk_write_delayed`): one that is
    evicted before its turn is gone. A fast drive writes 256 MiB in about 0.1 s."""

    segment_size: Annotated[
        Size | None, AfterValidator(_segment_size), Kind("size"), DefaultText("a 64th of the drive")
    ] = None
    """Unit of reclaim, and the largest record. Used when a drive is formatted and kept from then on. By default a
    64th of the drive, rounded down to a power of two, within 1 and 256 MiB."""

    read_threads: Annotated[Count, Field(le=256)] = 8
    """Reads at a time on each drive. An NVMe drive needs several to reach its rate."""

    max_drive_errors: Count = 16
    """After this many failed reads and writes a drive is left out until the next start."""

    missing_drives: Literal["refuse", "forget"] = "refuse"
    """When a drive of this store is not there: `refuse` to start; or start and `forget` it with all that it held.
    Refuse, so that a drive that is only slow to appear is not forgotten."""

    eviction: EvictionConfig = EvictionConfig()
    """When values are evicted, and which."""

    @field_validator("drives")
    @classmethod
    def _as_the_mode_says(cls, value: tuple[Drive, ...], info: ValidationInfo) -> tuple[Drive, ...]:
        mode = info.data.get("mode")
        if mode == "memory" and value:
            raise Reject("expected no drives in storage.mode memory: they would not be used", "remove them")
        if mode in ("file", "direct") and not value:
            raise Reject(f"expected at least one drive in storage.mode {mode}", "add {media, max_size}")
        if len({drive.media for drive in value}) != len(value):
            raise Reject("expected each storage.drives[].media once", "remove the repeated drive")
        return value


class ServerRdmaConfig(RoceKnobs):
    """RDMA on the server."""

    devices: DeviceNames = ()
    """NICs to serve on, one per rail. Empty: clients cannot use verbs with this server."""


class LimitsConfig(Settings):
    """Bounds of what clients may ask for. Each has a counter or a log line when it is met."""

    max_frame_bytes: Size = 4 * MIB
    """Largest control frame. A full batch of 1024 keys needs some 100 KiB, the largest manifest 64 KiB."""

    max_batch_keys: Annotated[Count, Field(le=65_536)] = 1024
    """Keys of one PUT, GET or EXISTS. An engine sends at most 64 values, or one step's lookups."""

    max_sessions: Count = 1024
    """Authenticated sessions. 128 hosts of 8 ranks."""

    max_handshakes: Count = 64
    """Connections that are not authenticated yet; bounded apart from sessions, so that a flood of strangers costs
    little and ends no client's session."""

    handshake_timeout_s: Seconds = 5.0
    """From accept to the end of the handshake; as long as a client's connect_timeout_s."""

    max_inflight_per_session: Count = 32
    """Requests of a session that are being worked on at a time. An engine with 4 lanes has about 8."""

    max_value_bytes: Size = 1 * GIB
    """Largest value. The largest known shard of a block is below 128 MiB."""

    max_connections_per_session: Annotated[Count, Field(le=256)] = 16
    """Data connections of a tcp session. Clients open 4 unless their num_connections says otherwise,
    and one for eager requests where there is room for it."""

    max_entries: Annotated[Whole, Field(ge=1, le=1 << 32)] = 4 * 1024**2
    """Values that the store may hold, in memory and on disk; then each new one takes the place of the oldest. Each
    costs some 650 bytes of memory beside the arena: 4 Mi are 2.6 GiB, and with values of 1 MiB 4 TiB of disk."""

    max_fetches: Annotated[Count, Field(le=1024)] = 32
    """Values that are read back from disk at a time. A drive reaches its rate with 8 to 16."""

    max_fetch_bytes: Size = 256 * MIB
    """Bytes of those; their place in the arena cannot be evicted meanwhile. At most a quarter of the arena is used."""

    max_waiting_fetches: Count = 65_536
    """Values that wait for their turn to be read back. Beyond it a get answers busy: 64 full batches of 1024."""

    max_waiting_writes: Count = 65_536
    """Values that wait for room in `storage.max_write_behind`. Beyond it new values stay in memory only. Each costs
    some 200 bytes."""

    max_regions_per_session: Count = 8
    """Staging regions of a session. An engine has one or two, and one more after a fence."""

    max_region_bytes: Size = 1 * TIB
    """Largest region. A tier registers vLLM's whole pinned pool, which is as large as a host's memory."""

    transfer_timeout_s: Seconds = 30.0
    """Deadline of every pull and every push, so that a hung client cannot hold a key."""

    max_transfers: Annotated[Count, Field(le=4096)] = 32
    """Pulls and pushes that run at once; they share the copy threads. Far more than these, for one whose client is dead
    goes on to its deadline. Puts have three quarters of them at most."""

    max_transfers_per_session: Annotated[Count, Field(le=4096)] = 4
    """Of them, most that one session has. As many as an engine has lanes; eight dead clients have them all, then."""

    copy_threads: Annotated[Count, Field(le=256), DefaultText("min(4, CPUs)")] = Field(
        default_factory=lambda: min(4, os.cpu_count() or 1)
    )
    """Threads that copy and checksum: several, for one does not reach memory bandwidth; 4, to leave cores to others."""

    max_manifest_bytes: Size = 64 * KIB
    """Largest manifest of a namespace. A manifest is a few KiB."""

    max_manifests: Count = 4096
    """Manifests are never evicted, so their number is bounded: 256 MiB at most with the default above."""

    put_slice_values: Count = 8
    """Values of a put batch that are moved before waiting gets get their turn. 8 of 1 MiB are under a millisecond of
    a 100 Gbit/s rail."""

    @field_validator("max_manifest_bytes")
    @classmethod
    def _fits_a_frame(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("max_frame_bytes", value):
            raise Reject("expected at most limits.max_frame_bytes: a manifest travels in one frame")
        return value


class LicenseConfig(Settings):
    """Whether clients must present a license. Ours asks for none unless configured to."""

    public_key_file: Path | None = None
    """PEM public key against which a client's license is verified; set: clients without a valid one are refused. The
    kind of key says the algorithm: RSA RS256, P-256 ES256, Ed25519 EdDSA."""

    issuer: str | None = None
    """What a license's `iss` must be. Left out: anything, for whoever has the private key is the issuer."""

    audience: str | None = None
    """What a license's `aud` must be or contain. Left out: it is not looked at."""

    leeway_s: Annotated[Number, Field(ge=0, le=3600)] = 60.0
    """How far this host's clock may be off when `exp` and `nbf` are compared with it. NTP keeps within a second; a
    minute forgives a host that has just booted."""

    @field_validator("issuer", "audience")
    @classmethod
    def _needs_the_key(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("public_key_file", ...) is None:
            raise Reject("expected license.public_key_file beside it: without, no license is asked for", "add it")
        return value


class ServerConfig(Settings):
    """The whole server yaml."""

    network: NetworkConfig
    """Where the server listens, and who may connect."""

    memory: MemoryConfig
    """The arena."""

    storage: StorageConfig = StorageConfig()
    """What stands behind the arena."""

    rdma: ServerRdmaConfig = ServerRdmaConfig()
    """RDMA on the server."""

    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    """Bounds of what clients may ask for."""

    license: LicenseConfig = LicenseConfig()
    """Whether clients must present a license."""

    def validate_supported(self) -> None:
        """Refuses what the model accepts and nothing would read.

        Raises:
            ConfigError: Naming each such setting.
        """
        if problems := unsupported(self):
            raise ConfigError("memkv server settings", problems)


def unsupported(config: ServerConfig) -> list[str]:
    """One problem for each setting that the model accepts and that would do nothing: that would be silent."""
    if config.rdma.devices:
        return []
    return [
        Problem(
            f"rdma.{name}", "has no effect without rdma.devices", "name the NICs to serve on there, or remove it"
        ).line()
        for name in RoceKnobs.model_fields
        if name in config.rdma.model_fields_set and getattr(config.rdma, name) is not None
    ]

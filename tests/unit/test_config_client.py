"""The client's settings: precedence of yaml and environment, all problems at once, no secret anywhere."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError

from memkv_vllm.config import (
    ENVIRONMENT,
    ClientConfig,
    RailAddress,
    TransportName,
    default_dev_key_file,
    load_client_config,
    parse_servers,
    python_hash_seed,
)
from memkv_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEY = "ab" * 32
OTHER = "cd" * 32
TOKEN = "eyJhbGciOiJFUzM4NCJ9.eyJzdWIiOiJ4In0.c2lnbmF0dXJl"
BASE = {"MEMKV_SERVERS": "10.0.0.2", "MEMKV_AUTH_KEY": KEY}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a private file and returns its path."""

    def write(text: str, name: str = "client.yaml", mode: int = 0o600) -> str:
        path = tmp_path / name
        path.write_text(text)
        path.chmod(mode)
        return str(path)

    return write


def problems(environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        load_client_config(environ)
    assert KEY not in str(caught.value)
    assert all("\n" not in line for line in caught.value.problems)
    return str(caught.value)


def secret(config: ClientConfig) -> str:
    return config.auth_key.get_secret_value().hex()


def test_environment_alone_and_the_defaults() -> None:
    config = load_client_config(BASE)
    assert config.servers[0].rails == (RailAddress("10.0.0.2", 9900),)
    assert secret(config) == KEY
    assert (config.num_connections, config.connect_timeout_s, config.op_timeout_s) == (4, 5.0, 30.0)
    assert config.auth_key_id == "default"
    assert config.rdma_devices == ()
    assert (config.gid_index, config.traffic_class, config.service_level, config.mtu) == (None, None, None, None)
    assert config.license is None


def test_every_setting_from_the_environment() -> None:
    config = load_client_config(
        BASE
        | {
            "MEMKV_AUTH_KEY_ID": "k1",
            "MEMKV_RDMA_DEVICES": "mlx5_0, mlx5_1:1",
            "MEMKV_TRANSPORT": "loopback",
            "MEMKV_NUM_CONNECTIONS": "8",
            "MEMKV_CONNECT_TIMEOUT_S": "2.5",
            "MEMKV_OP_TIMEOUT_S": "9",
            "MEMKV_GID_INDEX": "3",
            "MEMKV_TRAFFIC_CLASS": "106",
            "MEMKV_SERVICE_LEVEL": "3",
            "MEMKV_MTU": "4096",
        }
    )
    assert config.rdma_devices == ("mlx5_0", "mlx5_1:1")
    assert config.transport is TransportName.LOOPBACK
    assert (config.num_connections, config.connect_timeout_s, config.op_timeout_s) == (8, 2.5, 9.0)
    assert (config.gid_index, config.traffic_class, config.service_level, config.mtu) == (3, 106, 3, 4096)


def test_the_yaml_wins_and_the_environment_fills_the_gaps(write: Callable[..., str]) -> None:
    path = write(f"servers: [a, 's1=b|c']\nmtu: 1024\nop_timeout_s:\nauth_key: {KEY}\n")
    config = load_client_config(
        {
            "MEMKV_CONFIG": path,
            "MEMKV_SERVERS": "z",
            "MEMKV_MTU": "4096",
            "MEMKV_OP_TIMEOUT_S": "7",
            "MEMKV_AUTH_KEY": OTHER,
        }
    )
    assert [server.name for server in config.servers] == ["a:9900", "s1"]
    assert config.mtu == 1024
    assert config.op_timeout_s == 7
    assert secret(config) == KEY


def test_a_losing_variable_is_said(write: Callable[..., str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memkv.config")
    load_client_config(BASE | {"MEMKV_CONFIG": write("servers: a")})
    assert "variable=MEMKV_SERVERS" in caplog.text


def test_an_empty_variable_is_not_set() -> None:
    assert load_client_config(BASE | {"MEMKV_MTU": "", "MEMKV_CONFIG": " "}).mtu is None


# ---------------------------------------------------------------- the key


@pytest.mark.parametrize("in_yaml", [True, False])
def test_key_file(write: Callable[..., str], in_yaml: bool) -> None:
    file = write(KEY + "\n", "key")
    if in_yaml:
        # A key file named in the yaml also beats the other form in the environment.
        environ = BASE | {"MEMKV_AUTH_KEY": OTHER, "MEMKV_CONFIG": write(f"auth_key_file: {file}")}
    else:
        environ = {"MEMKV_SERVERS": "a", "MEMKV_AUTH_KEY_FILE": file}
    config = load_client_config(environ)
    assert secret(config) == KEY
    assert str(config.auth_key_file) == file


def test_the_yaml_key_beats_a_key_file_of_the_environment(write: Callable[..., str]) -> None:
    path = write(f"auth_key: {KEY}")
    config = load_client_config(
        {"MEMKV_SERVERS": "a", "MEMKV_CONFIG": path, "MEMKV_AUTH_KEY_FILE": write(OTHER, "key")}
    )
    assert secret(config) == KEY


@pytest.mark.parametrize("in_yaml", [True, False])
def test_both_forms_of_key_in_one_source(write: Callable[..., str], in_yaml: bool) -> None:
    file = write(KEY, "key")
    if in_yaml:
        text = problems({"MEMKV_CONFIG": write(f"servers: a\nauth_key: {KEY}\nauth_key_file: {file}")})
    else:
        text = problems(BASE | {"MEMKV_AUTH_KEY_FILE": file})
    assert "expected only one of auth_key and auth_key_file" in text
    assert "1 problem" in text


def test_no_key_names_all_ways_to_set_one() -> None:
    text = problems({"MEMKV_SERVERS": "a"})
    assert "auth_key: missing" in text
    for way in ("auth_key_file", "MEMKV_AUTH_KEY ", "MEMKV_AUTH_KEY_FILE", "MEMKV_CONFIG", "memkv keygen"):
        assert way in text


def test_missing_key_file_is_one_problem(tmp_path: Path) -> None:
    text = problems({"MEMKV_SERVERS": "a", "MEMKV_AUTH_KEY_FILE": str(tmp_path / "none")})
    assert "auth_key_file (from MEMKV_AUTH_KEY_FILE): no such file" in text
    assert "1 problem" in text


def test_a_wrong_key_in_a_file_names_the_file(write: Callable[..., str]) -> None:
    file = write(KEY + "00", "key")
    text = problems({"MEMKV_SERVERS": "a", "MEMKV_AUTH_KEY_FILE": file})
    assert f"auth_key (read from {file}): expected 64 hexadecimal characters (32 bytes), got 66" in text


@pytest.mark.parametrize(("mode", "warned"), [(0o644, True), (0o640, False), (0o600, False)])
@pytest.mark.parametrize("inline", [True, False])
def test_a_key_that_others_can_read_is_warned_about(
    write: Callable[..., str], caplog: pytest.LogCaptureFixture, mode: int, warned: bool, inline: bool
) -> None:
    if inline:
        load_client_config({"MEMKV_CONFIG": write(f"servers: a\nauth_key: {KEY}", mode=mode)})
    else:
        load_client_config({"MEMKV_SERVERS": "a", "MEMKV_AUTH_KEY_FILE": write(KEY, "key", mode)})
    assert ("readable by every user" in caplog.text) == warned


def test_the_key_is_shown_nowhere(write: Callable[..., str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    config = load_client_config(BASE | {"MEMKV_LICENSE": TOKEN})
    for text in (repr(config), str(config), str(config.model_dump()), config.model_dump_json(), repr(config.servers)):
        assert KEY not in text
        assert bytes.fromhex(KEY).decode("latin-1") not in text
        assert TOKEN not in text
    assert KEY not in caplog.text


@pytest.mark.parametrize(
    "yaml",
    [
        "auth_key: {}x",  # too long
        "auth_key: [{}]",  # another type
        "auth_key: {{k: {}}}",
        "auth_kye: {}",  # a typo of the name
        "licence: {}",
        "auth_key_file: {}",  # in the wrong place
        "mtu: {}",
        "transport: {}",
        "servers: [{}:x]",
        "auth_key: *{}",  # wrong yaml whose own message quotes the value
        "auth_key: '{}",
        "{}",
        "{}: 1",
        "auth_key: !{} x",
    ],
)
def test_no_error_shows_the_key(write: Callable[..., str], yaml: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_client_config({"MEMKV_SERVERS": "a", "MEMKV_CONFIG": write(yaml.format(KEY))})
    text = "".join(traceback.format_exception(caught.value))
    assert KEY not in text
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


def test_pydantics_own_error_does_not_show_the_key_either() -> None:
    with pytest.raises(ValidationError) as caught:
        ClientConfig(servers=parse_servers("a"), auth_key=KEY + "0")  # type: ignore[arg-type]
    # Pydantic shortens long values in the middle: the start of the key is what would show.
    assert KEY[:16] not in str(caught.value)


# ---------------------------------------------------------------- the license


def test_license_order(write: Callable[..., str]) -> None:
    def held(environ: dict[str, str]) -> str | None:
        token = load_client_config(BASE | environ).license
        return None if token is None else token.get_secret_value()

    every = {name: f"{TOKEN}{name[0]}" for name in ("MEMKV_LICENSE", "MINIO_LICENSE", "AISTOR_LICENSE")}
    assert held(every | {"MEMKV_CONFIG": write(f"license: {TOKEN}Y")}) == TOKEN + "Y"
    assert held(every) == TOKEN + "M"
    del every["MEMKV_LICENSE"]
    assert held(every) == TOKEN + "M"
    del every["MINIO_LICENSE"]
    assert held(every) == TOKEN + "A"
    assert held({}) is None
    assert held({"MEMKV_LICENSE": write(TOKEN + "\n", "license")}) == TOKEN


def test_a_wrong_license_is_an_error_where_it_is_ours_and_a_warning_where_it_is_not(
    write: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    assert "license (from MEMKV_LICENSE): no such file: /none" in problems(BASE | {"MEMKV_LICENSE": "/none"})
    assert "expected the file to hold" in problems(BASE | {"MEMKV_CONFIG": write("license: " + write("no", "license"))})
    config = load_client_config(BASE | {"MINIO_LICENSE": "/none", "AISTOR_LICENSE": TOKEN})
    assert config.license is not None
    assert config.license.get_secret_value() == TOKEN
    assert "variable=MINIO_LICENSE" in caplog.text


# ---------------------------------------------------------------- transports


@pytest.mark.parametrize(
    ("configured", "direct", "tier"),
    [
        (None, "verbs", "auto"),
        ("verbs", "verbs", "verbs"),
        ("loopback", "loopback", "loopback"),
        ("tcp", None, "tcp"),
        ("auto", None, "auto"),
    ],
)
def test_transport_for(configured: str | None, direct: str | None, tier: str) -> None:
    config = load_client_config(BASE | ({"MEMKV_TRANSPORT": configured} if configured else {}))
    assert config.transport_for("tier").value == tier
    if direct is not None:
        assert config.transport_for("direct").value == direct
        return
    with pytest.raises(ConfigError, match="never runs over TCP") as caught:
        config.transport_for("direct")
    assert f"transport = '{configured}'" in str(caught.value)
    assert "TieringOffloadingSpec" in str(caught.value)


# ---------------------------------------------------------------- problems


def test_all_problems_of_both_sources_at_once(write: Callable[..., str]) -> None:
    path = write("servers: [a, 'b:0']\nmtu: 1500\nserver: x\nconnect_timeout_s: true")
    environ = {"MEMKV_CONFIG": path, "MEMKV_TRANSPORT": "rdma", "MEMKV_GID_INDEX": "x", "MEMKV_OP_TIMEOUT_S": "inf"}
    text = problems(environ)
    for line in (
        "servers[1] = 'b:0': expected a port of 1 to 65535",
        "mtu = 1500: expected one of 256, 512, 1024, 2048, 4096",
        "server: unknown setting; did you mean servers?",
        "connect_timeout_s = True: expected a number, not true or false",
        "transport (from MEMKV_TRANSPORT) = 'rdma': expected 'verbs', 'loopback', 'tcp' or 'auto'",
        "gid_index (from MEMKV_GID_INDEX) = 'x': expected a valid integer",
        "op_timeout_s (from MEMKV_OP_TIMEOUT_S) = 'inf': expected a finite number",
        "auth_key: missing",
        "8 problems",
        path,
    ):
        assert line in text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "the file is empty, or has only comments"),
        ("# nothing\n", "the file is empty, or has only comments"),
        ("- a\n", "the file is a list"),
        ("just text", "the file is a str"),
        ("servers: [a", "not valid yaml at line 1, column 12"),
        ("a: 1\n\tb: 2", "not valid yaml at line 2, column 1"),
        ("servers: a\nservers: b", "not valid yaml at line 2, column 1: the key servers is given twice"),
        ("a: !!python/object:os.system x", "not valid yaml at line 1"),
        ("a: 2001-99-99", "not valid yaml"),
        ("\x00", "not valid yaml"),
        ("? [a]\n: b", "not valid yaml"),
    ],
)
def test_a_yaml_that_cannot_be_used(write: Callable[..., str], content: str, text: str) -> None:
    path = write(content)
    message = problems({"MEMKV_CONFIG": path, "MEMKV_MTU": "5"})
    assert f"{path} (from MEMKV_CONFIG): " in message
    assert text in message
    # What the environment says is still checked, but nothing that the yaml may hold is called missing.
    assert "mtu (from MEMKV_MTU) = '5'" in message
    assert "2 problems" in message


def test_a_yaml_that_cannot_be_read(tmp_path: Path) -> None:
    assert f"no such file: {tmp_path / 'none'}" in problems({"MEMKV_CONFIG": str(tmp_path / "none")})
    assert f"not a regular file: {tmp_path}" in problems({"MEMKV_CONFIG": str(tmp_path)})
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xff")
    assert "is not UTF-8 text" in problems({"MEMKV_CONFIG": str(binary)})
    binary.write_bytes(b"#" * 2**21)
    assert "is larger than" in problems({"MEMKV_CONFIG": str(binary)})


def test_an_unreadable_yaml(write: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    path = write("servers: a")
    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    assert f"cannot read {path}: Permission denied; check its owner and mode" in problems({"MEMKV_CONFIG": path})


@pytest.mark.parametrize("word", ["on", "off", "yes", "no"])
def test_yaml_words_stay_words(write: Callable[..., str], word: str) -> None:
    config = load_client_config(BASE | {"MEMKV_CONFIG": write(f"auth_key_id: {word}")})
    assert config.auth_key_id == word


@pytest.mark.parametrize("key_id", ["", "a b", "x" * 33, "ä"])
def test_wrong_key_ids(write: Callable[..., str], key_id: str) -> None:
    assert "auth_key_id" in problems(BASE | {"MEMKV_CONFIG": write(f"auth_key_id: '{key_id}'")})


@pytest.mark.parametrize("devices", ["mlx5_0,mlx5_0", "mlx5 0", "mlx5_0,,mlx5_1", "/dev/infiniband"])
def test_wrong_devices(devices: str) -> None:
    assert "rdma_devices (from MEMKV_RDMA_DEVICES)" in problems(BASE | {"MEMKV_RDMA_DEVICES": devices})


def test_what_is_dumped_can_be_loaded() -> None:
    config = load_client_config(BASE | {"MEMKV_SERVERS": "[::1]:7,s1=a|b", "MEMKV_RDMA_DEVICES": "mlx5_0"})
    dumped = config.model_dump(mode="json")
    assert dumped["servers"] == ["[::1]:7=[::1]:7", "s1=a:9900|b:9900"]
    assert ClientConfig.model_validate(dumped | {"auth_key": KEY}) == config


def test_models_are_frozen_and_read_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMKV_MTU", "1024")
    config = ClientConfig.model_validate({"servers": "a", "auth_key": KEY})
    assert config.mtu is None
    with pytest.raises(ValidationError):
        config.mtu = 512


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (BASE | {"PYTHONHASHSEED": "7"}).items():
        monkeypatch.setenv(name, value)
    assert secret(load_client_config()) == KEY
    assert python_hash_seed() == "7"
    assert python_hash_seed({}) is None


def test_dev_key_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/srv/me")
    assert str(default_dev_key_file({"XDG_STATE_HOME": "/state"})) == "/state/memkv/dev.key"
    assert str(default_dev_key_file({})) == "/srv/me/.local/state/memkv/dev.key"


# ---------------------------------------------------------------- unknown variables


def test_unknown_variables_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    load_client_config(BASE | {"MEMKV_SERVER": "x", "MEMKV_PORT": "9900", "MEMKV_ZZZ": KEY})
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert any("name=MEMKV_SERVER did you mean MEMKV_SERVERS?" in line for line in lines)
    assert any(line.endswith("name=MEMKV_ZZZ") for line in lines)
    assert KEY not in caplog.text


def test_kubernetes_variables_are_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    url = "tcp://10.96.0.9:9900"
    injected = {
        "MEMKV_SERVICE_HOST": "10.96.0.9",
        "MEMKV_SERVICE_PORT": "9900",
        "MEMKV_SERVICE_PORT_CONTROL": "9900",
        "MEMKV_PORT": url,
        "MEMKV_PORT_9900_TCP": url,
        "MEMKV_PORT_9900_TCP_PROTO": "tcp",
        "MEMKV_PORT_9900_TCP_PORT": "9900",
        "MEMKV_PORT_9900_TCP_ADDR": "10.96.0.9",
        "MEMKV_SERVER_SERVICE_HOST": "10.96.0.9",
        "MEMKV_SERVER_PORT": url,
        "MEMKV_SERVER_PORT_9901_TCP": url,
    }
    load_client_config(BASE | injected)
    assert caplog.records == []


def test_every_field_has_a_variable_and_every_variable_is_listed_once() -> None:
    names = [variable.name for variable in ENVIRONMENT]
    assert len(set(names)) == len(names)
    assert {variable.setting for variable in ENVIRONMENT} - {None} == set(ClientConfig.model_fields)


# ---------------------------------------------------------------- what nothing reads


EVERYTHING = BASE | {
    "MEMKV_SERVERS": "a=10.0.0.2|10.1.0.2,10.0.0.3,c=10.0.0.4|10.1.0.4",
    "MEMKV_RDMA_DEVICES": "mlx5_0",
    "MEMKV_NUM_CONNECTIONS": "4",
    "MEMKV_GID_INDEX": "0",
    "MEMKV_TRAFFIC_CLASS": "104",
    "MEMKV_SERVICE_LEVEL": "3",
    "MEMKV_MTU": "4096",
    "MEMKV_LICENSE": TOKEN,
    "MEMKV_CONNECT_TIMEOUT_S": "1",
}
VERBS_KNOBS = {"gid_index", "mtu", "rdma_devices", "service_level", "traffic_class"}


@pytest.mark.parametrize(
    ("transport", "names"),
    [
        (TransportName.LOOPBACK, VERBS_KNOBS | {"num_connections"}),
        (TransportName.VERBS, {"num_connections"}),
        (TransportName.TCP, VERBS_KNOBS),
        (TransportName.AUTO, set()),
    ],
)
def test_given_settings_that_nothing_reads_are_named(transport: TransportName, names: set[str]) -> None:
    unused = load_client_config(EVERYTHING).unused_with(transport)
    assert {line.replace(":", "").split()[0] for line in unused} == names
    assert TOKEN not in str(unused) and "10.1.0.2" not in str(unused)


@pytest.mark.parametrize("transport", TransportName)
def test_defaults_are_not_given(transport: TransportName) -> None:
    assert load_client_config(BASE | {"MEMKV_MTU": ""}).unused_with(transport) == ()

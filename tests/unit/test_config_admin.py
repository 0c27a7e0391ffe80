"""Admin settings: the server's token, and whom `memkv admin` asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from memkv_vllm.config import RailAddress, load_admin_targets, load_server_config, notify_socket
from memkv_vllm.errors import ConfigError

KEY = "ab" * 32
TOKEN = "a-token-of-some-length"


def server_yaml(tmp_path: Path, **network: Any) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(yaml.safe_dump({"network": {"auth_key": KEY, **network}, "memory": {"max_size": "8 MiB"}}))
    path.chmod(0o600)
    return path


def private(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


# ---------------------------------------------------------------------------------------------------- server


def test_the_token_from_the_yaml_or_a_file_and_never_shown(tmp_path: Path) -> None:
    file = private(tmp_path / "token", f"{TOKEN}\n")
    for network in ({"admin_token": TOKEN}, {"admin_token_file": str(file)}):
        config = load_server_config(server_yaml(tmp_path, **network))
        assert config.network.admin_token is not None
        assert config.network.admin_token.get_secret_value() == TOKEN
        for text in (repr(config), str(config), config.model_dump_json()):
            assert TOKEN not in text
    assert load_server_config(server_yaml(tmp_path)).network.admin_token is None


@pytest.mark.parametrize(
    "token", ["short", "has a space in it", "x" * 513, "ümlaut-token-of-length", 1234567890123456, ""]
)
def test_a_token_that_could_be_guessed_or_not_sent_is_refused_and_not_shown(tmp_path: Path, token: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        load_server_config(server_yaml(tmp_path, admin_token=token))
    assert "network.admin_token" in str(raised.value)
    assert "16 to 512" in str(raised.value)
    assert not str(token) or str(token) not in str(raised.value)


def test_one_source_of_the_token(tmp_path: Path) -> None:
    file = private(tmp_path / "token", TOKEN)
    with pytest.raises(ConfigError, match="only one of admin_token and admin_token_file") as raised:
        load_server_config(server_yaml(tmp_path, admin_token=TOKEN, admin_token_file=str(file)))
    assert TOKEN not in str(raised.value)
    with pytest.raises(ConfigError, match="network.admin_token_file: no such file"):
        load_server_config(server_yaml(tmp_path, admin_token_file="/none"))
    private(tmp_path / "bad", "short")
    with pytest.raises(ConfigError, match="16 to 512"):
        load_server_config(server_yaml(tmp_path, admin_token_file=str(tmp_path / "bad")))


def test_admin_address_and_tls_are_supported_now(tmp_path: Path) -> None:
    config = load_server_config(server_yaml(tmp_path, admin_address="127.0.0.1:9999"))
    assert config.network.admin == RailAddress("127.0.0.1", 9999)


# ---------------------------------------------------------------------------------------------------- memkv admin


def servers_of(*options: str, **environ: str) -> list[str]:
    return [str(address) for address in load_admin_targets(options, None, environ).servers]


def test_servers_come_from_the_option_then_the_environment_then_the_clients_settings(tmp_path: Path) -> None:
    client = tmp_path / "client.yaml"
    client.write_text(yaml.safe_dump({"servers": ["c:1", {"name": "d", "rails": ["d0:5", "d1:6"]}]}))
    everything = {"MEMKV_ADMIN_SERVERS": "b:7, b:8", "MEMKV_CONFIG": str(client), "MEMKV_SERVERS": "e"}
    assert servers_of("a:1", "a:2", "a:1", **everything) == ["a:1", "a:2"]
    assert servers_of(**everything) == ["b:7", "b:8"]
    del everything["MEMKV_ADMIN_SERVERS"]
    assert servers_of(**everything) == ["c:2", "d0:6"]
    del everything["MEMKV_CONFIG"]
    assert servers_of(**everything) == ["e:9901"]
    assert servers_of(MEMKV_SERVERS="[::1]:5,n=x:6|y:7") == ["[::1]:6", "x:7"]


@pytest.mark.parametrize(
    ("options", "environ", "problem"),
    [
        ((), {}, "no server is named"),
        (("a",), {}, "--server = 'a': expected host:port; add the port"),
        (("http://a:1",), {}, "--server = 'http://a:1': expected host:port; leave out the scheme"),
        ((), {"MEMKV_ADMIN_SERVERS": "a:0"}, "MEMKV_ADMIN_SERVERS = 'a:0': expected a port of 1 to 65535"),
        ((), {"MEMKV_SERVERS": "a:65535"}, "MEMKV_SERVERS = 'a:65535': .*give the admin address"),
        ((), {"MEMKV_SERVERS": "a:1|b:1"}, r"MEMKV_SERVERS\[0\] = 'a:1|b:1'"),
        ((), {"MEMKV_SERVERS": "a:x"}, "port"),
        ((), {"MEMKV_CONFIG": "/none.yaml"}, "/none.yaml"),
        (("a:1",), {"MEMKV_ADMIN_TOKEN_FILE": "/none"}, "MEMKV_ADMIN_TOKEN_FILE = '/none': no such file"),
    ],
)
def test_what_cannot_be_used_is_named(options: tuple[str, ...], environ: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_admin_targets(options, None, environ)


def test_the_token_of_the_command_is_read_from_a_file_and_never_shown(tmp_path: Path) -> None:
    file = private(tmp_path / "token", TOKEN + "\n")
    sources: list[tuple[Path | None, dict[str, str]]] = [(file, {}), (None, {"MEMKV_ADMIN_TOKEN_FILE": str(file)})]
    for option, environ in sources:
        targets = load_admin_targets(("a:1",), option, environ)
        assert targets.token is not None
        assert targets.token.get_secret_value() == TOKEN
        assert TOKEN not in repr(targets)
    assert load_admin_targets(("a:1",), None, {}).token is None


def test_systemds_socket() -> None:
    assert notify_socket({}) is None
    assert notify_socket({"NOTIFY_SOCKET": ""}) is None
    assert notify_socket({"NOTIFY_SOCKET": "/run/x"}) == "/run/x"

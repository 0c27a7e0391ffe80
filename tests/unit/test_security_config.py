"""Settings of TLS and licenses: what belongs together, what is read, and what is said when it does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memkv_vllm.config import ServerConfig, TransportName, load_client_config, load_server_config
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.errors import ConfigError
from memkv_vllm.transports.tcp import TcpClientTransport, TcpServerTransport
from tests.support.authority import Authority
from tests.support.licenses import Issuer

KEY = "ab" * 32
CLIENT = {"MEMKV_SERVERS": "a:1", "MEMKV_AUTH_KEY": KEY}


@pytest.fixture
def ca(tmp_path: Path) -> str:
    return str(Authority(tmp_path).file)


def test_a_clients_tls_reaches_its_transport(ca: str) -> None:
    environ = {
        **CLIENT,
        "MEMKV_TLS": "true",
        "MEMKV_TLS_CA": ca,
        "MEMKV_TLS_SERVER_NAME": "store",
        "MEMKV_TRANSPORT": "tcp",
    }
    config = load_client_config(environ)
    settings = ClusterSettings.from_config(config, "tier")
    assert (settings.tls, settings.tls_ca, settings.tls_server_name) == (True, Path(ca), "store")
    transport = settings.transports().get("tcp")
    assert isinstance(transport, TcpClientTransport)
    assert transport._tls is not None and transport._tls_server_name == "store"
    plain = ClusterSettings.from_config(load_client_config({**CLIENT, "MEMKV_TRANSPORT": "tcp"}), "tier")
    plain_transport = plain.transports().get("tcp")
    assert isinstance(plain_transport, TcpClientTransport) and plain_transport._tls is None


@pytest.mark.parametrize("name", ["MEMKV_TLS_CA", "MEMKV_TLS_SERVER_NAME"])
def test_tls_settings_without_tls_are_an_error(ca: str, name: str) -> None:
    with pytest.raises(ConfigError, match="expected tls"):
        load_client_config({**CLIENT, name: ca})


def test_an_authority_that_cannot_be_read_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tls_ca \(from MEMKV_TLS_CA\).*no such file"):
        load_client_config({**CLIENT, "MEMKV_TLS": "true", "MEMKV_TLS_CA": str(tmp_path / "none")})


def test_tls_that_the_transport_does_not_use_is_named(ca: str) -> None:
    config = load_client_config({**CLIENT, "MEMKV_TLS": "true", "MEMKV_TLS_CA": ca})
    assert {line.split()[0] for line in config.unused_with(TransportName.LOOPBACK)} == {"tls", "tls_ca"}
    assert config.unused_with(TransportName.TCP) == ()


def test_a_license_is_carried_to_the_credentials_and_not_shown() -> None:
    token = Issuer().license()
    config = load_client_config({**CLIENT, "AISTOR_LICENSE": token})
    settings = ClusterSettings.from_config(config, "tier")
    assert settings.credentials.license == token
    assert token not in repr(settings) + repr(config)
    assert ClusterSettings.from_config(load_client_config(CLIENT), "tier").credentials.license is None
    assert "license" not in str(config.unused_with(TransportName.LOOPBACK))


def server(**network: Any) -> ServerConfig:
    return ServerConfig.model_validate({"network": {"auth_key": KEY, **network}, "memory": {"max_size": "8MiB"}})


def test_tls_control_needs_a_certificate(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"network\.tls_cert and network\.tls_key"):
        server(tls_control=True)
    pair = Authority(tmp_path).issue("a")
    files = {"tls_cert": str(pair.cert), "tls_key": str(pair.key)}
    assert TcpServerTransport.from_config(server(**files, tls_control=True))._options.requires_tls
    assert not TcpServerTransport.from_config(server(**files))._options.requires_tls
    pair.key.write_text("no key")
    with pytest.raises(ConfigError, match=r"network\.tls_cert: cannot use"):
        TcpServerTransport.from_config(server(**files, tls_control=True))


def test_a_server_with_a_license_key_is_supported(tmp_path: Path) -> None:
    path = tmp_path / "memkv.yaml"
    key_file = Issuer().write(tmp_path)
    path.write_text(
        f"network: {{auth_key: '{KEY}'}}\nmemory: {{max_size: 8MiB}}\nlicense: {{public_key_file: {key_file}}}\n"
    )
    path.chmod(0o600)
    assert load_server_config(path).license.public_key_file == key_file

"""The server's yaml, and what `memkv start --dev` runs with."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from memkv_vllm.config import (
    RailAddress,
    Right,
    ServerConfig,
    default_dev_size_bytes,
    dev_server_config,
    load_server_config,
)
from memkv_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEY = "ab" * 32
OTHER = "cd" * 32
MIB = 1024**2


def with_keys(keys: object) -> dict[str, Any]:
    return {"network": {"auth_key": None, "auth_keys": keys}}


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """The smallest valid yaml, with more sections merged in; a None value takes a key away."""
    data: dict[str, Any] = {"network": {"auth_key": KEY}, "memory": {"max_size": "64 MiB"}}
    for part in parts:
        for section, values in part.items():
            data[section] = {**data.get(section, {}), **values} if isinstance(values, dict) else values
    return data


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., ServerConfig]:
    """Writes the data as a private yaml file and loads it."""

    def load(*parts: dict[str, Any]) -> ServerConfig:
        path = tmp_path / "server.yaml"
        path.write_text(yaml.safe_dump(merged(*parts)))
        path.chmod(0o600)
        return load_server_config(path)

    return load


def test_the_smallest_yaml_and_the_defaults(load: Callable[..., ServerConfig]) -> None:
    config = load()
    assert config.network.address == RailAddress("0.0.0.0", 9900)
    assert config.network.admin == RailAddress("0.0.0.0", 9901)
    entry = config.network.keys["default"]
    assert (entry.key.get_secret_value().hex(), entry.rights, entry.prefix) == (KEY, tuple(Right), b"")
    assert (config.memory.max_size, config.memory.block_size, config.memory.hugepages) == (64 * MIB, 2 * MIB, "auto")
    assert (config.storage.mode, config.storage.drives, config.storage.eviction.policy) == ("memory", (), "lru")
    assert config.limits.model_dump() == {
        "max_frame_bytes": 4 * MIB,
        "max_batch_keys": 1024,
        "max_sessions": 1024,
        "max_connections_per_session": 16,
        "max_transfers": 32,
        "max_transfers_per_session": 4,
        "max_handshakes": 64,
        "handshake_timeout_s": 5.0,
        "max_inflight_per_session": 32,
        "max_value_bytes": 1024**3,
        "max_regions_per_session": 8,
        "max_region_bytes": 1024**4,
        "transfer_timeout_s": 30.0,
        "copy_threads": min(4, os.cpu_count() or 1),
        "max_manifest_bytes": 65536,
        "max_manifests": 4096,
        "put_slice_values": 8,
        "max_entries": 4 * 1024**2,
        "max_fetches": 32,
        "max_fetch_bytes": 256 * MIB,
        "max_waiting_fetches": 65536,
        "max_waiting_writes": 65536,
    }


def test_everything_that_can_be_set(load: Callable[..., ServerConfig]) -> None:
    config = load(
        {
            "network": {"address": "[::1]:7"},
            "memory": {"max_size": "1.5 GiB", "block_size": "64 KiB", "hugepages": "on"},
            "limits": {"max_frame_bytes": "8 MB", "max_sessions": 3},
            "storage": {
                "eviction": {
                    "policy": "s3-fifo",
                    "high_watermark": 0.8,
                    "low_watermark": 0.5,
                    "namespace_quota": 0.25,
                }
            },
        }
    )
    eviction = config.storage.eviction
    assert (eviction.policy, eviction.high_watermark, eviction.low_watermark) == ("s3-fifo", 0.8, 0.5)
    assert eviction.namespace_quota == 0.25
    assert config.network.address == RailAddress("::1", 7)
    assert (config.memory.max_size, config.memory.block_size) == (3 * 512 * MIB, 65536)
    assert (config.limits.max_frame_bytes, config.limits.max_sessions) == (8_000_000, 3)


def test_what_the_model_knows_beyond_this_version() -> None:
    config = ServerConfig.model_validate(
        {
            "network": {"address": "[::1]:7", "admin_address": "127.0.0.1:8", "auth_key": KEY},
            "memory": {"max_size": "64 MiB"},
            "rdma": {"devices": ["mlx5_0"], "gid_index": 3, "mtu": 4096},
        }
    )
    assert config.network.admin == RailAddress("127.0.0.1", 8)
    assert (config.rdma.devices, config.rdma.gid_index, config.rdma.mtu) == (("mlx5_0",), 3, 4096)


def test_unquoted_on_and_off_and_empty_sections(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    text = (
        f"network:\n  auth_key: {KEY}\n  auth_keys:\nmemory:\n  max_size: 64 MiB\n  hugepages: off\nlimits:\nstorage:\n"
    )
    path.write_text(text)
    assert load_server_config(path).memory.hugepages == "off"
    path.write_text(text + "storag:\n")
    with pytest.raises(ConfigError, match=r"storag: unknown setting; did you mean storage\?"):
        load_server_config(path)


def test_several_keys_and_key_files(load: Callable[..., ServerConfig], tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(OTHER)
    keys = {"old": {"key": KEY, "rights": ["read"]}, "new": {"key_file": str(file), "prefix": "00ff"}}
    config = load({"network": {"auth_key": None, "auth_keys": keys}})
    found = config.network.keys
    assert found["old"].rights == (Right.READ,)
    assert (found["new"].key.get_secret_value().hex(), found["new"].prefix) == (OTHER, b"\x00\xff")
    only_file = load({"network": {"auth_key": None, "auth_key_file": str(file)}})
    assert only_file.network.keys["default"].key.get_secret_value().hex() == OTHER


def test_addresses_that_do_not_meet(load: Callable[..., ServerConfig]) -> None:
    for one, other in (("127.0.0.1:1", "127.0.0.2:1"), ("0.0.0.0:1", "[::1]:1"), ("0.0.0.0:0", "127.0.0.1:0")):
        assert str(load({"network": {"address": one, "admin_address": other}}).network.admin) == other


def test_admin_peers(load: Callable[..., ServerConfig]) -> None:
    assert load({}).network.admin_peers == ()
    both = (RailAddress("b", 9901), RailAddress("::1", 1))
    for written in ("B:9901, [::1]:1", ["b:9901", "[0::1]:1"]):
        assert load({"network": {"admin_peers": written}}).network.admin_peers == both
    assert load({"network": {"admin_peers": ""}}).network.admin_peers == ()


def test_what_a_file_holds_is_told_under_the_name_of_the_file(
    load: Callable[..., ServerConfig], tmp_path: Path
) -> None:
    file = tmp_path / "short"
    file.write_text("secret")
    network = {"auth_key": None, "auth_keys": {"a": {"key_file": str(file)}}, "admin_token_file": str(file)}
    with pytest.raises(ConfigError) as caught:
        load({"network": network})
    text = str(caught.value)
    assert f"network.admin_token_file = '{file}': expected 16 to 512 printable" in text
    assert f"network.auth_keys.a.key_file = '{file}': expected 64 hexadecimal characters" in text
    with pytest.raises(ConfigError, match=f"network.auth_key_file = '{file}': expected 64 hexadecimal"):
        load({"network": {"auth_key": None, "auth_key_file": str(file)}})
    assert "secret" not in text


def test_a_key_file_that_others_can_read(
    load: Callable[..., ServerConfig], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key"
    file.write_text(OTHER)
    file.chmod(0o600)
    load({"network": {"auth_key": None, "auth_key_file": str(file)}})
    assert not caplog.records
    file.chmod(0o604)
    load({"network": {"auth_key": None, "auth_key_file": str(file)}})
    assert f"path={file}" in caplog.text


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"network": {"auth_key": None}}, "network.auth_keys: expected one of network.auth_key"),
        ({"network": {"auth_keys": {"a": {"key": OTHER}}}}, "network.auth_keys: expected only one of"),
        ({"network": {"auth_key": KEY[1:]}}, "network.auth_key: expected 64 hexadecimal characters (32 bytes), got 63"),
        ({"network": {"auth_key": None, "auth_key_file": "/none"}}, "network.auth_key_file: no such file: /none"),
        ({"network": {"auth_key_file": "/none"}}, "network.auth_key_file: expected only one of auth_key and"),
        (with_keys({"a": KEY}), "network.auth_keys.a: expected a mapping"),
        (with_keys(KEY), "network.auth_keys: expected a mapping"),
        (
            with_keys({"a": {"kee": KEY, "key": OTHER}}),
            "did you mean network.auth_keys.a.key?",
        ),
        (
            with_keys({"a": {"key_file": "/none"}}),
            "network.auth_keys.a.key_file: no such",
        ),
        (with_keys({"a b": {"key": KEY}}), "expected 1 to 32 printable"),
        (
            with_keys({"a": {"key": KEY}, "b": {"key": KEY}}),
            "expected different keys: a and b hold the same one",
        ),
        (with_keys({"a": {"key": KEY, "rights": []}}), "at least one right"),
        (
            with_keys({"a": {"key": KEY, "rights": ["x"]}}),
            "rights[0] = 'x': expected 'read'",
        ),
        (with_keys({"a": {"key": KEY, "rights": 5}}), "(default ['read', 'write', 'delete', 'admin'])"),
        (with_keys({"a": {"key": KEY, "prefix": "0"}}), "two digits a byte; correct it or leave it out (default '')"),
        (
            {"network": {"tls_cert": "/c"}},
            "network.tls_key = nothing: expected network.tls_cert and",
        ),
        ({"network": {"tls_key": "/c"}}, "network.tls_key = '/c': expected network.tls_cert and network.tls_key both"),
        ({"network": {"tls_cert": "/c", "tls_key": "/k"}}, "network.tls_cert: no such file: /c"),
        ({"network": {"address": "0.0.0.0"}}, "network.address = '0.0.0.0': expected host:port; add the port"),
        ({"network": {"address": 9900}}, "network.address = 9900: expected host:port"),
        (
            {"network": {"address": 9900}},
            "host:port, such as 0.0.0.0:9900; correct it or leave it out (default '0.0.0.0:9900')",
        ),
        ({"network": {"address": "a:1", "admin_address": "a:1"}}, "expected another port than network.address (a:1)"),
        ({"network": {"address": "0.0.0.0:1", "admin_address": "127.0.0.1:1"}}, "expected another port than network."),
        ({"network": {"address": "[::1]:1", "admin_address": "[::]:1"}}, "expected another port than network.address"),
        ({"network": {"admin_peers": ["a:1", "b"]}}, "network.admin_peers[1] = 'b': expected host:port; add the port"),
        ({"network": {"admin_peers": "a:1, http://b:1"}}, "network.admin_peers[1] = 'http://b:1': expected host:port"),
        ({"network": {"admin_peers": [7]}}, "network.admin_peers[0] = 7: expected host:port; give the server's admin"),
        ({"network": {"admin_peers": "a:1,A:1"}}, "address a:1 is given more than once; keep one of them"),
        ({"network": {"admin_peers": {"a": 1}}}, "expected a list, or a comma list, of host:port, at most 64"),
        ({"network": {"admin_peers": [f"a:{n}" for n in range(1, 66)]}}, "a comma list, of host:port, at most 64"),
        (
            {"network": {"admin_peers_ca": "/c"}},
            "without them the peers are asked over plain HTTP; add them, or remove",
        ),
        ({"license": {"issuer": "me"}}, "license.issuer = 'me': expected license.public_key_file beside it"),
        ({"license": {"audience": "me"}}, "license.audience = 'me': expected license.public_key_file beside it"),
        ({"network": {"address": "a:65535"}}, "set network.admin_address"),
        ({"memory": {"max_size": None}}, "memory.max_size: missing"),
        (
            {"memory": {"max_size": "1 MiB"}},
            "memory.max_size = '1 MiB': expected at least memory.block_size (here 2 MiB)",
        ),
        ({"memory": {"max_size": 0}}, "at least one byte"),
        ({"memory": {"max_size": "64M"}}, "M may mean 1000 or 1024"),
        ({"memory": {"block_size": "3 MiB"}}, "expected a power of two"),
        ({"memory": {"maxSize": "1 GiB"}}, "memory.maxSize: unknown setting; did you mean memory.max_size?"),
        ({"memory": {"hugepages": True}}, "memory.hugepages = True: expected 'auto', 'on' or 'off'"),
        ({"memory": "64 MiB"}, "memory = '64 MiB': expected a mapping"),
        ({"max_size": 5}, "max_size: unknown setting; did you mean memory.max_size?"),
        ({"storage": {"mode": "disk"}}, "storage.mode = 'disk': expected 'memory', 'file' or 'direct'"),
        ({"storage": {"mode": "file"}}, "expected at least one drive in storage.mode file"),
        ({"storage": {"drives": [{"media": "/d", "max_size": "1 TiB"}]}}, "expected no drives in storage.mode memory"),
        ({"storage": {"mode": "file", "drives": [{"media": "/d"}]}}, "storage.drives[0].max_size: missing"),
        (
            {"storage": {"mode": "file", "drives": [{"media": "/d", "max_size": 9}] * 2}},
            "expected each storage.drives[].media once",
        ),
        ({"storage": {"eviction": {"policy": "s3fifo"}}}, "storage.eviction.policy = 's3fifo': expected 'lru'"),
        (
            {"storage": {"eviction": {"low_watermark": 0.99}}},
            "less than storage.eviction.high_watermark (here 0.95)",
        ),
        ({"storage": {"eviction": {"high_watermark": 95}}}, "storage.eviction.high_watermark = 95: expected less than"),
        ({"rdma": {"device": "mlx5_0"}}, "rdma.device: unknown setting; did you mean rdma.devices?"),
        ({"limits": {"max_session": 5}}, "limits.max_session: unknown setting; did you mean limits.max_sessions?"),
        ({"limits": {"max_manifest_bytes": "5 MiB"}}, "expected at most limits.max_frame_bytes"),
        ({"limits": {"transfer_timeout_s": 0}}, "limits.transfer_timeout_s = 0: expected greater than 0"),
    ],
)
def test_wrong_settings(load: Callable[..., ServerConfig], part: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(part)
    assert text in str(caught.value)
    assert KEY not in str(caught.value)
    assert OTHER not in str(caught.value)


@pytest.mark.parametrize(
    "part",
    [
        {"network": {"auth_key": None, "auth_key_file": "/none"}},
        {"network": {"auth_key_file": "/none"}},
        with_keys({"a": {"key_file": "/none"}}),
        {"network": {"auth_key": KEY[1:]}},
    ],
)
def test_one_wrong_key_is_one_problem(load: Callable[..., ServerConfig], part: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(part)
    assert len(caught.value.problems) == 1, caught.value.problems


def test_all_problems_of_all_sections_at_once(load: Callable[..., ServerConfig]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            {
                "network": {"address": "x", "tls_cert": "/c", "auth_key": "short"},
                "memory": {"max_size": "many"},
                "storage": {"eviction": {"low_watermark": 1.0}},
                "limits": {"nonsense": 1},
            }
        )
    assert len(caught.value.problems) == 6, str(caught.value)
    assert caught.value.source.endswith("server.yaml")


def test_an_empty_yaml(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("")
    with pytest.raises(ConfigError, match="the file is empty"):
        load_server_config(path)


@pytest.mark.parametrize("mode", ["memory", "file", "direct"])
def test_every_storage_mode_is_supported(load: Callable[..., ServerConfig], mode: str) -> None:
    drives = [{"media": "/d", "max_size": "1 TiB"}] if mode != "memory" else []
    assert load({"storage": {"mode": mode, "drives": drives}}).storage.mode == mode


def test_a_knob_of_rdma_without_devices_is_refused(load: Callable[..., ServerConfig]) -> None:
    part = {"rdma": {"service_level": 3}}
    config = ServerConfig.model_validate(merged(part))
    with pytest.raises(ConfigError, match="rdma.service_level: has no effect without rdma.devices"):
        config.validate_supported()
    with pytest.raises(ConfigError, match="has no effect"):
        load(part)
    ServerConfig.model_validate(merged()).validate_supported()
    assert load({"rdma": {"devices": ["mlx5_0"], "service_level": 3}}).rdma.service_level == 3


def test_the_key_is_shown_nowhere(load: Callable[..., ServerConfig]) -> None:
    config = load()
    for text in (
        repr(config),
        str(config),
        str(config.model_dump()),
        config.model_dump_json(),
        repr(config.network.keys),
    ):
        assert KEY not in text


def test_dev() -> None:
    config = dev_server_config(bytes(32), address="127.0.0.1:0", overrides={"limits": {"max_sessions": 2}})
    assert config.network.address == RailAddress("127.0.0.1", 0)
    assert config.network.admin == RailAddress("127.0.0.1", 0)
    assert config.storage.mode == "memory"
    assert config.limits.max_sessions == 2
    assert 0 < config.memory.max_size <= 2 * 1024**3
    assert dev_server_config(KEY, max_size="64 MiB").memory.max_size == 64 * MIB
    assert dev_server_config(KEY).network.address == RailAddress("127.0.0.1", 9900)
    with pytest.raises(ConfigError, match="memory.max_size"):
        dev_server_config(KEY, max_size="x")


@pytest.mark.parametrize(
    ("kib", "expected"), [(64 * 1024**2, 2 * 1024**3), (1024**2 + 3, 512 * MIB), (100, 2 * MIB), (None, 2 * 1024**3)]
)
def test_dev_size_follows_free_memory(tmp_path: Path, kib: int | None, expected: int) -> None:
    meminfo = tmp_path / "meminfo"
    if kib is not None:
        meminfo.write_text(f"MemTotal: 999 kB\nMemAvailable:   {kib} kB\n")
    assert default_dev_size_bytes(meminfo) == expected

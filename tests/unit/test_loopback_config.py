"""What the server's yaml bounds is what the transport bounds; what nothing reads is refused."""

from __future__ import annotations

from typing import Any

import pytest

from memkv_vllm.config import ServerConfig, dev_server_config
from memkv_vllm.errors import ConfigError
from memkv_vllm.transports.loopback import LoopbackServerTransport

KEY = "ab" * 32


def test_the_limits_reach_the_transport() -> None:
    limits = {
        "copy_threads": 3,
        "handshake_timeout_s": 2.5,
        "max_regions_per_session": 5,
        "max_region_bytes": 1 << 30,
    }
    config = dev_server_config(KEY, address="127.0.0.1:12345", max_size="64MiB", overrides={"limits": limits})
    transport = LoopbackServerTransport.from_config(config)
    assert transport.port == 12345
    assert (transport._copy_threads, transport._options.handshake_timeout_s) == (3, 2.5)
    assert (transport._max_regions, transport._max_region_bytes) == (5, 1 << 30)


@pytest.mark.parametrize(
    ("section", "name"),
    [
        ({"rdma": {"gid_index": 3}}, "rdma.gid_index"),
        ({"rdma": {"mtu": 4096}}, "rdma.mtu"),
        ({"rdma": {"traffic_class": 104, "devices": []}}, "rdma.traffic_class"),
    ],
)
def test_a_setting_that_nothing_reads_is_refused(section: dict[str, Any], name: str) -> None:
    """What is configured is what runs: a setting without effect would be silent."""
    base: dict[str, Any] = {"network": {"auth_key": KEY}, "memory": {"max_size": "64MiB"}}
    merged = {**base, **{key: {**base.get(key, {}), **value} for key, value in section.items()}}
    config = ServerConfig.model_validate(merged)
    with pytest.raises(ConfigError, match=name):
        config.validate_supported()


def test_a_plain_configuration_is_supported() -> None:
    dev_server_config(KEY, max_size="64MiB").validate_supported()

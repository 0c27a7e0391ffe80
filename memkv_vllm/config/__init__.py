"""Every setting of memkv, as frozen pydantic models: the one place that reads yaml and the environment.

``client`` holds the connection, ``extra`` what vLLM carries for us, ``server`` the server's yaml. The page
``docs/reference/settings.md`` is generated from these models by ``scripts/gen_settings_docs.py``.
"""

from memkv_vllm.config.admin import AdminTargets, load_admin_targets, notify_socket
from memkv_vllm.config.client import (
    ENVIRONMENT,
    LICENSE_VARIABLES,
    ClientConfig,
    EnvironmentVariable,
    Mode,
    TransportName,
    default_dev_key_file,
    load_client_config,
    load_rdma_devices,
    python_hash_seed,
    torch_allocator_settings,
)
from memkv_vllm.config.extra import (
    DirectConfig,
    TierConfig,
    parse_extra_config,
    parse_tier_entry,
    shown_extra_config,
)
from memkv_vllm.config.fields import RailAddress, ServerAddress, format_size, parse_auth_key, parse_servers, parse_size
from memkv_vllm.config.server import (
    DEFAULT_KEY_ID,
    Drive,
    EvictionConfig,
    KeyEntry,
    LicenseConfig,
    LimitsConfig,
    MemoryConfig,
    NetworkConfig,
    Right,
    ServerConfig,
    ServerRdmaConfig,
    StorageConfig,
)
from memkv_vllm.config.server_file import default_dev_size_bytes, dev_server_config, load_server_config

__all__ = [
    # client
    "ENVIRONMENT",
    "LICENSE_VARIABLES",
    "ClientConfig",
    "EnvironmentVariable",
    "Mode",
    "RailAddress",
    "ServerAddress",
    "TransportName",
    "load_client_config",
    "load_rdma_devices",
    "parse_auth_key",
    "parse_servers",
    "python_hash_seed",
    "torch_allocator_settings",
    # vLLM
    "DirectConfig",
    "TierConfig",
    "parse_extra_config",
    "parse_tier_entry",
    "shown_extra_config",
    # server
    "DEFAULT_KEY_ID",
    "Drive",
    "EvictionConfig",
    "KeyEntry",
    "LicenseConfig",
    "LimitsConfig",
    "MemoryConfig",
    "NetworkConfig",
    "Right",
    "ServerConfig",
    "ServerRdmaConfig",
    "StorageConfig",
    "default_dev_key_file",
    "default_dev_size_bytes",
    "dev_server_config",
    "load_server_config",
    # admin
    "AdminTargets",
    "load_admin_targets",
    "notify_socket",
    # sizes
    "format_size",
    "parse_size",
]

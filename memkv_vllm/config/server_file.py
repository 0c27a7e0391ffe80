"""Reading the yaml of ``memkv start --config``, and making what ``memkv start --dev`` runs with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretBytes, ValidationError

from memkv_vllm.config import sources
from memkv_vllm.config.problems import Problem, Reject, dotted, problems_of
from memkv_vllm.config.server import GIB, KIB, MIB, ServerConfig, unsupported
from memkv_vllm.errors import ConfigError


def load_server_config(path: str | Path) -> ServerConfig:
    """The server's settings from its yaml.

    Raises:
        ConfigError: With every problem, including what this version does not support yet.
    """
    path = Path(path)
    data = sources.without_empty(sources.read_yaml(path), ServerConfig)
    files, problems = _read_key_files(path, data)
    config: ServerConfig | None = None
    settled = {problem.key.replace("key_file", form) for problem in problems for form in ("key", "keys")}
    try:
        config = ServerConfig.model_validate(data)
    except ValidationError as error:
        found = [problem for problem in problems_of(error, ServerConfig) if problem.key not in settled]
        problems += [_of_its_file(problem, files) for problem in found]
    lines = [problem.line() for problem in problems]
    if config is not None:
        lines += _unreadable_files(config) + unsupported(config)
    if lines or config is None:
        raise ConfigError(str(path), lines)
    return config


def _of_its_file(problem: Problem, files: Mapping[str, str]) -> Problem:
    """The problem under the name of the setting that is in the yaml, with the file that holds the value."""
    file = files.get(problem.key)
    return problem if file is None else problem._replace(key=f"{problem.key}_file", seen=file)


def _read_key_files(path: Path, data: dict[str, Any]) -> tuple[dict[str, str], list[Problem]]:
    """Puts the content of each key file in place of the key, in ``data``; the files by the keys that they replaced."""
    network = data.get("network")
    if not isinstance(network, dict):
        return {}, []
    places: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
        (("network",), network, "auth_key"),
        (("network",), network, "admin_token"),
    ]
    entries = network.get("auth_keys")
    for key_id, entry in entries.items() if isinstance(entries, dict) else ():
        if isinstance(entry, dict):
            places.append((("network", "auth_keys", str(key_id)), entry, "key"))
    problems: list[Problem] = []
    files: dict[str, str] = {}
    for loc, section, name in places:
        file = section.get(f"{name}_file")
        if name in section:
            sources.warn_if_readable_by_others(path)
        if isinstance(file, str):
            try:
                if name in section:
                    raise Reject(f"expected only one of {name} and {name}_file", "remove one")
                what = "a file with the token" if name == "admin_token" else "a file with 64 hex characters"
                section[name] = sources.read_small_file(Path(file), what)
                files[dotted([*loc, name])] = file
                sources.warn_if_readable_by_others(Path(file))
            except Reject as error:
                problems.append(Problem(dotted([*loc, f"{name}_file"]), error.expected, error.fix))
    return files, problems


def _unreadable_files(config: ServerConfig) -> list[str]:
    problems = []
    files = {
        "network.tls_cert": config.network.tls_cert,
        "network.tls_key": config.network.tls_key,
        "network.admin_peers_ca": config.network.admin_peers_ca,
        "license.public_key_file": config.license.public_key_file,
    }
    for name, file in files.items():
        try:
            if file is not None:
                sources.read_small_file(file, "a PEM file")
        except Reject as error:
            problems.append(Problem(name, error.expected, error.fix).line())
    if config.network.tls_key is not None and not problems:
        sources.warn_if_readable_by_others(config.network.tls_key)
    return problems


def dev_server_config(
    auth_key: str | bytes | SecretBytes,
    *,
    address: str = "127.0.0.1:9900",
    max_size: int | str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ServerConfig:
    """What ``memkv start --dev`` runs with: an in-memory store on the loopback interface.

    Args:
        auth_key: Its key: 64 hexadecimal characters, or 32 bytes.
        address: Where it listens; port 0 takes any free port.
        max_size: Size of the arena; by default 2 GiB, or half of the free memory where that is less.
        overrides: More sections of the server yaml, such as ``{"limits": {"max_sessions": 2}}``.

    Raises:
        ConfigError: An argument is not valid.
    """
    size = default_dev_size_bytes() if max_size is None else max_size
    data: dict[str, Any] = {
        "network": {"address": address, "auth_key": auth_key},
        "memory": {"max_size": size},
    }
    for section, values in (overrides or {}).items():
        data[section] = {**data.get(section, {}), **values}
    try:
        return ServerConfig.model_validate(data)
    except ValidationError as error:
        problems = [problem.line() for problem in problems_of(error, ServerConfig)]
    raise ConfigError("memkv start --dev", problems)


def default_dev_size_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """2 GiB, or half of the memory that is free now where that is less; whole blocks of 2 MiB, one at least."""
    block = 2 * MIB
    available = 4 * GIB
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * KIB
    except (OSError, ValueError, IndexError):
        pass  # not Linux's /proc: the default is small enough for any machine that runs this
    return max(block, min(2 * GIB, available // 2) // block * block)

"""Where settings come from: yaml files, key and license files, and the environment. Nothing else reads either.

Each function raises :class:`~memkv_vllm.errors.ConfigError` or :class:`Reject`, never an ``OSError`` or a yaml error.
"""

import logging
import re
import stat
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import BaseModel

from memkv_vllm.config.problems import Reject, did_you_mean, model_in, redact
from memkv_vllm.errors import ConfigError

logger = logging.getLogger("memkv.config")

MAX_FILE_BYTES = 1024 * 1024
"""A settings, key or license file is a few KiB; a larger one is a wrong path (a drive, a model)."""

# What Kubernetes puts into every pod for a Service whose name starts with "memkv".
_KUBERNETES = re.compile(r"MEMKV_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_KUBERNETES_PORT = re.compile(r"MEMKV_(\w+_)?PORT")


class _Loader(yaml.SafeLoader):
    """Safe yaml, less two surprises: ``on``, ``off``, ``yes``, ``no`` stay text, and a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value} is given twice", key_node.start_mark
                )
            seen.add(str(key_node.value))
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|false)$"), list("tf"))


def read_small_file(path: Path, what: str) -> str:
    """The text of a settings, key or license file.

    Raises:
        Reject: It is missing, not a file, unreadable, too large, or not text; the message has no content of it.
    """
    try:
        if not path.is_file():
            reason = "not a regular file" if path.exists() else "no such file"
            raise Reject(f"{reason}: {path}", f"name {what}")
        if path.stat().st_size > MAX_FILE_BYTES:
            raise Reject(f"{path} is larger than {MAX_FILE_BYTES} bytes", f"name {what}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise Reject(f"cannot read {path}: {error.strerror}", "check its owner and mode") from None
    except UnicodeDecodeError:
        raise Reject(f"{path} is not UTF-8 text", f"name {what}") from None


def warn_if_readable_by_others(path: Path) -> None:
    """One warning when a file that holds a key can be read by every user of this host."""
    if path.stat().st_mode & stat.S_IROTH:
        logger.warning("secret is readable by every user of this host: path=%s fix='chmod o-rwx %s'", path, path)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a yaml file.

    Raises:
        ConfigError: With one problem that names the file and says what is wrong with it.
    """
    problem: str
    try:
        # yaml's own text quotes the line, which may hold the key: only its reason and place are used.
        data = yaml.load(read_small_file(path, "a yaml file of settings"), _Loader)
    except Reject as error:
        problem = f"{error.expected}; {error.fix}"
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = f"not valid yaml{place}: {redact(error.problem or 'cannot be parsed')}; correct the file"
    except (yaml.YAMLError, ValueError, RecursionError):
        problem = "not valid yaml: it cannot be parsed; correct the file"
    else:
        if isinstance(data, dict):
            return data
        found = "empty, or has only comments" if data is None else f"a {type(data).__name__}"
        problem = f"expected a mapping of settings, but the file is {found}; write one 'key: value' a line"
    raise ConfigError(str(path), [problem])


def without_empty(data: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """``data`` without the settings whose value is empty (``limits:`` and nothing beneath): the same as left out.

    Unknown keys stay, whatever their value, so that the model reports them.
    """
    kept: dict[str, Any] = {}
    for key, value in data.items():
        field = model.model_fields.get(str(key))
        section = model_in(field.annotation) if field is not None else None
        if value is None and field is not None:
            continue
        if field is None or section is None or not isinstance(value, dict):
            kept[key] = value
        elif get_origin(field.annotation) is dict:
            kept[key] = {
                name: without_empty(part, section) if isinstance(part, dict) else part for name, part in value.items()
            }
        else:
            kept[key] = without_empty(value, section)
    return kept


def warn_unknown_variables(environ: Mapping[str, str], known: Iterable[str]) -> None:
    """One warning for each ``MEMKV_*`` variable that nothing reads, silent for those that Kubernetes makes."""
    valid = tuple(known)
    for name in sorted(environ):
        if not name.startswith("MEMKV_") or name in valid or _from_kubernetes(name, environ[name]):
            continue
        near = did_you_mean(name, valid, cutoff=0.8)
        hint = f" did you mean {near}?" if near else ""
        logger.warning("environment variable is not one of memkv's and is ignored: name=%s%s", name, hint)


def _from_kubernetes(name: str, value: str) -> bool:
    if _KUBERNETES.fullmatch(name):
        return True
    # MEMKV_PORT alone could be a person's: the one that Kubernetes makes holds a url.
    return bool(_KUBERNETES_PORT.fullmatch(name)) and re.match(r"(tcp|udp|sctp)://", value) is not None

"""How a wrong setting is told to the operator: one line each, all of them at once, no secret in any of them.

A line has four parts: the full key, the value seen (unless it is secret), what was expected, and the next step.
Validators raise :class:`Reject`; :func:`problems_of` turns what pydantic collected into lines.
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from typing import Annotated, NamedTuple, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

__all__ = [
    "HIDDEN",
    "MISSING",
    "Problem",
    "Reject",
    "did_you_mean",
    "dotted",
    "field_at",
    "model_in",
    "problems_of",
    "redact",
    "shown",
]

SECRET_KEYS = frozenset({"admin_token", "auth_key", "auth_keys", "key", "license"})
"""Values under these names are never shown; nor are those of unknown keys, which may be a typo of one of these."""

# Keys and tokens end up in the wrong place (a key pasted as a file name): whatever looks like one is hidden anywhere.
_LOOKS_SECRET = re.compile(r"[0-9A-Fa-f]{32,}|eyJ[\w.-]{8,}")
_SHOWN_CHARS = 120


class _Hidden(Enum):
    HIDDEN = "hidden"


HIDDEN = _Hidden.HIDDEN
"""Stands for a value that must not be shown, or that does not exist."""

MISSING = "missing; it has no default"
"""What is wrong with a required setting that is not there."""


class Problem(NamedTuple):
    """One wrong setting: ``key`` (relative to where it is raised), ``expected``, next step and the value seen."""

    key: str
    expected: str
    fix: str = ""
    seen: object = HIDDEN

    def line(self) -> str:
        """The problem as one line of text."""
        seen = "" if self.seen is HIDDEN else f" = {shown(self.seen)}"
        fix = f"; {self.fix}" if self.fix else ""
        return " ".join(redact(f"{self.key}{seen}: {self.expected}{fix}").split())


class Reject(ValueError):
    """Raised by validators: what was expected and what to do. ``parts`` are problems of entries inside the value."""

    def __init__(self, expected: str = "", fix: str = "", parts: Sequence[Problem] = ()) -> None:
        self.expected, self.fix, self.parts = expected, fix, tuple(parts)
        super().__init__(expected or "; ".join(part.line() for part in parts))


def redact(text: str) -> str:
    """``text`` without anything that looks like a key or a token."""
    return _LOOKS_SECRET.sub("***", text)


def shown(value: object) -> str:
    """A value as it may stand in a message: scalars and short lists of them; never the inside of a mapping."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str | int | float | bool):
        text = repr(value)
    elif isinstance(value, list | tuple) and all(isinstance(item, str | int | float) for item in value):
        text = repr([item.value if isinstance(item, Enum) else item for item in value])
    else:
        return "nothing" if value is None else f"a {'mapping' if isinstance(value, Mapping) else type(value).__name__}"
    text = redact(text)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def did_you_mean(name: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The valid name nearest to ``name``, or None when none is near."""
    folded = {candidate.lower(): candidate for candidate in valid}
    near = difflib.get_close_matches(name.lower().replace("-", "_"), folded, n=1, cutoff=cutoff)
    return folded[near[0]] if near else None


def dotted(loc: Iterable[int | str]) -> str:
    """``("storage", "drives", 0, "media")`` as ``storage.drives[0].media``."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def model_in(annotation: object) -> type[BaseModel] | None:
    """The model class inside an annotation such as ``tuple[Drive, ...]`` or ``Limits | None``."""
    if isinstance(annotation, type) and get_origin(annotation) is None and issubclass(annotation, BaseModel):
        return annotation
    args = get_args(annotation)
    inside = args[:1] if get_origin(annotation) is Annotated else args
    return next((model for arg in inside if (model := model_in(arg))), None)


def field_at(model: type[BaseModel], loc: Sequence[int | str]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The section that holds ``loc`` and the field there (None when the key is not one of the section's)."""
    section: type[BaseModel] = model
    field: FieldInfo | None = None
    skip = False
    for part in loc:
        if skip:  # an index of a list of sections, or a name of a mapping of them
            skip = False
            continue
        if field is not None:
            inner = model_in(field.annotation)
            if inner is None:
                break
            section = inner
        field = section.model_fields.get(str(part))
        skip = field is not None and get_origin(field.annotation) in (tuple, list, dict)
    return section, field


def problems_of(error: ValidationError, model: type[BaseModel], key: Callable[[str], str] = str) -> list[Problem]:
    """What pydantic collected, as problems.

    Args:
        error: What ``model`` raised.
        model: The outermost model.
        key: Makes the name that the operator wrote out of a dotted key (a prefix, an environment variable).
    """
    found: list[Problem] = []
    # The url and the input of pydantic's own text are left out: the first is noise, the second may be a secret.
    for item in error.errors(include_url=False):
        loc = item["loc"]
        kind, cause = item["type"], item.get("ctx", {}).get("error")
        if isinstance(cause, Reject) and cause.parts:
            found += [part._replace(key=key(dotted(loc) + part.key)) for part in cause.parts]
        elif kind == "extra_forbidden":
            found.append(_unknown(model, loc, key))
        else:
            seen = HIDDEN if kind == "missing" or _is_secret(loc) else item["input"]
            expected, fix = _wording(kind, item["msg"], cause, field_at(model, loc)[1])
            found.append(Problem(key(dotted(loc)), expected, fix, seen))
    return found


def _is_secret(loc: Sequence[int | str]) -> bool:
    # An entry of auth_keys may be the bare key where a mapping was expected.
    return loc[-1:] != () and (loc[-1] in SECRET_KEYS or "auth_keys" in loc[-2:-1])


def _wording(kind: str, message: str, cause: object, field: FieldInfo | None) -> tuple[str, str]:
    fix = "correct it" if field is None or field.is_required() else f"correct it or leave it out ({_default(field)})"
    if isinstance(cause, Reject):
        return cause.expected, cause.fix or fix
    if kind == "missing":
        return MISSING, "add it"
    if kind in ("model_type", "dict_type"):
        return "expected a mapping of settings", "write its keys beneath it, indented"
    if kind in ("tuple_type", "list_type"):
        return "expected a list", fix
    return message.replace("Input should be ", "expected ", 1).replace("Input should", "expected to", 1), fix


def _default(field: FieldInfo) -> str:
    default = field.default
    if field.default_factory is not None or isinstance(default, BaseModel):
        return "it has a default"
    if is_dataclass(default):  # an address: as it is written in the yaml
        default = str(default)
    elif isinstance(default, bytes):
        default = default.hex()
    return "it is optional" if default is None or default == () else f"default {shown(default)}"


def _unknown(model: type[BaseModel], loc: Sequence[int | str], key: Callable[[str], str]) -> Problem:
    *section_loc, name = loc
    section = field_at(model, loc)[0]
    near = did_you_mean(str(name), section.model_fields)
    if near is not None:
        suggestion = dotted([*section_loc, near])
    else:
        suggestion = next((path for path in _leaves(model) if path.rsplit(".", 1)[-1] == name), "")
    if suggestion:
        return Problem(key(dotted(loc)), "unknown setting", f"did you mean {key(suggestion)}?")
    valid = ", ".join(sorted(key(field) for field in section.model_fields))
    return Problem(key(dotted(loc)), "unknown setting", f"remove it; valid here: {valid}")


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = model_in(field.annotation)
        if inner is None:
            yield prefix + name
        elif not get_args(field.annotation):
            yield from _leaves(inner, f"{prefix}{name}.")

"""The settings page is what the models say (fault P087: documented defaults that the code does not have)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from memkv_vllm.config import ENVIRONMENT, ClientConfig, DirectConfig, ServerConfig, TierConfig
from memkv_vllm.config.problems import model_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def generator() -> Any:
    spec = importlib.util.spec_from_file_location("gen_settings_docs", ROOT / "scripts" / "gen_settings_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def models(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        inner = model_in(field.annotation)
        if inner is not None:
            yield from models(inner)


def test_the_page_is_up_to_date(generator: Any) -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    assert page == generator.render(), "run scripts/gen_settings_docs.py"


@pytest.mark.parametrize("model", [ClientConfig, DirectConfig, TierConfig, ServerConfig])
def test_every_field_is_documented_and_every_model_is_frozen_and_strict(model: type[BaseModel]) -> None:
    for section in models(model):
        assert section.model_config["frozen"]
        assert section.model_config["extra"] == "forbid"
        assert section.__doc__
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"


def test_the_page_names_every_variable_and_the_real_defaults(generator: Any) -> None:
    page = generator.render()
    for variable in ENVIRONMENT:
        assert f"| `{variable.name}` |" in page
    assert "| `memkv_scratch_mb_per_thread` | integer, from 1 to 65536 | `128` |" in page
    assert "| `memory.block_size` | size | `2 MiB` |" in page
    assert "| `storage.drives[].media` | path | required |" in page
    assert "| `network.auth_keys.ID.rights` |" in page

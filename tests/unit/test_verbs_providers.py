"""Choosing a verbs provider by name, and what is said where its library is missing."""

from __future__ import annotations

import sys

import pytest

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.transports.verbs import libibverbs, providers


def test_the_default_is_one_of_them() -> None:
    assert providers.DEFAULT_PROVIDER in providers.PROVIDERS


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(EnvironmentFault, match=r"'ibverbs'; known: libibverbs, pyverbs"):
        providers.load_provider("ibverbs")


def test_without_libibverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise OSError(f"{path}: cannot open shared object file")

    monkeypatch.setattr(libibverbs, "Library", missing)
    with pytest.raises(EnvironmentFault, match="install libibverbs1 and ibverbs-providers") as caught:
        providers.load_provider("libibverbs")
    assert "libibverbs.so.1: cannot open" in str(caught.value)


def test_without_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never the other provider instead: what is asked for is what runs."""
    for name in list(sys.modules):
        if name.split(".")[0] == "pyverbs" or name.endswith((".pyverbs_provider", ".quiet_pyverbs")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    with pytest.raises(EnvironmentFault, match="install python3-pyverbs") as caught:
        providers.load_provider("pyverbs")
    assert sys.executable in str(caught.value) and "libibverbs provider" in str(caught.value)

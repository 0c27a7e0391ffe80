"""What every test of this repository gets."""

from __future__ import annotations

import os

import pytest

# vLLM, torch and what they import warn about their own dependencies; that is not ours to fix, and only the tests that
# are marked `vllm` import them.
pytest_plugins = ["pytester"]

_VLLM_NOISE = (
    "ignore::DeprecationWarning",
    "ignore::PendingDeprecationWarning",
    "ignore::FutureWarning",
    "ignore::UserWarning:torch.*",
    "ignore::UserWarning:vllm.*",
    "ignore::UserWarning:transformers.*",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-seconds",
        type=float,
        default=0.0,
        help="after its fixed examples, each fuzz test goes on with random ones for so long (default: 0)",
    )
    parser.addoption(
        "--soak-rounds", type=int, default=10, help="how often tests that kill a store do so (default: 10)"
    )


@pytest.fixture
def fuzz_seconds(request: pytest.FixtureRequest) -> float:
    """How long a fuzz test goes on with random examples."""
    return float(request.config.getoption("--fuzz-seconds"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Turns vLLM's own warnings off where vLLM runs, and only there; gives fuzz tests their time."""
    for item in items:
        if item.get_closest_marker("fuzz") is not None:
            item.add_marker(pytest.mark.timeout(60 + 2 * config.getoption("--fuzz-seconds")))
        if item.get_closest_marker("vllm") is not None:
            for line in _VLLM_NOISE:
                item.add_marker(pytest.mark.filterwarnings(line))


@pytest.fixture
def anyio_backend() -> str:
    """The loop that `@pytest.mark.anyio` tests run on: the one that the product uses."""
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_ambient_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that runs memkv must not change what its tests see."""
    for name in list(os.environ):
        if name.startswith("MEMKV_") or name in ("MINIO_LICENSE", "AISTOR_LICENSE", "NOTIFY_SOCKET"):
            monkeypatch.delenv(name)

"""An engine that must not start, in vLLM's own process for it: whoever reads the log finds the reason on one line."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.conftest import Scenario

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def refused(run_script: Scenario) -> dict[str, Any]:
    return run_script(
        "refused",
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "MEMKV_SERVERS": "127.0.0.1:1",
            "MEMKV_AUTH_KEY": "ab" * 32,
            "MEMKV_TRANSPORT": "",
            "MEMKV_RDMA_DEVICES": "mlx5_77",
        },
    )


def test_vllm_ends_and_the_reason_survives(refused: dict[str, Any]) -> None:
    """P073: direct mode without its NIC; nothing else is used in its place."""
    assert refused["type"], refused["text"]
    lines = [line for line in refused["output"].splitlines() if "event=start_refused" in line]
    assert lines and "rank=0" in lines[0]
    # On a machine without RDMA there is nothing at all; on one with, nothing of that name.
    assert "mlx5_77 is not on this host" in lines[0] or "no RDMA device" in lines[0] or "libibverbs" in lines[0]
    assert "EnvironmentFault" in refused["output"] or "RailError" in refused["output"], "in the traceback as well"

"""Direct mode over RDMA on a host without the NIC that it names: the engine must not start, in a process of its own."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.vllm.scripts.common import make_engine, run_scenario


def scenario(folder: Path) -> dict[str, Any]:
    """What vLLM's front end raised, and how long that took."""
    start = time.monotonic()
    try:
        make_engine(folder, extra={})
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error), "start_s": time.monotonic() - start}
    return {"type": "", "text": "it started", "start_s": time.monotonic() - start}


if __name__ == "__main__":
    run_scenario(scenario)

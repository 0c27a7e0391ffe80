"""A store that does one thing wrong over verbs: ``python -m tests.support.spoilt_verbs_server SPOIL CONFIG``.

It is ``memkv start --config CONFIG`` with one part replaced before it starts: as a control (where no test notices
``unfenced``, none shows what the fence is for), as a NIC that is broken (``deaf``), or one that gives up later than
usual (``patient``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import anyio

from memkv_vllm.cli import main
from memkv_vllm.transports.verbs import libibverbs, opening
from memkv_vllm.transports.verbs.bulk import VerbsBulk
from memkv_vllm.transports.verbs.client import DEFAULT_NUM_QUEUE_PAIRS

NUM_PROBES = 2 * DEFAULT_NUM_QUEUE_PAIRS
"""Completions by which a session's region is found good: for each queue pair one of a READ and one of a WRITE."""


def patient() -> None:
    """Nothing is wrong, but the NIC waits half a second for an answer, seven times: bytes can come late on purpose."""
    opening.ACK_TIMEOUT = 17


def unfenced() -> None:
    """As ``patient``, and a session's queue pairs live on after its fence."""
    patient()

    async def fence(self: Any) -> None:
        await anyio.lowlevel.checkpoint()

    VerbsBulk.fence = fence  # type: ignore[method-assign]


def deaf() -> None:
    """Bytes move, and after the probe no completion is ever reported."""
    queue: Any = libibverbs.LibibverbsCompletionQueue
    drain = queue.drain

    def few(self: Any) -> Sequence[Any]:
        left = getattr(self, "left", NUM_PROBES)
        told = drain(self)[:left]
        self.left = left - len(told)
        return told

    queue.drain = few


SPOILS = {"patient": patient, "unfenced": unfenced, "deaf": deaf}

if __name__ == "__main__":
    SPOILS[sys.argv[1]]()
    sys.argv = ["memkv", "start", "--config", sys.argv[2]]
    main()

"""Start a rank's engine as its vLLM worker would, in a process of its own, and say what came of it.

``python -m tests.support.engine_start [UID MEMLOCK_BYTES]``, settings from ``MEMKV_*``. One line of JSON: ``seconds``
of the start, and ``servers_ready`` or ``refused`` with the reason; ``import_seconds``, which tell how busy the machine
is. Then, if all servers are ready, values are stored and loaded, and the engine is closed. With UID and MEMLOCK_BYTES
it does so as that user, under that limit.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time

IMPORTS_AT = time.monotonic()

# ruff: noqa: E402 - the imports are timed
from memkv_vllm.config import load_client_config
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.transports.verbs import providers as _providers  # noqa: F401 - now, not while the start is timed
from tests.support.ranks import rank, staging_plan

IMPORT_SECONDS = time.monotonic() - IMPORTS_AT

REFUSED = 3
"""The exit status of an engine that refuses to start."""


def say(**facts: object) -> None:
    """The line of JSON."""
    sys.stdout.write(json.dumps({"import_seconds": IMPORT_SECONDS, **facts}) + "\n")
    sys.stdout.flush()


def main(uid: int | None, memlock_bytes: int | None) -> int:
    """Start, use, close; returns the exit status."""
    if memlock_bytes is not None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock_bytes, memlock_bytes))
    if uid is not None:
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    cluster = ClusterSettings.from_config(load_client_config(), "direct")
    started = time.monotonic()
    try:
        with rank(cluster, plan=staging_plan(16, value=1 << 20)) as one:
            seconds = time.monotonic() - started
            ready = one.statistics.servers_ready
            say(seconds=seconds, servers_ready=ready)
            if ready == len(cluster.servers):
                assert one.stored(range(8)).lost == {}
                result = one.loaded(range(8))
                assert (result.lost, one.wrong(result, range(8))) == ({}, [])
    except EnvironmentFault as error:
        say(seconds=time.monotonic() - started, refused=str(error))
        return REFUSED
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s %(message)s")
    sys.exit(main(*(map(int, sys.argv[1:]) if len(sys.argv) > 1 else (None, None))))

"""A client that puts values over the cable until it is killed: ``python -m tests.support.cable_putter KEY_FILE PORT``.

Prints ``putting`` before each put of 16 values.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import anyio

from memkv_vllm.protocol.auth import Credentials
from tests.support.cable import A
from tests.support.cable_store import VALUE_BYTES, ClientFactory, ValueClient
from tests.support.harness import connected

SLOTS = 16


async def main(key: str, port: int) -> None:
    """Until killed."""
    factory: Any = ClientFactory()
    address = (A.address, port)
    credentials = Credentials(bytes.fromhex(key))
    async with connected(factory, address, region_bytes=SLOTS * VALUE_BYTES, credentials=credentials) as client:
        one = ValueClient(client)
        for turn in itertools.count():
            sys.stdout.write("putting\n")
            sys.stdout.flush()
            await one.put(range(turn * SLOTS, (turn + 1) * SLOTS))


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]).read_text(), int(sys.argv[2]))

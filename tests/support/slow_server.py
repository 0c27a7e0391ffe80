"""The server process as `memkv start` runs it, with transfers that take long: ``python -m ... DELAY_S CONFIG.yaml``.

``never`` in place of the seconds: one that never comes to listen, as if it read large drives.
"""

from __future__ import annotations

import sys
from typing import Any

import anyio

from memkv_vllm.cli import configure_logging
from memkv_vllm.config import RailAddress, load_server_config
from memkv_vllm.serve import serve_until_signal
from memkv_vllm.store.server import StoreServer
from memkv_vllm.transports.base import SessionHandler
from memkv_vllm.transports.faults import Delay, FaultPlan, Operation
from memkv_vllm.transports.loopback import LoopbackServerTransport
from memkv_vllm.transports.memory import HostMemory


class NeverListens(LoopbackServerTransport):
    """Takes for ever to start."""

    async def serve(
        self, handler: SessionHandler, memory: HostMemory, *, task_status: Any = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Sleep."""
        await anyio.sleep_forever()


def main(delay: str, path: str) -> None:
    """Serve until a signal."""
    configure_logging(as_json=True)
    config = load_server_config(path)
    faults = FaultPlan()
    kind = NeverListens if delay == "never" else LoopbackServerTransport
    if delay != "never":
        faults.add(Operation.PULL, Delay(float(delay)))
    transport = kind.from_config(config, faults=faults)

    def announce(server: StoreServer, admin: RailAddress) -> None:
        sys.stdout.write(f"ready address=127.0.0.1:{server.addresses[0][1]} admin={admin}\n")
        sys.stdout.flush()

    anyio.run(serve_until_signal, config, [transport], announce)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

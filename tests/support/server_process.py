"""A scripted server in a process of its own: ``python -m tests.support.server_process TRANSPORT OPTIONS``.

Prints its port and serves until killed. OPTIONS is a JSON object: ``die`` names an operation (and ``type`` a
message type) at which the process ends by ``os._exit``; ``late_push_s`` makes every push write so much later and
answer OK at once.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import anyio

from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.transports.faults import Die, FaultPlan, LateWrite, Operation
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Status
from tests.support.harness import FACTORIES, MIB
from tests.support.scripted import ScriptedHandler


def plan_of(options: dict[str, Any]) -> FaultPlan:
    """The faults that OPTIONS ask for."""
    plan = FaultPlan()
    if "die" in options:
        type = MessageType[options["type"]] if options.get("type") else None
        plan.add(Operation(options["die"]), Die(exit_process=True), type=type, nth=options.get("nth"))
    if "late_push_s" in options:
        plan.add(Operation.PUSH, LateWrite(options["late_push_s"], Status.OK))
    return plan


async def serve(transport: str, options: dict[str, Any]) -> None:
    """Serve until killed."""
    arena = HostMemory.create("arena", 16 * MIB)
    arena.view(0, 8)[:] = b"from far"
    server = FACTORIES[transport].server(plan_of(options))
    async with anyio.create_task_group() as tasks:
        _, port = await tasks.start(server.serve, ScriptedHandler(), arena)
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(partial(serve, sys.argv[1], json.loads(sys.argv[2])))

"""A real store server in a process of its own, for scenarios that kill it: ``python -m ... KEY PORT SIZE``.

Reads commands and writes replies, a JSON object per line::

    {"fault": {"operation": "push", "action": "Delay", "arguments": {"seconds": 1}, "rule": {"times": 1}}}
    {"clear": true}          {"statistics": true}
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from memkv_vllm.pytest_plugin import LoopbackServer
from memkv_vllm.transports import faults


def serve(key: str, port: int, size: str) -> None:
    """Serve until standard input ends or the process is killed."""
    with tempfile.TemporaryDirectory() as folder:
        server = LoopbackServer(Path(folder), max_size=size, port=port)
        # One key over all restarts: clients reconnect with the one that they have.
        server.auth_key = key
        server.start()
        reply({"port": server.port})
        for line in sys.stdin:
            reply(obey(server, json.loads(line)))
        server.stop()


def obey(server: LoopbackServer, command: dict[str, Any]) -> dict[str, Any]:
    """Carry out one command."""
    if "statistics" in command:
        return server.statistics()
    if "clear" in command:
        server.faults.clear()
        return {}
    fault = command["fault"]
    action = getattr(faults, fault["action"])(**fault.get("arguments", {}))
    server.faults.add(faults.Operation(fault["operation"]), action, **fault.get("rule", {}))
    return {}


def reply(message: dict[str, Any]) -> None:
    """One line."""
    sys.stdout.write(json.dumps(message, default=str) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])

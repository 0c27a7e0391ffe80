"""A real store server in a process of its own, for scenarios that kill it: ``python -m ... KEY PORT SIZE``.

Reads commands and writes replies, a JSON object per line::

    {"fault": {"operation": "push", "action": "Delay", "arguments": {"seconds": 1}, "rule": {"times": 1}}}
    {"clear": true}          {"statistics": true}
    {"delete": "end of the key, hexadecimal"}          {"damage": "end of the key, hexadecimal"}
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
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
    if "delete" in command:
        return on_the_loop(server, delete, bytes.fromhex(command["delete"]))
    if "damage" in command:
        return on_the_loop(server, damage, bytes.fromhex(command["damage"]))
    if "clear" in command:
        server.faults.clear()
        return {}
    fault = command["fault"]
    action = getattr(faults, fault["action"])(**fault.get("arguments", {}))
    server.faults.add(faults.Operation(fault["operation"]), action, **fault.get("rule", {}))
    return {}


def on_the_loop(server: LoopbackServer, act: Callable[[Any, bytes], None], key_end: bytes) -> dict[str, Any]:
    """Act where the store's table is at home."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            act(server._server, key_end)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    assert server._thread is not None
    server._thread.post(run)
    done.result(10)
    return {}


def entry_of(store: Any, key_end: bytes) -> Any:
    """The one entry of the table whose key ends so."""
    spaces = store.handler._table._spaces.values()
    (entry,) = [entry for space in spaces for key, entry in space.entries.items() if key.endswith(key_end)]
    return entry


def delete(store: Any, key_end: bytes) -> None:
    """Make a value absent."""
    assert store.handler._table.delete(entry_of(store, key_end).key)


def damage(store: Any, key_end: bytes) -> None:
    """Flip a bit in the middle of a value."""
    entry = entry_of(store, key_end)
    store._memory.view(entry.offset + entry.length // 2, 1)[0] ^= 0x10


def reply(message: dict[str, Any]) -> None:
    """One line."""
    sys.stdout.write(json.dumps(message, default=str) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])

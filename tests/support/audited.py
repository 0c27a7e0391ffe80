"""A whole client or a whole server under an audit hook: ``python -m tests.support.audited ROLE KEY_HEX PORT``.

The hook is there before anything is imported, and no verbs library can be: neither ``pyverbs`` nor a shared library
of libibverbs or librdmacm. Prints one JSON object: every address that was connected, bound, resolved or sent to, every
process that was started, and what came of the work.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WATCHED = {
    "socket.connect", "socket.bind", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname",
    "socket.gethostbyaddr", "socket.getnameinfo", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn",
    "urllib.Request", "http.client.connect", "ftplib.connect", "smtplib.connect",
}  # fmt: skip
VERBS = ("ibverbs", "rdmacm", "mlx5")

seen: list[list[str]] = []


def audit(event: str, args: tuple[Any, ...]) -> None:
    """Note what leaves this process; refuse every way to a verbs library."""
    if event in WATCHED:
        seen.append([event, str(args[1] if event in ("socket.connect", "socket.bind", "socket.sendto") else args[0])])
    elif event == "ctypes.dlopen" and any(word in str(args[0]) for word in VERBS):
        raise OSError(f"blocked: {args[0]}")
    elif event == "import" and str(args[0]).split(".")[0] == "pyverbs":
        raise ModuleNotFoundError(f"blocked: {args[0]}", name="pyverbs")


def client(key: bytes, port: int) -> dict[str, Any]:
    """A rank's engine and the scheduler side's prober, at work."""
    from tests.support.ranks import cluster_settings, lookups, rank

    settings = cluster_settings(key, {"a": port})
    with rank(settings) as one, lookups(settings) as questions:
        one.ready().stored(range(10))
        result = one.loaded(range(10))
        present = questions.ready().present(range(20))
        return {"wrong": one.wrong(result, range(10)), "lost": len(result.bad_block_ids), "present": present}


def server(key: bytes, port: int) -> dict[str, Any]:
    """A store, started and ended."""
    from memkv_vllm.pytest_plugin import LoopbackServer

    with tempfile.TemporaryDirectory() as folder:
        store = LoopbackServer(Path(folder), max_size="8MiB", port=port)
        store.auth_key = key.hex()
        store.start()
        statistics = store.statistics()
        native_loops = sorted({"uvloop", "winloop", "gevent"} & sys.modules.keys())
        score = Path("/proc/self/oom_score_adj").read_text(encoding="ascii").strip()
        store.stop()
        complete = statistics["table"]["complete"]
        return {"port": store.port, "complete": complete, "native_loops": native_loops, "oom_score_adj": score}


if __name__ == "__main__":
    sys.addaudithook(audit)
    role: Callable[[bytes, int], dict[str, Any]] = {"client": client, "server": server}[sys.argv[1]]
    outcome = role(bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({"outcome": outcome, "seen": seen}))  # noqa: T201

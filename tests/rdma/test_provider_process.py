"""What a provider does to its process: limits, memory, loggers, threads, the end. Each in an interpreter of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from memkv_vllm.transports.verbs.providers import PROVIDERS

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(60)
every_provider = pytest.mark.parametrize("provider", sorted(PROVIDERS))

BEGIN = """
import ctypes, errno, gc, json, logging, mmap, os, resource, sys, threading, time
root = list(logging.root.handlers), logging.root.level, logging.root.disabled
import numpy as np
from memkv_vllm.transports.verbs.provider import Access, Opcode, VerbsError
from memkv_vllm.transports.verbs.providers import load_provider
from tests.support.provider_ends import ALL, End, batch, connect, wait

provider = load_provider(sys.argv[1])
name = provider.device_names()[0]
"""


def run(provider: str, code: str) -> dict[str, Any]:
    """The last line of what ``code`` prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-B", "-c", BEGIN + textwrap.dedent(code), provider],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=ROOT,
    )
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@every_provider
def test_memlock(provider: str) -> None:
    """P074: without the right to lock memory, and with a limit of 64 KiB, registering more is ENOMEM; less works."""
    seen = run(
        provider,
        """
        end = End(provider, name)
        end.region.close()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, 64 << 10))
        os.setresuid(65534, 65534, 65534)
        found = {}
        for length in (1 << 20, 128 << 10, 16 << 10):
            try:
                end.domain.register(int(end.bytes.ctypes.data), length, ALL).close()
                found[length] = "registered"
            except VerbsError as error:
                found[length] = [error.call, errno.errorcode[error.errno]]
        end.close()
        print(json.dumps(found))
        """,
    )
    refused = ["ibv_reg_mr", "ENOMEM"]
    assert seen == {str(1 << 20): refused, str(128 << 10): refused, str(16 << 10): "registered"}


@every_provider
def test_the_root_logger_is_left_alone(provider: str) -> None:
    """pyverbs calls logging.basicConfig when it is imported."""
    seen = run(
        provider,
        """
        End(provider, name).close()
        same = root == (list(logging.root.handlers), logging.root.level, logging.root.disabled)
        print(json.dumps({"same": same, "imported": "pyverbs" in sys.modules}))
        """,
    )
    assert seen == {"same": True, "imported": provider == "pyverbs"}


@every_provider
def test_posting_leaks_nothing(provider: str) -> None:
    """pyverbs' work requests leak 64 bytes each unless they are closed; refused ones too, and whole queue pairs."""
    seen = run(
        provider,
        """
        class Mallinfo(ctypes.Structure):
            names = "arena ordblks smblks hblks hblkhd usm fsm uord ford keep".split()
            _fields_ = [(name, ctypes.c_size_t) for name in names]

        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = Mallinfo

        near, far = End(provider, name), End(provider, name)
        connect(near, far)
        good, bad = batch(near, far, Opcode.WRITE, 50), batch(near, far, Opcode.WRITE, 4)
        bad.opcodes[2], bad.lengths[2] = 5, 4

        def some(rounds):
            for _ in range(rounds):
                near.queue_pair.post(good)
                wait(near, 50)
                try:
                    near.queue_pair.post(bad)
                except VerbsError:
                    pass
                wait(near, 2)
                near.domain.queue_pair(near.completions, 16).close()
            gc.collect()
            return mallinfo2().uord

        before = some(20)
        after = some(100)
        near.close()
        far.close()
        print(json.dumps({"grown": after - before, "live": provider.num_live()}))
        """,
    )
    assert seen["live"] == 0
    assert seen["grown"] < 64 * 1000, "5000 work requests and 100 queue pairs"


@every_provider
def test_a_process_that_closes_nothing_ends_quietly(provider: str) -> None:
    seen = run(
        provider,
        """
        near, far = End(provider, name), End(provider, name)
        connect(near, far)
        near.queue_pair.post(batch(near, far, Opcode.WRITE, 3))
        del near, far
        gc.collect()
        print(json.dumps({"live": provider.num_live()}))
        """,
    )
    assert seen == {"live": 10}

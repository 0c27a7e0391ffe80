"""What the two verbs providers cost per work request and completion, and what they move, in turns.

``python -m benchmarks.bench_providers [--rounds 5]``: one JSON object per case, the median of the rounds with the
lowest and the highest. ``fill``: a batch of work requests is written and handed to a function that does nothing; no
device is needed. The others need an RDMA device that reaches itself: on soft-RoCE, whose kernel moves all bytes inside
of the post, they compare the providers and say nothing about a NIC.

``fill`` with ``beside``: another thread of the process computes meanwhile. A post lets go of the interpreter lock, and
has to wait to get it back; ``libibverbs-keeping`` is the same function called without letting go.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.transports.verbs.provider import Opcode, Provider, WorkRequests
from memkv_vllm.transports.verbs.providers import PROVIDERS, load_provider
from tests.support.provider_ends import End, batch, connect, wait

VALUE_BYTES = 2_621_440
BATCHES = (1, 8, 64)
FILL_BATCHES = 200
"""Posts of one round of ``fill``."""
Measured = tuple[str, str, int, int, str, Callable[[], float]]
"""(peer, op, bytes, batch, unit, one round)."""


class Nothing:
    """Stands for a device and its peer where none is needed: what :func:`batch` reads of an end."""

    def __init__(self) -> None:
        self.region = self
        self.address, self.lkey, self.rkey = 0x7F00_0000_0000, 1, 2


def fill_cases() -> Iterator[Measured]:
    """Writing batches and a call of nothing."""
    # A C function of the same shape that only compares its first two arguments and returns 0.
    place = ctypes.cast(ctypes.CDLL(None).pthread_equal, ctypes.c_void_p).value
    assert place is not None
    from memkv_vllm.transports.verbs.libibverbs import WorkRequestArray
    from memkv_vllm.transports.verbs.symbols import POST

    array = WorkRequestArray(64)
    releasing = POST(place)
    keeping = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(place)
    posts: dict[str, Callable[[WorkRequests], None]] = {
        "libibverbs": lambda work: array.post(work, releasing, 1),
        "libibverbs-keeping": lambda work: array.post(work, keeping, 1),
    }
    try:
        from memkv_vllm.transports.verbs.pyverbs_provider import WorkRequestForm
    except ImportError as error:
        print(json.dumps({"peer": "pyverbs", "op": "fill", "error": str(error)}))
    else:
        form, pair = WorkRequestForm(), Nothing()
        pair.post_send = lambda _: None  # type: ignore[attr-defined]
        posts["pyverbs"] = lambda work: form.post(work, pair)
    for peer, post in posts.items():
        for count in BATCHES:
            work = batch(Nothing(), Nothing(), Opcode.WRITE, count, 8)  # type: ignore[arg-type]
            yield peer, "fill", 8, count, "us/work request", lambda w=work, p=post: _each(p, w)  # type: ignore[misc]
    for peer, post in posts.items():
        work = batch(Nothing(), Nothing(), Opcode.WRITE, 64, 8)  # type: ignore[arg-type]
        yield peer, "fill beside", 8, 64, "us/work request", lambda w=work, p=post: _beside(p, w)  # type: ignore[misc]


def _each(post: Callable[[WorkRequests], None], work: WorkRequests, rounds: int = FILL_BATCHES) -> float:
    begun = time.perf_counter()
    for _ in range(rounds):
        post(work)
    return (time.perf_counter() - begun) / rounds / len(work) * 1e6


def _beside(post: Callable[[WorkRequests], None], work: WorkRequests) -> float:
    with _busy():
        return _each(post, work, 20)


@contextmanager
def _busy() -> Iterator[None]:
    """Another thread that computes in Python."""
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Device:
    """A provider's two connected ends on one device, and the rounds over them."""

    def __init__(self, provider: Provider, name: str) -> None:
        self.near, self.far = (End(provider, name, length=4 * VALUE_BYTES) for _ in range(2))
        connect(self.near, self.far)

    def cases(self, peer: str) -> Iterator[Measured]:
        """All of them."""
        yield peer, "post", 8, 64, "us/work request", self.post
        yield peer, "completion", 8, 64, "us/completion", self.complete
        yield peer, "read latency", 4096, 1, "us", self.latency
        for op, opcode in (("read", Opcode.READ), ("write", Opcode.WRITE)):
            yield peer, op, VALUE_BYTES, 4, "MB/s", lambda o=opcode: self.move(o)  # type: ignore[misc]

    def post(self) -> float:
        """8 byte WRITEs, the last of each batch signalled; with the transfer, on soft-RoCE."""
        work = batch(self.near, self.far, Opcode.WRITE, 64, 8, signalled=[n == 63 for n in range(64)])
        spent = 0.0
        for _ in range(20):
            begun = time.perf_counter()
            self.near.queue_pair.post(work)
            spent += time.perf_counter() - begun
            wait(self.near, 1)
        return spent / 20 / 64 * 1e6

    def complete(self) -> float:
        """Taking 64 completions that are there."""
        work = batch(self.near, self.far, Opcode.WRITE, 64, 8)
        spent, taken = 0.0, 0
        for _ in range(20):
            self.near.queue_pair.post(work)
            time.sleep(0.01)
            begun = time.perf_counter()
            taken += len(self.near.completions.drain())
            spent += time.perf_counter() - begun
        assert taken == 20 * 64
        return spent / taken * 1e6

    def latency(self) -> float:
        """From the post to the completion, taken by its descriptor."""
        work, seen = batch(self.near, self.far, Opcode.READ, 1, 4096), []
        for _ in range(100):
            begun = time.perf_counter()
            self.near.queue_pair.post(work)
            wait(self.near, 1)
            seen.append(time.perf_counter() - begun)
        return statistics.median(seen) * 1e6

    def move(self, opcode: Opcode) -> float:
        """Batches of 4, one after the other."""
        work = batch(self.near, self.far, opcode, 4, VALUE_BYTES, signalled=[False, False, False, True])
        begun = time.perf_counter()
        for _ in range(4):
            self.near.queue_pair.post(work)
            wait(self.near, 1)
        return 16 * VALUE_BYTES / (time.perf_counter() - begun) / 1e6

    def close(self) -> None:
        """Both ends."""
        self.near.close()
        self.far.close()


def main() -> None:
    """Runs all cases, round by round, so that what else happens on the machine meets both providers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    cases, devices = list(fill_cases()), []
    for name in sorted(PROVIDERS):
        try:
            provider = load_provider(name)
        except EnvironmentFault as fault:
            print(json.dumps({"peer": name, "error": str(fault)}))
            continue
        if names := provider.device_names():
            devices.append(Device(provider, names[0]))
            cases.extend(devices[-1].cases(name))
    seen: dict[int, list[float]] = {}
    for _ in range(rounds):
        for number, case in enumerate(cases):
            seen.setdefault(number, []).append(case[-1]())
    for number, (peer, op, size, count, unit, _) in enumerate(cases):
        rows = seen[number]
        figures = {"median": statistics.median(rows), "low": min(rows), "high": max(rows)}
        figures = {name: round(value, 2) for name, value in figures.items()}
        print(json.dumps({"peer": peer, "op": op, "bytes": size, "batch": count, "unit": unit, **figures}))
    print(json.dumps({"rounds": rounds, "python": platform.python_version(), "kernel": platform.release()}))
    for device in devices:
        device.close()


if __name__ == "__main__":
    main()

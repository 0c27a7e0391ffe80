"""A process that ends with open verbs objects: ``python -m tests.support.open_at_exit PROVIDER [forget]``.

``PROVIDER`` is one of the verbs transport's, or ``none``: then objects that say when they are freed.
"""

from __future__ import annotations

import gc
import sys

from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs.ownership import Ledger, Owned
from memkv_vllm.transports.verbs.provider import Access
from memkv_vllm.transports.verbs.providers import load_provider


class Told(Owned):
    """Says that it is freed."""

    def __del__(self) -> None:
        sys.stdout.write("freed\n")
        sys.stdout.flush()

    def _destroy(self) -> None:
        pass


def opened(name: str) -> list[object]:
    """Some objects that stand on each other."""
    if name == "none":
        ledger = Ledger()
        parent = Told(ledger)
        return [ledger, parent, Told(ledger, parent)]
    provider = load_provider(name)
    device = provider.open("rxe0")
    domain, queue = device.protection_domain(), device.completion_queue(16)
    pair = domain.queue_pair(queue, 4)
    pair.initialize(1, Access.LOCAL)
    queue.arm()
    memory = HostMemory.create("exit", 1 << 20)
    region = domain.register(memory.address, memory.length, Access.LOCAL)
    return [provider, device, domain, queue, pair, memory, region]


def main() -> None:
    """See the module."""
    held = opened(sys.argv[1])
    if "forget" in sys.argv:
        held.clear()
        gc.collect()
    sys.stdout.write("open\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

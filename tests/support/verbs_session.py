"""The server's end of a verbs session without a server: a bulk on one fake NIC, its client's end on another."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from memkv_vllm.topology import read_host
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.faults import FaultPlan
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs.bulk import BulkOptions, VerbsBulk
from memkv_vllm.transports.verbs.endpoints import Endpoint
from memkv_vllm.transports.verbs.opening import Knobs, rail_of
from memkv_vllm.transports.verbs.passive import PassiveEnd
from memkv_vllm.transports.verbs.rails import Rails
from memkv_vllm.types import MemoryKind
from tests.support.fake_verbs import FakeNic
from tests.support.verbs_host import FakeHost

__all__ = ["CLIENT_ADDRESS", "SERVER_ADDRESS", "Pair", "paired"]

MIB = 1 << 20
SERVER_ADDRESS, CLIENT_ADDRESS = "10.77.0.1", "10.77.0.2"


@dataclass
class Pair:
    """Both ends of a session. ``nic`` is the server's: all that is posted is posted there."""

    host: FakeHost
    nic: FakeNic
    rails: Rails
    bulk: VerbsBulk
    end: PassiveEnd
    arena: HostMemory
    memory: HostMemory
    """The client's."""
    cuts: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    async def connect(self) -> Endpoint:
        """CONNECT, as a client does; returns what the server answered."""
        theirs = Endpoint.unpack(await self.bulk.connect("verbs", self.end.make().pack()))
        self.end.connect(theirs)
        return theirs

    async def register(self, region: int = 1, memory: HostMemory | None = None) -> None:
        """REGISTER the client's memory."""
        used = memory or self.memory
        token = self.end.register(Region(region, MemoryKind.HOST, used.length, used))
        await self.bulk.register(region, MemoryKind.HOST, used.length, token.pack())


@asynccontextmanager
async def paired(
    root: Path,
    *,
    host: FakeHost | None = None,
    num_queue_pairs: int = 4,
    num_bytes: int = 4 * MIB,
    faults: FaultPlan | None = None,
    probe_timeout_s: float = 0.3,
    registered: bool = True,
    devices: Sequence[str] = ("fake0",),
    spread_bytes: int = 0,
) -> AsyncIterator[Pair]:
    """A session on ``host`` (two NICs, made here unless given); everything is released at the end."""
    host = host or FakeHost.make(root, SERVER_ADDRESS, CLIENT_ADDRESS)
    facts = read_host(host.root)
    with HostMemory.create("arena", num_bytes) as arena, HostMemory.create("staging", num_bytes) as memory:
        rails = Rails(facts, devices, Knobs(), arena)
        end = PassiveEnd(host.provider, rail_of(facts, "fake1"), Knobs(), num_queue_pairs, host.root)
        options = BulkOptions(8, 64 * MIB, faults, probe_timeout_s, spread_bytes)
        cuts: list[str] = []
        counts: Counter[str] = Counter()
        bulk = VerbsBulk(
            rails,
            SERVER_ADDRESS,
            options,
            cut=lambda: cuts.append("cut"),
            counted=lambda event: counts.update([event]),
        )
        pair = Pair(host, host.nics[0], rails, bulk, end, arena, memory, cuts, counts)
        try:
            await rails.open(host.provider, host.root)
            if registered:
                await pair.connect()
                await pair.register()
            yield pair
        finally:
            await bulk.fence()
            assert end.close(5.0)
            await rails.aclose()
            host.fabric.close()
            assert host.provider.num_live() == 0

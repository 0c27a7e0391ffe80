"""A client that knows what may be visible: puts, gets, deletes, reports and resets over the transport's own seam.

It has one connection per server, and on each some workers that do one operation after the other; what each may find is
in the server's :class:`Ledger`. Any failure of a connection ends the workers; then it is fenced for as long as that
takes, and only after that a new one is made. ``python -m tests.soak.ledger_client ORDERS``.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import anyio
from anyio.abc import TaskGroup

from memkv_vllm.config import ClientConfig, load_client_config
from memkv_vllm.engine.client import ClusterSettings
from memkv_vllm.errors import FenceTimeout, MemkvError, StoreError
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.protocol.messages import Admin, BadValue, Delete, Exists, Get, GetItem, Put, PutItem, ReportBad, Stat
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.base import ClientConnection, ClientTransport, Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.types import Deadline, Extent, MemoryKind, Status
from tests.soak.client_process import Findings, Journal, begin
from tests.soak.content import MAX_BYTES, content, first_difference, length_of
from tests.soak.ledger import Ledger

logger = logging.getLogger("soak")

WORKERS = 3
STRIPE_BYTES = 2 * MAX_BYTES
"""Staging memory of one worker: a batch of small values, or two of the largest."""
BATCH = 12
LAYOUT = 7
REQUEST_S, CONNECT_S, FENCE_S, PAUSE_S = 10.0, 3.0, 2.0, 0.1
DEAD_BATCH = 64
KEPT = (Status.OK, Status.EXISTS)
TRANSIENT = (Status.NO_SPACE, Status.TIMEOUT, Status.FAILED, Status.BUSY, Status.PENDING)
"""What a store may answer to a put or a get in a storm. PENDING: a put of ours that timed out is not undone yet."""


@dataclass
class Worker:
    """One worker's part of a connection."""

    server: str
    connection: ClientConnection
    memory: HostMemory
    offset: int
    ledger: Ledger
    journal: Journal
    findings: Findings
    dice: random.Random

    # -- the operations

    async def put(self) -> None:
        """New values; now and then one that is there already, or one that was removed before."""
        ledger = self.ledger
        keys = ledger.new(self.dice.randint(1, BATCH)) + ledger.stored(self.dice.randint(0, 1))
        again = ledger.dead(self.dice.randint(0, 1))
        with self._using(keys + again, changes=True):
            self.journal.alive(self.server, again)
            items = []
            for key, extent in self._laid_out(keys + again):
                view = self.memory.array[extent.offset : extent.offset + extent.length]
                view[:] = content(key, extent.length)
                checksum = digest(self.memory.view(extent.offset, extent.length))
                items.append(PutItem(key, checksum, LAYOUT, extent))
            request = Put(items, ChecksumAlgorithm.XXH3_64_TREE_1M, int(REQUEST_S * 1000))
            statuses = await self.connection.request(request, _soon(REQUEST_S))
            for item, status in zip(items, statuses, strict=True):
                self._was_put(item.key, status)
            self.journal.dead(self.server, [key for key in again if ledger.is_dead(key)])

    def _was_put(self, key: bytes, status: Status) -> None:
        self.findings.counts[f"put_{status.name.lower()}"] += 1
        if status is Status.EXISTS and self.ledger.is_dead(key):
            self.findings.wrong(f"{self.server}: a removed value is there again: put of {key.hex()} answers EXISTS")
        elif status in KEPT:
            self.ledger.was_stored(key)
        elif status not in TRANSIENT:
            self.findings.wrong(f"{self.server}: put of {key.hex()} answers {status.name}")

    async def get(self) -> None:
        """Values that were stored: each is whole or absent."""
        keys = self.ledger.stored(self.dice.randint(1, BATCH))
        if not keys:
            return await self.put()
        with self._using(keys, changes=False):
            await self._get(keys)

    async def _get(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Fetch and compare; returns key and generation of those that arrived."""
        items = [GetItem(key, LAYOUT, extent) for key, extent in self._laid_out(keys)]
        for item in items:
            self.memory.array[item.extent.offset : item.extent.offset + item.extent.length] = 0xEE
        results = await self.connection.request(Get(items, int(REQUEST_S * 1000)), _soon(REQUEST_S))
        arrived = []
        for item, result in zip(items, results, strict=True):
            self.findings.counts[f"get_{result.status.name.lower()}"] += 1
            if result.status is Status.OK:
                self._compare(item)
                arrived.append((item.key, result.generation))
            elif result.status is Status.ABSENT:
                self.ledger.is_gone(item.key)
            elif result.status not in TRANSIENT:
                self.findings.wrong(f"{self.server}: get of {item.key.hex()} answers {result.status.name}")
        return arrived

    def _compare(self, item: GetItem) -> None:
        view = self.memory.array[item.extent.offset : item.extent.offset + item.extent.length]
        self.findings.counts["get_bytes"] += item.extent.length
        if self.ledger.is_dead(item.key):
            self.findings.wrong(f"{self.server}: a removed value was served: {item.key.hex()}")
        at = first_difference(item.key, view)
        if at is not None:
            self.findings.wrong(
                f"{self.server}: wrong bytes were served: {item.key.hex()}, {item.extent.length} bytes, first at {at}"
            )

    async def look(self) -> None:
        """Removed values: none is found, neither by a lookup nor by a get."""
        keys = self.ledger.dead(DEAD_BATCH)
        if not keys:
            return await self.delete()
        with self._using(keys, changes=False):
            present = await self.connection.request(Exists([key[:-2] for key in keys], 1), _soon(REQUEST_S))
            self.findings.counts["looked_for_removed"] += len(keys)
            for key, found in zip(keys, present, strict=True):
                if found:
                    self.findings.wrong(f"{self.server}: a removed value is found by a lookup: {key.hex()}")
            await self._get(keys[:2])

    async def delete(self) -> None:
        """Delete some values."""
        keys = self.ledger.stored(self.dice.randint(1, 4))
        with self._using(keys, changes=True):
            statuses = await self.connection.request(Delete(keys), _soon(REQUEST_S)) if keys else []
            for status in statuses:
                self.findings.counts[f"delete_{status.name.lower()}"] += 1
                if status not in (Status.OK, Status.ABSENT):
                    self.findings.wrong(f"{self.server}: delete answers {status.name}")
            self._removed(keys)

    async def report(self) -> None:
        """Fetch a value and call it bad: it is hidden at once."""
        keys = self.ledger.stored(1)
        with self._using(keys, changes=True):
            for key, generation in await self._get(keys) if keys else []:
                (hidden,) = await self.connection.request(ReportBad([BadValue(key, generation)]), _soon(REQUEST_S))
                self.findings.counts["reported_bad" if hidden else "reported_too_late"] += 1
                if hidden:
                    self._removed([key])

    async def reset(self) -> None:
        """Reset the namespace of everything stored until now."""
        old = self.ledger.closing()
        if not self.ledger.is_quiet(old):
            return  # a request about one of its keys is under way: the next turn resets it
        await self.connection.request(Admin({"command": "reset", "namespace": old.hex()}), _soon(REQUEST_S))
        self.findings.counts["resets"] += 1
        self.journal.dead(self.server, self.ledger.was_reset(old))

    async def stat(self) -> None:
        """Statistics: never a negative number."""
        statistics = await self.connection.request(Stat(), _soon(REQUEST_S))
        for name, value in statistics["table"].items():
            if isinstance(value, int) and value < 0:
                self.findings.wrong(f"{self.server}: table.{name} = {value}")

    # -- small things

    def _removed(self, keys: list[bytes]) -> None:
        for key in keys:
            self.ledger.was_removed(key)
        self.journal.dead(self.server, keys)

    def _laid_out(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, Extent]]:
        """Places in this worker's stripe for as many of the keys as fit."""
        offset, end = self.offset, self.offset + STRIPE_BYTES
        for key in keys:
            length = length_of(key)
            if offset + length <= end:
                yield key, Extent(1, offset, length)
                offset += -(-length // 64) * 64

    @contextmanager
    def _using(self, keys: Sequence[bytes], *, changes: bool) -> Iterator[None]:
        """Keys are busy meanwhile; without an answer nothing is known of those that the request changes."""
        answered = False
        try:
            yield
            answered = True
        except StoreError:
            answered = True  # refused as a whole
            raise
        finally:
            if changes and not answered:
                for key in keys:
                    self.ledger.forget(key)
                self.journal.alive(self.server, list(keys))
            self.ledger.release(keys)

    async def run(self) -> None:
        """One operation after the other until the process ends or the connection does."""
        operations: dict[Callable[[], Awaitable[None]], int] = {
            self.put: 30, self.get: 40, self.look: 12, self.delete: 8, self.report: 3, self.reset: 1, self.stat: 2,
        }  # fmt: skip
        while not self.findings.ending.is_set():
            (operation,) = self.dice.choices(list(operations), list(operations.values()))
            await operation()
            self.findings.operation()
            await anyio.sleep(self.dice.uniform(0, 0.02))


class ServerClient:
    """Everything that this process does with one server, over one connection after the other."""

    def __init__(
        self,
        name: str,
        config: ClientConfig,
        transport: ClientTransport,
        journal: Journal,
        findings: Findings,
        seed: str,
    ) -> None:
        self.name = name
        (self._rail, *_) = next(server for server in config.servers if server.name == name).rails
        self._credentials = Credentials(config.auth_key.get_secret_value(), config.auth_key_id)
        self._transport = transport
        self._journal = journal
        self._findings = findings
        self._dice = random.Random(f"{seed}:{name}")
        self._ledger = Ledger(self._dice)

    async def run(self) -> None:
        """Until the process is to end."""
        with HostMemory.create("soak", WORKERS * STRIPE_BYTES) as memory:
            while not self._findings.ending.is_set():
                try:
                    await self._one_connection(memory)
                except MemkvError as error:
                    self._findings.counts[f"ended_{type(error).__name__}"] += 1
                await anyio.sleep(self._dice.uniform(PAUSE_S / 2, PAUSE_S))

    async def _one_connection(self, memory: HostMemory) -> None:
        rail, deadline = self._rail, _soon(CONNECT_S)
        connection = await self._transport.connect(rail.host, rail.port, self._credentials, PeerKind.ENGINE, deadline)
        self._findings.counts["connections"] += 1
        failures: list[MemkvError] = []
        async with anyio.create_task_group() as tasks:

            async def guarded(part: Callable[[], Awaitable[None]]) -> None:
                """The end of one part is the end of all."""
                try:
                    await part()
                except MemkvError as error:
                    failures.append(error)
                tasks.cancel_scope.cancel()

            async def work() -> None:
                await connection.register(Region(1, MemoryKind.HOST, memory.length, memory), _soon(CONNECT_S))
                async with anyio.create_task_group() as workers:
                    for number in range(WORKERS):
                        workers.start_soon(_until_failure, self._worker(connection, memory, number), failures, tasks)

            tasks.start_soon(guarded, connection.run)
            tasks.start_soon(guarded, work)
        await connection.aclose()
        await self._fence(connection)
        if failures:
            raise failures[0]

    def _worker(self, connection: ClientConnection, memory: HostMemory, number: int) -> Worker:
        return Worker(
            self.name, connection, memory, number * STRIPE_BYTES, self._ledger, self._journal, self._findings,
            random.Random(self._dice.random()),
        )  # fmt: skip

    async def _fence(self, connection: ClientConnection) -> None:
        """The staging memory is used again only when no byte of this connection can land in it any more."""
        while True:
            try:
                await connection.fence(_soon(FENCE_S))
            except FenceTimeout:
                self._findings.counts["fence_timeouts"] += 1
            else:
                return
            await anyio.sleep(PAUSE_S)


def _soon(seconds: float) -> Deadline:
    return Deadline(time.monotonic() + seconds)


async def _until_failure(worker: Worker, failures: list[MemkvError], tasks: TaskGroup) -> None:
    try:
        await worker.run()
    except MemkvError as error:
        failures.append(error)
        tasks.cancel_scope.cancel()


async def main() -> None:
    """Run until SIGTERM."""
    orders, findings = begin()
    config = load_client_config(orders.environ)
    settings = ClusterSettings.from_config(config, "direct" if orders.mode == "direct" else "tier")
    transport = settings.transports(PeerKind.ENGINE).get(settings.transport)
    journal = Journal(orders.journal)
    async with anyio.create_task_group() as tasks:
        for server in config.servers:
            seed = f"{orders.seed}:{orders.name}:{orders.life}"
            tasks.start_soon(ServerClient(server.name, config, transport, journal, findings, seed).run)
    await transport.aclose()
    findings.beat(final=True)


if __name__ == "__main__":
    anyio.run(main)

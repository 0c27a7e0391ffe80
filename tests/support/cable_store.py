"""A real store server at one end of the cable, and clients over verbs at the other.

The server is ``memkv start --config`` with ``rdma.devices: [rxa]``, reached at 10.90.0.1 over the cable; at 127.0.0.1
by tcp, whatever the cable does. Every value is ``VALUE_BYTES`` of one byte, its *mark*, so that memory tells whose
bytes have landed in it.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import yaml

from memkv_vllm.config import ClientConfig, load_client_config
from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.checksum import ChecksumAlgorithm, digest
from memkv_vllm.protocol.messages import Get, GetItem, Put, PutItem
from memkv_vllm.transports.base import ClientTransport
from memkv_vllm.transports.registry import client_transport
from memkv_vllm.types import Extent, Status
from tests.support.actors import ServerActor
from tests.support.auditor import Auditor
from tests.support.cable import A, B
from tests.support.harness import Client, connected
from tests.support.scripted import soon

__all__ = ["VALUE_BYTES", "CableStore", "ClientFactory", "ValueClient", "cable_store"]

MIB = 1 << 20
VALUE_BYTES = MIB
LAYOUT = 7
PORT = 9900


def key_of(number: int) -> bytes:
    """Store key of value ``number``."""
    return b"\x01" + b"N" * 32 + number.to_bytes(32, "big") + bytes(4)


def mark_of(number: int) -> int:
    """The byte that value ``number`` is made of: from 1 to 200."""
    return number % 200 + 1


@dataclass(frozen=True)
class ClientFactory:
    """Makes client transports, for ``tests.support.harness.connected``."""

    name: str = "verbs"
    options: dict[str, Any] = field(default_factory=lambda: {"devices": (B.device,)})

    def client(self) -> ClientTransport:
        """A new one."""
        return client_transport(self.name, **self.options)


@dataclass
class ValueClient:
    """A connection with one region; slot ``i`` of the region has room for one value."""

    client: Client

    @property
    def bytes(self) -> np.ndarray[Any, Any]:
        """The region's bytes."""
        return self.client.memory.array

    def extent(self, slot: int) -> Extent:
        """Of a slot."""
        return Extent(1, slot * VALUE_BYTES, VALUE_BYTES)

    def count(self, mark: int) -> int:
        """How many bytes of the region are ``mark``."""
        return int(np.count_nonzero(self.bytes == mark))

    async def put(self, numbers: Sequence[int], *, timeout_ms: int = 20_000, deadline_s: float = 25) -> list[Status]:
        """Store the values, from the first slots on."""
        items = []
        for slot, number in enumerate(numbers):
            view = self.client.memory.view(slot * VALUE_BYTES, VALUE_BYTES)
            self.bytes[slot * VALUE_BYTES : (slot + 1) * VALUE_BYTES] = mark_of(number)
            items.append(PutItem(key_of(number), digest(view), LAYOUT, self.extent(slot)))
        request = Put(items, ChecksumAlgorithm.XXH3_64_TREE_1M, timeout_ms)
        return await self.client.connection.request(request, soon(deadline_s))

    async def get(self, numbers: Sequence[int], *, timeout_ms: int = 20_000, deadline_s: float = 25) -> list[Status]:
        """Fetch the values, into the first slots."""
        items = [GetItem(key_of(number), LAYOUT, self.extent(slot)) for slot, number in enumerate(numbers)]
        results = await self.client.connection.request(Get(items, timeout_ms), soon(deadline_s))
        return [result.status for result in results]

    async def first_byte(self) -> None:
        """Return once a byte of the region is not 0: the server has posted, and its bytes are on their way."""
        while not self.bytes.any():  # noqa: ASYNC110 - the NIC tells nobody
            await anyio.sleep(0.01)

    async def foreign(self, mark: int, watch_s: float) -> int:
        """Bytes of the region that are not ``mark``, as soon as there are some, else after ``watch_s``."""
        end = time.monotonic() + watch_s
        while time.monotonic() < end and self.count(mark) == self.bytes.size:  # noqa: ASYNC110 - as above
            await anyio.sleep(0.05)
        return int(self.bytes.size - self.count(mark))

    def wrong(self, numbers: Iterable[int]) -> list[int]:
        """Those of the values, which stand in the first slots, that are not whole."""
        return [
            number
            for slot, number in enumerate(numbers)
            if (self.bytes[slot * VALUE_BYTES : (slot + 1) * VALUE_BYTES] != mark_of(number)).any()
        ]

    async def fetch_right(self, numbers: Sequence[int]) -> None:
        """Fetch the values; all must arrive, and be right."""
        self.bytes[:] = 0
        assert await self.get(numbers) == [Status.OK] * len(numbers)
        assert self.wrong(numbers) == []


@dataclass
class CableStore:
    """Made by :func:`cable_store`."""

    actor: ServerActor
    folder: Path
    key: bytes
    port: int
    config: ClientConfig

    async def statistics(self) -> dict[str, Any]:
        """STAT, asked past the cable."""
        return await anyio.to_thread.run_sync(Auditor(self.config, "tcp").statistics, "past")

    async def wait_counted(self, name: str, at_least: int = 1) -> None:
        """Return once the server has counted that."""
        await self.wait(lambda now: now["counters"].get(name, 0) >= at_least, f"the server counts {name}")

    async def wait_rest(self, entries: int | None = None) -> None:
        """Return once nothing is left of any client, and the store holds ``entries`` values and nothing else."""

        def at_rest(now: dict[str, Any]) -> bool:
            table = now["table"]
            idle = not table["reserved"] and not table["pinned"] and now["server"]["sessions"] == 1  # the asker's
            whole = table["complete"] == now["arena"]["extents"]
            return bool(idle and whole and entries in (None, table["complete"]))

        values = "whole values" if entries is None else f"{entries} values"
        await self.wait(at_rest, f"no session but the asker's, {values}, nothing reserved or pinned")

    async def wait(self, condition: Any, what: str, timeout_s: float = 15.0) -> None:
        """Return once ``condition`` is true of STAT."""
        now: dict[str, Any] = {}
        with anyio.move_on_after(timeout_s):
            while True:
                now = await self.statistics()
                if condition(now):
                    return
                await anyio.sleep(0.1)
        picked = {name: now.get(name) for name in ("server", "table", "arena", "counters")}
        raise AssertionError(f"not within {timeout_s:g} s: {what}; {picked}\n{self.actor.tail()}")

    @asynccontextmanager
    async def client(
        self, *, factory: Any = None, host: str = A.address, slots: int = 16
    ) -> AsyncIterator[ValueClient]:
        """A client, over verbs at the other end of the cable unless told otherwise; closed (not fenced) on exit."""
        made: Any = factory or ClientFactory()
        credentials = Credentials(self.key)
        async with connected(made, (host, self.port), region_bytes=slots * VALUE_BYTES, credentials=credentials) as one:
            yield ValueClient(one)

    def past(self, slots: int = 16) -> Any:
        """A client over tcp, past the cable."""
        return self.client(factory=ClientFactory("tcp", {}), host="127.0.0.1", slots=slots)

    def environ(self, **more: str) -> dict[str, str]:
        """What an engine at the other end sets; its server is called ``a``."""
        return {
            "MEMKV_SERVERS": f"a={A.address}:{self.port}",
            "MEMKV_AUTH_KEY_FILE": str(self.folder / "key"),
            "MEMKV_TRANSPORT": "verbs",
            "MEMKV_RDMA_DEVICES": B.device,
            "MEMKV_CONNECT_TIMEOUT_S": "5",
            **more,
        }


@contextmanager
def cable_store(
    folder: Path,
    *,
    name: str = "store",
    key: bytes | None = None,
    port: int = PORT,
    max_size: int = 64 * MIB,
    module: Sequence[str] = (),
    **settings: Any,
) -> Iterator[CableStore]:
    """Start the server; killed on exit, frozen or not.

    Args:
        folder: for settings, the key and logs.
        name: of its files.
        key: that clients must have; random for None.
        port: it listens there; admin HTTP on the next one.
        max_size: of the arena, in bytes.
        module: what to run instead of the command, see ``ServerActor``.
        settings: more sections of the server yaml.
    """
    key = key or secrets.token_bytes(32)
    key_file = folder / "key"
    key_file.touch(mode=0o600)
    key_file.write_text(key.hex() + "\n", encoding="ascii")
    config = folder / f"{name}.yaml"
    sections: dict[str, Any] = {
        "network": {"address": f"0.0.0.0:{port}", "auth_key_file": str(key_file)},
        "memory": {"max_size": max_size, "hugepages": "off"},
        # Whole arenas of a few values: without this, the watermark would keep some of them free.
        "storage": {"eviction": {"high_watermark": 1.0, "low_watermark": 0.99}},
        "rdma": {"devices": [A.device]},
        **settings,
    }
    config.write_text(yaml.safe_dump(sections), encoding="utf-8")
    environ = {"MEMKV_SERVERS": f"past=127.0.0.1:{port}", "MEMKV_AUTH_KEY_FILE": str(key_file)}
    actor = ServerActor(name, folder, config=config, module=module)
    store = CableStore(actor, folder, key, port, load_client_config({**environ, "MEMKV_TRANSPORT": "tcp"}))
    try:
        actor.start()
        actor.wait_ready()
        yield store
    except BaseException:
        sys.stderr.write(f"--- end of the log of server {name}:\n{actor.tail()}\n")  # pytest shows it
        raise
    finally:
        actor.kill()

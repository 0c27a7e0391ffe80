"""A tcp client by hand: its control connection and data connections that say what a test wants, or nothing."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from memkv_vllm.protocol.auth import Credentials
from memkv_vllm.protocol.messages import Put, PutItem, Register
from memkv_vllm.protocol.session import PeerKind
from memkv_vllm.transports.control import ControlChannel
from memkv_vllm.transports.sockets import dial
from memkv_vllm.transports.streams import SocketStream
from memkv_vllm.transports.tcp.attach import attach
from memkv_vllm.transports.tcp.commands import FIRST_BYTES, CommandOpener, CommandSealer, Kind
from memkv_vllm.types import Extent, MemoryKind, Status
from tests.support.harness import Address, drive
from tests.support.scripted import KEY, key_at, soon

REGION_BYTES = 64 << 20


@dataclass
class DataPeer:
    """One attached data connection that answers nothing by itself. Its socket does not block."""

    sock: socket.socket
    sealer: CommandSealer
    opener: CommandOpener

    async def receive(self, length: int) -> bytes:
        """Exactly ``length`` bytes; fewer at the end of the stream."""
        data = b""
        with anyio.fail_after(10):
            while len(data) < length:
                await anyio.wait_readable(self.sock)
                try:
                    more = self.sock.recv(length - len(data))
                except ConnectionResetError:
                    more = b""
                if not more:
                    break
                data += more
        return data

    async def send(self, data: bytes) -> None:
        """All of ``data``."""
        view = memoryview(data)
        while view:
            await anyio.wait_writable(self.sock)
            view = view[self.sock.send(view) :]

    async def send_values(self, *values: bytes) -> None:
        """What a client sends of an eager put, or as the answer to a READ: SENT and the bytes."""
        await self.send(self.sealer.pack(Kind.SENT) + b"".join(values))

    async def command(self) -> tuple[Kind, list[Extent]]:
        """The next command of the server."""
        frame = await self.receive(FIRST_BYTES)
        frame += await self.receive(self.opener.more_bytes(frame))
        return self.opener.open(frame, Kind.READ, Kind.WRITE)

    async def closed(self) -> bool:
        """Whether the server ends the connection without a further word."""
        return await self.receive(1) == b""

    def die(self, *, reset: bool) -> None:
        """End the connection, by a reset or in order."""
        if reset:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


@dataclass
class HandMadeClient:
    """A session with one region of 64 MiB that does not exist."""

    channel: ControlChannel
    address: Address
    data: list[DataPeer]
    ended: list[BaseException | None] = field(default_factory=list)

    async def attach(self, key: bytes = KEY, key_id: str = "default", *, eager: bool = False) -> DataPeer:
        """One more data connection; ``eager``: the one for eager puts."""
        sock = await dial(*self.address, soon())
        sock, ours, theirs = await attach(
            sock, Credentials(key, key_id), self.channel.established, soon(), label="the server", eager=eager
        )
        self.data.append(DataPeer(sock, CommandSealer(ours), CommandOpener(theirs)))
        return self.data[-1]

    async def put(self, *extents: Extent, at: int = 0, timeout_ms: int = 5000, eager: bool = False) -> list[Status]:
        """Ask the server to fetch ``extents``; ``eager``: say that their bytes come by themselves, and send none."""
        items = [PutItem(key_at(at + index * (1 << 20)), 0, 0, extent) for index, extent in enumerate(extents)]
        return await self.channel.request(Put(items, 0, timeout_ms, eager), soon())


@asynccontextmanager
async def hand_made_client(address: Address, *, num_connections: int = 1) -> AsyncIterator[HandMadeClient]:
    """Connect, attach ``num_connections`` and register; everything is closed on exit."""
    stream = SocketStream(await dial(*address, soon()))
    channel = await ControlChannel.open(stream, Credentials(KEY), PeerKind.ENGINE, soon(), label="the server")
    client = HandMadeClient(channel, address, [])
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(drive, channel, client.ended)
        try:
            for _ in range(num_connections):
                await client.attach()
            await channel.request(Register(1, MemoryKind.HOST, REGION_BYTES), soon())
            yield client
        except Exception as error:
            failure = error  # raised outside, so that no task group wraps it
        finally:
            channel.close()
            for peer in client.data:
                peer.sock.close()
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure

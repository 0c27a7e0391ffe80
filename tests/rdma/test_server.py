"""The server's end of verbs on soft-RoCE: both providers, starts that are refused, and what nobody can reach."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.transports.base import DataPath
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.tcp import TcpServerTransport
from memkv_vllm.transports.verbs.datapath import VerbsDataPath
from memkv_vllm.transports.verbs.provider import Access, Opcode
from memkv_vllm.transports.verbs.providers import PROVIDERS, load_provider
from memkv_vllm.transports.verbs.statuses import outcome_of
from memkv_vllm.types import Extent, Status
from tests.support.actors import ROOT
from tests.support.harness import MIB, VerbsFactory, connected, serving, wait_until
from tests.support.provider_ends import ALL, batch, pair, wait
from tests.support.resources import num_fds
from tests.support.scripted import ScriptedHandler, fill

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

START_S = 5.0
"""By when a server that cannot serve has said so, beside what importing takes in the VM."""
IMPORTS_S = 10.0


class OverProvider(VerbsFactory):
    """A server that uses one of the libraries by name."""

    def __init__(self, provider: str) -> None:
        self.provider = load_provider(provider)

    def data_path(self, **options: object) -> DataPath:
        return VerbsDataPath([self.device], provider=self.provider, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("provider", sorted(PROVIDERS))
async def test_both_libraries_move_the_same_bytes_and_leave_nothing(provider: str) -> None:
    """P067: each session's queue pairs are destroyed, the arena's registration with the server."""
    factory = OverProvider(provider)
    async with serving(factory) as server:
        for turn in range(12):
            async with connected(factory, server.address, region_bytes=4 * MIB) as client:
                extents = [Extent(1, at * 100_001, 100_001) for at in range(20)]
                sent = [fill(client.memory, extent, turn + 7 * at) for at, extent in enumerate(extents)]
                assert await client.put(0, *extents) == [Status.OK] * 20
                client.memory.array[:] = 0
                assert await client.get(0, *extents) == [Status.OK] * 20
                assert [bytes(client.memory.view(extent.offset, extent.length)) for extent in extents] == sent
            await wait_until(lambda: not server.handler.peers, "the session has ended")
            # Device, domain, arena, scratch memory.
            assert factory.provider.num_live() == 4
            if turn == 2:
                before = num_fds()
        assert num_fds() == before
        assert not [event for event in server.handler.counts if event.startswith("rdma_")]
    assert factory.provider.num_live() == 0


def test_memory_for_local_use_has_no_key_for_others() -> None:
    """What the arena rests on: its registration's own key does not open it to a peer."""
    with pair(load_provider(), "rxe0", "rxe0") as (near, far):
        arena = far.domain.register(far.region.address, 4096, Access.LOCAL)
        for opcode in (Opcode.READ, Opcode.WRITE):
            work = batch(near, far, opcode, 1, 64)
            work.rkeys[:] = arena.rkey
            near.queue_pair.post(work)
            (completion,) = wait(near, 1)
            assert outcome_of(completion.status).name in ("REM_ACCESS_ERR", "REM_OP_ERR", "WR_FLUSH_ERR")
    with pair(load_provider(), "rxe0", "rxe0") as (near, far):
        shared = far.domain.register(far.region.address, 4096, ALL)
        work = batch(near, far, Opcode.READ, 1, 64)
        work.rkeys[:] = shared.rkey
        near.queue_pair.post(work)
        assert [completion.status for completion in wait(near, 1)] == [0]


# -- starts


def config(folder: Path, rdma: str, address: str = "0.0.0.0:0") -> Path:
    """A server's yaml."""
    path = folder / "server.yaml"
    path.write_text(
        f"network: {{address: '{address}', admin_address: '127.0.0.1:0', auth_key: '{'11' * 32}'}}\n"
        f"memory: {{max_size: 64MiB}}\nrdma: {rdma}\n"
    )
    path.chmod(0o600)
    return path


def refusal(folder: Path, rdma: str, *, prefix: tuple[str, ...] = ()) -> str:
    """What ``memkv start`` says before it ends with exit code 1."""
    command = [*prefix, sys.executable, "-m", "memkv_vllm", "start", "--config", str(config(folder, rdma))]
    begun = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - begun < START_S + IMPORTS_S
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@contextmanager
def started(folder: Path, rdma: str) -> Iterator[str]:
    """A server that runs; all that it has logged until it was ready."""
    command = [sys.executable, "-m", "memkv_vllm", "start", "--config", str(config(folder, rdma))]
    log = folder / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True)
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line.startswith("ready "), log.read_text()
            yield log.read_text()
        finally:
            process.terminate()
            assert process.wait(20) == 0
            process.stdout.close()


def test_it_says_what_it_serves_on(tmp_path: Path) -> None:
    with started(tmp_path, "{devices: [rxe0, 'rxe1:1'], traffic_class: 104, mtu: 2048}") as log:
        lines = [line for line in log.splitlines() if "event=rdma_ready" in line]
        assert len(lines) == 2
        assert re.search(r"device=rxe0 port=1 gid=10\.77\.0\.1 gid_index=\d+ mtu=2048 address=10\.77\.0\.1", lines[0])
        assert "traffic_class=104" in lines[0] and "device=rxe1" in lines[1] and "address=10.78.0.1" in lines[1]


@pytest.mark.parametrize(
    ("rdma", "message"),
    [
        (
            "{devices: [mlx5_0]}",
            r"RDMA device mlx5_0 is not on this host: found rxe0:1, rxe1:1; expected .*rdma.devices",
        ),
        ("{devices: [rxe0], gid_index: 250}", r"rxe0:1 has no GID at index 250: found GIDs .*10\.77\.0\.1"),
        ("{devices: [rxe0, 'rxe0:2']}", r"RDMA device rxe0:2 is not on this host"),
    ],
)
def test_a_start_that_is_refused(tmp_path: Path, rdma: str, message: str) -> None:
    """P073."""
    assert re.search(message, refusal(tmp_path, rdma))


def test_an_mtu_that_the_interface_does_not_carry(tmp_path: Path) -> None:
    subprocess.run(["ip", "link", "set", "rail1", "mtu", "1500"], check=True)
    try:
        text = refusal(tmp_path, "{devices: [rxe1], mtu: 4096}")
    finally:
        subprocess.run(["ip", "link", "set", "rail1", "mtu", "9000"], check=True)
    assert re.search(r"mtu is 4096, but rxe1:1 carries at most 1024 \(interface rail1\).*rdma\.mtu", text)


def test_a_memlock_that_is_too_small(tmp_path: Path) -> None:
    """P074: without the capability, the limit holds."""
    prefix = ("prlimit", "--memlock=1048576", "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock")
    text = refusal(tmp_path, "{devices: [rxe0]}", prefix=prefix)
    for part in ("the limit is 1.0 MiB", "the arena of 64.0 MiB on 1 devices needs 64.0 MiB", "LimitMEMLOCK=infinity"):
        assert part in text


async def test_a_data_path_that_cannot_be_had_keeps_no_address() -> None:
    """It is free again at once: the operator corrects a name and starts again."""
    factory = VerbsFactory()
    server = TcpServerTransport(factory.address, 0, data_paths=[VerbsDataPath(["rxe7"])])
    port = server.bind()
    with HostMemory.create("arena", 4096) as arena, pytest.raises(EnvironmentFault, match="rxe7 is not on this host"):
        await server.serve(ScriptedHandler(), arena)
    again = TcpServerTransport(factory.address, port)
    assert again.bind() == port
    again.close()

"""Both providers on soft-RoCE: the suite that the fake passes too, and what only a device can show.

Where the fake is not like soft-RoCE, so that a test over the fake shows nothing about it:

* Soft-RoCE moves all bytes of a loopback inside of the post and frees the send queue's places as it does; the fake can
  be late, and keeps places until a signalled completion behind them was taken, as NICs do.
* The fake refuses a batch that is longer than the free places with ENOMEM after those that fit; providers refuse one
  that is longer than the queue, soft-RoCE else takes what comes.
* Soft-RoCE registers nothing that is not mapped (EFAULT), counts pages against memlock (ENOMEM), pins them; the fake
  believes any address, and faults when it moves bytes there.
* The fake knows no packets: no MTU that differs between ends, no loss, no order between queue pairs, no limit on READs
  at once; a WRITE lands whole, at one time. Its retries take their time, but do not back off.
* Soft-RoCE 6.1 lets messages through that are longer than a port's largest; the fake fails them with LOC_LEN_ERR.
* A port that goes down ends what is posted with LOC_QP_OP_ERR in both; that soft-RoCE sometimes never completes is in
  the fake only on demand (``Troubles.silent``).
"""

from __future__ import annotations

import errno
import select
import subprocess
import time
from pathlib import Path

import pytest

from memkv_vllm.transports.verbs.provider import AsyncEvent, Opcode, PortState
from memkv_vllm.transports.verbs.providers import PROVIDERS, load_provider
from tests.support.provider_ends import ALL, End, batch, pair, wait
from tests.support.provider_suite import ProviderSuite, World, refused

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


@pytest.fixture(params=sorted(PROVIDERS))
def world(request: pytest.FixtureRequest) -> World:
    provider = load_provider(request.param)
    devices = provider.device_names()
    assert devices, "no RDMA device: `make test-rdma` runs this in a VM that has soft-RoCE"
    return World(provider, devices[0], devices[0])


class TestReal(ProviderSuite):
    """The suite, and what a fake cannot show."""

    def test_every_device_reaches_itself(self, world: World) -> None:
        for device in world.provider.device_names():
            with pair(world.provider, device, device) as (near, far):
                near.bytes[:] = 1
                near.queue_pair.post(batch(near, far, Opcode.WRITE))
                assert [c.status for c in wait(near, 1)] == [0]
                assert far.bytes[:100].all()

    def test_memory_that_is_not_there(self, world: World) -> None:
        near = End(world.provider, world.near)
        with refused("ibv_reg_mr", errno.EFAULT):
            near.domain.register(4096, 4096, ALL)
        near.close()

    def test_a_port_that_goes_down(self, world: World) -> None:
        """P069: it is told, and queried; what is posted meanwhile fails at once."""
        device = world.provider.device_names()[-1]
        interface = next(Path(f"/sys/class/infiniband/{device}/device/net").glob("*"), None)
        name = interface.name if interface else Path(f"/sys/class/infiniband/{device}/parent").read_text().strip()
        with pair(world.provider, device, device) as (near, far):
            try:
                subprocess.run(["ip", "link", "set", name, "down"], check=True)
                events = self._events(near, "port_err")
                assert near.device.port(1).state is PortState.DOWN
                near.queue_pair.post(batch(near, far, Opcode.WRITE, 2))
                assert [c.status for c in wait(near, 2)] == [2, 5]
            finally:
                subprocess.run(["ip", "link", "set", name, "up"], check=True)
            events += self._events(near, "port_active")
            assert near.device.port(1).state is PortState.ACTIVE
            assert {event.name for event in events} >= {"port_err", "port_active"}
            if world.provider.name == "libibverbs":
                assert {event.element for event in events if event.name.startswith("port")} == {1}

    def _events(self, end: End, awaited: str) -> list[AsyncEvent]:
        found: list[AsyncEvent] = []
        deadline = time.monotonic() + 5
        while not any(event.name == awaited for event in found):
            assert select.select([end.device.async_fd], [], [], max(0, deadline - time.monotonic()))[0], found
            found += end.device.async_events()
        return found

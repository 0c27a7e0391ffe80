"""Choosing and opening a port, and what a client checks before it starts. Faults P069, P070, P073, P074, P076."""

from __future__ import annotations

import errno
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memkv_vllm.errors import EnvironmentFault, RailError
from memkv_vllm.topology import read_host
from memkv_vllm.transports.base import Region
from memkv_vllm.transports.memory import HostMemory
from memkv_vllm.transports.verbs import VerbsClientTransport, preflight
from memkv_vllm.transports.verbs.endpoints import LANDING_BYTES
from memkv_vllm.transports.verbs.opening import Knobs, open_port, open_rail, rail_of
from memkv_vllm.transports.verbs.preflight import Memlock, ServerRails
from memkv_vllm.transports.verbs.provider import MAX_RETRY_COUNT, PortState, VerbsError
from memkv_vllm.types import MemoryKind
from tests.support.fake_verbs import FakeFabric, FakeNic, FakeProvider
from tests.support.sysfs import rail_optimised
from tests.support.verbs_tree import fake_library, host_tree, write_process

TWO = {"mlx5_0": "10.77.0.1/24", "mlx5_1": "10.78.0.1/24"}
MIB = 1 << 20


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    with FakeFabric() as made:
        yield made


@pytest.fixture
def provider(fabric: FakeFabric, tmp_path: Path) -> FakeProvider:
    return fake_library(fabric, tmp_path, TWO)


# -- opening


def test_a_port_is_opened_by_name_or_by_address(provider: FakeProvider, tmp_path: Path) -> None:
    host = read_host(tmp_path)
    opened = [
        open_port(provider, host, wanted="mlx5_1"),
        open_port(provider, host, wanted="mlx5_1:1"),
        open_port(provider, host, address="10.78.0.9"),
        open_port(provider, host, wanted="mlx5_1", address="10.78.0.1"),
    ]
    for port in opened:
        assert (port.rail.name, port.rail.gid_index, str(port.rail.address)) == ("mlx5_1:1", 1, "10.78.0.1")
        assert port.rail.gid == provider.nics["mlx5_1"].ports[1].gids[1]
        assert port.mtu == 4096
        port.device.close()
    assert provider.num_live() == 0


def test_what_is_left_to_choose_and_what_is_set(provider: FakeProvider, tmp_path: Path) -> None:
    host = read_host(tmp_path)
    chosen = open_port(provider, host, address="10.77.0.2")
    fixed = open_port(provider, host, address="10.77.0.2", knobs=Knobs(0, 104, 3, 1024))
    path = fixed.path(mtu=1024, max_reads=4)
    assert (chosen.traffic_class, chosen.service_level, chosen.mtu) == (0, 0, 4096)
    assert (path.gid_index, path.traffic_class, path.service_level, path.mtu, path.max_reads) == (0, 104, 3, 1024, 4)
    assert path.retry_count <= MAX_RETRY_COUNT
    assert "10.77.0.1 on rail0" in str(chosen) and "GID 1" in str(chosen)
    for port in (chosen, fixed):
        port.device.close()


def test_an_mtu_over_the_ports_is_refused_with_the_one_that_fits(provider: FakeProvider, tmp_path: Path) -> None:
    provider.nics["mlx5_0"].ports[1].active_mtu = 1024
    with pytest.raises(EnvironmentFault, match=r"mtu is 4096, but mlx5_0:1 carries at most 1024 .*set mtu: 1024"):
        open_port(provider, read_host(tmp_path), wanted="mlx5_0", knobs=Knobs(mtu=4096))
    assert provider.num_live() == 0, "the device that was opened for the look is closed"


def test_a_port_that_went_down_after_the_look_at_sysfs(provider: FakeProvider, tmp_path: Path) -> None:
    rail = rail_of(read_host(tmp_path), "mlx5_0")
    provider.nics["mlx5_0"].set_port(1, PortState.DOWN)
    with pytest.raises(EnvironmentFault, match=r"RDMA port mlx5_0:1 is DOWN; expected ACTIVE.*ip link set rail0 up"):
        open_rail(provider, rail, Knobs())


def test_a_gid_that_moved_after_the_look_at_sysfs(provider: FakeProvider, tmp_path: Path) -> None:
    rail = rail_of(read_host(tmp_path), "mlx5_0")
    provider.nics["mlx5_0"].ports[1].gids[1] = bytes(16)
    with pytest.raises(EnvironmentFault, match="GID 1 of mlx5_0:1 is .* try again"):
        open_rail(provider, rail, Knobs())


def test_a_device_without_reads_is_no_use(provider: FakeProvider, tmp_path: Path) -> None:
    provider.nics["mlx5_0"].limit(max_reads_accepted=0)
    with pytest.raises(EnvironmentFault, match="mlx5_0 does no RDMA READ"):
        open_rail(provider, rail_of(read_host(tmp_path), "mlx5_0"), Knobs())
    assert provider.num_live() == 0


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.EACCES, "read and write /dev/infiniband/uverbs"), (errno.EIO, "ibv_devinfo -d mlx5_0")],
)
def test_a_device_that_cannot_be_opened(provider: FakeProvider, tmp_path: Path, number: int, says: str) -> None:
    provider.nics["mlx5_0"].troubles.refuse["ibv_open_device"] = number
    with pytest.raises(EnvironmentFault, match=re.escape(says)) as caught:
        open_port(provider, read_host(tmp_path), wanted="mlx5_0")
    assert "mlx5_0 cannot be opened" in str(caught.value)


def test_a_named_port_and_never_another(provider: FakeProvider, tmp_path: Path) -> None:
    """P073: the other NIC would do, and is not taken."""
    with pytest.raises(RailError, match=r"mlx5_7 is not on this host: found mlx5_0:1, mlx5_1:1"):
        open_port(provider, read_host(tmp_path), wanted="mlx5_7")
    with pytest.raises(RailError, match=r"no RDMA port reaches 10\.78\.0\.1"):
        open_port(provider, read_host(tmp_path), wanted="mlx5_0", address="10.78.0.1")
    assert provider.num_opened == 0


# -- devices


def test_no_device_at_all(fabric: FakeFabric, tmp_path: Path) -> None:
    """P076: what to look for on a host, and the lines for docker and kubernetes."""
    host_tree(tmp_path, {}).finish()
    with pytest.raises(RailError) as caught:
        preflight.check_devices(FakeProvider(fabric, []), read_host(tmp_path), (), tmp_path)
    for part in ("no RDMA device", "--device=/dev/infiniband", "IPC_LOCK", "rdma link"):
        assert part in str(caught.value)


def test_devices_without_their_files(fabric: FakeFabric, tmp_path: Path) -> None:
    """P076: a container that sees /sys/class/infiniband and has no /dev/infiniband."""
    host_tree(tmp_path, TWO, device_files=False).finish()
    with pytest.raises(RailError) as caught:
        preflight.check_devices(FakeProvider(fabric, []), read_host(tmp_path), (), tmp_path)
    for part in (
        "there is no /dev/infiniband",
        "docker: --device=/dev/infiniband",
        "kubernetes: ",
        "rdma/hca",
        "ib_uverbs",
    ):
        assert part in str(caught.value)


def test_devices_that_the_library_has_no_driver_for(fabric: FakeFabric, tmp_path: Path) -> None:
    host_tree(tmp_path, TWO).finish()
    only_one = FakeProvider(fabric, [FakeNic("mlx5_0", "10.77.0.1")])
    host = read_host(tmp_path)
    preflight.check_devices(only_one, host, (), tmp_path)
    with pytest.raises(RailError, match=r"does not know mlx5_1: found it knows mlx5_0.*ibverbs-providers"):
        preflight.check_devices(only_one, host, ("mlx5_1",), tmp_path)
    with pytest.raises(RailError, match="found it knows no device"):
        preflight.check_devices(FakeProvider(fabric, []), host, (), tmp_path)


def test_a_missing_device_lists_those_there_are(provider: FakeProvider, tmp_path: Path) -> None:
    """P073."""
    with pytest.raises(RailError, match=r"RDMA device mlx5_9 is not on this host: found mlx5_0:1, mlx5_1:1"):
        preflight.check_devices(provider, read_host(tmp_path), ("mlx5_0", "mlx5_9"), tmp_path)


def test_no_port_up(fabric: FakeFabric, tmp_path: Path) -> None:
    host_tree(tmp_path, TWO, state="1: DOWN").finish()
    provider = FakeProvider(fabric, [FakeNic("mlx5_0", "10.77.0.1"), FakeNic("mlx5_1", "10.78.0.1")])
    with pytest.raises(
        RailError, match=r"no RDMA port can be used: found mlx5_0:1 is in state DOWN .*ip link set rail0"
    ):
        preflight.check_ports(provider, read_host(tmp_path), [], (), Knobs())


def test_a_named_device_whose_port_is_down_is_named(fabric: FakeFabric, tmp_path: Path) -> None:
    """P073: the other one is well, so "no port" would be wrong."""
    host_tree(tmp_path, TWO, state="1: DOWN").finish()
    with pytest.raises(RailError, match=r"^RDMA device mlx5_1 cannot be used: found mlx5_1:1 is in state DOWN .*rail1"):
        rail_of(read_host(tmp_path), "mlx5_1")


def test_no_usable_gid(fabric: FakeFabric, tmp_path: Path) -> None:
    tree = host_tree(tmp_path, {})
    tree.netdev("rail0")
    tree.rdma("mlx5_0")
    tree.port("mlx5_0", gids=[])
    tree.finish()
    provider = FakeProvider(fabric, [FakeNic("mlx5_0", "")])
    with pytest.raises(RailError, match=r"mlx5_0:1 has no usable GID \(an IP address"):
        preflight.check_ports(provider, read_host(tmp_path), [], (), Knobs())


# -- rails


def check_rails(root: Path, *servers: ServerRails, devices: tuple[str, ...] = ()) -> tuple[Any, Any]:
    return preflight.check_rails(read_host(root), servers, devices, (), None)


def test_a_rail_for_each_address(provider: FakeProvider, tmp_path: Path) -> None:
    rails, problems = check_rails(
        tmp_path, ServerRails("a", ("10.77.0.9", "10.78.0.9")), ServerRails("b", ("10.78.0.8",))
    )
    assert {address: rail.name for address, rail in rails.items()} == {
        "10.77.0.9": "mlx5_0:1", "10.78.0.9": "mlx5_1:1", "10.78.0.8": "mlx5_1:1"
    }  # fmt: skip
    assert not problems


def test_a_server_in_no_rails_subnet(provider: FakeProvider, tmp_path: Path) -> None:
    """P070: it names the server, the address, and the subnets that there are."""
    with pytest.raises(RailError) as caught:
        check_rails(tmp_path, ServerRails("a", ("10.77.0.9",)), ServerRails("far", ("10.99.0.1",)))
    for part in ("server far cannot be reached over RDMA", "10.99.0.1", "10.77.0.0/24", "10.78.0.0/24"):
        assert part in str(caught.value)


def test_a_server_that_only_another_device_reaches(provider: FakeProvider, tmp_path: Path) -> None:
    """P070, P073: the named NIC is on another rail."""
    with pytest.raises(RailError, match=r"server a cannot be reached over RDMA: no RDMA port reaches 10\.77\.0\.9"):
        check_rails(tmp_path, ServerRails("a", ("10.77.0.9",)), devices=("mlx5_1",))


def test_one_rail_of_two_is_enough_and_the_other_is_told(provider: FakeProvider, tmp_path: Path) -> None:
    rails, problems = check_rails(tmp_path, ServerRails("a", ("10.77.0.9", "10.99.0.9")))
    assert list(rails) == ["10.77.0.9"]
    assert list(problems) == ["10.99.0.9"]


def test_names_are_left_to_the_resolver(provider: FakeProvider, tmp_path: Path) -> None:
    rails, problems = check_rails(tmp_path, ServerRails("a", ("store-1.example",)))
    assert not rails and not problems


# -- memlock


def test_memlock_in_numbers() -> None:
    """P074."""
    problem = preflight.memlock_problem(Memlock(8 * MIB, False), 512 * MIB, "staging")
    assert "the limit is 8.0 MiB, staging needs 512.0 MiB" in problem
    for step in (
        "ulimit -l unlimited",
        "LimitMEMLOCK=infinity",
        "--ulimit memlock=-1",
        "--cap-add=IPC_LOCK",
        "kubernetes",
    ):
        assert step in problem
    assert "cannot allocate" not in problem.lower()


@pytest.mark.parametrize("memlock", [Memlock(None, False), Memlock(8 * MIB, True), Memlock(512 * MIB, False)])
def test_memlock_that_is_enough(memlock: Memlock) -> None:
    assert preflight.memlock_problem(memlock, 512 * MIB, "staging") == ""


def test_memlock_counts_every_registration() -> None:
    """P074: the kernel counts pages once per registration, so it is bytes times connections."""
    each_bytes = 512 * MIB + LANDING_BYTES
    preflight.check_memlock(Memlock(2 * each_bytes, False), 512 * MIB, 2)
    for limit_bytes, num_servers in ((each_bytes - 1, 1), (2 * each_bytes - 1, 2)):
        text = rf"512\.0 MiB of staging memory and 8 KiB beside it, registered for each of {num_servers} servers, needs"
        with pytest.raises(EnvironmentFault, match=text):
            preflight.check_memlock(Memlock(limit_bytes, False), 512 * MIB, num_servers)


@pytest.fixture
def small_memlock() -> Iterator[int]:
    """A real limit of this process, for the time of a test."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    small = 64 * 1024
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (small, before[1]))
    yield small
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


def test_memlock_is_read_from_the_process(small_memlock: int, tmp_path: Path) -> None:
    write_process(tmp_path, ipc_lock=False)
    assert preflight.read_memlock(tmp_path) == Memlock(small_memlock, False)


def test_the_capability_counts_where_the_kernel_asks_for_it(tmp_path: Path) -> None:
    """A rootless container has CAP_IPC_LOCK in a user namespace of its own, which is none to the RDMA subsystem."""
    write_process(tmp_path, ipc_lock=True)
    assert preflight.read_memlock(tmp_path).is_exempt
    write_process(tmp_path, ipc_lock=True, uid_map="0 1000 1")
    assert not preflight.read_memlock(tmp_path).is_exempt


def test_a_refused_registration_names_the_limit() -> None:
    """P074: the library says 'cannot allocate memory', whatever is free."""
    refused = VerbsError("ibv_reg_mr", errno.ENOMEM)
    assert "memlock is 8.0 MiB" in preflight.explain_refusal(refused, Memlock(8 * MIB, False))
    assert preflight.explain_refusal(refused, Memlock(None, False)) == str(refused)
    other = VerbsError("ibv_reg_mr", errno.EFAULT)
    assert preflight.explain_refusal(other, Memlock(8 * MIB, False)) == str(other)


# -- which of several


def test_a_rank_prefers_the_nic_near_its_gpu(fabric: FakeFabric, tmp_path: Path) -> None:
    """P069: eight NICs, each on the switch of one GPU; CUDA writes the GPU's address in its own way."""
    host = read_host(rail_optimised(tmp_path))
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    nics = []
    for port in host.ports:
        nic = FakeNic(port.device, "")
        nic.ports[1].gids = [gid.raw for gid in port.gids]
        nic.ports[1].active_mtu = 4096
        nics.append(nic)
    provider = FakeProvider(fabric, nics)
    for gpu in host.gpus:
        pci = gpu.pci.replace("0000:", "00000000:").upper()
        transport = VerbsClientTransport(provider=provider, root=tmp_path, gpu=pci, rank=0, num_ranks=8)
        assert transport.devices == [f"mlx5_{gpu.index}:1"]
        rails = [f"10.10.{number}.9" for number in (3, 2, 1, 0, 7, 6, 5, 4)]
        assert transport.first_rail(rails) == (gpu.index ^ 3), "the address of that NIC's subnet, wherever it stands"
        assert transport.first_rail(["10.10.0.9"]) is None
    assert provider.num_live() == 0


def test_registration_can_be_tried_before_any_connection(provider: FakeProvider, tmp_path: Path) -> None:
    """What GPU staging asks: with the NICs that reach the servers of the settings."""
    write_process(tmp_path, ipc_lock=True)
    servers = [("a", ("10.78.0.9",))]
    transport = VerbsClientTransport(provider=provider, root=tmp_path, servers=servers)
    assert transport.devices == ["mlx5_1:1"]
    with HostMemory.create("trial", MIB) as memory:
        region = Region(1, MemoryKind.HOST, MIB, memory)
        assert transport.try_registration(region) == "host"
        provider.nics["mlx5_1"].troubles.refuse["ibv_reg_mr"] = errno.EIO
        with pytest.raises(EnvironmentFault, match="cannot be registered with mlx5_1"):
            transport.try_registration(region)
    assert provider.num_live() == 0


def test_ranks_without_a_known_gpu_share_the_rails_out(provider: FakeProvider, tmp_path: Path) -> None:
    """P069: as many on each, whatever order the server's addresses have."""
    chosen = [
        VerbsClientTransport(provider=provider, root=tmp_path, rank=rank, num_ranks=4).first_rail(
            ["10.78.0.9", "10.77.0.9"]
        )
        for rank in range(4)
    ]
    assert sorted(chosen) == [0, 0, 1, 1]  # type: ignore[type-var]


def test_a_rail_that_cannot_be_used_is_not_the_first_choice(provider: FakeProvider, tmp_path: Path) -> None:
    transport = VerbsClientTransport(provider=provider, root=tmp_path)
    assert transport.first_rail(["10.99.0.9", "10.78.0.9"]) == 1
    assert transport.first_rail(["10.99.0.9", "10.98.0.9"]) is None

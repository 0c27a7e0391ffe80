"""``memkv net``: what this host's networks look like to RDMA."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

LEGEND = (
    "PIX: one PCIe switch, PXB: several, PHB: the same host bridge, NODE: the same NUMA node,",
    "SYS: another one, UNKNOWN: the PCI tree does not say",
)


@click.group()
def net() -> None:
    """See which NICs RDMA would use here, and why."""


@net.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path("/"),
    metavar="FOLDER",
    help="Read the sys and proc of this folder instead of this machine's.",
)
@click.option("--server", "servers", multiple=True, metavar="HOST[:PORT]", help="Show the rail to it; may be repeated.")
@click.option("--ranks", type=click.IntRange(0, 1024), default=0, help="Ranks of this host (default: one per GPU).")
@click.option("--device", "devices", multiple=True, metavar="NAME", help="Only these; default: rdma_devices, if set.")
@click.option("--gid-index", type=click.IntRange(0), metavar="N", help="As in gid_index: this GID of each port.")
def topo(
    as_json: bool, root: Path, servers: tuple[str, ...], ranks: int, devices: tuple[str, ...], gid_index: int | None
) -> None:
    """Draw GPUs, NICs and ports: how near they are, the GID of each port, the NIC of each rank.

    Reads /sys and /proc only and changes nothing. The exit status is 0 also where there is no NIC, and 1 when a
    --server or --device (MEMKV_RDMA_DEVICES) cannot be used as asked.
    """
    from memkv_vllm.config import load_rdma_devices
    from memkv_vllm.topology import describe, read_host

    if not devices and root == Path("/"):
        # Of another machine's tree the settings here say nothing.
        devices = load_rdma_devices()
    facts = describe(
        read_host(root), servers=addresses_of(servers), num_ranks=ranks, devices=devices, gid_index=gid_index
    )
    if as_json:
        click.echo(json.dumps(facts))
    else:
        click.echo("\n".join(draw(facts)))
    failed = any(not row["port"] for row in facts["servers"]) or (
        devices and any(not r["ports"] for r in facts["ranks"])
    )
    if failed:
        raise click.exceptions.Exit(1)


def addresses_of(servers: Sequence[str]) -> dict[str, str]:
    """IP addresses of all rails by what to call them; an empty one where a name has none."""
    import anyio

    from memkv_vllm.config import parse_servers
    from memkv_vllm.doctor.resolving import resolve

    try:
        rails = [rail for server in parse_servers(list(servers)) for rail in server.rails] if servers else []
    except ValueError as error:
        raise click.UsageError(f"--server: {error}") from None
    found = anyio.run(resolve, [rail.host for rail in rails]) if rails else {}
    return {str(rail): found[rail.host] for rail in rails}


# ---------------------------------------------------------------------------------------------------- drawing


def draw(facts: Mapping[str, Any]) -> list[str]:
    """The facts of ``topology.describe`` as lines for people."""
    lines = [f"memkv: {problem}" for problem in facts["problems"]]
    if facts["gpus"] and facts["nics"]:
        lines += [*_table(_affinity_rows(facts)), *LEGEND, ""]
    elif facts["gpus"]:
        lines += ["", *_table([["GPU", "NUMA", "PCI"], *([f"GPU{g['index']}", *_place(g)] for g in facts["gpus"])]), ""]
    elif facts["nics"]:
        lines += ["no GPU in the PCI tree", ""]
    if facts["nics"]:
        lines += [*_table(_port_rows(facts)), ""]
        lines += _problem_lines(facts)
    if facts["ranks"] and facts["nics"]:
        lines += [*_table(_rank_rows(facts)), ""]
    if facts["servers"]:
        lines += [*_table(_server_rows(facts)), *_missing_rails(facts), ""]
    return lines[:-1] if lines and not lines[-1] else lines


def _place(device: Mapping[str, Any]) -> list[str]:
    node = device["numa_node"]
    return ["-" if node is None else str(node), device["pci"] or "-"]


def _affinity_rows(facts: Mapping[str, Any]) -> list[list[str]]:
    names = [nic["name"] for nic in facts["nics"]]
    rows = [[f"GPU{gpu['index']}", *(gpu["affinity"][name] for name in names), *_place(gpu)] for gpu in facts["gpus"]]
    return [["", *names, "NUMA", "PCI"], *rows]


def _port_rows(facts: Mapping[str, Any]) -> list[list[str]]:
    heads = ["port", "state", "link", "rate", "MTU", "interface", "NUMA", "PCI", "GID"]
    rows = [
        [
            port["name"],
            port["state"] or "-",
            port["link_layer"] or "-",
            "software" if nic["software"] else format_rate(port["rate_bytes_per_s"]),
            str(port["mtu"] or "-"),
            port["netdev"] or "-",
            *_place(nic),
            _gid_text(port["gids"]),
        ]
        for nic in facts["nics"]
        for port in nic["ports"]
    ]
    return [heads, *rows]


def format_rate(bytes_per_s: float | None) -> str:
    """As NICs are sold: ``400 Gb/s``."""
    return "-" if bytes_per_s is None else f"{bytes_per_s * 8 / 1e9:g} Gb/s"


def _gid_text(gids: Sequence[Mapping[str, Any]]) -> str:
    best = next((gid for gid in gids if gid["usable"]), None)
    return "none usable" if best is None else f"{best['index']}: {best['address']} ({best['reason']})"


def _problem_lines(facts: Mapping[str, Any]) -> list[str]:
    problems = [port["problem"] for nic in facts["nics"] for port in nic["ports"] if port["problem"]]
    return [*(f"not used: {problem}" for problem in problems), ""] if problems else []


def _rank_rows(facts: Mapping[str, Any]) -> list[list[str]]:
    rows = [["rank", "GPU", "port", "then", "why"]]
    for rank in facts["ranks"]:
        gpu = "-" if rank["gpu"] is None else str(rank["gpu"])
        first, *others = rank["ports"] or ["none"]
        rows.append([str(rank["rank"]), gpu, first, ",".join(others[:3]) or "-", rank["reason"]])
    return rows


def _server_rows(facts: Mapping[str, Any]) -> list[list[str]]:
    rows = [
        [
            row["server"],
            row["port"] or "none",
            row["reason"] if row["port"] else "see below" if not facts["problems"] else "no RDMA device",
        ]
        for row in facts["servers"]
    ]
    return [["server", "port", "why"], *rows]


def _missing_rails(facts: Mapping[str, Any]) -> list[str]:
    """One line for each reason; without any device the first line has said it already."""
    if facts["problems"]:
        return []
    return [f"memkv: {reason}" for reason in dict.fromkeys(r["reason"] for r in facts["servers"] if not r["port"])]


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

"""``memkv doctor``: what an operator would check, and what to do about it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from memkv_vllm.doctor.findings import Finding


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--side", type=click.Choice(["client", "server"]), default="client", show_default=True, help="Which host this is."
)
@click.option(
    "--config", type=click.Path(path_type=Path), metavar="FILE", help="The server's yaml; with --side server."
)
@click.option(
    "--server",
    "servers",
    multiple=True,
    metavar="HOST:PORT",
    help="Ask this server, not the configured ones; may be repeated. With several rails: name=addr0|addr1.",
)
@click.option("--staging", metavar="SIZE", help="Staging memory of a rank; default: what the settings' defaults allow.")
@click.option(
    "--medium",
    type=click.Choice(["host", "gpu", "auto"]),
    default="host",
    show_default=True,
    help="memkv_scratch_medium: whether a NIC must reach GPU memory.",
)
def doctor(
    as_json: bool, side: str, config: Path | None, servers: tuple[str, ...], staging: str | None, medium: str
) -> None:
    """Check this host, its settings and the servers; say what is wrong, and the fix.

    A client's settings are read as always (the yaml of MEMKV_CONFIG, MEMKV_*); a server's from --config. Nothing is
    changed; a server is asked as any client would. Exit status: 0 all ok, 1 a warning, 2 a failure.
    """
    from memkv_vllm.config import parse_servers, parse_size
    from memkv_vllm.doctor.checks import check_all
    from memkv_vllm.doctor.findings import exit_status
    from memkv_vllm.doctor.gathering import gather
    from memkv_vllm.doctor.settings import client_settings, default_staging_bytes, server_settings

    if config is not None and side == "client":
        raise click.UsageError("--config is a server's yaml: say --side server; a client's is named by MEMKV_CONFIG")
    try:
        if servers:
            parse_servers(list(servers))
        size = default_staging_bytes() if staging is None else parse_size(staging)
    except ValueError as error:
        raise click.UsageError(f"--server or --staging: {error}") from None
    settings = client_settings(servers, size) if side == "client" else server_settings(config, servers)
    findings = check_all(gather(settings, medium))
    status = exit_status(findings)
    click.echo(to_json(findings, side, status) if as_json else "\n".join(to_lines(findings)))
    sys.exit(status)


def to_json(findings: Sequence[Finding], side: str, status: int) -> str:
    """One JSON object with every finding."""
    rows = [finding._asdict() | {"level": finding.level.value} for finding in findings]
    return json.dumps({"side": side, "status": status, "findings": rows})


def to_lines(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding, its fix below it, and a summary."""
    width = max(len(finding.check) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level.value.upper():<4}  {finding.check:<{width}}  {finding.seen}")
        if finding.fix:
            lines.append(f"{'':<6}{'fix:':>{width}}  {finding.fix}")
    counts = [(name, sum(1 for finding in findings if finding.level.value == name)) for name in ("fail", "warn", "ok")]
    return [*lines, ", ".join(f"{count} {name}" for name, count in counts)]

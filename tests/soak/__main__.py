"""``python -m tests.soak``: see docs/testing.md. Exit code 0 when nothing was wrong."""

from __future__ import annotations

import secrets
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click

from tests.soak.cluster import Options
from tests.soak.controller import run_soak
from tests.support.cable import A, B, lay


@click.command()
@click.option("--minutes", type=click.FloatRange(0.2), default=30.0, show_default=True, help="Length of the load.")
@click.option("--seed", type=int, help="Repeats the plan of another run; random by default, and printed.")
@click.option("--transport", type=click.Choice(["loopback", "tcp", "verbs"]), default="tcp", show_default=True)
@click.option("--modes", default="memory,file,direct", show_default=True, help="storage.mode of each server.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/soak.json"), show_default=True)
@click.option("--keep", is_flag=True, help="Keep logs and disks after a good run, too.")
def main(minutes: float, seed: int | None, transport: str, modes: str, out: Path, keep: bool) -> None:
    """Store servers and clients under load while they are killed, frozen and damaged; then a judgement."""
    # An ordered end is an end like any other: the processes that were started end as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    seed = secrets.randbelow(1 << 32) if seed is None else seed
    folder = Path(tempfile.mkdtemp(prefix="memkv-soak-"))
    begun = time.monotonic()
    click.echo(f"soak: seed {seed}, {minutes:g} minutes, files in {folder}")

    def say(line: str) -> None:
        click.echo(f"soak: {time.monotonic() - begun:7.1f} s  {line}")

    options = Options(seed, minutes * 60, transport, tuple(modes.split(",")))
    if transport == "verbs":
        lay()
        options = replace(options, host=A.address, devices=(A.device, B.device))
    report = run_soak(options, folder, say)
    out.parent.mkdir(parents=True, exist_ok=True)
    report.write(out)
    click.echo(report.summary())
    if report.passed and not keep:
        shutil.rmtree(folder)
    sys.exit(0 if report.passed else 1)


if __name__ == "__main__":
    main()

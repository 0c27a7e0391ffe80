"""What the demo prints: progress while it runs, and a table that needs no knowledge of this project."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import IO, Any

import click

MIB = 1 << 20
PULSE_S = 10.0
"""In a pipe: a line at least so often, so that a slow step is not taken for a hang."""


class Progress:
    """Says what happens and since when. On a terminal the last line counts seconds; in a pipe lines are added."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._terminal = self._stream.isatty()
        self._begun = time.monotonic()
        self._said_at = self._begun
        self._text = ""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begun

    def say(self, text: str) -> None:
        """A new step begins."""
        self._text = text
        self._print(text, final=True)

    def pulse(self) -> None:
        """Called now and then while a step runs."""
        if self._terminal:
            self._print(self._text, final=False)
        elif time.monotonic() - self._said_at >= PULSE_S:
            self._print("  ...", final=True)

    def _print(self, text: str, *, final: bool) -> None:
        self._said_at = time.monotonic()
        line = f"[{self.elapsed_s:4.0f} s] {text}"
        click.echo(f"\r{line}" if self._terminal else line, file=self._stream, nl=final)


@dataclass
class Verdict:
    """What must be true, and whether it was."""

    checks: list[tuple[bool, str, str]] = field(default_factory=list)

    def check(self, holds: bool, claim: str, seen: str = "") -> None:
        """Notes that ``claim`` holds or not; ``seen`` are the numbers that say so."""
        self.checks.append((holds, claim, seen))

    @property
    def good(self) -> bool:
        """Whether everything held."""
        return bool(self.checks) and all(holds for holds, _, _ in self.checks)

    def show(self) -> None:
        """Every claim, with what was seen beneath it."""
        for holds, claim, seen in self.checks:
            click.echo(f"  {'yes' if holds else 'NO '}  {claim}")
            if seen:
                click.echo(f"         {seen}")


def compare(expected: Sequence[dict[str, Any]], seen: Sequence[dict[str, Any]]) -> tuple[bool, bool, float]:
    """Whether two runs gave the same tokens and the same log-probabilities to the last bit, and how far they differ."""
    tokens = [answer["tokens"] for answer in expected] == [answer["tokens"] for answer in seen]
    pairs = [
        (a, b)
        for one, other in zip(expected, seen, strict=True)
        for step, other_step in zip(one["logprobs"], other["logprobs"], strict=True)
        for a, b in zip(step, other_step, strict=True)
    ]
    farthest = max((abs(a - b) for a, b in pairs), default=0.0)
    return tokens, tokens and farthest == 0.0, farthest


def first_token_table(computed: Sequence[float], restored: Sequence[float], prompt_tokens: int) -> None:
    """Seconds until the first token of each prompt, computed and restored."""
    click.echo(f"\nSeconds from asking to the first token, prompts of {prompt_tokens} tokens:\n")
    click.echo("  prompt    computed    restored after the restart")
    for number, (slow, fast) in enumerate(zip(computed, restored, strict=True), 1):
        click.echo(f"  {number:6d}  {slow:10.3f}  {fast:10.3f}")
    slow, fast = median(computed), median(restored)
    click.echo(f"  median  {slow:10.3f}  {fast:10.3f}   {_factor(slow, fast)}")


def _factor(slow: float, fast: float) -> str:
    if fast < slow:
        return f"{slow / fast:.1f} times sooner"
    return f"{fast / slow:.1f} times later: on this machine, with this tiny model, restoring does not pay"


def mib(num_bytes: float) -> str:
    """Bytes as MiB for people."""
    return f"{num_bytes / MIB:.1f} MiB"

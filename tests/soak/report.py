"""What a soak found: as JSON for machines, as some lines for people."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tests.soak import verdict
from tests.soak.clients import ClientActor
from tests.soak.cluster import Options
from tests.support.actors import Held, ServerActor

__all__ = ["Report"]

MAX_TOLD = 20


@dataclass
class Report:
    """Filled while a soak runs; it passed when there is no problem at the end.

    Attributes:
        options: what was run.
        folder: where its files are.
        plan: one line per event.
        problems: whatever was wrong.
        done: events carried out, by kind.
        counts: what the clients counted, all lives together.
        removed: keys that had to stay away.
        idle_before: what servers held before the first client came.
        held: (before, after) of each process that is compared.
        statistics: STAT of each server after the load.
        recovered: values that a disk gave back after the last restart.
        tails: ends of the logs, when something was wrong.
    """

    options: Options
    folder: Path
    plan: Sequence[str]
    problems: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    removed: int = 0
    idle_before: dict[str, Held] = field(default_factory=dict)
    held: dict[str, tuple[Held, Held]] = field(default_factory=dict)
    statistics: dict[str, dict[str, Any]] = field(default_factory=dict)
    recovered: dict[str, int] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    tails: dict[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems

    @property
    def hit_ratio(self) -> float:
        """Part of the values asked for that arrived."""
        return verdict.hit_ratio(self.counts)

    def finish(self, servers: Sequence[ServerActor], clients: Sequence[ClientActor]) -> None:
        """Take what only the processes know."""
        self.lives = {actor.name: actor.life + 1 for actor in [*servers, *clients]}
        if self.problems:
            self.tails = {actor.name: actor.tail() for actor in [*servers, *clients]}

    def write(self, path: Path) -> None:
        """As JSON."""
        facts: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        facts["options"] = asdict(self.options)
        facts["held"] = {name: [held._asdict() for held in pair] for name, pair in self.held.items()}
        facts |= {"passed": self.passed, "hit_ratio": self.hit_ratio}
        path.write_text(json.dumps(facts, indent=1, default=str), encoding="utf-8")

    def summary(self) -> str:
        """For people; after a failure with the seed, the plan and the ends of the logs."""
        counts, options = self.counts, self.options
        gib = (counts["get_bytes"] + counts["load_bytes"]) / 2**30
        how = "passed" if self.passed else "FAILED"
        what = f"{options.duration_s:g} s, seed {options.seed}, {options.transport}, {'/'.join(options.modes)}"
        by = f"{counts['delete_ok']} deletes, {counts['reported_bad']} reports, {counts['resets']} resets"
        lines = [
            f"soak of {what}: {how}",
            f"  done      {_pairs(self.done)}",
            f"  lives     {_pairs(self.lives)}",
            f"  hits      {counts['get_ok'] + counts['load_good']} values, {self.hit_ratio:.0%} of those asked for",
            f"  compared  {gib:.2f} GiB, byte by byte",
            f"  removed   {self.removed} values, looked for {counts['looked_for_removed']} times",
            f"            by {by}",
        ]
        for name, (before, after) in self.held.items():
            lines.append(f"  {name:9} held {_held(before)}, at the end {_held(after)}")
        for name, statistics in self.statistics.items():
            lines.append(f"  {name:9} {_table(statistics['table']['counters'])}")
        for name, count in self.recovered.items():
            lines.append(f"  {name:9} found {count} values on its disk again")
        if self.passed:
            return "\n".join(lines)
        lines += [f"  PROBLEM   {problem}" for problem in self.problems[:MAX_TOLD]]
        lines += ["", "plan:", *self.plan, ""]
        lines += [f"--- end of the log of {name}\n{tail}" for name, tail in self.tails.items()]
        lines += ["", f"files: {self.folder}", f"again: python -m tests.soak --seed {options.seed} ..."]
        return "\n".join(lines)


def _pairs(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items())) or "nothing"


def _held(held: Held) -> str:
    return f"{held.fds} descriptors, {held.threads} threads, {held.private_kib >> 10} MiB"


def _table(counters: dict[str, int]) -> str:
    names = ("commits", "evictions", "demotions", "fetches", "disk_writes", "disk_reclaimed", "disk_lost")
    return "in its last life: " + ", ".join(f"{counters[name]} {name}" for name in names if counters[name])

"""What a link says in the log: one line per new problem, and never a flood.

A server that comes and goes, or gives another reason each time, is one line at first and then one in a while with the
number of those left out, from each rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from memkv_vllm.engine.breaker import Allowance
from memkv_vllm.engine.inflight import Holder
from memkv_vllm.engine.pace import Pace, PaceChange
from memkv_vllm.engine.routes import Route
from memkv_vllm.errors import EnvironmentFault, MemkvError

__all__ = ["LINES_AT_ONCE", "LINE_EVERY_S", "LinkLog"]

logger = logging.getLogger("memkv.engine")

LINES_AT_ONCE, LINE_EVERY_S = 8, 10.0
"""Bound of one link's lines about problems: so many at once, then one per so many seconds; none twice in that time."""


class LinkLog:
    """Lines about one server.

    Args:
        server: its name.
        ways: all ways to it.
    """

    def __init__(self, server: str, ways: Sequence[Route]) -> None:
        self._server = server
        self._ways = ", ".join(map(str, ways))
        self._lines = Allowance(LINES_AT_ONCE, LINE_EVERY_S)
        self._fence_lines = Allowance(LINES_AT_ONCE, LINE_EVERY_S)
        self._last_line, self._said_at = "", 0.0
        self._left_out = 0
        self.last_problem = ""
        """Why the server is down; empty while it is connected."""

    def connected(self, holder: Holder, route: Route) -> None:
        """A connection is ready, over what was chosen."""
        self.last_problem = ""
        ways = (route.transport, route.rail, route.address)
        logger.info("event=connected server=%s generation=%d transport=%s rail=%d address=%s", *holder, *ways)

    def moved(self, old: Route, new: Route) -> None:
        """A connection over a better way took over."""
        logger.info("event=moved server=%s away_from=%r to=%r", self._server, str(old), str(new))

    def down(self, *errors: MemkvError) -> None:
        """No connection is ready, and why: one line per new problem, not one per attempt."""
        text = "; ".join(_reasons(errors) or dict.fromkeys(map(str, errors)))
        if text == self.last_problem:
            return
        self.last_problem = text
        self._say(
            logging.WARNING,
            "event=server_down server=%s ways=%r reason=%r: its share of lookups and loads misses until it is back; "
            "reconnecting in the background%s",
            self._server,
            self._ways,
            text,
        )

    def second_choice(self, used: Route, errors: Sequence[MemkvError]) -> None:
        """It was connected over ``used`` because of ``errors`` on better ways."""
        if reasons := _reasons(errors):
            self._say(
                logging.WARNING,
                "event=second_choice server=%s using=%r reason=%r: better ways are tried again from time to time%s",
                self._server,
                str(used),
                "; ".join(reasons),
            )

    def rails_differ(self, error: MemkvError) -> None:
        """Two rails of the entry lead to different servers."""
        self._say(
            logging.ERROR,
            "event=rails_differ server=%s reason=%r: the rail is not used; give every server an entry of its own%s",
            self._server,
            str(error),
        )

    def pace_changed(self, change: PaceChange, pace: Pace) -> None:
        """Transfers became far slower than their way should be, or no longer are."""
        rate, expected = f"{pace.rate / 1e9:.2f}", f"{(pace.expected or 0.0) / 1e9:.2f}"
        if change is PaceChange.RECOVERED:
            logger.info("event=path_recovered server=%s gb_per_s=%s expected=%s", self._server, rate, expected)
            return
        self._say(
            logging.WARNING,
            "event=slow_path server=%s gb_per_s=%s expected=%s: large transfers reach less than a third of what this "
            "rank's share of the rail should carry: see the port's speed and error counters (memkv net topo, "
            "ethtool -S), the switch's drops, and whether the server or its drives are the limit%s",
            self._server,
            rate,
            expected,
        )

    def fence_pending(self, holder: Holder, problem: MemkvError) -> None:
        """A condemned connection cannot be fenced yet."""
        if self._fence_lines.take(time.monotonic()):
            logger.warning(
                "event=fence_pending server=%s generation=%d reason=%r: its staging slots stay in quarantine until the "
                "server answers or its process has ended",
                *holder,
                str(problem),
            )

    def _say(self, level: int, text: str, *values: object) -> None:
        now, line = time.monotonic(), text % (*values, "")
        if (line == self._last_line and now - self._said_at < LINE_EVERY_S) or not self._lines.take(now):
            self._left_out += 1
            return
        left_out, self._left_out = self._left_out, 0
        self._last_line, self._said_at = line, now
        logger.log(level, text, *values, f" ({left_out} lines about it were left out)" if left_out else "")


def _reasons(errors: Sequence[MemkvError]) -> list[str]:
    """Without repetitions, and without what this host cannot run at all: that was logged once, for all servers."""
    return list(dict.fromkeys(str(error) for error in errors if not isinstance(error, EnvironmentFault)))

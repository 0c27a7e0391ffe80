"""Runs a soak: starts everything, carries out the plan, looks on, and judges at the end.

One thread, in ticks. Whatever goes wrong becomes a line of the report's problems; the first one that shows wrong bytes,
an end that nobody ordered or a client that hangs stops the load at once, so that the files still show why.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from memkv_vllm.config import load_client_config
from memkv_vllm.errors import MemkvError
from tests.soak import cluster, verdict
from tests.soak.client_process import Journal
from tests.soak.clients import ClientActor
from tests.soak.cluster import Options
from tests.soak.plan import Action, Event, Phases, chaos_plan
from tests.soak.report import Report
from tests.support.actors import END_S, Actor, Growth, Held, ServerActor, damage
from tests.support.auditor import Auditor

__all__ = ["run_soak"]

TICK_S, SAMPLE_S = 0.05, 1.0
WARM_SAMPLES = 40
"""A life with fewer seconds is not judged by its threads and memory; descriptors are counted in any case."""
HANG_S = 120.0
"""A client whose number of operations stands still for so long hangs: longer than any event and any deadline of its."""


def run_soak(options: Options, folder: Path, say: Callable[[str], None] = lambda _: None) -> Report:
    """Run one; every process that it starts has ended when it returns.

    Args:
        options: what to run.
        folder: an empty folder for settings, logs, journals and the report; it is not removed.
        say: called with a line for each step.
    """
    servers = cluster.make_servers(options, folder)
    clients = cluster.make_clients(options, servers, folder)
    disks = [server.name for server in servers if server.medium is not None]
    plan = chaos_plan(options.seed, options.duration_s, [s.name for s in servers], cluster.killable(options), disks)
    cluster.note(folder, options, [event.line() for event in plan])
    soak = _Soak(options, folder, servers, clients, plan, say)
    with _all_ended([*servers, *clients]):
        soak.run()
    report = soak.report
    report.finish(servers, clients)
    report.write(folder / "report.json")
    return report


@contextmanager
def _all_ended(actors: Sequence[Actor]) -> Iterator[None]:
    """No process outlives the soak, frozen or not."""
    try:
        yield
    finally:
        for actor in actors:
            actor.kill()


class _Soak:
    """One run; see the module's text."""

    def __init__(
        self,
        options: Options,
        folder: Path,
        servers: list[ServerActor],
        clients: list[ClientActor],
        plan: list[Event],
        say: Callable[[str], None],
    ) -> None:
        self._servers, self._clients, self._say = servers, clients, say
        self._actors: dict[str, Actor] = {actor.name: actor for actor in [*servers, *clients]}
        self._plan, self._phases = plan, Phases.of(options.duration_s)
        self._later: dict[str, tuple[float, Callable[[], None]]] = {}
        """What is to be done to whom, and when (monotonic)."""
        self._ending: dict[str, tuple[float, Event]] = {}
        """Who was asked to end by which event, and when it must have (monotonic)."""
        self._started = self._sampled = 0.0
        self._broken = False
        environ = cluster.environ_of(options, servers, folder)
        self._auditor = Auditor(
            load_client_config(environ), "tcp" if options.transport == "verbs" else options.transport
        )
        self.report = Report(options, folder, [event.line() for event in plan])

    def run(self) -> None:
        """Load, then judgement; an error of the soak itself is a problem too."""
        try:
            self._begin()
            self._load()
            self._settle()
            if not self._broken:
                self._judge()
        except (RuntimeError, OSError, MemkvError, AssertionError) as error:
            self._problem(f"the soak could not go on: {type(error).__name__}: {error}")

    def _problem(self, text: str, *, fatal: bool = False) -> None:
        self._say(f"PROBLEM {text}")
        self.report.problems.append(text)
        self._broken |= fatal

    # -- the load

    def _begin(self) -> None:
        for server in self._servers:
            server.start()
        for server in self._servers:
            server.wait_ready()
            server.sample(time.monotonic())
            self.report.idle_before[server.name] = server.samples[-1][1]
        for client in self._clients:
            client.start()
        self._say(f"{len(self._servers)} servers, {len(self._clients)} clients; {len(self._plan)} events to come")

    def _load(self) -> None:
        self._started = time.monotonic()
        events = iter(self._plan)
        event = next(events, None)
        while not self._broken and (now := time.monotonic() - self._started) < self._phases.calm_s:
            self._do_what_is_due()
            if event is not None and event.at_s <= now:
                self._carry_out(event)
                event = next(events, None)
            self._look_on()
            time.sleep(TICK_S)

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for name in [name for name, (at, _) in self._later.items() if at <= now]:
            self._undo(name)
        for name, (last, event) in list(self._ending.items()):
            self._look_at_end(self._actors[name], last, event)

    def _look_at_end(self, actor: Actor, last: float, event: Event) -> None:
        """Of one that was asked to end."""
        if actor.process is None or (code := actor.process.poll()) is None:
            if time.monotonic() > last:
                del self._ending[actor.name]
                self._problem(f"{actor.name} did not end within {END_S:g} s of SIGTERM", fatal=True)
            return
        del self._ending[actor.name]
        if (wrong := actor.how_ended(code)) is not None:
            self._problem(wrong, fatal=True)
        self._gone(actor, event)

    def _undo(self, name: str) -> None:
        """Start again what was ended, let go on what was frozen."""
        _, call = self._later.pop(name, (0.0, lambda: None))
        call()

    def _carry_out(self, event: Event) -> None:
        actor = self._actors[event.target]
        if event.target in self._ending:
            return  # a slow machine is late with it
        self._undo(event.target)
        self._say(event.line().strip())
        self.report.done[event.action.value] += 1
        if event.action is Action.FREEZE:
            actor.freeze()
            self._later[event.target] = (time.monotonic() + event.for_s, lambda: self._thaw(actor))
        elif event.action is Action.END and actor.ready:
            actor.ask_to_end()
            self._ending[event.target] = (time.monotonic() + END_S, event)
        else:
            actor.kill()  # in the middle of its start, too: before it is ready there is no orderly end
            self._gone(actor, event)

    def _gone(self, actor: Actor, event: Event) -> None:
        """It is down: its disk may be damaged, and it will start again."""
        if event.damage is not None and isinstance(actor, ServerActor) and actor.medium is not None:
            offsets = damage(actor.medium, cluster.values_begin(actor.medium), event.damage)
            self.report.done["damage"] += 1
            self._say(f"bits of {actor.medium.name} were inverted at {', '.join(map(str, offsets))}")
        self._later[event.target] = (time.monotonic() + event.for_s, actor.start)

    def _thaw(self, actor: Actor) -> None:
        actor.thaw()
        if isinstance(actor, ClientActor):
            actor.grew_at = time.monotonic()

    def _look_on(self) -> None:
        now = time.monotonic()
        if now < self._sampled + SAMPLE_S:
            return
        self._sampled = now
        for actor in self._actors.values():
            if actor.process is not None and not actor.running and not actor.expected_end:
                self._problem(f"{actor.name} ended by itself, exit code {actor.process.returncode}", fatal=True)
            elif not actor.frozen:
                actor.sample(now - self._started)
        for client in self._clients:
            self._look_at_client(client, now)

    def _look_at_client(self, client: ClientActor, now: float) -> None:
        if not client.running or client.frozen:
            return
        client.listen(now)
        if client.heartbeat is not None and client.heartbeat.findings:
            self._problem(f"{client.name}: {client.heartbeat.findings[0]}", fatal=True)
        if now - client.grew_at > HANG_S:
            client.signal(signal.SIGUSR1)
            self._problem(f"{client.name} has finished nothing for {HANG_S:g} s: its log shows where", fatal=True)

    # -- the end

    def _settle(self) -> None:
        """Everything runs; then the clients end in order, and say what they counted."""
        while self._ending:
            self._do_what_is_due()
            time.sleep(TICK_S)
        for actor in self._actors.values():
            if not actor.running:
                actor.start()
            actor.thaw()
        for server in self._servers:
            server.wait_ready()
        for client in self._clients:
            client.wait_ready()
        self._say("the clients end")
        for client in self._clients:
            client.sample(time.monotonic() - self._started)
            wrong = client.end()
            client.listen(time.monotonic())
            if wrong is not None:
                self._problem(wrong)
            elif client.heartbeat is None or not client.heartbeat.final:
                self._problem(f"{client.name} ended without its last word")
        for client in self._clients:
            for beat in client.beats():
                self.report.counts.update(beat.counts)
                found = [f"{client.name}: {text}" for text in beat.findings]
                self.report.problems += [text for text in found if text not in self.report.problems]

    def _judge(self) -> None:
        dead = self._dead_keys()
        for server in self._servers:
            self._wait_rest(server)
            self._look_for_risen(server, dead, "after the load")
            server.sample(time.monotonic() - self._started)
            self._look_for_growth(server, Growth())
        for client in self._clients:
            if client.name in cluster.steady(self.report.options):
                self._look_for_growth(client, Growth(fds=8))
        self._end_servers()
        self._restart_disks(dead)
        for server in self._servers:
            lines = verdict.log_problems(server.log.read_text(errors="replace"))
            self.report.problems += [f"log of {server.name}: {line[:400]}" for line in lines[:5]]
        self.report.problems += verdict.coverage(self.report.counts)
        self.report.problems += verdict.server_coverage(self.report.statistics.values())

    def _wait_rest(self, server: ServerActor) -> None:
        """A server drops a dead peer and sweeps what was reset by itself, and soon."""
        end = time.monotonic() + self.report.options.rest_s
        while True:
            self.report.statistics[server.name] = statistics = self._auditor.statistics(server.name)
            problems = verdict.rest_problems(statistics)
            if not problems or time.monotonic() > end:
                self.report.problems += [f"{server.name} does not come to rest: {problem}" for problem in problems]
                return
            time.sleep(0.2)

    def _dead_keys(self) -> set[tuple[str, bytes]]:
        dead: set[tuple[str, bytes]] = set()
        for client in self._clients:
            for path in client.journals:
                dead |= Journal.read(path)
        self.report.removed = len(dead)
        return dead

    def _look_for_risen(self, server: ServerActor, dead: set[tuple[str, bytes]], when: str) -> None:
        keys = sorted(key for name, key in dead if name in (server.name, "*"))
        risen = self._auditor.risen(server.name, keys)
        if risen:
            self._problem(f"{server.name} {when}: {len(risen)} removed values are there, such as {risen[0].hex()}")

    def _look_for_growth(self, actor: Actor, growth: Growth) -> None:
        """What it holds now against the first half of its life; a server's descriptors against its first idle ones."""
        *life, (_, after) = actor.samples
        before = _most_at_first(life) or after
        idle = self.report.idle_before.get(actor.name)
        if idle is not None:
            before = before._replace(fds=idle.fds)
        self.report.held[actor.name] = (before, after)
        self.report.problems += [f"{actor.name}: {text}" for text in growth.problems(before, after)]

    def _end_servers(self) -> None:
        for server in self._servers:
            if (wrong := server.end()) is not None:
                self._problem(wrong)

    def _restart_disks(self, dead: set[tuple[str, bytes]]) -> None:
        """What was removed stays removed over an orderly end as well, and what was kept is found again."""
        for server in self._servers:
            if server.medium is None:
                continue
            server.start()
            server.wait_ready()
            self._look_for_risen(server, dead, "after a last restart")
            recovered = self._auditor.statistics(server.name)["table"]["complete"]
            self.report.recovered[server.name] = recovered
            if not recovered:
                self._problem(f"{server.name}: nothing was found on its disk after an orderly end")
            if (wrong := server.end()) is not None:
                self._problem(wrong)


def _most_at_first(samples: Sequence[tuple[float, Held]]) -> Held | None:
    """The most of each kind that was held in the first half of a life; None where that is too short to say.

    Threads and buffers are made when they are first needed, which takes a while.
    """
    if len(samples) < WARM_SAMPLES:
        return None
    first = [held for _, held in samples[: len(samples) // 2]]
    return Held(*map(max, zip(*first, strict=True)))

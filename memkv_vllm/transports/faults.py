"""A plan of faults that a server transport carries out on itself: the seam where tests break things.

A plan is made in code and handed to a server transport's constructor; no setting reaches it. A rule names an
:class:`Operation`, which of its occurrences it hits, and an action. For ``PULL`` and ``PUSH`` an occurrence is
one move (one value), for ``REQUEST`` and ``REPLY`` one control message, for ``CONNECT`` one accepted connection.

::

    plan = FaultPlan()
    late = plan.add(Operation.PUSH, LateWrite(after_s=0.3, answer=Status.OK), nth=1)
    server = LoopbackServerTransport(port, faults=plan)
    ...
    assert late.fired == 1
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import anyio

from memkv_vllm.protocol.frame import MessageType
from memkv_vllm.protocol.messages import ErrorCode, ErrorReply
from memkv_vllm.transports.base import Move
from memkv_vllm.types import Extent, Status

DEATH_EXIT_CODE = 70


class Operation(Enum):
    """Where a fault can strike."""

    CONNECT = "connect"
    """A connection was accepted; nothing was read yet."""
    REQUEST = "request"
    """A control request has arrived and is about to be carried out."""
    REPLY = "reply"
    """A control reply is about to be sent."""
    PULL = "pull"
    """One move from the client's memory is about to start."""
    PUSH = "push"
    """One move into the client's memory is about to start."""


@dataclass(frozen=True)
class Delay:
    """Wait ``seconds`` first. Everywhere."""

    seconds: float


@dataclass(frozen=True)
class Throttle:
    """Moves: no faster than ``bytes_per_s`` together, over all sessions of the server."""

    bytes_per_s: float


@dataclass(frozen=True)
class Drop:
    """Moves: never done; the answer is TIMEOUT at the deadline (FAILED if the peer is fenced before)."""


@dataclass(frozen=True)
class LateWrite:
    """Moves: answer ``answer`` at once, write the bytes ``after_s`` later unless the peer is fenced by then.

    ``answer=Status.OK`` is the answer that overtakes its bytes.
    """

    after_s: float
    answer: Status = Status.TIMEOUT


@dataclass(frozen=True)
class Short:
    """Moves: only the first ``length`` bytes are copied, the answer is OK. REPLY: so much of the frame."""

    length: int


@dataclass(frozen=True)
class BitFlip:
    """Moves: bit ``bit`` of the byte at ``offset`` arrives inverted, the answer is OK. REPLY: of the sent frame."""

    offset: int
    bit: int = 0


@dataclass(frozen=True)
class Fail:
    """Moves: nothing is copied, the answer is ``status``. REQUEST: an error reply. CONNECT: closed at once."""

    status: Status = Status.FAILED


@dataclass(frozen=True)
class NoReply:
    """REQUEST: never carried out nor answered. REPLY: carried out, not answered. CONNECT: nothing is ever said."""


@dataclass(frozen=True)
class Die:
    """The server dies here: its process (``os._exit``), or only this connection for a server that shares ours."""

    exit_process: bool = False


Action = Delay | Throttle | Drop | LateWrite | Short | BitFlip | Fail | NoReply | Die


@dataclass(frozen=True)
class FaultPoint:
    """What a rule's predicate sees. ``type`` and ``extent`` are set where the operation has one."""

    operation: Operation
    type: MessageType | None = None
    extent: Extent | None = None


@dataclass
class Rule:
    """One fault. ``seen`` counts the occurrences that matched, ``fired`` those that were hit."""

    operation: Operation
    action: Action
    type: MessageType | None = None
    nth: int | None = None
    every: int | None = None
    times: int | None = None
    predicate: Callable[[FaultPoint], bool] | None = None
    seen: int = field(default=0, init=False)
    fired: int = field(default=0, init=False)

    def _hits(self, point: FaultPoint) -> bool:
        if self.operation is not point.operation or (self.type is not None and self.type is not point.type):
            return False
        if self.predicate is not None and not self.predicate(point):
            return False
        self.seen += 1
        if self.nth is not None and self.seen != self.nth:
            return False
        if self.every is not None and self.seen % self.every:
            return False
        return self.times is None or self.fired < self.times


class FaultPlan:
    """Rules, asked in the order they were added; the first that hits decides. Thread-safe."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self._lock = threading.Lock()
        self._free_at = 0.0

    def add(
        self,
        operation: Operation,
        action: Action,
        *,
        type: MessageType | None = None,
        nth: int | None = None,
        every: int | None = None,
        times: int | None = None,
        predicate: Callable[[FaultPoint], bool] | None = None,
    ) -> Rule:
        """Add a rule; it may be added and removed while the server runs.

        Args:
            operation: where it strikes.
            action: what happens.
            type: only for messages of this type.
            nth: only the nth occurrence (from 1).
            every: only each ``every``-th occurrence.
            times: at most so often.
            predicate: only where this says so.
        """
        rule = Rule(operation, action, type, nth, every, times, predicate)
        with self._lock:
            self._rules.append(rule)
        return rule

    def remove(self, rule: Rule) -> None:
        """Take a rule out; its counters stay readable."""
        with self._lock:
            self._rules.remove(rule)

    def clear(self) -> None:
        """Take all rules out."""
        with self._lock:
            self._rules.clear()

    def strike(
        self, operation: Operation, *, type: MessageType | None = None, extent: Extent | None = None
    ) -> Action | None:
        """The action for this occurrence, counted; None for none. Called by transports."""
        with self._lock:
            if not self._rules:
                return None
            point = FaultPoint(operation, type, extent)
            for rule in self._rules:
                if rule._hits(point):
                    rule.fired += 1
                    return rule.action
        return None

    @property
    def idle(self) -> bool:
        """Whether there is no rule at the moment."""
        return not self._rules

    def delay_of(self, action: Delay | Throttle, length: int) -> float:
        """Seconds that a move of ``length`` bytes has to wait under ``action``."""
        if isinstance(action, Delay):
            return action.seconds
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + length / action.bytes_per_s
            return self._free_at - now


class MoveFaults(NamedTuple):
    """What strikes one batch of moves: how long all of it waits, and an action per slot that has one."""

    delay_s: float
    actions: dict[int, Action]


def strike_moves(plan: FaultPlan | None, operation: Operation, moves: Sequence[Move]) -> MoveFaults:
    """The faults of one pull or push, counted."""
    delay_s, actions = 0.0, dict[int, Action]()
    if plan is not None:
        for slot, move in enumerate(moves):
            action = plan.strike(operation, extent=move.remote)
            if isinstance(action, (Delay, Throttle)):
                delay_s = max(delay_s, plan.delay_of(action, move.remote.length))
            elif action is not None:
                actions[slot] = action
    return MoveFaults(delay_s, actions)


class Verdict(NamedTuple):
    """What to answer to a request that is not carried out; None: nothing."""

    answer: ErrorReply | None


class ControlFaults:
    """Carries out a plan's rules for control traffic on one connection; ``cut`` ends it abruptly."""

    def __init__(self, plan: FaultPlan, cut: Callable[[], None]) -> None:
        self._plan = plan
        self._cut = cut

    @property
    def idle(self) -> bool:
        """Whether nothing is to be broken at the moment: then neither of the calls below would do anything."""
        return self._plan.idle

    async def connected(self) -> None:
        """A connection was accepted."""
        action = self._plan.strike(Operation.CONNECT)
        if isinstance(action, Delay):
            await anyio.sleep(action.seconds)
        elif isinstance(action, NoReply):
            await anyio.sleep_forever()
        elif isinstance(action, Die):
            die(action, self._cut)
        elif action is not None:
            self._cut()

    async def requested(self, type: MessageType) -> Verdict | None:
        """A request is about to be carried out; None lets it go on."""
        action = self._plan.strike(Operation.REQUEST, type=type)
        if isinstance(action, Delay):
            await anyio.sleep(action.seconds)
        elif isinstance(action, Die):
            die(action, self._cut)
        elif isinstance(action, Fail):
            return Verdict(ErrorReply(ErrorCode.INTERNAL, "an injected fault"))
        elif action is not None:
            return Verdict(None)
        return None

    async def replying(self, type: MessageType) -> Action | None:
        """A reply is about to be sealed; the action is for :func:`spoilt`, or NoReply."""
        action = self._plan.strike(Operation.REPLY, type=type)
        if isinstance(action, Delay):
            await anyio.sleep(action.seconds)
        elif isinstance(action, Die):
            die(action, self._cut)
        return action


def spoilt(frame: bytes, action: Action | None) -> bytes:
    """What is sent in place of ``frame``."""
    if isinstance(action, Short):
        return frame[: action.length]
    if isinstance(action, BitFlip):
        broken = bytearray(frame)
        broken[action.offset % len(frame)] ^= 1 << action.bit
        return bytes(broken)
    return frame


def die(action: Die, cut: Callable[[], None]) -> None:
    """End this process, or with ``cut`` one connection."""
    if action.exit_process:
        os._exit(DEATH_EXIT_CODE)
    cut()

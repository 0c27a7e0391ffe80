"""The queue pairs of one session at work: transfers in, posts out, completions in.

Everything here but :meth:`QueuePairs.shut_down` runs on the event loop, in callbacks, without a task: a post is a call
into the library that returns at once, and completions make the channel's descriptor readable.

Each queue pair serves its runs first come, first served, with at most ``depth`` work requests outstanding. Some
devices carry out the whole transfer inside of the post (soft-RoCE: 3.8 ms for 2.5 MiB), so posts are cut into slices,
and after about ``TURN_S`` the rest of the loop has its turn. How large a slice may be is learned from how long the last
ones took: on a NIC, where a post takes microseconds, it soon holds all that there is.

The first work request that fails, or a post that is refused, is the end: nothing is posted any more, and the owner is
told. What was outstanding then ends by being flushed; when all of it has, nothing can touch memory any more
(:attr:`QueuePairs.quiet`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from memkv_vllm.errors import LocalProtocolError
from memkv_vllm.transports.verbs.planning import Columns
from memkv_vllm.transports.verbs.provider import Completion, CompletionQueue, QueuePair, VerbsError, WorkRequests
from memkv_vllm.transports.verbs.sendqueue import SendQueue
from memkv_vllm.transports.verbs.statuses import SUCCESS, Outcome, outcome_of
from memkv_vllm.transports.verbs.transfers import Run, Transfer

__all__ = ["TURN_S", "Pace", "QueuePairs", "Sender"]

logger = logging.getLogger("memkv.transports.verbs")

TURN_S = 0.025
"""Seconds of posting after which the rest of the loop has its turn: of soft-RoCE alone, a NIC takes microseconds.

Where the post itself carries the bytes all caches are cold after it, and what Python does until the next costs 0.2 to
1 ms: with turns of 5 ms a tenth of the time. With these, a control message may wait 40 ms behind a session's bytes.
"""

SLICE_ROWS = 72
"""Most work requests of one post: a full batch and the READs behind it. Filling the array for more gains nothing."""

_TRIFLE_BYTES = 64
"""By which a slice may be longer than the pace says."""

_SLICE_BYTES_FIRST, _SLICE_BYTES_LEAST, _SLICE_BYTES_MOST = 1 << 20, 1 << 16, 1 << 34


class Pace:
    """How many bytes one post may ask for, so that it takes about ``TURN_S`` at most. Pure."""

    def __init__(self) -> None:
        self.slice_bytes = _SLICE_BYTES_FIRST

    def took(self, seconds: float, num_bytes: int) -> None:
        """A post of ``num_bytes`` took so long."""
        if seconds > TURN_S:
            self.slice_bytes = max(_SLICE_BYTES_LEAST, min(self.slice_bytes, int(num_bytes * TURN_S / seconds)))
        elif seconds < TURN_S / 2 and num_bytes >= self.slice_bytes // 2:
            self.slice_bytes = min(_SLICE_BYTES_MOST, self.slice_bytes * 2)


class Sender:
    """One queue pair with its send queue and the runs on it.

    Args:
        queue_pair: connected.
        depth: places of its send queue.
    """

    def __init__(self, queue_pair: QueuePair, depth: int) -> None:
        self.queue_pair = queue_pair
        self.queue = SendQueue(depth)
        self.waiting: deque[Run] = deque()
        """Runs of which something is not posted, in order."""
        self.flying: deque[Run] = deque()
        """Runs of which something is posted and has not ended, in order."""
        self.num_bytes = 0
        """Of all its runs: what a new one would have to wait for."""
        self.settled = 0
        """Work requests that have ended well or badly: all below this number."""
        self._broken = False

    @property
    def quiet(self) -> bool:
        """Whether nothing that was posted is outstanding."""
        return self.settled >= self.queue.posted

    @property
    def oldest(self) -> Transfer | None:
        """Whose work request is the next to end."""
        return self.flying[0].transfer if self.flying else None

    @property
    def ready(self) -> bool:
        """Whether something can be posted."""
        return bool(self.waiting) and self.queue.free > 0

    def add(self, run: Run) -> None:
        """Do ``run`` after the others."""
        self.waiting.append(run)
        self.num_bytes += run.num_bytes

    def post(self, pace: Pace) -> None:
        """Post a slice of the first run that waits.

        Raises:
            VerbsError: it was refused.
        """
        run = self.waiting[0]
        if run.posted == 0:
            run.first = self.queue.posted
            self.flying.append(run)
        rows, num_bytes = self._slice(run, pace.slice_bytes)
        signalled = self.queue.take(rows, awaited=run.posted + rows == run.end)
        work = _work(run.columns, run.posted, rows, run.first + run.posted, signalled)
        started = time.monotonic()
        try:
            self.queue_pair.post(work)
        except VerbsError as error:
            refused = rows - error.accepted
            self.queue.refuse(refused)
            run.posted += error.accepted
            raise
        pace.took(time.monotonic() - started, num_bytes)
        run.posted += rows
        if not run.waits:
            self.waiting.popleft()

    def _slice(self, run: Run, most_bytes: int) -> tuple[int, int]:
        """How many rows of ``run`` to post now, and their bytes: one at least."""
        most_rows = min(run.end - run.posted, self.queue.free, SLICE_ROWS)
        if run.num_bytes <= most_bytes and most_rows == len(run.columns):
            return most_rows, run.num_bytes
        before = run.ends[run.posted - 1] if run.posted else 0
        # Work requests of a few bytes go along with the long one before them: the READ behind WRITEs.
        longest = max(most_bytes, run.ends[run.posted] - before) + _TRIFLE_BYTES
        end = bisect_right(run.ends, before + longest, run.posted, run.posted + most_rows)
        return end - run.posted, run.ends[end - 1] - before

    def complete(self, number: int) -> None:
        """Work request ``number`` and all before it have ended well.

        Raises:
            LocalProtocolError: the device speaks of one that is not under way.
        """
        self.queue.complete(number)
        self.settled = max(self.settled, number + 1)
        while self.flying:
            run = self.flying[0]
            run.ended = min(number + 1 - run.first, run.posted)
            if run.ended < run.posted or run.waits:
                return
            self.flying.popleft()
            self.num_bytes -= run.num_bytes
            if run.end == len(run.columns):
                run.transfer.run_ended()

    def break_at(self, number: int) -> None:
        """Work request ``number`` has failed, or was flushed."""
        if not self._broken and number > self.queue.completed:
            # What went before the first that fails has ended well: they complete in order.
            self.complete(number - 1)
        self._broken = True
        self.settled = max(self.settled, number + 1)

    def drop(self, run: Run) -> None:
        """Post nothing more of ``run``; what was posted goes on."""
        run.end = run.posted
        if run in self.waiting:
            self.waiting.remove(run)
            if run.ended >= run.posted:
                self.num_bytes -= run.num_bytes
                if run in self.flying:
                    self.flying.remove(run)


def _work(columns: Columns, begin: int, rows: int, number: int, signalled: npt.NDArray[np.bool_]) -> WorkRequests:
    part = columns if rows == len(columns) else columns.part(begin, begin + rows)
    return WorkRequests(
        np.arange(number, number + rows, dtype=np.uint64),
        part.opcodes,
        part.local,
        part.lkeys,
        part.lengths,
        part.remote,
        part.rkeys,
        signalled,
    )


class QueuePairs:
    """All queue pairs of a session, which share a completion queue.

    Args:
        completions: of all of them; owned.
        queue_pairs: connected; owned.
        depth: work requests that may be outstanding on each.
        on_failed: called once, when the first thing fails, with the outcome and what it was.
    """

    def __init__(
        self,
        completions: CompletionQueue,
        queue_pairs: Sequence[QueuePair],
        depth: int,
        on_failed: Callable[[Outcome | VerbsError | LocalProtocolError, str], None],
    ) -> None:
        self.failed = False
        self.quiet = False
        """After a failure: nothing that was posted can touch memory any more."""
        self.failed_first: Transfer | None = None
        """Whose work request the first one was that failed; None also where a post or the device did."""
        self._completions = completions
        self._senders = [Sender(queue_pair, depth) for queue_pair in queue_pairs]
        self._by_number = {sender.queue_pair.number: sender for sender in self._senders}
        self._turn = deque(self._senders)
        self._on_failed = on_failed
        self._pace = Pace()
        self._loop = asyncio.get_running_loop()
        self._next: asyncio.Handle | None = None
        self._transfers: set[Transfer] = set()
        self._stopped = False
        self._loop.add_reader(completions.fd, self._on_readable)

    def __len__(self) -> int:
        return len(self._senders)

    @property
    def num_transfers(self) -> int:
        """Transfers that were begun and not given back."""
        return len(self._transfers)

    def least_busy(self, among: range) -> int:
        """Index, one of ``among``, of the queue pair with the fewest bytes before a new run."""
        return min(among, key=lambda index: self._senders[index].num_bytes)

    def begin(self, transfer: Transfer, parts: Sequence[tuple[int, Columns]]) -> None:
        """Start ``transfer``: each of ``parts`` on the queue pair of that index. To be given back by :meth:`drop`.

        Neither after a failure nor after :meth:`stop`: nothing of it would ever end.
        """
        self._transfers.add(transfer)
        for index, columns in parts:
            self._senders[index].add(transfer.add(columns))
        if self._next is None:
            self._post()

    def drop(self, transfer: Transfer) -> None:
        """Post nothing more of ``transfer``; the owner does not wait for it any more."""
        self._transfers.discard(transfer)
        if not transfer.is_complete:
            for sender in self._senders:
                for run in transfer.runs:
                    sender.drop(run)

    def fail(self) -> None:
        """Move all to their error state. In a worker thread; on the loop nothing is posted any more."""
        for sender in self._senders:
            try:
                sender.queue_pair.fail()
            except VerbsError as error:
                logger.warning("event=rdma_error_state qp=%d reason=%r", sender.queue_pair.number, str(error))

    def stop(self) -> None:
        """Neither post nor look at completions any more. A second call does nothing."""
        if not self._stopped:
            self._stopped = True
            self._loop.remove_reader(self._completions.fd)
            if self._next is not None:
                self._next.cancel()

    def destroy(self) -> list[VerbsError]:
        """Destroy all, after :meth:`stop`: then nothing of them touches memory. In a worker thread, once.

        Returns:
            why queue pairs could not be destroyed: each of those may go on as long as this process lives.
        """
        self.fail()
        failures: list[VerbsError] = []
        for sender in self._senders:
            try:
                sender.queue_pair.close()
            except VerbsError as error:
                failures.append(error)
        try:
            self._completions.close()
        except VerbsError as error:
            # It holds some memory of this process, but moves none.
            logger.error("event=rdma_close_failed reason=%r: restart this server once it is idle", str(error))
        return failures

    def wake_all(self) -> None:
        """Whoever waits for a transfer need not wait any more."""
        for transfer in self._transfers:
            transfer.wake()

    # -- inside

    def _post(self) -> None:
        self._next = None
        end = time.monotonic() + TURN_S / 2  # what is posted then may take as long again
        try:
            while not (self.failed or self._stopped):
                sender = self._next_ready()
                if sender is None:
                    return
                sender.post(self._pace)
                if time.monotonic() > end:
                    self._next = self._loop.call_soon(self._post)
                    return
        except VerbsError as error:
            self._fail(error, "a post of work requests")

    def _next_ready(self) -> Sender | None:
        for _ in self._senders:
            self._turn.rotate(-1)
            if self._turn[0].ready:
                return self._turn[0]
        return None

    def _on_readable(self) -> None:
        try:
            for completion in self._completions.drain():
                self._take(completion)
        except VerbsError as error:
            # The descriptor of a device that is gone stays readable: the loop would do nothing else any more.
            self._loop.remove_reader(self._completions.fd)
            self._fail(error, "reading completions")
        except LocalProtocolError as error:
            self._fail(error, "reading completions")
        if self.failed:
            self._look_for_quiet()
        elif self._next is None:
            self._post()

    def _take(self, completion: Completion) -> None:
        sender = self._by_number.get(completion.queue_pair)
        if sender is None:
            raise LocalProtocolError(f"a completion of queue pair {completion.queue_pair}, which is not ours")
        if completion.status == SUCCESS:
            sender.complete(completion.wr_id)
            return
        sender.break_at(completion.wr_id)
        if not self.failed:
            self.failed_first = sender.oldest
        outcome = outcome_of(completion.status)
        vendor = f", vendor error {completion.vendor_error:#x}" if completion.vendor_error else ""
        self._fail(outcome, f"a work request on queue pair {completion.queue_pair}{vendor}")

    def _fail(self, cause: Outcome | VerbsError | LocalProtocolError, what: str) -> None:
        if not self.failed:
            self.failed = True
            self._on_failed(cause, what)
            self._look_for_quiet()

    def _look_for_quiet(self) -> None:
        if not self.quiet and all(sender.quiet for sender in self._senders):
            self.quiet = True
            self.wake_all()

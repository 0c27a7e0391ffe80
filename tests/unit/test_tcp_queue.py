"""How transfers of one session share its data connections."""

from __future__ import annotations

from memkv_vllm.transports.base import Move
from memkv_vllm.transports.faults import Operation
from memkv_vllm.transports.tcp.pieces import cut
from memkv_vllm.transports.tcp.queue import PieceQueue, Transfer
from memkv_vllm.types import Extent

MEMORY = memoryview(bytearray(1000))


def transfer(num_bytes: int, done: list[int] | None = None) -> Transfer:
    """In pieces of 10 bytes."""
    pieces = cut([0], [Move(Extent(1, 0, num_bytes), 0)], piece_bytes=10)
    return Transfer(Operation.PULL, pieces, MEMORY, lambda: None if done is None else done.append(num_bytes))


def test_a_long_transfer_shares_the_connections_with_a_short_one() -> None:
    """However long a value is, the next connection that is free goes to somebody else."""
    queue: PieceQueue[str] = PieceQueue()
    long, short = transfer(1000), transfer(20)
    queue.add(long)
    taken = [queue.take("a") for _ in range(3)]
    queue.add(short)
    taken += [queue.take("a") for _ in range(4)]
    assert [work.transfer is long for work in taken if work] == [True, True, True, True, False, True, False]


def test_idle_connections_are_told_and_never_more_than_there_are_pieces() -> None:
    queue: PieceQueue[str] = PieceQueue()
    for name in "abc":
        assert queue.take(name) is None
    assert len(queue.add(transfer(20))) == 2
    assert len(queue.add(transfer(50))) == 1


def test_it_completes_once_after_its_last_piece() -> None:
    queue: PieceQueue[str] = PieceQueue()
    done: list[int] = []
    queue.add(transfer(30, done))
    works = [queue.take("a") for _ in range(3)]
    for index, work in enumerate(works):
        assert done == []
        assert work is not None
        queue.done(work)
        assert work.piece.done
        assert done == ([30] if index == 2 else [])


def test_a_dropped_transfer_starts_no_further_piece() -> None:
    queue: PieceQueue[str] = PieceQueue()
    dropped = transfer(100)
    queue.add(dropped)
    assert queue.take("a")
    queue.drop(dropped)
    queue.drop(dropped)
    assert queue.take("a") is None


def test_a_closed_queue_starts_nothing() -> None:
    queue: PieceQueue[str] = PieceQueue()
    assert queue.take("a") is None
    queue.add(transfer(100))
    queue.close()
    assert queue.add(transfer(100)) == []
    assert queue.take("b") is None

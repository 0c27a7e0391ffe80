"""What the drives of one log have in common. All of it belongs to the event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from memkv_vllm.keys import namespace_of
from memkv_vllm.store.log.api import Location, Record
from memkv_vllm.store.log.journal import DriveOut, Entry, Manifest, Reset
from memkv_vllm.store.log.recovery import Memory
from memkv_vllm.transports.memory import HostMemory

__all__ = ["Shared"]


@dataclass
class Shared:
    """Settings, callbacks and state of all drives."""

    arena: HostMemory
    sync: bool
    read_threads: int
    max_errors: int
    on_written: Callable[[int, Location | None], None]
    on_reclaimed: Callable[[Sequence[Location]], None]
    memory: Memory = field(default_factory=Memory)
    counters: Counter[str] = field(default_factory=Counter)
    """By reason."""
    oldest: Callable[[], int] = lambda: 0
    """Lowest sequence number of any record of any drive."""

    def is_reset(self, record: Record, sequence: int) -> bool:
        """Whether its namespace was reset after the record was accepted."""
        return bool(self.memory.resets) and sequence < self.memory.resets.get(namespace_of(record.key), 0)

    def remembered(self) -> list[Entry]:
        """What every drive's journal holds beside tombstones. Resets that cover no record any more are dropped."""
        oldest = self.oldest()
        resets = self.memory.resets
        for namespace in [name for name, sequence in resets.items() if sequence <= oldest]:
            del resets[namespace]
        return [
            *(Reset(*item) for item in resets.items()),
            *(Manifest(*place, manifest) for place, manifest in self.memory.manifests.items()),
            *(DriveOut(*item) for item in self.memory.drives_out.items()),
        ]

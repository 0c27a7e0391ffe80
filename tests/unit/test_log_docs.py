"""docs/storage.md names tests, settings and sizes that exist."""

from __future__ import annotations

import re
from pathlib import Path

from memkv_vllm.config import StorageConfig
from memkv_vllm.store.log.drive import BATCH_BYTES
from memkv_vllm.store.log.format import JOURNAL_OFFSET, Geometry, default_segment_bytes

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/storage.md").read_text(encoding="utf-8")


def test_every_test_of_the_page_exists() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_log_*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert len(named) >= 9
    assert {name for name in named if f"def {name}(" not in sources} == set()


def test_every_row_of_the_table_of_survival_names_its_test() -> None:
    table = PAGE.split("## What survives what")[1].split("\n*Kept*")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 8
    assert all("`test_" in row for row in rows)


def test_every_setting_of_the_page_exists() -> None:
    named = set(re.findall(r"`storage\.(\w+)", PAGE))
    assert named <= set(StorageConfig.model_fields), named
    assert {"sync", "max_write_behind", "missing_drives", "max_drive_errors", "read_threads"} <= named


def test_the_sizes_of_the_page_are_those_of_the_format() -> None:
    size = 4 << 40
    geometry = Geometry.for_size(size, default_segment_bytes(size))
    assert 2 * geometry.journal_half_bytes == size // 512 and "a 512th of the drive, at least 512 KiB" in PAGE
    assert 2 * Geometry.for_size(16 << 20, 1 << 20).journal_half_bytes == 512 << 10
    assert geometry.segment_bytes == 256 << 20 and default_segment_bytes(1 << 30) == (1 << 30) // 64
    assert JOURNAL_OFFSET == 64 << 10 and "64 KiB       journal" in PAGE
    assert BATCH_BYTES == 16 << 20 and "up to 16 MiB" in PAGE

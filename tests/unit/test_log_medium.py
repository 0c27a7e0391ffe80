"""Media: what kind they must be, who has them, and system calls that do less than they were asked to."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from memkv_vllm.errors import EnvironmentFault
from memkv_vllm.store.log.medium import AlignedBuffer, FileMedium, error_reason, read_bytes, write_bytes

BLOCK = 4096


def patterned(blocks: int) -> bytes:
    return b"".join(bytes([number % 251]) * BLOCK for number in range(blocks))


def made(path: Path, blocks: int = 8) -> FileMedium:
    medium = FileMedium.open(path, "file")
    medium.resize(blocks * BLOCK)
    return medium


def test_bytes_come_back(tmp_path: Path) -> None:
    medium = made(tmp_path / "d")
    write_bytes(medium, BLOCK, patterned(3))
    medium.sync()
    assert read_bytes(medium, BLOCK, 3 * BLOCK) == patterned(3)
    assert medium.size() == 8 * BLOCK
    medium.close()
    medium.close()


def test_many_buffers_go_in_one_call_or_several(tmp_path: Path) -> None:
    """More buffers than one system call takes."""
    medium = made(tmp_path / "d", 1200)
    buffer = AlignedBuffer(1200 * BLOCK)
    buffer.view[:] = patterned(1200)
    medium.writev([buffer.block(number) for number in range(1200)], 0)
    assert read_bytes(medium, 0, 1200 * BLOCK) == patterned(1200)
    buffer.close()
    medium.close()


def test_short_writes_and_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device or file system may move less than asked for, ending inside of a buffer."""
    monkeypatch.setattr(FileMedium, "_open", staticmethod(lambda path, flags: (os.open(path, flags, 0o600), False)))
    medium = made(tmp_path / "d")
    real_write, real_read = os.pwritev, os.preadv

    def first_bytes(buffers: list[memoryview]) -> list[memoryview]:
        return [buffers[0][: min(len(buffers[0]), 1000)]]

    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: real_write(fd, first_bytes(buffers), offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real_read(fd, first_bytes(buffers), offset))
    medium.writev([patterned(2), patterned(1)], BLOCK)
    assert read_bytes(medium, BLOCK, 3 * BLOCK) == patterned(2) + patterned(1)
    medium.close()


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_call_that_moves_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    medium = made(tmp_path / "d")
    monkeypatch.setattr(os, call, lambda fd, buffers, offset: 0)
    with pytest.raises(OSError, match="nothing moved at 4096") as caught:
        write_bytes(medium, BLOCK, patterned(1)) if call == "pwritev" else read_bytes(medium, BLOCK, BLOCK)
    assert error_reason(caught.value) == {"pwritev": "short_write", "preadv": "short_read"}[call]
    medium.close()


def test_errors_have_a_reason() -> None:
    assert error_reason(OSError(errno.EIO, "x")) == "eio"
    assert error_reason(OSError(errno.ENOSPC, "x")) == "enospc"
    assert error_reason(OSError("x")) == "error"


@pytest.mark.parametrize("when", ["open", "read"])
def test_without_direct_reads_the_page_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """P078: some file systems refuse O_DIRECT at once, some with the first read."""
    real_open, real_read, direct = os.open, os.preadv, set()

    def refusing_open(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and when == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        fd = real_open(path, flags, mode)
        if flags & os.O_DIRECT:
            direct.add(fd)
        else:
            direct.discard(fd)
        return fd

    def refusing_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fd in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_read(fd, buffers, offset)

    monkeypatch.setattr(os, "open", refusing_open)
    monkeypatch.setattr(os, "preadv", refusing_read)
    medium = made(tmp_path / "d")
    assert not medium.direct
    write_bytes(medium, 0, patterned(1))
    assert read_bytes(medium, 0, BLOCK) == patterned(1)
    medium.close()


def test_a_medium_belongs_to_one_opening(tmp_path: Path) -> None:
    medium = made(tmp_path / "d")
    with pytest.raises(EnvironmentFault, match="is in use by another process.*fuser"):
        FileMedium.open(tmp_path / "d", "file")
    medium.close()
    FileMedium.open(tmp_path / "d", "file").close()


@pytest.mark.timeout(60)
def test_a_medium_belongs_to_one_process(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from memkv_vllm.store.log.medium import FileMedium\n"
        "medium = FileMedium.open(Path(sys.argv[1]), 'file'); print('mine', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "d")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "mine\n"
        with pytest.raises(EnvironmentFault, match="is in use"):
            FileMedium.open(tmp_path / "d", "file")
        other.kill()
        other.wait()
    FileMedium.open(tmp_path / "d", "file").close()


def test_direct_mode_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"does not exist; name the drive as /dev/disk/by-id"):
        FileMedium.open(tmp_path / "d", "direct")
    assert not (tmp_path / "d").exists()


def test_a_folder_is_no_medium(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="is a directory; name a file in it"):
        FileMedium.open(tmp_path, "file")


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="make its folder first"):
        FileMedium.open(tmp_path / "missing" / "d", "file")


def test_a_character_device_is_no_medium() -> None:
    with pytest.raises(EnvironmentFault, match="neither a file nor a block device"):
        FileMedium.open(Path("/dev/null"), "direct")


def test_reserving_fails_where_there_is_no_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    medium = made(tmp_path / "d")
    medium.reserve(0, 8 * BLOCK)
    assert os.stat(tmp_path / "d").st_blocks * 512 >= 8 * BLOCK

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(refusal, "refused")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    refusal = errno.EOPNOTSUPP
    medium.reserve(0, BLOCK)  # cannot be promised: then writes say it
    refusal = errno.ENOSPC
    with pytest.raises(OSError, match="refused"):
        medium.reserve(0, BLOCK)
    medium.close()

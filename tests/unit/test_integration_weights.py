"""The fingerprint that tells two checkpoints of one name apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memkv_vllm.integration.weights import weights_fingerprint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_checkpoint(
    folder: Path, *, shape: tuple[int, ...] = (4, 4), filler: bytes = b"\0", config: str = "{}"
) -> Path:
    """A model folder: config.json and one safetensors file of 64 bytes of data."""
    folder.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 64]}}).encode()
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + filler * 64)
    return folder


def test_the_commit_of_a_snapshot_path_is_the_fingerprint(tmp_path: Path) -> None:
    path = f"/cache/models--org--name/snapshots/{COMMIT}"
    assert weights_fingerprint(path) == f"commit:{COMMIT}"
    assert weights_fingerprint(path + "/", commit="f" * 40) == f"commit:{COMMIT}"
    assert weights_fingerprint("org/name", commit=COMMIT) == f"commit:{COMMIT}"


def test_a_folder_is_known_by_its_config_and_headers_wherever_it_lies(tmp_path: Path) -> None:
    one, other = write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b")
    assert weights_fingerprint(str(one)) == weights_fingerprint(str(other))
    assert weights_fingerprint(str(one)).startswith("files:")


@pytest.mark.parametrize(
    "change",
    [{"shape": (2, 8)}, {"config": '{"hidden_size": 1}'}, {"filler": b"\0\0"}],
    ids=["tensor shape", "config", "size"],
)
def test_another_checkpoint_has_another_fingerprint(tmp_path: Path, change: dict[str, object]) -> None:
    plain = write_checkpoint(tmp_path / "plain")
    other = write_checkpoint(tmp_path / "other", **change)  # type: ignore[arg-type]
    assert weights_fingerprint(str(plain)) != weights_fingerprint(str(other))


def test_a_further_shard_changes_it_and_other_files_do_not(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    before = weights_fingerprint(str(folder))
    (folder / "README.md").write_text("hello")
    assert weights_fingerprint(str(folder)) == before
    (folder / "more.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    assert weights_fingerprint(str(folder)) != before


def test_new_values_in_the_same_shapes_are_not_seen(tmp_path: Path) -> None:
    # The stated limit: reading every weight at start would cost minutes.
    one, other = write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b", filler=b"\1")
    assert weights_fingerprint(str(one)) == weights_fingerprint(str(other))


def test_a_damaged_header_is_no_error(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "a")
    (folder / "model.safetensors").write_bytes(b"\xff" * 16)
    assert weights_fingerprint(str(folder)).startswith("files:")


def test_a_hub_id_that_is_not_on_this_disk_is_unknown() -> None:
    assert weights_fingerprint("org/name") == "unknown:org/name"


def test_a_single_file_model(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    assert weights_fingerprint(str(path)).startswith("files:")

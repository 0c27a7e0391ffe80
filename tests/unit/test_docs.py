"""What the documents say is there: links lead somewhere, commands, targets, settings and files exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from memkv_vllm.cli import main
from memkv_vllm.config import ENVIRONMENT, DirectConfig, load_server_config, parse_extra_config
from memkv_vllm.store.admin.families import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")])

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


@every_page
def test_commands_and_their_options_exist(page: Path) -> None:
    for name, rest in re.findall(r"\bmemkv ([a-z]+)\b([^\n`|]*)", page.read_text(encoding="utf-8")):
        command = main.commands.get(name)
        if command is None:
            # "the memkv store" in prose; a command would be in a code span or block.
            assert not re.search(rf"(`|^)memkv {name}", page.read_text(encoding="utf-8"), re.MULTILINE), name
            continue
        assert isinstance(command, click.Command)
        subcommand = rest.split()[0] if rest.split() else ""
        if isinstance(command, click.Group) and re.fullmatch("[a-z]+", subcommand):
            assert subcommand in command.commands, f"memkv {name} {subcommand}"
            command = command.commands[subcommand]
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest.split("#")[0])) <= known | {"--help"}


@every_page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets


@every_page
def test_settings_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    variables = {variable.name for variable in ENVIRONMENT}
    assert set(re.findall(r"\bMEMKV_[A-Z_]*[A-Z]\b", text)) <= variables
    fields = {f"memkv_{name}" for name in DirectConfig.model_fields}
    ours = {"memkv_vllm", "memkv_loopback", "memkv_loopback_factory"}
    metrics = {family.name for family in FAMILIES}
    named = set(re.findall(r"(?<![:\w])memkv_[a-z_]*[a-z]\b", text))
    assert named <= fields | ours | metrics, named - fields - ours - metrics


@every_page
def test_named_files_exist(page: Path) -> None:
    for name in re.findall(r"`((?:memkv_vllm|tests|docs|scripts)/[\w./]+\.\w+)`", page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), name


def test_the_server_yaml_of_the_operator_page_loads(tmp_path: Path) -> None:
    (yaml,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/operate.md").read_text(encoding="utf-8"), re.DOTALL)
    for name in ("key", "admin.token"):
        (tmp_path / name).write_text("ab" * 32)
        (tmp_path / name).chmod(0o600)
    config = tmp_path / "server.yaml"
    config.write_text(yaml.replace("/etc/memkv/", f"{tmp_path}/"))
    assert load_server_config(config).memory.max_size == 64 << 30


@pytest.mark.timeout(60)
def test_the_python_samples_run_as_they_are_written(tmp_path: Path) -> None:
    """Each block in a file of its own, as a project would that has installed the package."""
    samples = [
        block
        for page in PAGES
        for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    ]
    assert samples
    for number, sample in enumerate(samples):
        (tmp_path / f"test_sample_{number}.py").write_text(sample, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:asyncio", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{sum(sample.count('def test_') for sample in samples)} passed" in done.stdout


@every_page
def test_vllm_arguments_are_json_with_the_recompute_policy(page: Path) -> None:
    for text in re.findall(r"--kv-transfer-config '([^']+)'", page.read_text(encoding="utf-8")):
        config = json.loads(text)
        assert config["kv_load_failure_policy"] == "recompute"
        parse_extra_config(config["kv_connector_extra_config"])


def test_every_page_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in PAGES:
        if page.name != "README.md":
            assert str(page.relative_to(ROOT)) in readme, page


def test_nothing_about_the_machine_it_was_written_on() -> None:
    for page in PAGES:
        assert not re.search(r"(?<!\w)/(root|home|tmp|work)/", page.read_text(encoding="utf-8")), page


def test_the_readme_has_the_output_of_the_demo() -> None:
    assert "@@" not in (ROOT / "README.md").read_text(encoding="utf-8")

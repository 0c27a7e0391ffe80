"""The VM of ``make test-rdma``, as far as none is started: arguments, refusals, the kernel's name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rdma.vm import __main__ as launcher
from tests.rdma.vm import kernel, machine, preflight

ROOT = Path(__file__).resolve().parents[2]
MEMINFO = "MemTotal:       8388608 kB\nMemAvailable:   {} kB\n"


# ---------------------------------------------------------------------------------------------------- arguments


def test_what_is_not_said_has_a_default() -> None:
    order = launcher.parse(["--", "true"])
    assert (list(order.command), order.memory_mb, order.rails, order.timeout_s) == (["true"], 4096, 2, None)
    assert order.directory == Path.cwd()


def test_options_end_at_the_dashes_and_the_command_keeps_its_own() -> None:
    order = launcher.parse(["--mem", "512", "--rails", "0", "--timeout", "1.5", "--", "cmd", "--mem", "7", "--", "-x"])
    assert list(order.command) == ["cmd", "--mem", "7", "--", "-x"]
    assert (order.memory_mb, order.rails, order.timeout_s) == (512, 0, 1.5)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "command"),
        (["--"], "command"),
        (["--mem", "0", "--", "true"], "above 0"),
        (["--rails", "17", "--", "true"], "0 to 16"),
        (["--timeout", "-1", "--", "true"], "above 0"),
        (["--share", "/nowhere", "--", "true"], "expected a directory, got /nowhere"),
        (["--cpus", "2", "--", "true"], "--cpus"),
    ],
)
def test_a_wrong_command_line_is_named(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launcher.parse(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_the_script_for_the_guest_keeps_every_word() -> None:
    words = ["echo", "a b", "it's", "$HOME", "line\nbreak"]
    order = machine.Order(words, environment={"ODD": "x'y\n$z", "BASH_FUNC_f%%": "() { :; }"}, directory=Path("/"))
    made = machine.script(order).replace("exec ", "", 1)
    done = subprocess.run(["env", "-i", "bash", "-c", made + "\necho $RDMA_VM-$ODD"], capture_output=True, text=True)
    assert done.stdout == "a b it's $HOME line\nbreak\n1-x'y $z\n"
    assert "BASH_FUNC" not in made


def test_the_kernel_is_told_its_memory_its_root_and_its_lines() -> None:
    lines = {"out": 7, "err": 8, "status": 9}
    arguments = machine.kernel_arguments(machine.Order(["x"], memory_mb=77), Path("/tmp/f"), 5, lines)
    for wanted in ("mem=77M", "init=/tmp/f/init", "ro", "con0=null,fd:5", "ssl1=null,fd:7", "ssl3=null,fd:9"):
        assert wanted in arguments


# ---------------------------------------------------------------------------------------------------- refusals


def test_a_machine_that_has_all_is_not_refused() -> None:
    assert preflight.problem(1024, True, {"python3": "x", "/etc/passwd": "y"}, MEMINFO.format(4 << 20)) is None


def test_whoever_is_not_root_is_told_so() -> None:
    told = preflight.problem(1024, False, {})
    assert told is not None and "started by root" in told and "sudo" in told


def test_missing_packages_are_named_in_one_command() -> None:
    told = preflight.problem(1024, True, {"no-such-tool": "its-package", "/no/file": "another", "sh": "dash"})
    assert told is not None and told.endswith("apt-get install -y another its-package")


def test_a_vm_larger_than_the_machine_is_refused_with_both_numbers() -> None:
    told = preflight.problem(2048, True, {}, MEMINFO.format(2 << 20))
    assert told is not None and "a VM of 2048 MiB does not fit: 2048 MiB of memory are available" in told
    assert "--mem" in told


def test_a_machine_that_allows_no_namespaces_is_told_which_option_does() -> None:
    told = preflight.namespace_problem(["sh", "-c", "echo unshare failed: Operation not permitted >&2; exit 1"])
    assert told is not None and "Operation not permitted" in told and "--privileged" in told
    assert preflight.namespace_problem(["true"]) is None


def test_the_bound_of_mappings_is_raised_and_told(tmp_path: Path) -> None:
    knob, said = tmp_path / "max_map_count", list[str]()
    knob.write_text("65530\n")
    assert preflight.raise_map_count(knob, said.append) is None
    assert knob.read_text() == "4000000\n"
    assert "from 65530 to 4000000" in said[0]
    assert preflight.raise_map_count(knob, said.append) is None and len(said) == 1


def test_a_bound_that_cannot_be_raised_is_told_with_the_command(tmp_path: Path) -> None:
    class Fixed(type(tmp_path)):  # type: ignore[misc]
        def write_text(self, *_: object, **__: object) -> int:
            raise PermissionError(1, "Operation not permitted")

    (tmp_path / "knob").write_text("65530\n")
    told = preflight.raise_map_count(Fixed(tmp_path / "knob"))
    assert told is not None and "sysctl -w vm.max_map_count=4000000" in told and "65530" in told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else: run the tests as root, as CI does")
def test_the_command_itself_refuses_without_root_and_says_the_next_step() -> None:
    code = "import os, sys; from tests.rdma.vm.__main__ import main; os.setuid(65534); sys.exit(main(['--', 'true']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=20)
    assert done.returncode == launcher.NOT_RUN
    assert "cannot run the VM: it must be started by root" in done.stderr


@pytest.mark.parametrize(
    ("outcome", "status", "told"),
    [
        (machine.Outcome(0, True, False, ""), 0, ""),
        (machine.Outcome(7, True, False, ""), 7, ""),
        (machine.Outcome(None, True, True, ""), 124, "ended after --timeout, 5 s"),
        (machine.Outcome(None, False, True, ""), 124, "before the command began"),
        (machine.Outcome(None, False, False, "panic: no root"), 125, "did not start; its kernel said"),
        (machine.Outcome(None, True, False, "panic"), 125, "the VM died before the command ended"),
        (machine.Outcome(137, True, False, "[1] Out of memory: Killed process 7"), 137, "give more with --mem"),
    ],
)
def test_every_end_has_a_status_and_a_reason(
    outcome: machine.Outcome, status: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launcher.status_of(outcome, machine.Order(["x"], timeout_s=5)) == status
    said = capsys.readouterr().err
    assert told in said and ("did not start" not in said or outcome.log in said)
    assert bool(said) == bool(told)


# ---------------------------------------------------------------------------------------------------- the kernel


def test_another_configuration_is_another_kernel_and_a_comment_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = []
    for number, text in enumerate(("NET TTY", "# why\nNET # x\nTTY", "TTY NET", "NET TTY VETH")):
        config = tmp_path / f"{number}.config"
        config.write_text(text)
        names.append(kernel.cached(config))
    assert names[0] == names[1] == names[2] != names[3]
    assert names[0].parent == tmp_path / "memkv-vllm"


def test_it_is_kept_outside_of_the_checkout() -> None:
    assert ROOT not in kernel.cached().parents


def test_options_that_a_source_does_not_take_are_found() -> None:
    wanted = kernel.configuration("NET VETH # cables\n")
    assert wanted == ["CONFIG_NET=y", "CONFIG_VETH=y"]
    assert kernel.missing_options(wanted, "CONFIG_NET=y\n# CONFIG_VETH is not set\n") == ["CONFIG_VETH=y"]


def test_what_the_tests_rely_on_is_in_it() -> None:
    options = set(kernel.configuration(kernel.CONFIG.read_text(encoding="utf-8")))
    names = ("RDMA_RXE", "INFINIBAND_USER_ACCESS", "NET_SCH_NETEM", "VETH", "HOSTFS", "OVERLAY_FS", "UML_RANDOM")
    assert {f"CONFIG_{name}=y" for name in names} <= options


def test_without_its_tools_the_build_is_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel, "TOOLS", {"no-such-tool": "its-package"})
    with pytest.raises(kernel.KernelError, match="apt-get install -y its-package"):
        kernel.ensure()


def test_a_build_that_fails_shows_its_last_words_and_leaves_no_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel, "TOOLS", {})
    monkeypatch.setattr(kernel, "SOURCE", tmp_path / "none.tar.xz")
    with pytest.raises(kernel.KernelError, match=r"(?s)failed at `tar .*build\.log.*none\.tar\.xz"):
        kernel.ensure()
    assert sorted(path.name for path in (tmp_path / "memkv-vllm").iterdir()) == ["build.lock", "build.log"]


def test_a_kernel_that_is_there_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel, "TOOLS", {"no-such-tool": "its-package"})
    kernel.cached().parent.mkdir()
    kernel.cached().write_bytes(b"kernel")
    assert kernel.ensure() == kernel.cached()

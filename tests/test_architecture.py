"""The rules of the design that a reader of one file cannot see, held by parsing the whole package.

Import direction, who may import what, purity, forbidden calls, size budgets, docstrings, and what importing costs.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "memkv_vllm"

# ---------------------------------------------------------------------------------------------------- the rules

LAYERS = {
    "__init__": 0, "types": 0, "errors": 0,
    "config": 1, "keys": 1, "observe": 1, "topology": 1,
    "protocol": 2,
    "transports": 3,
    "engine": 4, "store": 4,
    "integration": 5, "bench": 5,
    "spec": 6, "cli": 6, "cli_admin": 6, "cli_doctor": 6, "cli_net": 6, "doctor": 6,
    "serve": 6, "demo": 6, "pytest_plugin": 6, "__main__": 6,
}  # fmt: skip
"""Line of the design's drawing that a room stands on. A room imports only from lines beneath its own."""

SIBLINGS = {
    ("errors", "types"): "an error names the counter of its reason",
    ("__main__", "cli"): "`python -m memkv_vllm` is the command",
    ("cli", "demo"): "`memkv demo` starts it",
    ("cli", "cli_admin"): "`memkv admin`",
    ("cli", "cli_doctor"): "`memkv doctor`",
    ("cli", "cli_net"): "`memkv net`",
    ("cli_doctor", "doctor"): "the command prints what it finds",
    ("cli_net", "doctor"): "names to addresses within a deadline",
    ("cli", "serve"): "`memkv start`",
}
"""Imports on one line of the drawing that are allowed, with the reason."""

TRANSPORT_SEAM = {"memkv_vllm.transports.base", "memkv_vllm.transports.memory", "memkv_vllm.transports.registry"}
"""All of the transports that engine and store may see."""

ONLY_IN = {
    "pyverbs": ("memkv_vllm.transports.verbs",),
    "vllm": ("memkv_vllm.integration", "memkv_vllm.spec", "memkv_vllm.demo"),
    "torch": ("memkv_vllm.integration", "memkv_vllm.bench", "memkv_vllm.demo"),
    "triton": ("memkv_vllm.integration",),
    "transformers": (),
    "safetensors": ("memkv_vllm.demo",),
    "pytest": ("memkv_vllm.pytest_plugin",),
    "aiohttp": ("memkv_vllm.store.admin", "memkv_vllm.cli_admin"),
    "prometheus_client": ("memkv_vllm.store.admin",),
    "click": (
        "memkv_vllm.cli",
        "memkv_vllm.cli_admin",
        "memkv_vllm.cli_doctor",
        "memkv_vllm.cli_net",
        "memkv_vllm.bench",
        "memkv_vllm.demo",
    ),
    "yaml": ("memkv_vllm.config",),
    "pydantic": ("memkv_vllm.config",),
    "jwt": ("memkv_vllm.store.license",),
    "cryptography": ("memkv_vllm.store.license",),
}
"""Foreign packages and the rooms that may import them."""

PURE = {
    "memkv_vllm.errors", "memkv_vllm.keys", "memkv_vllm.types",
    "memkv_vllm.protocol",
    "memkv_vllm.engine.breaker", "memkv_vllm.engine.inflight", "memkv_vllm.engine.pace",
    "memkv_vllm.engine.placement", "memkv_vllm.engine.presence", "memkv_vllm.engine.routes",
    "memkv_vllm.engine.schedule", "memkv_vllm.engine.staging", "memkv_vllm.engine.verify",
    "memkv_vllm.store.admin.access", "memkv_vllm.store.admin.families",
    "memkv_vllm.store.admin.health", "memkv_vllm.store.admin.servers", "memkv_vllm.store.admin.watch",
    "memkv_vllm.store.latency",
    "memkv_vllm.store.arena", "memkv_vllm.store.batches", "memkv_vllm.store.bulkqueue", "memkv_vllm.store.entries",
    "memkv_vllm.store.eviction",
    "memkv_vllm.store.manifests", "memkv_vllm.store.spaces", "memkv_vllm.store.content", "memkv_vllm.store.disk_index",
    "memkv_vllm.store.policies", "memkv_vllm.store.room", "memkv_vllm.store.s3fifo", "memkv_vllm.store.table",
    "memkv_vllm.store.log.format", "memkv_vllm.store.log.handles", "memkv_vllm.store.log.journal",
    "memkv_vllm.store.log.membership", "memkv_vllm.store.log.reclaim", "memkv_vllm.store.log.recovery",
    "memkv_vllm.store.log.segments", "memkv_vllm.store.log.shared",
    "memkv_vllm.doctor.checks", "memkv_vllm.doctor.devices", "memkv_vllm.doctor.engine", "memkv_vllm.doctor.facts",
    "memkv_vllm.doctor.findings", "memkv_vllm.doctor.memory", "memkv_vllm.doctor.network",
    "memkv_vllm.doctor.placement", "memkv_vllm.doctor.servers", "memkv_vllm.doctor.storage",
    "memkv_vllm.topology.affinity", "memkv_vllm.topology.facts", "memkv_vllm.topology.gids",
    "memkv_vllm.topology.marking", "memkv_vllm.topology.model", "memkv_vllm.topology.ports",
    "memkv_vllm.topology.rails",
    "memkv_vllm.transports.regions", "memkv_vllm.transports.tcp.commands", "memkv_vllm.transports.tcp.pieces",
    "memkv_vllm.transports.verbs.endpoints", "memkv_vllm.transports.verbs.planning",
    "memkv_vllm.transports.verbs.probing", "memkv_vllm.transports.verbs.sendqueue",
    "memkv_vllm.transports.verbs.statuses", "memkv_vllm.transports.verbs.watching",
}  # fmt: skip
"""No socket, thread, clock, event loop or file in these (a package name stands for all of it): time is an argument."""

IMPURE_IMPORTS = {
    "anyio", "asyncio", "concurrent", "datetime", "fcntl", "io", "mmap", "multiprocessing", "os", "pathlib", "queue",
    "select", "selectors", "shutil", "signal", "socket", "ssl", "subprocess", "sys", "tempfile", "threading", "time",
    "trio",
}  # fmt: skip

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "hash", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {"create_task", "ensure_future", "run_coroutine_threadsafe", "basicConfig", "_exit"}
"""Tasks belong to task groups; a library configures no logging and ends no process."""
ATTRIBUTES_ALLOWED = {
    ("memkv_vllm.transports.faults", "_exit"): "the fault plan's Die: tests of a server that dies in the middle",
}

ENVIRONMENT_ROOMS = {"config", "demo"}
"""config reads it for everybody; the demo hands it on to the processes that it starts."""

THREADS_ALLOWED = {
    "memkv_vllm.doctor.patience", "memkv_vllm.engine.portal", "memkv_vllm.transports.tcp.datalink",
    "memkv_vllm.transports.tcp.mover",
}  # fmt: skip
"""Loops of their own for as long as their owner lives, calls that may never return. Work that ends uses a pool."""
DYNAMIC_IMPORT_ALLOWED = {"memkv_vllm.transports.registry"}

MODULE_LINES, MODULE_LINES_LOOK, CLASS_LINES, FUNCTION_LINES = 600, 400, 350, 40
LONG_FUNCTIONS: dict[str, tuple[int, str]] = {}
"""Functions over the budget: their own limit and why splitting them would not help."""
LONG_CLASSES: dict[str, tuple[int, str]] = {}

ROOMS = {
    "": {
        "__init__", "__main__", "cli", "cli_admin", "cli_doctor", "cli_net", "errors", "keys", "observe",
        "pytest_plugin", "serve", "spec", "types",
    },
    "bench": {"__init__", "models", "report", "runner", "workload"},
    "config": {"__init__", "admin", "client", "extra", "fields", "problems", "server", "server_file", "sources"},
    "doctor": {
        "__init__", "asking", "checks", "devices", "engine", "facts", "findings", "gathering", "looking", "memory",
        "network", "patience", "placement", "resolving", "servers", "settings", "storage",
    },
    "demo": {"__init__", "__main__", "generate", "model", "report", "store", "vllm_process"},
    "engine": {
        "__init__", "api", "breaker", "client", "core", "engine", "generation", "inflight", "lanes", "link", "linklog",
        "medium", "pace", "placement", "plan", "portal", "presence", "prober", "routes", "schedule", "slots", "staging",
        "tasks", "verdict", "verify",
    },
    "integration": {
        "__init__", "compat", "cuda_driver", "facts", "gather", "gather_cuda", "gather_kernel", "gpu_staging", "layout",
        "manager", "metrics", "releases", "scratch", "tier", "weights", "worker",
    },
    "protocol": {"__init__", "auth", "checksum", "codec", "connect", "columns", "frame", "messages", "session"},
    "store/admin": {
        "__init__", "access", "collector", "commands", "families", "health", "listener", "peers", "routes", "server",
        "servers", "watch",
    },
    "store": {
        "__init__", "admission", "arena", "batches", "bulkqueue", "commands", "content", "disk_index", "entries",
        "eviction", "fetching", "garbage", "handler", "keyring", "latency", "license", "maintenance", "manifests",
        "policies", "polling", "reloading", "requests", "residency", "room", "s3fifo", "server", "sessions", "spaces",
        "table", "transfers", "turns",
    },
    "store/log": {
        "__init__", "api", "drive", "drivelog", "format", "handles", "journal", "journaling", "medium", "membership",
        "opening", "reading", "reclaim", "reclaiming", "recovery", "rolling", "scanning", "segments", "shared",
        "starting", "transfer", "worker",
    },
    "topology": {"__init__", "affinity", "facts", "gids", "marking", "model", "ports", "rails", "reading"},
    "transports": {
        "__init__", "accepting", "answering", "base", "choosing", "control", "faults", "handshakes", "licensing",
        "memory", "regions", "registry", "serving", "sockets", "streams", "tcp", "tls",
    },
    "transports/loopback": {"__init__", "address", "bulk", "client", "copying", "server"},
    "transports/tcp": {
        "__init__", "attach", "batch", "bulk", "client", "commands", "datalink", "eager", "eagerlink", "links", "mover",
        "pieces", "queue", "server",
    },
    "transports/verbs": {
        "__init__", "abi", "active", "bulk", "client", "datapath", "endpoints", "facts", "gpu_memory", "injecting",
        "libibverbs", "opening", "ownership", "passive", "planning", "preflight", "probing", "provider",
        "providers", "pyverbs_provider", "queuepairs", "quiet_pyverbs", "rails", "sendqueue", "statuses", "structs",
        "symbols", "threads", "transfers", "watching",
    },
}  # fmt: skip
"""Every module of the package. A new one is added here and, if it is a new room, to CONTRIBUTING.md."""


# ---------------------------------------------------------------------------------------------------- the parser


@dataclass(frozen=True)
class Import:
    """One imported module, with the line it stands on."""

    target: str
    line: int


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    path: Path

    @property
    def name(self) -> str:
        """Dotted name; a package's ``__init__`` has the package's name."""
        parts = list(self.path.relative_to(ROOT).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """First name under the package."""
        return self.path.relative_to(PACKAGE).with_suffix("").parts[0]

    @cached_property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, str(self.path))

    @cached_property
    def code_lines(self) -> frozenset[int]:
        """Numbers of the lines that hold code: neither blank nor only a comment (docstrings count as code here)."""
        skip = {
            tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
            tokenize.ENCODING,
        }  # fmt: skip
        found: set[int] = set()
        with tokenize.open(self.path) as file:
            for token in tokenize.generate_tokens(file.readline):
                if token.type not in skip:
                    found.update(range(token.start[0], token.end[0] + 1))
        return frozenset(found)

    def imports(self) -> Iterator[Import]:
        """Everything imported anywhere in the file, under TYPE_CHECKING too: the direction holds for types as well."""
        package = self.name if self.path.stem == "__init__" else self.name.rpartition(".")[0]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, node.lineno)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*above, base] if base else above)
                for alias in node.names:
                    full = f"{base}.{alias.name}"
                    yield Import(full if full in NAMES else base, node.lineno)

    def definitions(self) -> Iterator[tuple[str, ast.AST]]:
        """Every class and function with its qualified name, outermost first."""

        def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.AST]]:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    qualified = f"{prefix}{child.name}"
                    yield qualified, child
                    yield from walk(child, qualified + ".")
                elif not isinstance(child, ast.expr):
                    yield from walk(child, prefix)

        yield from walk(self.tree, "")

    def lines_of(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        """Lines of code of a function: signature and body without docstring, comments and blank lines."""
        lines = {line for line in self.code_lines if node.lineno <= line <= (node.end_lineno or node.lineno)}
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        return len(lines)


MODULES = [Module(path) for path in sorted(PACKAGE.rglob("*.py"))]
NAMES = {module.name for module in MODULES}

every_module = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)


def within(name: str, roots: set[str] | tuple[str, ...]) -> bool:
    """Whether ``name`` is one of the modules ``roots`` or inside one of them."""
    return any(name == root or name.startswith(root + ".") for root in roots)


def report(problems: list[str]) -> None:
    assert not problems, "\n".join(["", *problems])


# ---------------------------------------------------------------------------------------------------- direction


def test_every_module_has_a_room() -> None:
    found: dict[str, set[str]] = {}
    for module in MODULES:
        relative = module.path.relative_to(PACKAGE)
        found.setdefault(relative.parent.as_posix().removeprefix("."), set()).add(relative.stem)
    report(
        [
            f"{room or 'memkv_vllm'}/{stem}.py is in no room: add it to ROOMS here and to the table in CONTRIBUTING.md"
            for room, stems in sorted(found.items())
            for stem in sorted(stems - ROOMS.get(room, set()))
        ]
    )
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    report(
        [
            f"CONTRIBUTING.md does not name {room}/"
            for room in sorted(found)
            if f"`{room}/`" not in contributing and room
        ]
    )


@every_module
def test_imports_point_down(module: Module) -> None:
    problems = []
    for imported in module.imports():
        if not within(imported.target, ("memkv_vllm",)):
            continue
        target = imported.target.split(".")[1] if "." in imported.target else "__init__"
        if target == module.room or (module.room, target) in SIBLINGS:
            continue
        if LAYERS[target] >= LAYERS[module.room]:
            problems.append(
                f"{module.path.name}:{imported.line} imports {imported.target}: line {LAYERS[module.room]} of the "
                f"design must not import from line {LAYERS[target]}"
            )
        if target == "transports" and LAYERS[module.room] == 4 and imported.target not in TRANSPORT_SEAM:
            problems.append(f"{module.path.name}:{imported.line}: {imported.target} is behind the transport seam")
    report(problems)


def test_transports_do_not_know_each_other() -> None:
    families = {"loopback", "tcp", "verbs"}
    problems = []
    for module in MODULES:
        if module.room != "transports":
            continue
        own = module.name.split(".")[2] if module.name.count(".") >= 2 else ""
        for imported in module.imports():
            parts = imported.target.split(".")
            if parts[:2] == ["memkv_vllm", "transports"] and len(parts) > 2 and parts[2] in families - {own}:
                problems.append(f"{module.name}:{imported.line} imports {imported.target}")
    report(problems)


@every_module
def test_foreign_packages_stay_in_their_rooms(module: Module) -> None:
    report(
        [
            f"{module.path.name}:{imported.line} imports {imported.target}; only {ONLY_IN[top] or 'nobody'} may"
            for imported in module.imports()
            if (top := imported.target.split(".")[0]) in ONLY_IN and not within(module.name, ONLY_IN[top])
        ]
    )


def test_nothing_imports_the_command_line() -> None:
    report(
        [
            f"{module.name}:{imported.line}"
            for module in MODULES
            for imported in module.imports()
            if within(imported.target, ("memkv_vllm.cli",)) and module.name != "memkv_vllm.__main__"
        ]
    )


# ---------------------------------------------------------------------------------------------------- purity


def test_pure_modules_exist() -> None:
    report([f"{name} is in the list of pure modules and does not exist" for name in sorted(PURE - NAMES)])


@pytest.mark.parametrize("module", [m for m in MODULES if within(m.name, PURE)], ids=lambda module: module.name)
def test_pure_modules_do_no_io(module: Module) -> None:
    problems = [
        f"{module.path.name}:{imported.line} imports {imported.target}"
        for imported in module.imports()
        if imported.target.split(".")[0] in IMPURE_IMPORTS
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await):
            problems.append(f"{module.path.name}:{node.lineno} is async")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("open", "print"):
            problems.append(f"{module.path.name}:{node.lineno} calls {node.func.id}()")
    report(problems)


@every_module
def test_the_environment_is_read_in_one_place(module: Module) -> None:
    if module.room in ENVIRONMENT_ROOMS:
        return
    report(
        [
            f"{module.path.name}:{node.lineno} reads the environment: config does that"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv")
        ]
    )


@every_module
def test_forbidden_calls(module: Module) -> None:
    """P091, P093: no pickle or its like, and nothing that makes code of bytes."""
    problems = []
    for imported in module.imports():
        top = imported.target.split(".")[0]
        if top in FORBIDDEN_IMPORTS:
            problems.append(f"{module.path.name}:{imported.line} imports {top}")
        if top == "importlib" and imported.target != "importlib.metadata" and module.name not in DYNAMIC_IMPORT_ALLOWED:
            problems.append(f"{module.path.name}:{imported.line} imports importlib: names become code in one place")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            problems.append(f"{module.path.name}:{node.lineno} calls {node.func.id}()")
        elif isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_ATTRIBUTES:
            if (module.name, node.attr) in ATTRIBUTES_ALLOWED:
                continue
            problems.append(f"{module.path.name}:{node.lineno} uses .{node.attr}")
        elif _names_a_thread(node) and module.name not in THREADS_ALLOWED:
            problems.append(f"{module.path.name}:{node.lineno} uses a bare thread")  # type: ignore[attr-defined]
    report(problems)


def _names_a_thread(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "threading" and any(alias.name in ("Thread", "Timer") for alias in node.names)
    if not isinstance(node, ast.Attribute) or node.attr not in ("Thread", "Timer"):
        return False
    return isinstance(node.value, ast.Name) and node.value.id == "threading"


# ---------------------------------------------------------------------------------------------------- size, words


def test_size_budgets() -> None:
    problems, look = [], []
    for module in MODULES:
        lines = module.source.count("\n")
        if lines > MODULE_LINES:
            problems.append(f"{module.name}: {lines} lines, at most {MODULE_LINES}")
        elif lines > MODULE_LINES_LOOK:
            look.append(f"{module.name}: {lines} lines")
        for name, node in module.definitions():
            qualified = f"{module.name}.{name}"
            if isinstance(node, ast.ClassDef):
                length, limit = (node.end_lineno or 0) - node.lineno + 1, LONG_CLASSES.get(qualified, (CLASS_LINES,))[0]
            else:
                assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                length, limit = module.lines_of(node), LONG_FUNCTIONS.get(qualified, (FUNCTION_LINES,))[0]
            if length > limit:
                problems.append(f"{qualified}: {length} lines, at most {limit}")
    if look:
        print("worth a second look, over", MODULE_LINES_LOOK, "lines:", *look, sep="\n  ")  # noqa: T201
    report(problems)


def test_no_exception_outlives_its_cause() -> None:
    known = {f"{module.name}.{name}" for module in MODULES for name, _ in module.definitions()}
    report(
        [f"{name} is excepted from a budget and does not exist" for name in {*LONG_FUNCTIONS, *LONG_CLASSES} - known]
    )


@every_module
def test_public_names_have_docstrings(module: Module) -> None:
    problems = [] if ast.get_docstring(module.tree) else [f"{module.name} has no docstring"]
    functions = {name for name, node in module.definitions() if not isinstance(node, ast.ClassDef)}
    for name, node in module.definitions():
        parts = name.split(".")
        private = any(part.startswith("_") for part in parts)
        inside_function = any(".".join(parts[:depth]) in functions for depth in range(1, len(parts)))
        assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        repeats = "overload" in decorators or any(d.endswith(".setter") for d in decorators)
        if not (private or inside_function or repeats or ast.get_docstring(node)):
            problems.append(f"{module.path.name}:{node.lineno} {name} has no docstring")
    report(problems)


# ---------------------------------------------------------------------------------------------------- importing

PROBE = """
import json, logging, os, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"vllm", "torch", "pyverbs", "triton", "transformers"}:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
        return None

sys.meta_path.insert(0, Blocker())
events = []
watched = ("socket.__new__", "socket.connect", "socket.bind", "socket.getaddrinfo", "subprocess.Popen", "os.fork")
sys.addaudithook(lambda event, args: events.append(event) if event in watched else None)

class Environ(type(os.environ)):
    def __getitem__(self, key):
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") in ("os", "_collections_abc"):
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith("memkv_vllm"):
            events.append(f"environment {key}")
        return super().__getitem__(key)

os.environ.__class__ = Environ
handlers, level = list(logging.root.handlers), logging.root.level
"""

AFTER = """
loggers = [name for name, logger in logging.root.manager.loggerDict.items()
           if name.startswith("memkv") and (getattr(logger, "handlers", []) or getattr(logger, "level", 0))]
print(json.dumps({"events": events, "loggers": loggers, "modules": sorted(sys.modules),
                  "root": logging.root.handlers == handlers and logging.root.level == level}))
"""


def probe(code: str) -> dict[str, object]:
    """What happened while ``code`` ran in a fresh interpreter without vLLM, torch and pyverbs."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE + textwrap.dedent(code) + AFTER],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


WITHOUT_VLLM = sorted(
    module.name
    for module in MODULES
    if module.room not in ("integration", "spec", "demo", "pytest_plugin", "__main__")
    and not module.name.startswith("memkv_vllm.transports.verbs")
)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", ["memkv_vllm", "memkv_vllm.config", "memkv_vllm.cli", "memkv_vllm.pytest_plugin"])
def test_importing_touches_nothing(name: str) -> None:
    seen = probe(f"import {name}")
    assert seen["events"] == []
    assert seen["loggers"] == []
    assert seen["root"] is True


@pytest.mark.timeout(90)
def test_all_but_the_vllm_side_imports_without_vllm() -> None:
    """P088: nor does it need pyverbs; ``tests/integration/test_no_surprises.py`` runs it so."""
    seen = probe("".join(f"import {name}\n" for name in WITHOUT_VLLM))
    assert seen["events"] == []
    assert seen["loggers"] == []
    assert seen["root"] is True


@pytest.mark.timeout(90)
def test_the_package_itself_imports_nothing_heavy() -> None:
    modules = probe("import memkv_vllm")["modules"]
    assert isinstance(modules, list)
    assert not {"numpy", "pydantic", "anyio", "click"} & set(modules)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["start", "--help"], ["keygen"]])
def test_small_commands_open_no_socket_and_import_little(arguments: list[str]) -> None:
    seen = probe(f"from memkv_vllm.cli import main\nmain({arguments!r}, standalone_mode=False)\nprint()")
    assert seen["events"] == []
    modules = seen["modules"]
    assert isinstance(modules, list)
    # What makes a command feel slow; each is imported by the command that needs it.
    assert not {"numpy", "pydantic", "anyio", "asyncio"} & set(modules)

"""The house: who may import whom, and where the words of the outer world may stand."""

from __future__ import annotations

import ast
import graphlib
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.kit import house

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pswire", "psserver", "psclient", "pstesting")
ROOMS = tuple(house.ROOMS.values())


def modules(room: str, names: str) -> set[str]:
    return {f"{room}.{name}" for name in names.split()}


ONLY_IN = {
    "grpc": modules("psserver.network", "grpc_service server health small_requests joining peers")
    | modules("psclient._src.network", "retries grpc_calls remote_server")
    | {"pswire.network.grpc_channel", "psclient.psctl.health", "pstesting.faults"},
    "cupy": {"psserver.devices", "psclient._src.arrays.devices"},
    "grpc_health": {"psserver.network.health", "psclient.psctl.health"},
    "grpc_reflection": {"psserver.network.health"},
    "prometheus_client": {"pswire.telemetry.prometheus"},
    "google": {f"pswire.encoding.{name}" for name in ("calls", "mapper", "verbs")} | {"psserver.network.grpc_service"},
    "cryptography": {"pswire.security.certificates", "psclient.psctl.certificate_authority"},
    "opentelemetry": {"pswire.traces.tracer"},
    "pickle": set(),
    "marshal": set(),
    "torch": set(),
    "jax": modules("psclient.jax", "arrays parameters rows state trees"),
    "flax": {"psclient.jax.modules"},
}
HAVE_ROOMS = {"torch": "psclient.torch", "jax": "psclient.jax"}
"""Frameworks, each of which has a room of its own: nobody else imports it, nor that room."""
ENVIRON_IN = {"psserver.config", "psclient", "psclient._src.config", "psclient.psctl", "pstesting.forks"}
FORBIDDEN = {
    "pswire": {"psserver", "psclient", "pstesting", "threading", "asyncio"},
    "psserver": {"psclient", "pstesting"},
    "psclient": {"psserver", "pstesting"},
    "pstesting": set(),
}
HAVE_LOCKS = modules("pswire.network", "futures payload shared_memory tls_socket sockets traffic") | {
    *("pswire.telemetry.web_server", "pswire.telemetry.page.sampler", "pswire.security.identity")
}
"""What is filled by one thread and read by another needs one; of the contract only the port of metrics starts some."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    name_of(path): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
    if not path.name.endswith("_pb2.py")
}


@cache
def tree_of(module: str) -> ast.Module:
    """What a module's text says; read by the first test that asks, as every worker of the pool loads this file."""
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@cache
def nodes(module: str) -> tuple[ast.AST, ...]:
    """Those that tests look for: a walk through all trees takes a second."""
    kinds = ast.Import | ast.ImportFrom | ast.Attribute | ast.ClassDef
    return tuple(node for node in ast.walk(tree_of(module)) if isinstance(node, kinds))


@cache
def imports(module: str) -> frozenset[str]:
    """Dotted names that a module imports: at load, in functions, and for type checkers only."""
    names: set[str] = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import in line {node.lineno}"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


@cache
def imported_modules(module: str) -> frozenset[str]:
    """The modules of this house that a module imports; `from psclient import x` is for x where that is a module."""
    names = {name for name in imports(module) if name in MODULES and name != module}
    return frozenset(n for n in names if not any(other.startswith(n + ".") for other in names))


def room_of(module: str) -> str:
    """The room in which a module is: the nearest package above it, but for modules that stand for themselves."""
    parts = module.split(".")
    return next(name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in house.ROOMS)


@cache
def tops(module: str) -> set[str]:
    return {name.partition(".")[0] for name in imports(module)}


def sideways(module: str) -> set[str]:
    allowed = {"threading"} if module in HAVE_LOCKS else set()
    return tops(module) & FORBIDDEN[module.partition(".")[0]] - allowed


def test_packages_do_not_look_sideways():
    """psclient -> pswire <- psserver: the sides never import each other, nor pswire them; nor are there circles."""
    assert {module: found for module in MODULES if (found := sideways(module))} == {}
    order = graphlib.TopologicalSorter({module: imported_modules(module) for module in MODULES})
    order.prepare()


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_a_library_stands_in_its_room(library):
    """grpc is spoken at the rims, cupy in the array modules, and nothing is pickled anywhere."""
    own = HAVE_ROOMS.get(library)
    assert {module for module in MODULES if library in tops(module) and room_of(module) != own} <= ONLY_IN[library]


def test_nobody_imports_the_rooms_of_frameworks():
    """Who does not use PyTorch or JAX needs none of them, whatever is imported of psclient."""
    rooms_of_frameworks = set(HAVE_ROOMS.values())
    for module in MODULES:
        found = {room_of(name) for name in imported_modules(module)} & rooms_of_frameworks
        assert found <= {room_of(module)}, module


def environment_lines(module: str) -> list[int]:
    names = ("environ", "getenv", "environb", "putenv")
    return [
        node.lineno
        for node in nodes(module)
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & {*names})
    ]


WALL_CLOCK_IN = {
    "pswire.checkpoint.assembly",  # when a checkpoint was saved, for people
    "pswire.security.names",  # certificates
    "psserver.network.process",  # what its clock says, for psctl doctor
    "psclient._src.telemetry.observer",  # the same
    "psclient.psctl.dashboard",  # how long a link is good, by the clock of the server that checks it
    "pswire.telemetry.page.status_page",  # the same
    "psclient._src.rounds.rounds",  # when rows were updated that live for a time
    "psclient._src.network.lease",  # which heartbeats come together
    "psclient.train.manager",  # keep_checkpoint_every_n_hours
    "psclient.summary.writer",  # TensorBoard
    "pswire.traces.tracer",  # when spans began
}


def test_no_verdict_rests_on_the_wall_clock():
    """It may be wrong, or be set back: names of sessions, tokens and lives come from chance, times are monotonic."""
    found = {
        module
        for module in MODULES
        for node in nodes(module)
        if isinstance(node, ast.Attribute) and node.attr in ("time", "time_ns") and ast.unparse(node.value) == "time"
    }
    assert found <= WALL_CLOCK_IN


def test_the_environment_is_read_where_configuration_is():
    """No module deep inside changes what it does because of an environment variable."""
    deep = sorted({*MODULES} - ENVIRON_IN)
    assert {module: lines for module in deep if (lines := environment_lines(module))} == {}


def test_each_room_imports_what_the_plan_says():
    """No more, and no less: a permission that nobody needs is a door; and each room is above all that it imports."""
    found: dict[str, set[str]] = {name: set() for name in house.ROOMS}
    for module in MODULES:
        found[room_of(module)] |= {room_of(name) for name in imported_modules(module)}
    assert {name: names - {name} for name, names in found.items()} == {r.name: {*r.imports} for r in ROOMS}
    assert [(r.name, name) for r in ROOMS for name in r.imports if house.ROOMS[name].floor >= r.floor] == []


def test_each_package_is_a_room():
    """One without a row in the plan is built where nobody decided it; docs/architecture.md names every room."""
    packages = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    inner = {"psserver.programs.kernels", "pswire.pb"}
    assert packages - inner <= house.ROOMS.keys()
    assert not house.RESERVED.keys() & house.ROOMS.keys()
    floors = [room.floor for room in ROOMS]
    assert all(min(floors) <= floor <= max(floors) + 1 for floor in house.RESERVED.values())
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `([\w./]+)` \|", text, flags=re.MULTILINE)
    assert [name for name in house.ROOMS if name.replace(".", "/") not in {row.rstrip("/") for row in table}] == []


def length(node: ast.stmt) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def lines_of(node: ast.ClassDef) -> int:
    """The lines of a class without its docstrings, which are its users' documents."""
    documents = [
        n.body[0]
        for n in ast.walk(node)
        if isinstance(n, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(n) is not None
    ]
    return length(node) - sum(map(length, documents))


ALIKE = {
    "Optimizer",  # of each front end
    *("Constant", "TruncatedNormal", "Zeros"),  # of variables, and of rows of tables
    *("Loader", "Mirrored", "StrategyExtended", "TableView"),  # a protocol or another front end has its own
}
"""Classes that several modules have, and that mean the same there."""


def test_a_class_name_has_one_meaning():
    """Two classes have one name only where they are the same thing, in another front end or by another protocol."""
    inside = [module for module in MODULES if not module.startswith("pstesting")]
    found = Counter(node.name for module in inside for node in nodes(module) if isinstance(node, ast.ClassDef))
    assert {name for name, count in found.items() if count > 1 and name[0] != "_"} == ALIKE


def test_a_room_can_be_held_in_the_head():
    """Under twenty names in a folder, at most 620 lines in a file, and 300 of code in a class."""
    crowded: list[str] = []
    long: list[str] = []
    large: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        lines = path.read_text(encoding="utf-8").count("\n")
        long += [module] if lines > 620 else []
        for node in nodes(module):
            if isinstance(node, ast.ClassDef) and lines_of(node) > 300:
                large.setdefault(module, set()).add(node.name)
        if path.name == "__init__.py":
            shown = [p for p in path.parent.iterdir() if not p.name.startswith("__") and p.suffix in ("", ".py")]
            crowded += [module] if len(shown) >= 20 else []
    assert (crowded, long, large) == ([], [], {})


def public(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if node.name.startswith("_") or any("overload" in ast.unparse(d) for d in node.decorator_list):
            continue
        yield node


def silent_names(module: str) -> list[str]:
    """The public names of a module that have no docstring; its own name where it has none itself."""
    tree = tree_of(module)
    silent = [module] if tree.body and not ast.get_docstring(tree) else []
    for node in public(tree):
        silent += [] if ast.get_docstring(node) else [node.name]
        if isinstance(node, ast.ClassDef) and not node.bases:
            silent += [f"{node.name}.{m.name}" for m in public(node) if not ast.get_docstring(m)]
    return silent


def test_public_names_say_what_they_are():
    """Every module, public class, function and method has a docstring; methods with a base may have it there."""
    assert {module: silent for module in MODULES if (silent := silent_names(module))} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_face_is_a_table_of_contents(package):
    """`__all__` is sorted, without doubles, and names what is there: all of it where it exists."""
    face = importlib.import_module(package)
    listed = getattr(face, "__all__", None)
    checked = [node for node in tree_of(package).body if isinstance(node, ast.If)]  # what type checkers alone import
    found = [node for node in (tree_of(package), *checked) for node in node.body if isinstance(node, ast.ImportFrom)]
    if listed is None:
        assert not found
        return
    assert len(set(listed)) == len(listed)
    imported = {alias.asname or alias.name for node in found for alias in node.names if node.module != "__future__"}
    assert {name for name in imported if not name.startswith("_")} <= set(listed)
    assert not [name for name in listed if not hasattr(face, name)]


def test_the_face_shows_the_public_names_alone():
    """`dir(psclient)` is `__all__`, before a name is used and once all are: inner modules are not there.

    At run time each name is what type checkers are told, though it is imported where it is used first.
    """
    shown = "print(*(n for n in dir(psclient) if not n.startswith('_')))"
    script = f"import psclient; {shown}; [getattr(psclient, n) for n in psclient.__all__]; {shown}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    import psclient

    assert [line.split() for line in lines] == [[n for n in sorted(psclient.__all__) if not n.startswith("_")]] * 2
    (told,) = [node for node in tree_of("psclient").body if isinstance(node, ast.If)]
    for node in told.body:
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            there = sys.modules.get(f"{node.module}.{alias.name}") or getattr(
                sys.modules[node.module or ""], alias.name
            )
            assert getattr(psclient, alias.name) is there


def may_wait(call: ast.Call) -> bool:
    """Whether a call may last until another thread or process has done something, by its name."""
    match call.func:
        case ast.Name(id=name):
            return name in ("wait", "sleep", "ThreadPoolExecutor")  # leaving an executor waits for its work
        case ast.Attribute(value=owner, attr="join"):
            return not isinstance(owner, ast.Constant | ast.JoinedStr) and ast.unparse(owner) != "os.path"
        case ast.Attribute(attr="poll"):
            return bool(call.args)
        case ast.Attribute(attr="select"):
            return len(call.args) < 2 or (len(call.args) == 4 and ast.unparse(call.args[3]) != "0.0")
        case ast.Attribute(attr=name):
            return name in ("wait", "wait_for", "result", "sleep", "shutdown", "ThreadPoolExecutor")
    return False


def waiting_functions(module: str) -> set[str]:
    """The functions of a module, by their whole names, with a call that may wait; those inside count as the outer."""
    found: set[str] = set()

    def visit(node: ast.AST, name: str, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call) and may_wait(child):
                found.add(name)
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            named = (function or isinstance(child, ast.ClassDef)) and not inside
            visit(child, f"{name}.{child.name}" if named else name, inside or function)

    visit(tree_of(module), module, False)
    return found


def test_every_wait_is_tried():
    """A call that waits says for whom, and a test hears it; or there is a reason why nobody has to be told."""
    assert not house.TRIED.keys() & house.BRIEF.keys()
    ours = [module for module in MODULES if not module.startswith("pstesting")]  # a test waits as long as it likes
    assert set().union(*map(waiting_functions, ours)) == house.TRIED.keys() | house.BRIEF.keys()


READ_SUFFIXES = {".py", ".pyi", ".md", ".toml", ".yaml", ".yml", ".proto", ".cfg", ".txt"}
READ_NAMES = {"Makefile", "Dockerfile", "run"}
_MACHINE = re.compile(r"(?<![\w.])/(?:home|root|Users|work)/[\w.]+")


def texts() -> Iterator[Path]:
    """The files that people read; what is hidden, such as an environment, and what runs have left is passed over."""
    for directory, below, files in os.walk(ROOT):
        seen = [name for name in below if not name.startswith(".") or name == ".ci"]
        below[:] = [name for name in seen if name != "runs" and "egg-info" not in name]
        for path in (Path(directory, name) for name in files):
            if path.suffix in READ_SUFFIXES or path.name in READ_NAMES:
                yield path


def test_no_paths_of_one_machine():
    found = []
    for path in sorted(texts()):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found += [f"{path.relative_to(ROOT)}:{number}: {line.strip()}"] if _MACHINE.search(line) else []
    assert not found

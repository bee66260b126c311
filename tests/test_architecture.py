"""The house: who may import whom, and where the words of the outer world may stand."""

from __future__ import annotations

import ast
import importlib
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support import waits

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pswire", "psserver", "psclient")

ONLY_IN = {
    "grpc": {
        "psserver.transport.grpc_service",
        "psserver.transport.server",
        "psclient._src.transport.retries",
        "psclient._src.transport.grpc_channel",
        "psclient.psctl.health_client",
        "psclient._src.transport.remote_server",
    },
    "cupy": {"psserver.devices", "psclient._src.devices"},
    "grpc_health": {"psserver.transport.health", "psclient.psctl.health_client"},
    "grpc_reflection": {"psserver.transport.health"},
    "prometheus_client": {"pswire.telemetry.prometheus"},
    "google": {
        "psserver.transport.grpc_service",
        "psclient._src.transport.remote_server",
        "pswire.encoding.values",
        "pswire.encoding.verbs",
    },
    "cryptography": {"pswire.security.certificates", "psclient.psctl.certificate_authority"},
    "pickle": set(),
    "marshal": set(),
}
ENVIRON_IN = {"psserver.config", "psclient._src.config"}
FORBIDDEN = {
    "pswire": {"psserver", "psclient", "threading", "asyncio"},
    "psserver": {"psclient"},
    "psclient": {"psserver"},
}
HAVE_LOCKS = {
    "pswire.transport.payload",
    "pswire.transport.shared_memory",
    "pswire.transport.tls_socket",
    "pswire.transport.sockets",
    "pswire.transport.traffic",
}
"""What is filled by one thread and read by another needs one; of the contract only a page of metrics starts one."""


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


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def walk(node: ast.AST, *, into_functions: bool = True) -> Iterator[ast.AST]:
    """All nodes below, but not what only a type checker sees."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        yield child
        if into_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from walk(child, into_functions=into_functions)


def imports(module: str, *, at_load: bool = False) -> set[str]:
    """Dotted names that a module imports; with `at_load` only those that loading it loads."""
    names: set[str] = set()
    for node in walk(tree_of(module), into_functions=not at_load):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import in line {node.lineno}"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@cache
def tops(module: str) -> set[str]:
    return {name.partition(".")[0] for name in imports(module)}


def sideways(module: str) -> set[str]:
    """What a module imports and may not."""
    allowed = {"threading"} if module in HAVE_LOCKS else set()
    return tops(module) & FORBIDDEN[module.partition(".")[0]] - allowed


def test_packages_do_not_look_sideways():
    """psclient -> pswire <- psserver: the sides never import each other, and the contract neither."""
    assert {module: found for module in MODULES if (found := sideways(module))} == {}


@pytest.mark.parametrize("library", sorted(ONLY_IN))
def test_a_library_stands_in_its_room(library):
    """grpc is spoken at the rims, cupy in the array modules, and nothing is pickled anywhere."""
    assert {module for module in MODULES if library in tops(module)} <= ONLY_IN[library]


def environment_lines(module: str) -> list[int]:
    """Where a module reads the environment."""
    names = ("environ", "getenv", "environb", "putenv")
    return [
        node.lineno
        for node in ast.walk(tree_of(module))
        if (isinstance(node, ast.Attribute) and node.attr in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and {a.name for a in node.names} & {*names})
    ]


WALL_CLOCK_IN = {
    "pswire.checkpoint.writer",  # when a checkpoint was saved, for people
    "pswire.security.identity",  # certificates
    "psserver.transport.process",  # what its clock says, for psctl doctor
    "psclient.psctl.observer",  # the same
    "psclient.psctl.status",  # since when a server is up
    "psclient.train.manager",  # keep_checkpoint_every_n_hours
    "psclient.summary",  # TensorBoard
}


def test_no_verdict_rests_on_the_wall_clock():
    """It may be wrong, or be set back: names of sessions, tokens and lives come from chance, times are monotonic."""
    found = {
        module
        for module in MODULES
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Attribute) and node.attr in ("time", "time_ns") and ast.unparse(node.value) == "time"
    }
    assert found <= WALL_CLOCK_IN


def test_the_environment_is_read_where_configuration_is():
    """No module deep inside changes what it does because of an environment variable."""
    deep = sorted({*MODULES} - ENVIRON_IN)
    assert {module: lines for module in deep if (lines := environment_lines(module))} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_document_names_every_room(package):
    """Who looks for something finds in docs/architecture.md in which module it is."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## The house")[2]
    sections = re.split(r"^`(\w+)`", text.partition("## The road")[0], flags=re.MULTILINE)
    rooms = {module.split(".")[1] for module in MODULES if module.startswith(package + ".")} - {"__main__"}
    assert rooms <= set(re.findall(r"`(\w+)/?`", sections[sections.index(package) + 1]))


def test_no_circles():
    """Modules have an order in which each can be understood from those before it."""
    graph = {
        module: {name for name in imports(module, at_load=True) if name in MODULES and name != module}
        for module in MODULES
    }
    for package in PACKAGES:  # `from psclient import x` is for the module x, not for the face
        for module, names in graph.items():
            if any(name.startswith(package + ".") for name in names) and module != package:
                names.discard(package)
    seen: dict[str, bool] = {}
    path: list[str] = []

    def visit(module: str) -> None:
        assert seen.get(module) is not False, "circle: " + " -> ".join([*path[path.index(module) :], module])
        if module in seen:
            return
        seen[module] = False
        path.append(module)
        for name in sorted(graph[module]):
            visit(name)
        path.pop()
        seen[module] = True

    for module in sorted(graph):
        visit(module)


def public(
    tree: ast.Module | ast.ClassDef,
) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
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
        # The codec's pairs say the same sixty times; its module says what they do.
        pair = module in ("pswire.encoding.values", "pswire.encoding.messages") and node.name.endswith(
            ("_to_pb", "_from_pb")
        )
        silent += [] if pair or ast.get_docstring(node) else [node.name]
        if isinstance(node, ast.ClassDef) and not node.bases and not is_implementation(module, node):
            silent += [f"{node.name}.{m.name}" for m in public(node) if not ast.get_docstring(m)]
    return silent


def test_public_names_say_what_they_are():
    """Every module, public class, function and method has a docstring.

    Methods of a class with a base may have it there.
    """
    assert {module: silent for module in MODULES if (silent := silent_names(module))} == {}


def is_implementation(module: str, node: ast.ClassDef) -> bool:
    """The verbs of `ParameterServer` are described there, once."""
    protocol = next(n for n in ast.walk(tree_of("pswire.api")) if isinstance(n, ast.ClassDef) and n.bases)
    return {m.name for m in public(protocol)} <= {m.name for m in public(node)}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_face_is_a_table_of_contents(package):
    """`__all__` is sorted, without doubles, and names what is there: all of it where it exists."""
    face = importlib.import_module(package)
    listed = getattr(face, "__all__", None)
    if listed is None:
        assert not [node for node in tree_of(package).body if isinstance(node, ast.ImportFrom)]
        return
    assert len(set(listed)) == len(listed)
    imported = {
        alias.asname or alias.name
        for node in tree_of(package).body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    assert {name for name in imported if not name.startswith("_")} <= set(listed)
    assert not [name for name in listed if not hasattr(face, name)]


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
            return len(call.args) < 2
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
    assert not waits.TRIED.keys() & waits.BRIEF.keys()
    assert set().union(*map(waiting_functions, MODULES)) == waits.TRIED.keys() | waits.BRIEF.keys()


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
    """What is here works everywhere."""
    found = []
    for path in sorted(texts()):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found += [f"{path.relative_to(ROOT)}:{number}: {line.strip()}"] if _MACHINE.search(line) else []
    assert not found

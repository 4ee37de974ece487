"""Reads a package's source and finds what breaks its rules. The rules' tables are in test_architecture.py.

Every rule takes modules and returns complaints, one line each, that say where and what to do.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "moesaic"


@dataclass(frozen=True)
class Import:
    """One imported module."""

    target: str
    """The full dotted name, such as "moesaic.core.request" or "torch.nn"."""
    line: int
    in_function: bool
    for_types: bool
    """True if it is under `if TYPE_CHECKING`, so that it is never executed."""


class Module:
    """One source file. name: dotted, as it is imported; `is_package` for an __init__.py."""

    def __init__(self, name: str, source: str, is_package: bool = False) -> None:
        self.name = name
        self.source = source
        self.is_package = is_package
        self.tree = ast.parse(source)

    @property
    def inner(self) -> str:
        """The name within the package: "core.request", and "" for the package itself."""
        return self.name.partition(".")[2]

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the module's syntax tree."""
        return list(ast.walk(self.tree))

    def imports(self, known: frozenset[str] = frozenset()) -> list[Import]:
        """The imports of a module. `from a import b` means module a.b if `known` has it, and module a
        otherwise."""
        return [
            Import(target, node.lineno, inside, types)
            for node, inside, types in self._statements
            for target in self._targets(node, known)
        ]

    @cached_property
    def _statements(self) -> list[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
        """The import statements, each with whether it is in a function and whether it is for types alone."""
        return list(self._importing(self.tree, False, False))

    def _importing(
        self, node: ast.AST, inside: bool, types: bool
    ) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child, inside, types
            elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                yield from self._importing(child, inside or function, types or typing)

    def _targets(self, node: ast.Import | ast.ImportFrom, known: frozenset[str]) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        base = node.module or ""
        if node.level:
            package = self.name.split(".")[: None if self.is_package else -1]
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
        full = [f"{base}.{alias.name}" for alias in node.names]
        return list(dict.fromkeys(name if name in known else base for name in full))


def read_package(root: Path) -> list[Module]:
    """Every module under `root`, the folder of the package."""
    modules = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if package else parts)
        modules.append(Module(name, path.read_text(encoding="utf-8"), package))
    return modules


def names(modules: Iterable[Module]) -> frozenset[str]:
    return frozenset(module.name for module in modules)


def within(name: str, prefixes: Iterable[str]) -> bool:
    """Whether `name` is one of `prefixes` or lies below one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def room_of(inner: str, rooms: Iterable[str]) -> str | None:
    """The room in which a module lies: the longest of `rooms` that holds it, or None.

    Example: with the rooms "cluster" and "cluster.joining", "cluster.joining.loop" is in "cluster.joining".
    """
    return max((room for room in rooms if within(inner, [room])), key=len, default=None)


def in_places(inner: str, places: Iterable[str], rooms: Iterable[str]) -> bool:
    """Whether a module lies in one of `places` without being in a room of its own there."""
    room = room_of(inner, rooms)
    return any(within(inner, [place]) and room_of(place, rooms) == room for place in places)


def crossings(modules: Sequence[Module], allowed: Mapping[str, Sequence[str]]) -> list[str]:
    """Imports between rooms that the table does not allow, and rooms that it does not know."""
    known = names(modules)
    found = []
    for module in modules:
        room = room_of(module.inner, allowed)
        if room is None:
            found.append(f"{module.name} is in no room of EDGES: say there what it may import")
            continue
        for item in module.imports(known):
            root, _, inner = item.target.partition(".")
            if root == PACKAGE and not in_places(inner, [room, *allowed[room]], allowed):
                may = ", ".join(allowed[room]) or "nothing of ours"
                found.append(
                    f"{module.name}:{item.line} imports {item.target}; {room or PACKAGE!r} may import "
                    f"{may}: move the code, or argue for an edge"
                )
    return found


def entangled(modules: Sequence[Module], room: str, subjects: Sequence[str]) -> list[str]:
    """Imports between the subjects of a room, and modules of the room that belong to none of them."""
    known = names(modules)
    found = []
    for module in modules:
        if not within(module.inner, [room]) or module.inner == room:
            continue
        mine = module.inner.split(".")[1]
        if mine not in subjects:
            found.append(f"{module.name}: the subjects of {room} are {', '.join(subjects)}: move it into one")
            continue
        others = [f"{PACKAGE}.{room}.{other}" for other in subjects if other != mine]
        found += [
            f"{module.name}:{item.line} imports {item.target}: subjects of {room} do not know each other"
            for item in module.imports(known)
            if within(item.target, others)
        ]
    return found


def unreached(modules: Sequence[Module], public: Sequence[str]) -> list[str]:
    """Modules that no program (a `__main__`) and no public module imports, directly or through others."""
    known = names(modules)
    graph = {module.name: {item.target for item in module.imports(known)} & known for module in modules}
    waiting = [m.name for m in modules if m.inner in public or m.name.endswith("__main__")]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            packages = [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]
            waiting += [*graph[name], *(package for package in packages if package in known)]
    return [
        f"{module.name} is reached by no command and no public name: move it to its users, or delete it"
        for module in modules
        if module.name not in reached
    ]


def homeless(
    modules: Sequence[Module], homes: Mapping[str, Sequence[str]], rooms: Iterable[str]
) -> list[str]:
    """Foreign libraries imported outside of their homes, or without one. A home holds no other room."""
    rooms = list(rooms)
    found = []
    for module in modules:
        for item in module.imports():
            library = item.target.partition(".")[0]
            if library == PACKAGE or library in sys.stdlib_module_names:
                continue
            if library not in homes:
                found.append(f"{module.name}:{item.line} imports {library}: give it a home in HOMES")
            elif not in_places(module.inner, homes[library], rooms):
                places = ", ".join(homes[library])
                found.append(
                    f"{module.name}:{item.line} imports {library}, whose home is {places}: go through it"
                )
    return found


def impure(modules: Sequence[Module], rooms: Sequence[str], banned: Iterable[str]) -> list[str]:
    """Clocks, threads, I/O and global randomness in rooms that must be pure."""
    found = []
    for module in (module for module in modules if within(module.inner, rooms)):
        where = [
            (item.line, f"imports {item.target}") for item in module.imports() if within(item.target, banned)
        ]
        calls = [node for node in module.nodes if isinstance(node, ast.Call)]
        where += [(call.lineno, "draws from a global generator") for call in calls if _draws_globally(call)]
        found += [
            f"{module.name}:{line} {what}: take time, data and generators as arguments"
            for line, what in where
        ]
    return found


def _draws_globally(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name in ("random.Random", "np.random.default_rng", "numpy.random.default_rng"):
        return not call.args and not call.keywords
    return name.startswith(("random.", "np.random.", "numpy.random."))


def cycles(modules: Sequence[Module], doors: Iterable[str] = ()) -> list[str]:
    """One import cycle, if there is any. Imports for types count, except those of `doors`."""
    known = names(modules)
    graph = {
        module.name: {
            item.target
            for item in module.imports(known)
            if item.target in known
            and item.target != module.name
            and not ((item.in_function or item.for_types) and module.inner in doors)
        }
        for module in modules
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [f"import cycle {' -> '.join(error.args[1])}: move what both need below both"]
    return []


def late_imports(modules: Sequence[Module], allowed: Iterable[str]) -> list[str]:
    return [
        f"{module.name}:{item.line} imports {item.target} in a function: import at the top, or list why not"
        for module in modules
        for item in module.imports()
        if item.in_function and not within(module.inner, allowed)
    ]


def broad_excepts(modules: Sequence[Module], allowed: Iterable[str]) -> list[str]:
    """Handlers of everything that do not raise, outside the modules in `allowed`."""
    return [
        f"{module.name}:{node.lineno} swallows every exception: name what is expected, or raise again"
        for module in modules
        if not within(module.inner, allowed)
        for node in module.nodes
        if isinstance(node, ast.ExceptHandler) and _is_broad(node.type) and not _raises(node)
    ]


def _is_broad(kind: ast.expr | None) -> bool:
    if isinstance(kind, ast.Tuple):
        return any(_is_broad(item) for item in kind.elts)
    return kind is None or ast.unparse(kind) in ("Exception", "BaseException")


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) for statement in handler.body for node in ast.walk(statement))


def globals_written(modules: Sequence[Module]) -> list[str]:
    return [
        f"{module.name}:{node.lineno} has a global statement: keep the state in an object"
        for module in modules
        for node in module.nodes
        if isinstance(node, ast.Global)
    ]


def environment_readers(modules: Sequence[Module], home: str) -> list[str]:
    found = []
    for module in modules:
        for node in module.nodes:
            text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.ImportFrom) else ""
            direct = text in ("os.environ", "os.getenv", "os.putenv")
            named = text.startswith("from os import") and ("environ" in text or "getenv" in text)
            if (direct or named) and module.inner != home:
                found.append(
                    f"{module.name}:{node.lineno} reads the environment: {home}.py does, and passes it on"
                )
    return found


def untyped(modules: Sequence[Module]) -> list[str]:
    return [
        f"{module.name}:{function.lineno} {function.name} has no return type: annotate it"
        for module in modules
        for function in functions(module)
        if function.returns is None and not is_kernel(function)
    ]


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is in Triton's language, whose arguments have no Python types."""
    decorators = map(ast.unparse, function.decorator_list)
    return any(one in ("triton.jit", "core.extern") for one in decorators)


def functions(module: Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [n for n in module.nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def drawers(modules: Sequence[Module], banned: Sequence[str]) -> list[str]:
    """Modules and classes whose names say nothing."""
    found = []
    for module in modules:
        classes = [node.name for node in module.nodes if isinstance(node, ast.ClassDef)]
        bad_part = [
            p for p in module.inner.split(".") if p.rstrip("s") in {word.rstrip("s") for word in banned}
        ]
        bad_class = [
            n for n in classes if n.lower().rstrip("s").endswith(tuple(w.rstrip("s") for w in banned))
        ]
        found += [f"{module.name}: {name!r} names no thing: say what it is" for name in bad_part + bad_class]
    return found


def oversized(modules: Sequence[Module], lines: Mapping[str, int], file_limit: int, limit: int) -> list[str]:
    """Files over `file_limit` lines (or what `lines` grants by name), functions over `limit`.

    The arguments of a Triton kernel do not count: a line each.
    """
    found = []
    for module in modules:
        size, most = module.source.count("\n"), lines.get(module.inner, file_limit)
        if size > most:
            found.append(f"{module.name} has {size} lines, allowed {most}: split it by what it is about")
        for function in functions(module):
            begin = function.body[0].lineno if is_kernel(function) else function.lineno
            size = (function.end_lineno or begin) - begin + 1
            if size > limit:
                found.append(
                    f"{module.name}:{function.lineno} {function.name} has {size} lines, allowed {limit}"
                )
    return found

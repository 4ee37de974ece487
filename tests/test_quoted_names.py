"""What docstrings and comments quote exists: files, attributes, names, and parameters. Examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import keyword
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import architecture_rules as rules

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "moesaic"
FILE = re.compile(r"(?<![\w./-])((?:[a-z_]+/)+[a-z_0-9]+\.py)\b")
ATTRIBUTE = re.compile(r"`(?:\w+\.)*([A-Z]\w+)\.(\w+)(?:\(\))?`")
MODULE_NAME = re.compile(r"`((?:[a-z_]+\.)+[A-Za-z_]+)(?:\(\))?`")
WORD = re.compile(r"`(\w*[A-Za-z]\w*)`")
PARAMETERS = re.compile(r"(?:^|[.\])?`\"] )([a-z_]\w*(?:(?:, | and )[a-z_]\w*)+): ")
FOREIGN = ("vllm/", "python/sglang/", "cluster/x.py")
"""Beginnings of paths in other projects, and an example."""
FOREIGN_WORDS = {
    "Stored",
    "X_blocks",
    "X_scales",
    "block_q4_K",
    "extra_config",
    "ps",
    "topologySpreadConstraints",
    "v1",
    "w2",
}
"""Names of the native kernels, of checkpoints, of llama.cpp, of Kubernetes, and of a program."""


def bound_in(node: ast.AST) -> set[str]:
    """Every name that a module or a class binds, and each attribute that it sets on `self`."""
    bound: set[str] = set()
    for child in ast.walk(node):
        kind = type(child)
        if kind in (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
            bound.add(child.name)
        elif kind is ast.Name:
            bound.add(child.id)
        elif kind is ast.Attribute and type(child.value) is ast.Name and child.value.id in ("self", "cls"):
            bound.add(child.attr)
        elif kind is ast.alias:
            bound.add(child.asname or child.name)
    return bound


class Index:
    """The classes and modules of a package by name."""

    def __init__(self, modules: list[rules.Module]) -> None:
        self.modules = {module.inner: bound_in(module.tree) for module in modules}
        self.rooms = {module.inner.partition(".")[0] for module in modules}
        self.classes: dict[str, set[str]] = {}
        self.bases: dict[str, set[str]] = {}
        for module in modules:
            for node in module.nodes:
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, set()).update(bound_in(node))
                    names = {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
                    self.bases.setdefault(node.name, set()).update(names)

    def has_attribute(self, name: str, attribute: str) -> bool:
        """Whether a class or one of its bases has the attribute. Classes of other packages have each."""
        if name not in self.classes:
            return True
        return attribute in self.classes[name] or any(
            self.has_attribute(base, attribute) for base in self.bases[name] if base in self.classes
        )

    def has_module_name(self, path: str) -> bool:
        """Whether a dotted path that begins in a room ends at a module or at a name of one."""
        room, _, rest = path.partition(".")
        if not rest or room not in self.rooms or path.endswith((".json", ".weight")):  # of a checkpoint
            return True
        parts = path.split(".")
        modules = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        module = next(name for name in modules if name in self.modules or name == room)
        following = parts[module.count(".") + 1 :]
        return not following or following[0] in self.modules.get(module, set())


def stale(text: str, index: Index, files: set[str]) -> list[str]:
    """The quoted names of a text that lead nowhere."""
    found = [path for path in FILE.findall(text) if not path.startswith(FOREIGN)]
    lost = [path for path in found if not any(file.endswith(f"/{path}") for file in files)]
    lost += [
        f"{name}.{part}" for name, part in ATTRIBUTE.findall(text) if not index.has_attribute(name, part)
    ]
    return lost + [path for path in MODULE_NAME.findall(text) if not index.has_module_name(path)]


@pytest.mark.slow
def test_what_the_source_quotes_exists() -> None:
    modules = rules.read_package(SOURCE)
    index = Index(modules)
    folders = (SOURCE, *(ROOT / name for name in ("tests", "scripts", "benchmarks", "training")))
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    files = {f"/{path.relative_to(ROOT).as_posix()}" for path in paths}
    lost = [f"{module.name}: {name}" for module in modules for name in stale(module.source, index, files)]
    assert lost == []


def test_what_does_not_exist_is_found() -> None:
    source = "import a\nclass Server(Base):\n    rows: int\n    def f(self):\n        self.size = 1\n"
    index = Index([rules.Module("moesaic.core.x", source), rules.Module("moesaic.core", "", is_package=True)])
    files = {"/src/moesaic/core/x.py"}
    good = "core/x.py, `Server.rows`, `Server.size`, `Foreign.y`, `core.x.Server`, `core.x`, `numpy.array`"
    assert stale(good, index, files) == []
    bad = "core/y.py, `Server.lost`, `core.x.Gone`, `core.y`"
    assert stale(bad, index, files) == ["core/y.py", "Server.lost", "core.x.Gone", "core.y"]


# ---- words


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """The strings that stand alone: docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(value := node.value, ast.Constant):
            yield from [value] if isinstance(value.value, str) else []


def known_words(tree: ast.AST) -> set[str]:
    """Names that a module uses, and the words of its strings that are no docstrings."""
    words: set[str] = set()
    texts = set(map(id, docstrings(tree)))
    for node in ast.walk(tree):
        words.update(
            value for _, value in ast.iter_fields(node) if isinstance(value, str) and value.isidentifier()
        )
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            words.update(re.findall(r"\w+", node.value))
    return words


def lost_words(module: rules.Module, known: set[str]) -> list[str]:
    return [
        word for text in docstrings(module.tree) for word in WORD.findall(text.value) if word not in known
    ]


@pytest.mark.slow
def test_words_in_backticks_are_names() -> None:
    modules = rules.read_package(SOURCE)
    known = FOREIGN_WORDS.union(keyword.kwlist, *(known_words(module.tree) for module in modules))
    known |= {module.inner.rpartition(".")[2] for module in modules}
    lost = [f"{module.name}: {word}" for module in modules for word in lost_words(module, known)]
    assert lost == []


def test_a_word_that_is_no_name_is_found() -> None:
    source = '"""`f`, `size`, `flfs`, `gone`"""\ndef f(size):\n    "`lost`"\n    return size == "flfs"\n'
    module = rules.Module("moesaic.core.x", source)
    assert lost_words(module, known_words(module.tree)) == ["gone", "lost"]


# ---- parameters


def lost_parameters(tree: ast.AST) -> list[str]:
    """Names in a docstring's lists of parameters that the function lacks, if it has others of the list."""
    lost: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = {child.arg for child in ast.walk(node.args) if isinstance(child, ast.arg)}
            for together in PARAMETERS.findall(" ".join((ast.get_docstring(node) or "").split())):
                listed = set(re.split(", | and ", together))
                lost += sorted(listed - names) if listed & names else []
    return lost


@pytest.mark.slow
def test_docstrings_list_parameters_that_exist() -> None:
    modules = rules.read_package(SOURCE)
    lost = [f"{module.name}: {name}" for module in modules for name in lost_parameters(module.tree)]
    assert lost == []


def test_a_parameter_that_does_not_exist_is_found() -> None:
    text = 'def f(rows, sizes):\n    """Does it. rows, width: numbers. Others, of these: not listed."""\n'
    assert lost_parameters(ast.parse(text)) == ["width"]


# ---- examples

EXAMPLES = [module.name for module in rules.read_package(SOURCE) if "    >>> " in module.source]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_give_what_they_say(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed

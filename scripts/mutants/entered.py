"""Which tests enter a function of the package, as one run of the tests without a change tells.

The run uses compiled files of the package in which each function begins with a lookup of its key. This costs
little, counts every thread, and needs no change of the sources. `recorder` notes the keys.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import marshal
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType

from scripts.mutants import recorder

UNCHECKED = (1).to_bytes(4, "little") + bytes(8)
"""Begins a compiled file, after the magic number, that is used whatever its source is (PEP 552)."""


@dataclass
class Functions:
    """The tests of each function. Its key is "PATH:LINE" of its `def`."""

    tests: dict[str, set[str]] = field(default_factory=dict)
    """Tests that enter it in pytest's own process."""
    files: dict[str, set[str]] = field(default_factory=dict)
    """Test files of which another process enters it. One is "" if the function runs while no test does."""

    def during_imports(self, key: str) -> bool:
        return "" in self.files.get(key, ())

    def of(self, key: str) -> set[str]:
        """Names of the tests that enter the function, and of the files whose processes do."""
        return self.tests.get(key, set()) | self.files.get(key, set()) - {""}

    def of_files(self, paths: Collection[str]) -> set[str]:
        """The same for all functions of these files."""
        keys = {key for key in (*self.tests, *self.files) if key.partition(":")[0] in paths}
        return set().union(*map(self.of, keys))


def key_of(path: str, source: str, line: int) -> str | None:
    """The key of the innermost function whose body has the line. None if it is run by an import."""
    around = [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body[0].lineno <= line <= (node.end_lineno or line)
    ]
    return f"{path}:{max(around)}" if around else None


@contextmanager
def recording(root: Path, package: str, folder: Path) -> Iterator[Functions]:
    """While the context is open, the functions of the package record themselves. At its end the result is
    complete."""
    functions, compiled = Functions(), []
    folder.mkdir()
    try:
        for file in (root / "src" / package).rglob("*.py"):
            compiled.append(Path(importlib.util.cache_from_source(file)))
            compiled[-1].parent.mkdir(exist_ok=True)
            code = marshal.dumps(_with_lookups(file, str(file.relative_to(root))))
            compiled[-1].write_bytes(importlib.util.MAGIC_NUMBER + UNCHECKED + code)
        yield functions
        _read(folder, functions)
    finally:
        for one in compiled:
            one.unlink(missing_ok=True)
        shutil.rmtree(folder)


def _with_lookups(file: Path, path: str) -> CodeType:
    tree = ast.parse(file.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lookup = ast.parse(f"{recorder.NAME}[{f'{path}:{node.lineno}'!r}]").body[0]
            for part in ast.walk(lookup):
                ast.copy_location(part, node.body[0])
            node.body.insert(0 if ast.get_docstring(node, clean=False) is None else 1, lookup)
    code: CodeType = compile(tree, str(file), "exec", dont_inherit=True)
    return code


def _read(folder: Path, functions: Functions) -> None:
    for file in folder.glob("*.json"):
        found = json.loads(file.read_text("utf-8"))
        for key, numbers in found["entered"].items():
            functions.tests.setdefault(key, set()).update(found["tests"][number] for number in numbers)
    others = folder / recorder.OTHERS
    for line in others.read_text("utf-8").splitlines() if others.exists() else ():
        test, key = line.split("\t")
        functions.files.setdefault(key, set()).add(test)

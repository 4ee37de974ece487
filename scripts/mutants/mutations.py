"""The small changes that a line of Python allows."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
}  # fmt: skip
NOT_SWAPPED = ("isinstance", "issubclass", "cast", "getattr", "setattr", "hasattr", "min", "max")
"""Calls whose first two arguments are not swapped. Swapped, they would fail at once or return the same."""
LOGGERS = ("log", "logger", "logging", "warnings")
SKIPPED_FIELDS = ("annotation", "returns", "decorator_list", "bases")
TYPE_NODES = (ast.Name, ast.Attribute, ast.Subscript, ast.Tuple, ast.List, ast.BinOp, ast.BitOr, ast.Load)
Node = ast.expr | ast.stmt
Change = tuple[Node, str]
"""The node whose source is replaced, and its replacement."""


@dataclass(frozen=True)
class Mutation:
    """One change of one file: the bytes from `start` to `end` become `after`."""

    path: str
    """Path of the file, relative to the root of the tree."""
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int
    text: str
    """The line without its indentation."""

    @property
    def change(self) -> tuple[str, ...]:
        """What says that a mutation of another version of the file is the same."""
        return self.path, self.kind, self.before, self.after, self.text

    def apply(self, source: str) -> str:
        data = source.encode()
        return (data[: self.start] + self.after.encode() + data[self.end :]).decode()

    def __str__(self) -> str:
        return f"{self.kind}: {_short(self.before)} -> {_short(self.after)}"


def find(path: str, source: str) -> list[Mutation]:
    """Every mutation of a file, in the order of the source."""
    data, starts = source.encode(), [0]
    for text in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(text))
    found = []
    for node, default in _executable(ast.parse(source)):
        for kind, (target, after) in _changes(node, default):
            assert target.end_lineno is not None and target.end_col_offset is not None
            start = starts[target.lineno - 1] + target.col_offset
            end = starts[target.end_lineno - 1] + target.end_col_offset
            whole = data[starts[target.lineno - 1] : starts[target.lineno]].decode().strip()
            before = data[start:end].decode()
            found.append(Mutation(path, target.lineno, kind, before, after, start, end, whole))
    return found


def standing_in(wanted: Iterable[Mutation], found: Iterable[Mutation]) -> list[Mutation]:
    """Of the mutations in `found` those that are the same as one of `wanted`, in its order.

    Of several that stand on equal lines the nearest is taken.
    """
    equal: dict[tuple[str, ...], list[Mutation]] = {}
    for one in found:
        equal.setdefault(one.change, []).append(one)
    return [
        min(equal[one.change], key=lambda other: abs(other.line - one.line))
        for one in wanted
        if one.change in equal
    ]


def choose(found: Iterable[Mutation], seed: int, count: int) -> list[Mutation]:
    """`count` lines, each as likely as any other, and one mutation of each.

    The same seed with a larger count gives the same mutations and more.
    """
    by_line: dict[tuple[str, int], list[Mutation]] = {}
    for one in found:
        by_line.setdefault((one.path, one.line), []).append(one)
    lines = sorted(by_line)
    random.Random(seed).shuffle(lines)
    return [
        random.Random(f"{seed}:{path}:{line}").choice(by_line[path, line]) for path, line in lines[:count]
    ]


def _executable(node: ast.AST, default: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """The nodes that are executed.

    Docstrings, log lines, annotations and formatted strings are left out. The second value says whether the
    node is the default of an argument or of a field of a class.
    """
    if _is_text_or_type(node):
        return
    yield node, default
    for name, value in ast.iter_fields(node):
        if name in SKIPPED_FIELDS or (name == "body" and _for_types(node)):
            continue
        inner = name in ("defaults", "kw_defaults") or (name == "value" and isinstance(node, ast.AnnAssign))
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _executable(child, inner)


def _is_text_or_type(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.pattern():
            return True
        case ast.Expr(value=ast.Constant()) | ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
        case ast.Call():
            return _names(node)[-1] == "TypeVar" or any(name in LOGGERS for name in _names(node)[:-1])
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp() as value):
            return not name.isupper() and name[0].isupper() and all(map(_is_type, ast.walk(value)))
    return False


def _is_type(node: ast.AST) -> bool:
    return isinstance(node, TYPE_NODES) or (isinstance(node, ast.Constant) and node.value in (None, ...))


def _for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _changes(node: ast.AST, default: bool) -> Iterator[tuple[str, Change]]:
    for kind, rule in RULES.items():
        for change in rule(node):
            yield kind, change
    if default and isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield "default", (node, repr(f"{node.value}x"))


def _compared(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            other = copy.deepcopy(node)
            other.ops[index] = COMPARED[type(op)]()
            yield node, f"({ast.unparse(other)})"


def _computed(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.BinOp | ast.AugAssign) or type(node.op) not in COMPUTED:
        return
    parts = [node.left, node.right] if isinstance(node, ast.BinOp) else [node.value]
    if any(isinstance(one, ast.JoinedStr) or _is_string(one) for one in parts):
        return  # a text that is put together
    other = copy.deepcopy(node)
    other.op = COMPUTED[type(node.op)]()
    yield node, ast.unparse(other) if isinstance(node, ast.AugAssign) else f"({ast.unparse(other)})"


def _joined(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp):
        op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield node, f"({ast.unparse(ast.BoolOp(op, node.values))})"


def _negated(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.If | ast.While | ast.IfExp) and not _for_types(node):
        yield node.test, f"(not ({ast.unparse(node.test)}))"


def _constants(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield node, repr(not node.value)
        elif isinstance(node.value, int | float):
            near = node.value + 1, node.value - 1
            yield from ((node, f"({one!r})") for one in near if one != node.value)  # 1e30 + 1 is 1e30


def _removed(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Expr(value=ast.Call() as call) if not _is_text_or_type(call):
            yield node, "pass"
        case ast.Expr(value=ast.Await()):
            yield node, "pass"
        case ast.AugAssign() | ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
            yield node, "pass"
        case ast.Assign(targets=targets) if all(
            isinstance(one, ast.Attribute | ast.Subscript) for one in targets
        ):
            yield node, "pass"


def _swapped(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Call) and len(node.args) > 1 and _names(node)[-1] not in NOT_SWAPPED:
        first, second, *more = node.args
        starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
        if not starred and ast.dump(first) != ast.dump(second):
            yield node, ast.unparse(ast.Call(node.func, [second, first, *more], node.keywords))


RULES: dict[str, Callable[[ast.AST], Iterator[Change]]] = {
    "comparison": _compared,
    "operator": _computed,
    "and/or": _joined,
    "negation": _negated,
    "constant": _constants,
    "removed": _removed,
    "arguments": _swapped,
}


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _names(call: ast.Call) -> list[str]:
    """The names ["a", "b"] of `a.b()`, in lower case. Leading underscores are removed except from the last
    name."""
    *owners, last = ast.unparse(call.func).split(".")
    return [*(owner.lower().strip("_") for owner in owners), last]


def _short(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."

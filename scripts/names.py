"""Finds names that say nothing: function words, bare participles and words that only point at something.

    python -m scripts.names             counts of each room, and every interface that breaks the rule
    python -m scripts.names --check     exit code 1 where the rule is broken, or a count of locals grew
    python -m scripts.names --write     store the counts of locals, which may only fall
    python -m scripts.names --locals ROOM    every local name that the count of a room has
    python -m scripts.names --measure NAME=FOLDER ...    the same list on other packages

An interface is a parameter, an attribute, a function, a class or a module. None may be such a word. Names of
local variables are counted by room: `scripts/names.json` has the highest count that each room may have.
The first sentence of a docstring is whole: it does not begin with "Of", "By", "As" or another word that leans
on the line before it. These are counted in the same way.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "moesaic"
COUNTS = Path(__file__).with_suffix(".json")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTION_WORDS = _words(
    """
    about above across after afterwards again against ago all alone along already also although always
    am amid among an and another any anybody anyone anything anywhere apart are around as aside at away
    back be became because become been before beforehand behind being below beneath beside besides
    between beyond both but by came can cannot come comes could did do does doing down during each
    earlier early either else elsewhere enough especially even ever every everybody everyone everything
    everywhere except few fewer for former forth from further furthermore had has have having he hence
    her here hereby hers herself him himself his how however if in inside instead into is it its itself
    just lately later latter less lest like likewise mainly many may maybe me meanwhile merely might
    mine more moreover most mostly much must my myself namely near nearby nearly neither never
    nevertheless no nobody none nor not nothing nowhere of off often oftentimes on once one ones oneself
    only onto or other others otherwise ought our ours ourselves out outside over own per perhaps quite
    rather really regardless rest same several shall she should since so some somebody somehow someone
    something sometime sometimes somewhere soon still such than that the their theirs them themselves
    then thence there thereafter thereby therefore these they this those though through throughout thus
    till to together too toward towards twice two under underneath unless unlike until up upon us very
    was we well were what whatever when whence whenever where whereas whereby wherever whether which
    whichever while who whoever whole wholly whom whose why will with within without would yet you your
    yours yourself
    """
)
"""English words that connect or point at something. `now` is not among them: it is a clock's reading."""

POINTERS = _words(
    """
    pays holds knows owes goes gives takes makes says gets stands belongs matters
    """
)
"""Verbs that stand where a noun or a predicate (`is_`, `has_`, `can_`) belongs."""

IRREGULAR = _words(
    """
    become begun bent bitten bought brought broken built burnt caught chosen dealt done drawn driven
    eaten fallen felt forgiven forgotten fought found frozen given gone gotten grown had heard held kept
    known laid led lent lost made meant met overtaken paid proven ridden risen said seen sent shaken
    shown shut slept sold spent spoken spun stolen stood stuck struck sunk sworn taken taught thought
    thrown told torn understood undone unseen unsent unknown unheard upheld withdrawn withheld woken won
    worn woven written unwritten
    """
)
NO_PARTICIPLES = _words(
    """
    bed bleed breed creed deed embed exceed feed greed indeed led need proceed red reed seed shed speed
    succeed weed
    """
)
"""Words that end in "ed" and are verbs or nouns. `hidden` states are a term of the field."""

PREFIXES = frozenset(("is", "has", "can", "on", "was", "did", "should", "must", "may"))
"""First words of predicates and callbacks. A participle says something behind them: `is_closed`."""

ALLOWED = frozenset(("all_to_all", "out", "unembed"))
"""Terms of the field that are made of such words. torch and NumPy call the array for a result `out`."""
KEPT: dict[str, str] = {
    "commands/client_options.py: once": "the flag --once of `moesaic top`",
    "commands/model_options.py: against": "the flag --against of `moesaic verify`",
    "commands/schedule_curves.py: shared": "a field of `moesaic doctor --json`",
    "commands/top_view.py: suspected": "a field of `moesaic top --json`, and of the status",
    "commands/top_view.py: watched": "a field of `moesaic top --json`, and of the status",
    "jobs/batch/show.py: completed": "a field of `moesaic run-batch --json`",
    "jobs/batch/show.py: done_before": "a field of `moesaic run-batch --json`",
    "jobs/batch/show.py: failed": "a field of `moesaic run-batch --json`",
    "jobs/batch/show.py: failed_before": "a field of `moesaic run-batch --json`",
    "jobs/batch/show.py: interrupted_by": "a field of `moesaic run-batch --json`",
    "jobs/batch/show.py: unfinished": "a field of `moesaic run-batch --json`",
    "jobs/profiling/run.py: not_counted": "a field of `moesaic profile --json`",
    "jobs/profiling/run.py: shortened": "a field of `moesaic profile --json`",
    "planning/sim/figures.py: completed": "a field of `moesaic simulate --json`",
    "planning/sim/scenario.py: at": "a field of a scenario's table [[faults]]",
    "planning/sim/scenario.py: back": "a field of a scenario's table [[faults]]",
    "planning/sim/scenario.py: shuffled": "a field of a scenario's table [routing]",
    "cluster/member.py: STOPPED": "a stage of the status, where it is written `stopped`",
    "config/cluster.py: paced": "the flag --paced",
    "config/expert_server.py: joined": "a field of the JSON on an expert server's command line",
    "config/expert_server.py: paced": "the flag --paced, in the JSON on an expert server's command line",
    "config/worker.py: beside": "a field of the JSON on a worker's command line",
    "config/worker.py: paced": "the flag --paced, in the JSON on a worker's command line",
    "config/worker.py: supervised": "a field of the JSON on a worker's command line",
    "policy/fleet/model_pool.py: LOADED": "a state of /v1/models, where it is written `loaded`",
    "policy/fleet/model_pool.py: UNLOADED": "a state of /v1/models, where it is written `unloaded`",
    "server/front/status.py: created": "a field of /v1/models",
    "server/front/status.py: failed": "a field of /v1/models",
    "server/front/status.py: owned_by": "a field of /v1/models",
    "server/openai_responses/body.py: parsed": "a field of requests to /v1/responses",
    "server/openai_responses/objects.py: completed_at": "a field of answers of /v1/responses",
    "server/openai_responses/objects.py: created_at": "a field of answers of /v1/responses",
    "server/responses.py: Detokenized": "the name of a schema in /openapi.json",
    "server/responses.py: Tokenized": "the name of a schema in /openapi.json",
    "server/responses.py: created": "a field of answers in OpenAI's form",
    "server/responses.py: owned_by": "a field of answers of /v1/models",
    "core/cluster_status.py: suspected": "a field of the status, as JSON",
    "core/cluster_status.py: held": "a field of the status, as JSON",
    "core/cluster_status.py: one": "a field of the status, as JSON",
    "core/cluster_status.py: other": "a field of the status, as JSON",
    "core/cluster_status.py: most": "a field of the status, as JSON",
    "core/cluster_status.py: what": "a field of the status, as JSON",
    "core/cluster_status.py: paced": "a field of the status, as JSON",
    "core/cluster_status.py: watched": "a field of the status, as JSON",
    "core/cluster_status.py: killed": "a field of the status, as JSON",
    "core/metrics.py: chosen": "a field of the live view's events",
    "core/request.py: penalised": "a public property of SamplingParams",
    "core/request.py: finished": "a public property of RequestOutput",
    "core/structured_outputs.py: around": "a field of structured_outputs in requests",
    "core/tables.py: after": "an array of the tables' file",
    "policy/scheduling/sequence.py: FINISHED": "the name of this stage in vLLM and SGLang",
    "policy/offloading/advice.py: streamed": "a field of by_batch in the plan, as JSON",
    "policy/offloading/policies.py: unfilled": "a field of the workload in the plan, as JSON",
    "policy/placement/routing_prediction.py: both": "a field of profile show, as JSON",
    "policy/placement/routing_prediction.py: most": "a field of profile show, as JSON",
    "policy/placement/routing_statistics.py: repeated": "a field of profile show, as JSON",
}
"""Interfaces that keep their names, as "cluster/x.py: lost": the reason. Others see these names: they are
flags, fields of a file or of an answer, or methods that a library calls."""
OPERAND = "other"
"""The second operand of a special method such as `__eq__`."""

FRAGMENT = re.compile(
    r"(?:Of|By|That of|Those of|As|In|Such as|See|With|Without|For|To|From|And|But|Its|Their|One|None of)\b"
)
"""How a docstring begins that leans on the line before it."""


def says_nothing(name: str) -> bool:
    """Whether all words of a name are function words, participles or pointers.

    >>> [says_nothing(name) for name in ("held", "before_late", "held_rows", "_other", "rows", "is_closed")]
    [True, False, False, True, False, False]
    """
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+", name)]
    if name.startswith("__") or (len(words) > 1 and words[0] in PREFIXES and is_participle(words[1])):
        return False
    return bool(words) and any(len(word) > 1 for word in words) and all(map(_says_nothing, words))


def _says_nothing(word: str) -> bool:
    return word in FUNCTION_WORDS or word in POINTERS or is_participle(word)


def is_participle(word: str) -> bool:
    """Whether a word has the form of a past participle, as "sent" and "loaded"."""
    return word in IRREGULAR or (word.endswith("ed") and len(word) > 3 and word not in NO_PARTICIPLES)


@dataclass(frozen=True)
class Bound:
    """A name where it is bound."""

    kind: str
    """parameter, attribute, function, class, module or local."""
    name: str
    line: int


def bound_names(tree: ast.Module) -> Iterator[Bound]:
    """Every name that a module binds. The special names of Python (`__init__`) are none."""
    yield from _bound(tree, in_class=False, in_function=False)


def _bound(node: ast.AST, in_class: bool, in_function: bool) -> Iterator[Bound]:
    for child in ast.iter_child_nodes(node):
        yield from _names_of(child, in_class, in_function)
        inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        new_class = isinstance(child, ast.ClassDef)
        yield from _bound(
            child, new_class or (in_class and not inside), (in_function or inside) and not new_class
        )


def _names_of(node: ast.AST, in_class: bool, in_function: bool) -> Iterator[Bound]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            special = name.startswith("__") and name.endswith("__")
            if not special:
                yield Bound("function", name, node.lineno)
            yield from _parameters(node.args, special)
        case ast.Lambda(args=arguments):
            for parameter in _parameters(arguments, False):
                yield Bound("local", parameter.name, parameter.line)
        case ast.ClassDef(name=name):
            yield Bound("class", name, node.lineno)
        case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
            yield Bound("attribute", name, node.lineno)
        case ast.Name(id=name, ctx=ast.Store()):
            yield Bound("local" if in_function or not in_class else "attribute", name, node.lineno)


def _parameters(arguments: ast.arguments, special: bool) -> Iterator[Bound]:
    every = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    for argument in filter(None, every):
        if argument.arg not in ("self", "cls") and not (special and argument.arg == OPERAND):
            yield Bound("parameter", argument.arg, argument.lineno)


def fragments(tree: ast.Module) -> list[tuple[int, str]]:
    """The docstrings, also those of attributes, that begin as fragments: line and first words."""
    texts = [
        (node.lineno, node.value.value.strip())
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    return [(line, text.partition("\n")[0]) for line, text in texts if FRAGMENT.match(text)]


@dataclass
class Room:
    """What one folder of a package binds."""

    names: int = 0
    """All bound names, with repetitions."""
    participle_functions: int = 0
    """Functions whose first word is a participle, as in `moved_rows`: a function is a verb and its object."""
    interfaces: list[str] = field(default_factory=list)
    locals: list[str] = field(default_factory=list)
    fragments: list[str] = field(default_factory=list)


def read_rooms(package: Path) -> dict[str, Room]:
    """What each folder directly in `package` binds. Modules in `package` itself are the room "."."""
    rooms: dict[str, Room] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).parts
        if any(part in ("tests", "_tests") for part in parts):
            continue
        room = rooms.setdefault(parts[0] if len(parts) > 1 else ".", Room())
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except SyntaxError:
            continue
        where = path.relative_to(package).as_posix()
        if path.stem != "__init__" and says_nothing(path.stem):
            room.interfaces.append(f"{where}: module {path.stem}")
        for bound in bound_names(tree):
            room.names += 1
            if bound.kind == "function":
                first = bound.name.strip("_").partition("_")[0]
                room.participle_functions += is_participle(first) and not says_nothing(bound.name)
            kept = bound.name.strip("_") in ALLOWED or f"{where}: {bound.name}" in KEPT
            if says_nothing(bound.name) and not kept:
                lines = room.locals if bound.kind == "local" else room.interfaces
                lines.append(f"{where}:{bound.line}: {bound.kind} {bound.name}")
        room.fragments += [f"{where}:{line}: docstring {text!r}" for line, text in fragments(tree)]
    return rooms


def counts(rooms: dict[str, Room]) -> dict[str, dict[str, int]]:
    """Room -> what may only fall."""
    return {
        name: {
            "interfaces": len(room.interfaces),
            "locals": len(room.locals),
            "participle_functions": room.participle_functions,
            "fragments": len(room.fragments),
        }
        for name, room in rooms.items()
    }


def problems(rooms: dict[str, Room], allowed: dict[str, dict[str, int]]) -> Iterator[str]:
    """A line for each interface that says nothing, and for each count that grew."""
    for name, room in rooms.items():
        for kind, count in counts({name: room})[name].items():
            most = allowed.get(name, {}).get(kind, 0)
            if count > most:
                yield f"{name}: {count} {kind}; allowed: {most} (python -m scripts.names --locals {name})"


def _show(rooms: Iterable[tuple[str, Room]]) -> None:
    columns = ("names", "interfaces", "locals", "share", "participle functions", "fragments")
    print(f"{'room':12}", *(f"{column:>{len(column) + 2}}" for column in columns))
    total = Counter[str]()
    for name, room in rooms:
        row = Counter(
            names=room.names,
            interfaces=len(room.interfaces),
            locals=len(room.locals),
            participles=room.participle_functions,
            fragments=len(room.fragments),
        )
        total += row
        _show_row(name, row)
    _show_row("all", total)


def _show_row(name: str, row: Counter[str]) -> None:
    share = (row["interfaces"] + row["locals"]) / max(1, row["names"])
    print(
        f"{name:12} {row['names']:7} {row['interfaces']:12} {row['locals']:8} {share:7.2%} "
        f"{row['participles']:22} {row['fragments']:11}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 when a rule is broken")
    parser.add_argument("--write", action="store_true", help="store today's counts")
    parser.add_argument("--locals", metavar="ROOM", help="list the local names of a room that say nothing")
    parser.add_argument("--measure", nargs="+", metavar="NAME=FOLDER", help="measure other packages")
    arguments = parser.parse_args()
    if arguments.measure:
        for item in arguments.measure:
            name, _, folder = item.partition("=")
            print(name)
            _show(read_rooms(Path(folder)).items())
        return 0
    rooms = read_rooms(PACKAGE)
    if arguments.write:
        COUNTS.write_text(json.dumps(counts(rooms), indent=1) + "\n")
        return 0
    if arguments.locals:
        room = rooms[arguments.locals]
        print(*room.interfaces, *room.locals, *room.fragments, sep="\n")
        return 0
    broken = list(problems(rooms, json.loads(COUNTS.read_text())))
    if not arguments.check:
        _show(rooms.items())
    print(*broken, sep="\n", file=sys.stderr)
    return 1 if arguments.check and broken else 0


if __name__ == "__main__":
    sys.exit(main())

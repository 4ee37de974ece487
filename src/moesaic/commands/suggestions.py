"""What to say about a flag that a command does not have."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence

from cyclopts import App

FOREIGN_FLAGS = {
    **dict.fromkeys(("--uvicorn-log-level", "--enable-log-requests"), "--access-log"),
    **dict.fromkeys(("--verbose", "--log-verbosity"), "--log-level"),
    **dict.fromkeys(("--ctx-size", "--context-length", "--max-seq-len", "--session-len"), "--max-model-len"),
    **dict.fromkeys(("--max-running-requests", "--max-batch-size", "--parallel"), "--max-num-seqs"),
    **dict.fromkeys(
        ("--gpu-memory-utilization", "--mem-fraction-static", "--memory-ratio"), "--kv-cache-memory"
    ),
    **dict.fromkeys(("--tp", "--tp-size", "--tensor-parallel"), "--tensor-parallel-size"),
    **dict.fromkeys(("--dp", "--dp-size", "--data-parallel"), "--data-parallel-size"),
    **dict.fromkeys(("--ep", "--ep-size", "--expert-parallel-size"), "--enable-expert-parallel"),
    **dict.fromkeys(("--model-path", "--model-name-or-path"), "--model"),
    **dict.fromkeys(("--models-max",), "--max-loaded"),
    **dict.fromkeys(("--sleep-idle-seconds", "--ttl"), "--idle-unload"),
    **dict.fromkeys(("--alias", "--model-name"), "--served-model-name"),
    **dict.fromkeys(("--chunked-prefill-size", "--ubatch-size", "--n-batch"), "--max-num-batched-tokens"),
    **dict.fromkeys(("--cpu-offload-gb", "--n-gpu-layers", "--n-cpu-moe"), "--fast-memory"),
    **dict.fromkeys(("--cache-type-k", "--cache-type-v", "--kv-cache-type"), "--kv-cache-dtype"),
    **dict.fromkeys(("--enable-eplb", "--ep-num-redundant-experts"), "--redundant-experts"),
    **dict.fromkeys(("--cors-allow-origins", "--cors-origins"), "--allowed-origins"),
}
"""Flags of other programs and the flags that do this here."""
SIMILARITY = 0.8
"""Least likeness of a flag that is taken for a typing mistake. Less gives far-fetched answers."""


def suggest(flag: str, command: Sequence[str], app: App) -> str:
    """A sentence about what `flag` may have meant, or an empty text. command: such as ("bench", "serve")."""
    flags = dict(_flags(app, ()))
    name = flag.partition("=")[0]
    own_flags = flags.get(tuple(command), frozenset())
    known_flags = own_flags.union(FOREIGN_FLAGS, *flags.values())
    # A flag of this command is the likelier one to have been meant.
    similar_flags = difflib.get_close_matches(
        name, sorted(own_flags), 1, SIMILARITY
    ) or difflib.get_close_matches(name, sorted(known_flags), 1, SIMILARITY)
    if not similar_flags:
        return ""
    proposal = (
        FOREIGN_FLAGS.get(similar_flags[0], similar_flags[0])
        if similar_flags[0] not in own_flags
        else similar_flags[0]
    )
    return f"Did you mean {proposal}?" if proposal in own_flags else _name_other_commands(proposal, flags)


def flags_of(commands: Sequence[str], app: App) -> frozenset[str]:
    """Every flag of these commands of `app`."""
    return frozenset().union(*(names for name in commands for _, names in _flags(app[name], (name,))))


def _name_other_commands(flag: str, flags: Mapping[tuple[str, ...], frozenset[str]]) -> str:
    """Which commands have `flag`."""
    command_names = [" ".join(command) for command, names in flags.items() if flag in names]
    return f"{flag} is a flag of {', '.join(command_names)}." if command_names else ""


def _flags(app: App, command: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], frozenset[str]]]:
    """Every command with the names of its flags."""
    if app.default_command is not None:
        arguments = app.assemble_argument_collection()
        yield command, frozenset(name for argument in arguments if argument.parse for name in argument.names)
    for name in app:
        if not name.startswith("-"):
            yield from _flags(app[name], (*command, name))

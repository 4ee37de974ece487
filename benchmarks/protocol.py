"""How `peers.py` and its child processes talk: JSON lines, orders on stdin and answers on stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

Order = dict[str, Any]
"""{"do": "run", "prompts": [[token ids]], "new": number of tokens for each} and settings of one engine."""
Answer = dict[str, Any]
"""{"prefill_s", "decode_s", "tokens": [[token ids]]}"""

# Libraries of some engines look for optional packages, and would find a script of that name in this folder.
sys.path[:] = [entry for entry in sys.path if Path(entry).absolute() != Path(__file__).absolute().parent]


def private_stdout() -> TextIO:
    """The stream for answers. Whatever else this process prints goes to stderr from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(answers: TextIO, obey: Callable[[Order], Answer]) -> None:
    """Answer one order after the other, until stdin ends."""
    for line in sys.stdin:
        print(json.dumps(obey(json.loads(line))), file=answers, flush=True)


def timed(started: float, first: float, ended: float, tokens: list[list[int]]) -> Answer:
    """The answer to a run, from its three times and the tokens of each prompt."""
    return {"prefill_s": first - started, "decode_s": ended - first, "tokens": tokens}

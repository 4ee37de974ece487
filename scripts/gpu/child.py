"""A child process of `make gpu`: tries the cases that stdin names, and answers each with a line of JSON."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping

from scripts.gpu.plan import Found, Part, Work, problem


def attempt(part: Part, case: str, work: Work) -> Found:
    """The result of a case, or the error that it ended with."""
    try:
        return part.run(work, case)
    except Exception as error:
        traceback.print_exc()
        return problem(f"{type(error).__name__}: {error}")


def main(parts: Mapping[str, Part]) -> int:
    """Argument: the work, as JSON. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    work = Work(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        order = json.loads(line)
        found = attempt(parts[order["part"]], order["case"], work)
        print(json.dumps(found), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    from scripts.gpu.parts import PARTS

    raise SystemExit(main(PARTS))

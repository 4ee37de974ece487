"""Checks a commit message, as the commit-msg hook that `make setup` installs.

    python scripts/commit_message.py FILE

The subject begins with a verb in the imperative, as in "Answer 503 while the model loads". It has at most 72
characters and no full stop at its end. The second line is blank. If not, the exit code is 1, and a line on
stderr says why.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LONGEST = 72
BY_GIT = re.compile(
    r"(fixup|squash|amend)! |Merge (branch|branches|commit|pull request|remote-tracking|tag) |Revert \""
)
"""Matches subjects that git or a forge writes. They are accepted."""
SCISSORS = re.compile(r"^# -+ >8 -+$", re.MULTILINE)
"""Below this line of a commit message git shows the change."""
NO_VERBS = re.compile(
    r"an?|the|this|that|these|those|its?|our|we|in|of|on|under|with|how|what|when|where|which|who|why|"
    r"and|all|any|both|each|every|few|fewer|many|more|most|new|no|now|one|only|several|some|two"
)
VERBS = re.compile(
    r"(em)?bed|bleed|breed|exceed|feed|heed|need|proceed|(re)?seed|shed|shred|speed|succeed|weed|"
    r"bring|fling|ping|ring|sing|sling|spring|sting|string|swing|wring|alias|bias|canvas|focus"
)
"""Verbs in the imperative whose endings look like another form."""


def complaint(message: str) -> str | None:
    """What is wrong with `message`, in one line. None if nothing is wrong, or if git wrote it."""
    written = SCISSORS.split(message)[0]
    lines = [line.rstrip() for line in written.splitlines() if not line.startswith("#")]
    while lines and not lines[0]:
        del lines[0]
    if not lines or BY_GIT.match(lines[0]):
        return None
    subject = lines[0]
    if len(subject) > LONGEST:
        return f"subject: got {len(subject)} characters; allowed: at most {LONGEST}"
    if subject.endswith("."):
        return "subject: ends with a full stop; allowed: none at the end"
    first = subject.split()[0]
    if wrong := _not_imperative(first):
        return f"subject: begins with {first!r}, {wrong}; allowed: a verb in the imperative, as in 'Add'"
    if len(lines) > 1 and lines[1]:
        return f"second line: got {lines[1]!r}; allowed: a blank line between subject and body"
    return None


def _not_imperative(word: str) -> str | None:
    """Why `word` cannot begin an imperative, judged by its ending and a list. A noun such as 'Test' passes as
    a verb."""
    plain = word.lower().strip("`'\"*")
    if plain.endswith(":"):
        return "a prefix"
    if NO_VERBS.fullmatch(plain):
        return "which is no verb"
    if VERBS.fullmatch(plain) or plain.endswith("ss"):
        return None
    ending = next((ending for ending in ("ing", "ed", "s") if plain.endswith(ending)), None)
    return f"a form in -{ending}" if ending else None


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: commit_message.py FILE", file=sys.stderr)
        return 2
    found = complaint(Path(arguments[0]).read_text(encoding="utf-8"))
    if found:
        print(f"commit message: {found}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

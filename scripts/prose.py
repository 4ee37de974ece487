"""Measures the sentences of the project's Markdown files and checks their links.

    python scripts/prose.py            each file's mean sentence length, and its sentences over 30 words
    python scripts/prose.py --check    exit code 1 when a rule of docs/how-we-write.md is broken

Code blocks, tables and headings are no sentences. Lab notes (docs/lab) may have long sentences, but no dead
links.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs")
"""The files, or folders of files, whose sentences are limited."""
LAB = "docs/lab"
LONGEST_SENTENCE = 30
README_MEAN = 14.0
LINES = {"README.md": 100, "ARCHITECTURE.md": 120, "docs/benchmarks.md": 150}
ROW_WORDS = {"ARCHITECTURE.md": 20}
"""Page -> the most words of a row of its tables."""
CHANGELOG_WIDTH = 100
SKIPPED = ("build", "dist", "shared", "node_modules")

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1[^\n]*$", re.MULTILINE | re.DOTALL)
_TABLE_OR_HEADING = re.compile(r"^ *(\||#|<).*$", re.MULTILINE)
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?= *(?:[-*+]|\d+\.) )")
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]*)\)")
_SOURCE = re.compile(r'\bsrc="([^"]+)"')
_END = re.compile(r"(?<![ei]\.[ge]\.)(?<! al\.)(?<=[.!?])[\"')*]*\s+")
_HEADING = re.compile(r"^#+ +(.*?) *$", re.MULTILINE)


def files(root: Path = ROOT) -> list[Path]:
    """Every Markdown file of the project, without those of virtual environments and builds."""

    def ours(path: Path) -> bool:
        folders = path.relative_to(root).parts[:-1]
        return not any(name.startswith(".") or name in SKIPPED for name in folders)

    return sorted(path for path in root.rglob("*.md") if ours(path))


def sentences(text: str) -> list[str]:
    """The sentences of a Markdown text. A list item is one at least, an inline code span is one word.

    Example: "It starts. Then `a b` runs." -> ["It starts.", "Then Code runs."]
    """
    text = _TABLE_OR_HEADING.sub("", _FENCE.sub("", text))
    text = _LINK.sub(r"\1", _IMAGE.sub("", text))
    text = re.sub(r"`[^`]+`", "Code", text)
    found: list[str] = []
    for paragraph in _PARAGRAPH.split(text):
        words = re.sub(r"^ *([-*+]|\d+\.) +", "", " ".join(paragraph.split()))
        found += [part for part in _END.split(words) if length(part)]
    return found


def length(sentence: str) -> int:
    """The number of words of a sentence. A word has a letter or a digit."""
    return sum(any(letter.isalnum() for letter in word) for word in sentence.split())


def mean(found: list[str]) -> float:
    """Mean number of words of a sentence. 0 if there is no sentence."""
    return sum(map(length, found)) / len(found) if found else 0.0


def anchors(text: str) -> set[str]:
    """The fragments that GitHub gives to the headings of a page: "## Two words" -> "two-words"."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        plain = _LINK.sub(r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        copies = sum(1 for known in found if re.fullmatch(re.escape(slug) + r"(-\d+)?", known))
        found.add(f"{slug}-{copies}" if copies else slug)
    return found


def dead_links(file: Path) -> list[str]:
    """The relative links of a page that lead to no file or to no heading."""
    text = _FENCE.sub("", file.read_text(encoding="utf-8"))
    targets = [target for _, target in _LINK.findall(text)] + _SOURCE.findall(text)
    found: list[str] = []
    for target in targets:
        name, _, fragment = target.partition("#")
        page = file.parent / name if name else file
        if re.match(r"[a-z]+:", target):
            continue
        if not page.exists():
            found.append(f"{target}: there is no such file")
        elif fragment and fragment not in anchors(page.read_text(encoding="utf-8")):
            found.append(f"{target}: the page has no such heading")
    return found


def problems(root: Path = ROOT) -> Iterator[str]:
    """A line for everything that breaks a rule."""
    for file in files(root):
        name = file.relative_to(root).as_posix()
        text = file.read_text(encoding="utf-8")
        yield from (f"{name}: link {dead}" for dead in dead_links(file))
        lines = text.splitlines()
        if len(lines) > LINES.get(name, len(lines)):
            yield f"{name}: {len(lines)} lines; allowed: {LINES[name]}"
        rows = [line for line in lines if line.startswith("|") and length(line) > ROW_WORDS.get(name, 1000)]
        yield from (f"{name}: a row of {length(row)} words: {row}" for row in rows)
        if name == "CHANGELOG.md":
            wide = [line for line in lines if len(line) > CHANGELOG_WIDTH]
            yield from (f"{name}: a line of {len(line)} characters: {line}" for line in wide)
        if name.startswith(PAGES) and not name.startswith(LAB):
            found = sentences(text)
            long = [sentence for sentence in found if length(sentence) > LONGEST_SENTENCE]
            yield from (f"{name}: a sentence of {length(sentence)} words: {sentence}" for sentence in long)
            if name == "README.md" and mean(found) > README_MEAN:
                yield f"{name}: sentences have {mean(found):.1f} words on average; allowed: {README_MEAN:g}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 when a rule is broken")
    check: bool = parser.parse_args().check
    broken = list(problems())
    if not check:
        for file in files():
            found = sentences(file.read_text(encoding="utf-8"))
            long = sum(length(sentence) > LONGEST_SENTENCE for sentence in found)
            print(f"{mean(found):5.1f} words a sentence, {long:3d} over 30  {file.relative_to(ROOT)}")
    for line in broken:
        print(line, file=sys.stderr)
    return 1 if check and broken else 0


if __name__ == "__main__":
    sys.exit(main())

"""Reads the demo model's three text domains and splits off held-out documents.

Every domain becomes a list of documents. The split depends only on the
documents, the requested size and a fixed seed, so that an evaluation run with
the same arguments rebuilds exactly the texts that training never saw.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

SPLIT_SEED = 20240
SKIPPED_PACKAGES = frozenset(
    {
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "site-packages",
        "dist-packages",
        "ensurepip",
        "turtledemo",
        "encodings",
        "pydoc_data",
    }
)
LARGEST_SOURCE_FILE = 110_000
HEADINGS = frozenset({"h1", "h2", "h3", "h4", "h5"})
OPAQUE = frozenset({"pre", "table", "script", "style", "head", "nav", "sup"})
SECTION_NUMBER = re.compile(r"^(?:Chapter|Appendix)?\s*[\dA-Z]{0,2}(?:\.\d+)*\.\s+|^\d+(?:\.\d+)*\s+")
CALCULATOR_NOTE = re.compile(r"<<.*?>>")


@dataclass(frozen=True)
class Document:
    """A plain text with questions about it that the model is not to answer."""

    name: str
    text: str
    questions: tuple[str, ...] = ()


@dataclass
class Domain:
    """A named set of documents, split into training and held-out parts."""

    name: str
    train: list[Document]
    heldout: list[Document]
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def heldout_text(self) -> str:
        """The held-out documents as one text, in their fixed order."""
        return "\n\n".join(document.text for document in self.heldout)


@dataclass(frozen=True)
class TextArguments:
    """Where the three domains come from and how much of each is used."""

    maths: Path
    prose: Sequence[Path]
    stdlib: Path
    domain_bytes: int
    heldout_bytes: int


def sha256_of(texts: Iterable[str]) -> str:
    """The SHA-256 of the texts' UTF-8 bytes, separated by NUL bytes."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8"))
        digest.update(b"\0")
    return digest.hexdigest()


def split_documents(name: str, documents: list[Document], heldout_bytes: int) -> Domain:
    """Shuffles the documents with the fixed seed and holds out the first ones."""
    order = sorted(documents, key=lambda document: document.name)
    random.Random(f"{SPLIT_SEED}:{name}").shuffle(order)
    size = 0
    cut = 0
    while cut < len(order) and size < heldout_bytes:
        size += len(order[cut].text.encode("utf-8"))
        cut += 1
    return Domain(name=name, train=order[cut:], heldout=order[:cut])


def read_maths(path: Path) -> list[Document]:
    """Reads question/answer rows and drops the answers' calculator notes."""
    documents = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        row = json.loads(line)
        question = str(row["question"]).strip()
        answer = CALCULATOR_NOTE.sub("", str(row["answer"])).strip()
        documents.append(
            Document(
                name=f"row{number:06d}",
                text=f"Question: {question}\nAnswer: {answer}",
                questions=(question,),
            )
        )
    return documents


def source_files(stdlib: Path, limit: int) -> list[tuple[str, str]]:
    """Picks library modules in a seeded order until `limit` bytes are reached."""
    paths = sorted(
        path
        for path in stdlib.rglob("*.py")
        if not SKIPPED_PACKAGES.intersection(path.relative_to(stdlib).parts)
        and not path.name.startswith("_sysconfigdata")
        and 400 <= path.stat().st_size <= LARGEST_SOURCE_FILE
    )
    random.Random(SPLIT_SEED).shuffle(paths)
    chosen: list[tuple[str, str]] = []
    total = 0
    for path in paths:
        if total >= limit:
            break
        text = path.read_text(encoding="utf-8", errors="replace").strip()
        total += len(text.encode("utf-8"))
        chosen.append((path.relative_to(stdlib).as_posix(), text))
    return chosen


def read_python(stdlib: Path, limit: int) -> list[Document]:
    """Reads the standard library's modules."""
    return [Document(name, text) for name, text in source_files(stdlib, limit)]


class ProseParser(HTMLParser):
    """Collects the headings and paragraphs of one HTML page."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[tuple[str, str]] = []
        self._opaque = 0
        self._kind = ""
        self._pieces: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Opens a block, or a part whose text is skipped."""
        if tag in OPAQUE:
            self._opaque += 1
        elif tag in HEADINGS or tag == "p" or (tag == "div" and ("class", "para") in attrs):
            self._close()
            self._kind = "heading" if tag in HEADINGS else "paragraph"

    def handle_endtag(self, tag: str) -> None:
        """Closes a block, or a part whose text is skipped."""
        if tag in OPAQUE:
            self._opaque = max(0, self._opaque - 1)
        elif tag in HEADINGS or tag in {"p", "div"}:
            self._close()

    def handle_data(self, data: str) -> None:
        """Keeps the text of the open block."""
        if self._kind and not self._opaque:
            self._pieces.append(data)

    def _close(self) -> None:
        text = " ".join("".join(self._pieces).replace("\u00b6", " ").split())
        if self._kind and text:
            self.blocks.append((self._kind, text))
        self._kind, self._pieces = "", []


def page_sections(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields each heading of a page with the paragraphs that follow it."""
    parser = ProseParser()
    parser.feed(page.read_text(encoding="utf-8", errors="replace"))
    heading: str | None = None
    paragraphs: list[str] = []
    for kind, text in parser.blocks:
        if kind == "paragraph":
            if len(text) >= 40:
                paragraphs.append(text)
            continue
        if heading and paragraphs:
            yield heading, paragraphs
        heading, paragraphs = SECTION_NUMBER.sub("", text).strip(" .:"), []
    if heading and paragraphs:
        yield heading, paragraphs


def read_prose(folders: Sequence[Path]) -> list[Document]:
    """Reads sections of English prose; a paragraph seen before is dropped."""
    documents = []
    seen: set[str] = set()
    for folder in folders:
        for page in sorted(path for path in folder.rglob("*.html") if path.is_file()):
            for number, (heading, found) in enumerate(page_sections(page)):
                fresh = [text for text in dict.fromkeys(found) if text not in seen]
                seen.update(fresh)
                if not fresh:
                    continue
                forms = ("Tell me about {}.", "What should I know about {}?", "What is {}?", "Explain {}.")
                documents.append(
                    Document(
                        name=f"{folder.name}/{page.relative_to(folder).as_posix()}/{number:04d}",
                        text=f"# {heading}\n\n" + "\n\n".join(fresh),
                        questions=tuple(form.format(heading) for form in forms),
                    )
                )
    return documents


def read_domains(arguments: TextArguments) -> list[Domain]:
    """Reads all three domains and splits each; the same arguments, the same split."""
    found = {
        "maths": read_maths(arguments.maths),
        "python": read_python(arguments.stdlib, arguments.domain_bytes),
        "prose": read_prose(arguments.prose),
    }
    domains = []
    for name, documents in found.items():
        domain = split_documents(name, documents, arguments.heldout_bytes)
        domain.sources = {
            "documents_sha256": sha256_of(document.text for document in documents),
            "heldout_sha256": hashlib.sha256(domain.heldout_text.encode("utf-8")).hexdigest(),
        }
        domains.append(domain)
    return domains


def default_stdlib() -> Path:
    """Where the running interpreter keeps its standard library."""
    return Path(sysconfig.get_path("stdlib"))

"""A GGUF file in a repository of a hub: `org/name:Q4_K_M`, as llama.cpp calls it, or `org/name:FILE.gguf`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from moesaic.core.errors import ConfigError
from moesaic.models.gguf import header
from moesaic.models.gguf.header import SPLIT, SUFFIX

NAME = re.compile(r"([\w.-]+/[\w.-]+):([^:]+)")
BESIDE = ("mmproj", "imatrix")
"""How names of files begin that are not a model of text. Repositories have them beside it."""
SHOWN = 8
"""Most names of files in a message."""
FIRST_RANGE = 1 << 20
"""Bytes of the first range."""
LARGEST_RANGE = 4 << 20
"""Most bytes of a range, unless a list in the header is longer. So few bytes of weights come with it."""
LONGEST_HEADER = 256 << 20
"""Longest header that is read. Those of models with 200,000 tokens have about 10 MB."""

Fetch = Callable[[int, int], tuple[bytes, int]]
"""Bytes [begin, end) of a file, or those that it has of them, and the bytes of the whole file."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository, or the first of several."""

    repository: str
    selector: str
    """The name of the file, or a word in it that is like Q4_K_M. Empty: the only model of the repository."""

    @property
    def name(self) -> str:
        """How a model is called that is this file."""
        return f"{self.repository}:{self.selector}"

    def files(self, names: Collection[str]) -> list[str]:
        """The files of the model in order, of all files of the repository.

        Raises ConfigError if no model fits, or several do.
        """
        candidates = sorted(_models(names))
        matches = [name for name in candidates if self._fits(name)]
        if len(matches) != 1:
            choices = matches if matches else candidates
            names_shown = ", ".join(choices[:SHOWN]) + (", .." if len(choices) > SHOWN else "")
            form = "" if self.selector else f" as {self.repository}:FILE"
            allowed_names = (
                f"one of its files{form}: {names_shown}" if choices else "a repository with GGUF files"
            )
            raise ConfigError.field("model", self.name if self.selector else self.repository, allowed_names)
        split = SPLIT.fullmatch(matches[0])
        if split is None:
            return matches
        return [
            f"{split[1]}-{part_number:05}-of-{split[3]}{SUFFIX}"
            for part_number in range(1, int(split[3]) + 1)
        ]

    def _fits(self, name: str) -> bool:
        if not self.selector or self.selector.endswith(SUFFIX):
            return self.selector in ("", name)
        split = SPLIT.fullmatch(name)
        stem = name.removesuffix(SUFFIX) if split is None else split[1]
        word = rf"(?:^|.*[-._/]){re.escape(self.selector)}(?:[-./].*)?"
        return re.fullmatch(word, stem, re.IGNORECASE) is not None


def parse_hub_file(model: str) -> HubFile | None:
    """The file that the name of a model stands for; None for all other names.

    >>> parse_hub_file("org/name:Q4_K_M")
    HubFile(repository='org/name', selector='Q4_K_M')
    """
    match = NAME.fullmatch(model)
    return None if match is None else HubFile(match[1], match[2])


def _models(names: Collection[str]) -> set[str]:
    """GGUF files with a model, of several that it is split over the first."""
    models = set()
    for name in names:
        split = SPLIT.fullmatch(name)
        is_later_part = split is not None and int(split[2]) != 1
        if name.endswith(SUFFIX) and not is_later_part and not name.rpartition("/")[2].startswith(BESIDE):
            models.add(name)
    return models


def read_header(fetch: Fetch) -> tuple[bytes, int]:
    """The header of a file that is somewhere else, and the bytes of the whole file.

    A header has the vocabulary in it and takes megabytes, and nothing at its beginning says how many. So
    ranges grow until the header is whole.

    Raises ValueError for a header that is damaged or longer than LONGEST_HEADER, and if the file changes
    meanwhile.
    """
    data, size = fetch(0, FIRST_RANGE)
    if not size:
        raise ValueError("not a GGUF file (it is empty)")
    while (least := header.length(data, size)) > len(data):
        if least > LONGEST_HEADER:
            raise ValueError(f"its header has {least} bytes or more; allowed: at most {LONGEST_HEADER}")
        end = min(max(least, len(data) + min(len(data), LARGEST_RANGE)), size, LONGEST_HEADER)
        more, now = fetch(len(data), end)
        if now != size:
            raise ValueError(f"it had {size} bytes and then {now}: it changed while its header was read")
        data += more
    return data[:least], size

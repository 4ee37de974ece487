"""Writes prompts for `moesaic quantize` from the demo model's texts.

calibrate.jsonl has documents that the model was trained on, evaluate.jsonl those that were held out. The
three domains take turns. The texts are chosen by the arguments of training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
from pathlib import Path

from demo_texts import Document, Domain, read_domains
from train_demo import add_text_arguments, text_arguments

SEED = 1
LONGEST = 2600
"""Letters of a prompt."""
ROWS = 6
"""Rows of maths in a prompt."""
SHORTEST = 200
"""Letters of a document that becomes a prompt."""


def maths(documents: list[Document], count: int) -> list[str]:
    """Several rows in each prompt."""
    return ["\n\n".join(one.text for one in documents[at * ROWS : (at + 1) * ROWS]) for at in range(count)]


def pieces(documents: list[Document], count: int) -> list[str]:
    """A piece of each document."""
    drawn = random.Random(SEED)
    found: list[str] = []
    for document in documents:
        if len(document.text) < SHORTEST or len(found) == count:
            continue
        more = len(document.text) - LONGEST
        begin = drawn.randrange(more) if more > 0 else 0
        found.append(document.text[begin : begin + LONGEST])
    return found


def prompts(domain: Domain, documents: list[Document], count: int) -> list[str]:
    """The prompts of one domain, as lines of a file."""
    texts = (maths if domain.name == "maths" else pieces)(documents, count)
    return [json.dumps({"text": text, "topic": domain.name}) for text in texts]


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_text_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, help="folder of the two files")
    parser.add_argument("--calibrate", type=int, default=64, help="prompts of each domain")
    parser.add_argument("--evaluate", type=int, default=24, help="prompts of each domain")
    options = parser.parse_args()
    domains = read_domains(text_arguments(options))
    for name, count in (("calibrate", options.calibrate), ("evaluate", options.evaluate)):
        trained = name == "calibrate"
        each = [prompts(one, one.train if trained else one.heldout, count) for one in domains]
        mixed = [line for turn in itertools.zip_longest(*each) for line in turn if line]
        (options.output / f"{name}.jsonl").write_text("\n".join(mixed) + "\n", encoding="utf-8")
        print(f"{name}.jsonl: {len(mixed)} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())

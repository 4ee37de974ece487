"""Writes the results in training/README.md from the files of a checkpoint.

    python training/write_results.py src/moesaic/demo
    python training/write_results.py src/moesaic/demo --check     # exit code 1 where the page says otherwise

The folder needs training.json, which train_demo.py wrote, and evaluation.json, which evaluate_demo.py wrote.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draw_skills import mean_distances, read_shares

PAGE = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- training/write_results.py wrote this -->", "<!-- end of what it wrote -->"
DOMAINS = {"maths": "maths", "python": "Python", "prose": "prose"}


def replace_results(page: str, folder: Path) -> str:
    """The page with the results of the checkpoint in `folder` between BEGIN and END."""
    run, measured = (
        json.loads((folder / name).read_text(encoding="utf-8"))
        for name in ("training.json", "evaluation.json")
    )
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise SystemExit(f"{PAGE.name}: got no place for results; allowed: one between {BEGIN} and {END}")
    before, _, rest = page.partition(BEGIN)
    parts = [_tell_run(run), *_tell_skills(measured, folder), *_tell_texts(measured, run)]
    return f"{before}{BEGIN}\n" + "\n\n".join(parts) + f"\n{END}{rest.partition(END)[2]}"


def _tell_run(run: Mapping[str, Any]) -> str:
    settings = run["settings"]
    return (
        f"It was trained for {run['seconds'] / 60:.0f} minutes on two CPU cores, {run['steps']:,} steps. "
        f"It saw {run['text_tokens']:,} tokens of text and {run['skill_tokens']:,} of chats.\n"
        f"Windows of text had {settings['length']} tokens and, in the last {settings['long_share']:.0%} of "
        f"the time, {2 * settings['length']:,}. `config.json` allows {run['shape']['positions']:,} "
        "positions, but nothing beyond was trained or measured."
    )


def _tell_skills(measured: Mapping[str, Any], folder: Path) -> Iterator[str]:
    yield "Held-out questions, answered greedily. An answer is exact if it is the right text, token by token:"
    rows = [
        (name, f"{row['questions']}", f"{row['exact']}", f"{row['share']:.1%}".replace("%", " %"))
        for name, row in measured["skills"].items()
    ]
    yield _table(("skill", "questions", "exact", "share"), rows)
    by_layer = mean_distances(read_shares(folder / "evaluation.json"))
    layers = [str(layer) for layer in range(len(by_layer))]
    yield (
        "Jensen-Shannon distance (root of the divergence in bits, from 0 to 1) between two skills' shares of "
        "the experts, averaged over all pairs of skills, beside two domains' of text:"
    )
    pairs = {"two skills": by_layer}
    for name, values in measured["routing"]["distances"].items():
        pairs["/".join(DOMAINS.get(part, part) for part in name.split("/"))] = values
    shown = [(name, *(f"{value:.3f}" for value in values)) for name, values in pairs.items()]
    yield _table(("pair", f"layer {layers[0]}", *layers[1:]), shown)
    total = len(by_layer) * len(next(iter(measured["skills"].values()))["experts"][0])
    yield (
        f"Over the three domains of text {measured['routing']['idle_experts']} of the {total} experts get "
        "less than a tenth of an even share."
    )


def _tell_texts(measured: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[str]:
    yield "Held-out text, next to `xz -9` (LZMA preset 9) on the very same bytes:"
    rows = [
        (
            DOMAINS.get(name, name),
            f"{row['bytes']:,}",
            f"{row['tokens']:,}",
            f"{row['bits_per_byte']:.3f}",
            f"{row['xz_bits_per_byte']:.3f}",
        )
        for name, row in measured["domains"].items()
    ]
    yield _table(("domain", "bytes", "tokens", "model, bits per byte", "`xz -9`, bits per byte"), rows)
    yield "SHA-256 of these texts, each document's UTF-8 bytes with a NUL byte after it:"
    hashes = [
        (DOMAINS.get(name, name), f"`{text['train_sha256']}`", f"`{text['heldout_sha256']}`")
        for name, text in run["texts"].items()
    ]
    yield _table(("text", "training documents", "held-out text"), hashes, ":---")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], columns: str = "---:") -> str:
    lines = [head, ["---", *[columns] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="its folder")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    page = PAGE.read_text(encoding="utf-8")
    after = replace_results(page, options.checkpoint)
    if after == page:
        return 0
    if options.check:
        print(f"{PAGE}: other results; run: python training/write_results.py {options.checkpoint}")
        return 1
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

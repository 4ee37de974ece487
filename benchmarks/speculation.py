"""What drafted tokens give: tokens/s with and without them, by acceptance, at several numbers of requests.

    python benchmarks/speculation.py demo
    python benchmarks/speculation.py /tmp/qwen --rounds 6 --new 64 --draft 4 --requests 1 8
    python benchmarks/speculation.py demo --edits      # n-grams on edits of code, in place of a known answer
    python benchmarks/speculation.py MODEL --prompts mt_bench.jsonl     # n-grams on answers in a chat
    python benchmarks/speculation.py MODEL --prompts mt_bench.jsonl --requests 8 --num-prompts 80

Engines of one model take turns in this process, so that a slow minute of the machine meets all of them. One
drafts nothing. The others draft tokens of the answers, which are known from a first run, and each token is
right with a given probability. Shown are medians over the rounds of the ratio to the engine without drafts,
their spread, and the acceptance that was counted. Every answer is compared with that of the first run.

--cpu counts the CPU time of this process instead of seconds, which other processes hardly change. Give it
--threads 1, since threads that wait count too.

--edits asks for a function to be written again with small changes. Its drafter is n-grams, as in `serve`.
--prompts asks what files ask, one chat for each prompt, and answers end where the model ends them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from moesaic import LLM, SamplingParams
from moesaic.core.speculation import SpeculativeConfig
from moesaic.core.tokens import IntArray
from moesaic.jobs.profiling import prompts as prompt_files

PROMPT = 64
"""Number of tokens of a prompt."""
CHANCES = (0.0, 0.5, 0.8, 0.9, 1.0)
CODE = (
    (
        'def total(prices, tax):\n    """Sum of the prices with tax."""\n    value = 0\n'
        "    for price in prices:\n        value += price * (1 + tax)\n    return value\n"
    ),
    (
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
        "        self.items.append(item)\n\n    def pop(self):\n        return self.items.pop()\n"
    ),
    (
        "def find(items, wanted):\n    for index, item in enumerate(items):\n        if item == wanted:\n"
        "            return index\n    return -1\n"
    ),
    (
        "def read(path):\n    with open(path) as file:\n        lines = file.readlines()\n"
        "    return [line.strip() for line in lines]\n"
    ),
)
"""Functions that are asked for again."""


class Known:
    """A drafter that proposes tokens of known answers, each of which is right with a probability."""

    def __init__(self, answers: Sequence[Sequence[int]], chance: float) -> None:
        """answers: prompts with the answers behind them, which differ in the first PROMPT tokens."""
        self._known = {tuple(tokens[:PROMPT]): list(tokens) for tokens in answers}
        self._chance = chance
        self._random = random.Random(0)

    def propose(self, tokens: IntArray, max_tokens: int) -> list[int]:
        """See `Drafter`."""
        known = self._known.get(tuple(tokens[:PROMPT].tolist()), [])
        behind = known[len(tokens) : len(tokens) + max_tokens]
        return [token if self._random.random() < self._chance else token ^ 1 for token in behind]


def engine(model: str, draft: int, drafter: Known | None, count: int, options: argparse.Namespace) -> LLM:
    """drafter: in place of n-grams. draft: tokens; 0: nothing is drafted. count: most requests at a time."""
    settings: dict[str, Any] = {"max_num_seqs": count, "enable_prefix_caching": False}
    if draft:
        given = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        settings["speculative_config"] = {"method": "ngram", "num_speculative_tokens": draft, **given}
    if options.threads:
        settings["threads"] = options.threads
    if drafter is None:
        return LLM(model, **settings)

    def chosen(config: SpeculativeConfig) -> Known:
        return drafter

    with patch("moesaic.runtime.drafting.make_drafter", chosen):
        return LLM(model, **settings)


def prompts(llm: LLM, count: int, options: argparse.Namespace) -> list[list[int]]:
    """Random tokens, functions that are to be written again, or the first prompts of files as chats."""
    numbers = random.Random(1)
    if options.prompts:
        chosen = prompt_files.read(options.prompts)[:count]
        return [llm.tokenizer.chat([{"role": "user", "content": str(each.text)}]) for each in chosen]
    if not options.edits:
        return [[numbers.randrange(300, llm.info.vocab_size) for _ in range(PROMPT)] for _ in range(count)]
    texts = []
    for number in range(count):
        code = CODE[number % len(CODE)]
        begun = numbers.randrange(10, 30)
        texts.append(f"# version {number}\n{code}\n# version {number}, again\n{code[:begun]}")
    return [llm.tokenizer.encode(text) for text in texts]


def run(llm: LLM, expert_rows: list[list[int]], options: argparse.Namespace) -> tuple[float, list[list[int]]]:
    """Generated tokens/s of all requests together, and the answers."""
    params = SamplingParams(temperature=0.0, max_tokens=options.new, ignore_eos=not options.prompts)
    clock = time.process_time if options.cpu else time.perf_counter
    began = clock()
    answers = [completion.outputs[0].token_ids for completion in llm.generate(expert_rows, params)]
    return sum(map(len, answers)) / (clock() - began), answers


def acceptance(llm: LLM, before: tuple[int, int, int]) -> tuple[str, str, tuple[int, int, int]]:
    """Share of the drafted tokens that were right and drafted tokens a step, since `before`."""
    stats = llm.stats()
    now = stats.speculation.accepted_tokens, stats.speculation.draft_tokens, stats.steps
    accepted, drafted, steps = (late - early for late, early in zip(now, before, strict=True))
    return (f"{accepted / drafted:.2f}" if drafted else "-"), f"{drafted / max(1, steps):.1f}", now


def measure(options: argparse.Namespace, table: Table, count: int) -> None:
    """Add the rows of `count` requests at a time to the table."""
    plain = engine(options.model, 0, None, count, options)
    given = prompts(plain, max(count, options.num_prompts), options)
    _, wanted = run(plain, given, options)
    known = [prompt + answer for prompt, answer in zip(given, wanted, strict=True)]
    chances = [None] if options.edits or options.prompts else list(CHANCES)
    others = [
        engine(options.model, options.draft, None if chance is None else Known(known, chance), count, options)
        for chance in chances
    ]
    seen = [(0, 0, 0)] * len(others)
    ratios: list[list[float]] = [[] for _ in others]
    speeds: list[float] = []
    for number in range(options.rounds + 1):
        turns = [(None, plain), *enumerate(others)]
        found: dict[int | None, float] = {}
        for place, llm in turns if number % 2 else turns[::-1]:
            found[place], answers = run(llm, given, options)
            if answers != wanted:
                sys.exit("an answer differs from that without drafts")
        if not number:  # it warms up: steps are recorded, prices are measured
            seen = [acceptance(llm, (0, 0, 0))[2] for llm in others]
            continue
        speeds.append(found[None])
        for place in range(len(others)):
            ratios[place].append(found[place] / found[None])
    for chance, llm, ratio, before in zip(chances, others, ratios, seen, strict=True):
        share, drafted, _ = acceptance(llm, before)
        name = "n-grams" if chance is None else f"{chance:.1f}"
        spread = f"{min(ratio):.2f} to {max(ratio):.2f}"
        median, speed = statistics.median(ratio), statistics.median(speeds)
        table.add_row(str(count), name, share, drafted, f"{speed:.0f}", f"{median:.2f}", spread)


def main() -> None:
    """Measure every number of requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--draft", type=int, default=4, help="num_speculative_tokens")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--num-prompts", type=int, default=0, help="more of them than --requests wait")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu", action="store_true", help="CPU time in place of seconds")
    parser.add_argument("--edits", action="store_true", help="n-grams on edits of code")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], help="n-grams on answers to these")
    options = parser.parse_args()
    table = Table(
        "requests", "right with", "accepted", "drafted a step", "tokens/s without", "ratio", "spread"
    )
    for count in options.requests:
        measure(options, table, count)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

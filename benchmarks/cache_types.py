"""What a KV cache in fewer bits costs: the same text and the same greedy answers, beside a float32 cache.

    python benchmarks/cache_types.py demo
    python benchmarks/cache_types.py demo --caches --other-kernels avx512_bf16
    python benchmarks/cache_types.py /tmp/qwen --pieces 8 --length 512 --text some.txt other.py

Pieces of text are scored token by token with each type of cache. Shown are, over all tokens: bytes that one
takes in the cache, the mean and the largest |difference| of its log-probability, the change of the mean
log-probability (below 0: the text became less likely), and how often the most likely token is the same. Then
each piece is continued greedily: how many answers are the same from the first token to the last, and which
share of their tokens comes before the first that is another. The text is this repository's LICENSE and some
modules of Python's own library. --other-kernels are compared in the same way, with a float32 cache on both
sides.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moesaic import LLM, SamplingParams
from moesaic.core.request import TokenLogprob

TEXTS = (
    str(Path(__file__).parent.parent / "LICENSE"),
    *(str(module.__file__) for module in (argparse, heapq, statistics, textwrap)),
)
WHOLE = "float32"


@dataclass(frozen=True)
class Answered:
    """The answers with one type of cache and one kind of kernels."""

    token_bytes: float
    scores: list[TokenLogprob]
    """The log-probability of every token of all pieces except their first ones, with the most likely token
    beside it."""
    answers: list[list[int]]


@dataclass(frozen=True)
class Compared:
    """The comparison with the float32 cache."""

    cache: str
    """The type of the cache, or the name of the other kernels."""
    token_bytes: float
    mean_difference: float
    largest_difference: float
    change: float
    same_best: float
    same_answers: float
    before_the_first_other: float


def pieces(model: LLM, texts: Sequence[str], count: int, length: int) -> list[list[int]]:
    """The number of pieces of each text, spread over it."""
    found = []
    for file in texts:
        tokens = model.tokenizer.encode(Path(file).read_text(encoding="utf-8"))
        step = max(1, (len(tokens) - length) // count)
        found += [tokens[start : start + length] for start in range(0, step * count, step)]
    return [piece for piece in found if len(piece) == length]


def answered(model: str, cache: str, options: argparse.Namespace, kernels: str | None = None) -> Answered:
    settings = {"max_model_len": options.length + options.new, "kernels": kernels or options.kernels}
    llm = LLM(model, kv_cache_dtype=cache, **settings)
    params = SamplingParams(max_tokens=options.new, temperature=0.0, prompt_logprobs=1, ignore_eos=True)
    done = llm.generate(pieces(llm, options.text, options.pieces, options.length), params)
    outputs = [completion.outputs[0] for completion in done]
    scores = [score for output in outputs for score in output.prompt_logprobs or () if score is not None]
    token_bytes = llm.info.kv_bytes / llm.info.num_blocks / llm.info.block_size
    return Answered(token_bytes, scores, [output.token_ids for output in outputs])


def compared(cache: str, one: Answered, whole: Answered) -> Compared:
    pairs = list(zip(one.scores, whole.scores, strict=True))
    apart = [ours.logprob - theirs.logprob for ours, theirs in pairs]
    answers = list(zip(one.answers, whole.answers, strict=True))
    return Compared(
        cache,
        one.token_bytes,
        statistics.fmean(map(abs, apart)),
        max(map(abs, apart)),
        statistics.fmean(apart),
        statistics.fmean(ours.top[0][0] == theirs.top[0][0] for ours, theirs in pairs),
        statistics.fmean(ours == theirs for ours, theirs in answers),
        sum(_common(*pair) for pair in answers) / sum(len(ours) for ours, _ in answers),
    )


def _common(one: list[int], other: list[int]) -> int:
    """Number of equal tokens before the first difference."""
    unequal = (index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    return next(unequal, len(one))


def show(results: Sequence[Compared], title: str) -> None:
    shown = Table(title=title)
    columns = ("cache", "bytes a token", "mean |diff|", "largest", "change", "same best", "same answers")
    for column in (*columns, "tokens before another"):
        shown.add_column(column, justify="left" if column == "cache" else "right")
    for one in results:
        shown.add_row(
            one.cache,
            f"{one.token_bytes:.0f}",
            f"{one.mean_difference:.5f}",
            f"{one.largest_difference:.3f}",
            f"{one.change:+.5f}",
            f"{one.same_best:.2%}",
            f"{one.same_answers:.0%}",
            f"{one.before_the_first_other:.1%}",
        )
    Console(width=110).print(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a Hugging Face directory, or demo")
    parser.add_argument("--caches", nargs="*", default=["bfloat16", "int8"])
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--other-kernels", nargs="+", default=[])
    parser.add_argument("--text", nargs="+", default=TEXTS, help="files")
    parser.add_argument("--pieces", type=int, default=8, help="of each file")
    parser.add_argument("--length", type=int, default=512, help="tokens of a piece")
    parser.add_argument("--new", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    whole = answered(options.model, WHOLE, options)
    results = [compared(cache, answered(options.model, cache, options), whole) for cache in options.caches]
    results += [
        compared(name, answered(options.model, WHOLE, options, name), whole) for name in options.other_kernels
    ]
    show(results, f"{options.model}: {len(whole.scores)} tokens scored, {len(whole.answers)} answers")
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in results], indent=2))


if __name__ == "__main__":
    main()

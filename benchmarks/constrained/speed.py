"""Tokens per second with a schema beside those without, in turn."""

from __future__ import annotations

import json
import statistics
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
from rich.console import Console
from rich.table import Table
from tokenizers import decoders, models, pre_tokenizers, trainers

from moesaic import LLM, SamplingParams, StructuredOutputsParams
from moesaic.models import files

SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "kind": {"enum": ["file", "folder", "link"]},
            "size": {"type": "integer", "minimum": 0, "maximum": 99999},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 10}, "maxItems": 4},
        },
        "required": ["name", "kind", "size", "tags"],
        "additionalProperties": False,
    },
}
"""Its answers are far longer than any budget here."""
TEXT = 50_000_000
"""Bytes that a tokenizer is trained on."""
PROMPT = 64


@dataclass(frozen=True)
class Speed:
    """Of one number of requests."""

    requests: int
    free: float
    """Median tokens/s without a schema."""
    constrained: float
    """Median tokens/s with one."""
    ratio: float
    """Median of the rounds' ratios."""
    least: float
    most: float


@dataclass(frozen=True)
class Report:
    machine: str
    vocabulary: int
    speeds: list[Speed]

    def asdict(self) -> dict[str, Any]:
        return asdict(self)

    def show(self) -> None:
        table = Table("requests", "free, tokens/s", "with a schema", "ratio", "of rounds", title=self.machine)
        for one in self.speeds:
            spread = f"{one.least:.3f} to {one.most:.3f}"
            table.add_row(
                str(one.requests), f"{one.free:.1f}", f"{one.constrained:.1f}", f"{one.ratio:.3f}", spread
            )
        Console().print(table)


def run(model: str, requests: list[int], new: int, rounds: int, vocabulary: int | None) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        path = model if vocabulary is None else with_vocabulary(model, Path(folder), vocabulary)
        llm = LLM(path, max_model_len=PROMPT + new + 8, max_num_seqs=max(requests))
        speeds = [_speed(llm, count, new, rounds) for count in requests]
        kernels = f"{llm.info.kernels}, {llm.info.threads} threads, {llm.info.dtype}"
        return Report(kernels, llm.tokenizer.vocab_size, speeds)


def _speed(llm: LLM, count: int, new: int, rounds: int) -> Speed:
    forms = (None, StructuredOutputsParams(json=SCHEMA))
    _seconds(llm, count, 8, 0, forms[1])  # compiles the grammar, and warms up
    found: list[tuple[float, float]] = []
    for number in range(rounds):
        order = (0, 1) if number % 2 else (1, 0)
        seconds = {which: _seconds(llm, count, new, number, forms[which]) for which in order}
        found.append((count * new / seconds[0], count * new / seconds[1]))
    ratios = [constrained / free for free, constrained in found]
    free, constrained = (statistics.median(column) for column in zip(*found, strict=True))
    return Speed(count, free, constrained, statistics.median(ratios), min(ratios), max(ratios))


def _seconds(llm: LLM, count: int, new: int, seed: int, form: StructuredOutputsParams | None) -> float:
    """Seconds of `count` requests. Prompts are new in each round, so that no prefix is reused."""
    size = llm.tokenizer.vocab_size
    prompts = [
        [(7 * i + 31 * number + 1009 * seed + 3) % size for i in range(PROMPT)] for number in range(count)
    ]
    params = [
        SamplingParams(max_tokens=new, temperature=1.0, seed=number, ignore_eos=True, structured_outputs=form)
        for number in range(count)
    ]
    begin = time.perf_counter()
    done = llm.generate(prompts, params)
    seconds = time.perf_counter() - begin
    assert all(len(one.outputs[0].token_ids) == new for one in done)
    return seconds


def with_vocabulary(model: str, folder: Path, size: int) -> str:
    """A copy of the checkpoint, whose weights are links, with a tokenizer of `size` tokens."""
    path = files.resolve(model, None)
    logits = json.loads((path / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    if size > logits:  # masks of tokens that the model cannot write would cost nothing
        raise SystemExit(f"--vocabulary: got {size}; allowed: at most the {logits} logits of {model}")
    for file in path.iterdir():
        if not file.name.startswith("tokenizer"):
            (folder / file.name).symlink_to(file.resolve())
    texts, total = [], 0
    for text in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))[::3]:
        if text.stat().st_size < 300_000 and total < TEXT:
            texts.append(str(text))
            total += text.stat().st_size
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(
        texts,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=["<end>"], initial_alphabet=alphabet, min_frequency=1
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)

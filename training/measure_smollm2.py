"""Compares a checkpoint in moesaic with a reference in transformers, both in float32.

    python training/measure_smollm2.py CHECKPOINT REFERENCE [--prompts FILE.jsonl ...]

Greedy tokens have to be equal up to the first place where the two best logits of the reference are nearer
than MARGIN. Perplexities of held-out text are printed. The exit code is 1 where a token differs.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import smollm2_texts as texts
from moesaic import LLM, SamplingParams

MARGIN = 1e-4


@dataclass(frozen=True)
class Agreement:
    """How far an answer is that of the reference."""

    num_equal: int
    """Tokens from the beginning that are equal."""
    has_near_tie: bool
    """Whether the comparison ended at two logits of the reference that are nearer than MARGIN."""
    is_different: bool
    """Whether it ended at another token."""


def compare_answer(reference: PreTrainedModel, prompt: list[int], answer: list[int]) -> Agreement:
    """Compares greedy tokens with those that the reference chooses after the same tokens."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + answer[:-1]]), logits_to_keep=len(answer)).logits[0]
    best = logits.topk(2, dim=-1)
    margins = (best.values[:, 0] - best.values[:, 1]).tolist()
    for place, (margin, choice) in enumerate(zip(margins, best.indices[:, 0].tolist(), strict=True)):
        if margin < MARGIN:
            return Agreement(place, True, False)
        if choice != answer[place]:
            return Agreement(place, False, True)
    return Agreement(len(answer), False, False)


def reference_loss(reference: PreTrainedModel, pieces: list[list[int]]) -> float:
    """The mean negative log-likelihood of pieces of text in transformers."""
    total = 0.0
    with torch.inference_mode():
        for piece in pieces:
            ids = torch.tensor([piece])
            logits = reference(ids).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
    return total / sum(len(piece) - 1 for piece in pieces)


def own_loss(llm: LLM, pieces: list[list[int]]) -> float:
    """The mean negative log-likelihood of pieces of text in moesaic."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    completions = llm.generate(pieces, params)
    scores = [
        entry.logprob
        for completion in completions
        for entry in completion.outputs[0].prompt_logprobs or []
        if entry is not None
    ]
    return -sum(scores) / len(scores)


def cut(llm: LLM, documents: list[str], size: int, count: int) -> list[list[int]]:
    """The first `size` tokens of each document, of as many documents as have `count` tokens in total."""
    pieces: list[list[int]] = []
    for document in documents:
        piece = llm.tokenizer.encode(document)[:size]
        if count > 0 and len(piece) > 1:
            pieces.append(piece[:count])
            count -= len(pieces[-1])
    return pieces


def encode(llm: LLM, text: str, is_chat: bool) -> list[int]:
    """The tokens of a prompt; of a question, with the chat template around it."""
    if is_chat:
        return llm.tokenizer.chat([{"role": "user", "content": text}])
    return llm.tokenizer.encode(text)


def compare_tokens(
    llm: LLM, reference: PreTrainedModel, rows: list[tuple[str, bool]], new_tokens: int
) -> list[Agreement]:
    """Lets both answer prompts, each with whether it is a question for a chat."""
    prompts = [encode(llm, text, is_chat) for text, is_chat in rows]
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens)
    completions = llm.generate(prompts, params)
    return [
        compare_answer(reference, prompt, completion.outputs[0].token_ids)
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def show(line: str) -> None:
    """Prints a figure."""
    print(line, flush=True)


def show_agreement(name: str, agreements: list[Agreement]) -> None:
    """Prints how many tokens are equal."""
    equal = sum(agreement.num_equal for agreement in agreements)
    ties = sum(agreement.has_near_tie for agreement in agreements)
    different = sum(agreement.is_different for agreement in agreements)
    print(
        f"{name}: {len(agreements)} answers, {equal} tokens equal, {ties} answers up to a near tie, "
        f"{different} with another token",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="default: questions of its own")
    parser.add_argument("--count", type=int, default=24, help="prompts of each file")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--perplexity-tokens", type=int, default=8192)
    parser.add_argument("--piece", type=int, default=512, help="tokens of a piece of text")
    parser.add_argument("--dtype", default="float32", help="moesaic's; the reference has float32")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    """Runs the command."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    llm = LLM(str(options.checkpoint), dtype=options.dtype, threads=options.threads)
    reference = AutoModelForCausalLM.from_pretrained(options.reference, dtype=torch.float32)
    prompts = {file.name: list(texts.read_prompts(file)) for file in options.prompts}
    questions = [(question, True) for question in texts.split(texts.questions())[1]]
    is_different = False
    for name, rows in (prompts or {"own questions": questions}).items():
        agreements = compare_tokens(llm, reference, rows[: options.count], options.new_tokens)
        is_different = is_different or any(agreement.is_different for agreement in agreements)
        show_agreement(name, agreements)
    for name, documents in (("prose", texts.prose()), ("code", texts.code())):
        pieces = cut(llm, texts.split(documents)[1], options.piece, options.perplexity_tokens // 2)
        own, theirs = own_loss(llm, pieces), reference_loss(reference, pieces)
        tokens = sum(len(piece) - 1 for piece in pieces)
        print(
            f"{name}: {tokens} tokens, perplexity {math.exp(own):.5f}, reference {math.exp(theirs):.5f}, "
            f"relative difference {math.exp(own - theirs) - 1:.1e}",
            flush=True,
        )
    return int(is_different)


if __name__ == "__main__":
    sys.exit(main())

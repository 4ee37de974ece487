"""Measures the split model beside the dense one: perplexity of held-out text for several numbers of experts.

    python training/curve_smollm2.py MOE COPIES [--top-k 6 10 14]

MOE and COPIES are checkpoints of smollm2_checkpoint.py. Chats are answers of the dense model to questions
that were held out. moesaic computes both models.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import smollm2_texts as texts
from measure_smollm2 import cut, own_loss
from moesaic import LLM
from smollm2_experts import FILE, read

ANSWER = 128
"""Tokens of an answer."""


def held_out_pieces(llm: LLM, size: int, tokens: int) -> dict[str, list[list[int]]]:
    """Pieces of each kind of text, with about `tokens` tokens. llm: the model that answers the chats."""
    kinds = {"prose": texts.prose(), "code": texts.code()}
    pieces = {name: cut(llm, texts.split(documents)[1], size, tokens) for name, documents in kinds.items()}
    questions = texts.split(texts.questions())[1][: tokens // ANSWER]
    chats = [[{"role": "user", "content": question}] for question in questions]
    params = replace(llm.default_sampling, max_tokens=ANSWER, seed=1)
    completions = llm.chat(chats, params)
    answers = [[*each.prompt_token_ids, *each.outputs[0].token_ids] for each in completions]
    return pieces | {"chat": answers}


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("moe", type=Path)
    parser.add_argument("copies", type=Path)
    parser.add_argument("--top-k", type=int, nargs="*", default=[4, 7, 10, 14, 18, 24])
    parser.add_argument("--tokens", type=int, default=6000, help="of each kind of text")
    parser.add_argument("--piece", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    settings = {"threads": options.threads, "max_model_len": 1024}
    llm = LLM(str(options.copies), seed=1, **settings)
    pieces = held_out_pieces(llm, options.piece, options.tokens)
    dense = {kind: own_loss(llm, parts) for kind, parts in pieces.items()}
    print("dense: " + ", ".join(f"{kind} {math.exp(loss):.3f}" for kind, loss in dense.items()), flush=True)
    shape = read(FILE).shape
    for top_k in options.top_k:
        overrides = json.dumps({"num_experts_per_tok": top_k})
        llm = LLM(str(options.moe), hf_overrides=overrides, **settings)
        rows = []
        for kind, parts in pieces.items():
            loss = own_loss(llm, parts)
            rows.append(f"{kind} {math.exp(loss):.3f} ({100 * math.expm1(loss - dense[kind]):+.1f} %)")
        share = replace(shape, top_k=top_k).active_share
        print(f"{top_k} experts, {100 * share:.1f} % of the neurons: {', '.join(rows)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

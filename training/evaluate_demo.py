"""Measures a finished demo checkpoint and writes the figures next to it.

Per domain: bits per byte on the held-out text beside those of xz on the same
bytes. Per skill: the share of held-out questions whose greedy answer is exactly
right. For both: how far their expert loads lie apart. The texts are rebuilt from
the same arguments as in training, and their hashes must match those in training.json.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from demo_chat import END_OF_TEXT
from demo_export import write_json
from demo_probe import Forward, SkillFigures, measure_skills
from demo_routing import distances, idle_experts, mean_distance
from demo_skill_list import held_out_conversations, list_skills
from demo_skills import Draw, Example, held_out_examples
from demo_texts import Domain, read_domains
from train_demo import add_text_arguments, text_arguments


@dataclass(frozen=True)
class Reading:
    """What one pass over a held-out text found."""

    nats: float
    tokens: int
    loads: Tensor  # [layers, experts]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_text_arguments(parser)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=240, help="held-out ones of each skill")
    parser.add_argument("--results", type=Path, help="JSON file; default: evaluation.json in the checkpoint")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(arguments)


def document_tokens(domain: Domain, tokenizer: Tokenizer) -> Tensor:
    """All held-out documents, with the end-of-text token before and after each."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ids = [end]
    for document in domain.heldout:
        ids.extend(tokenizer.encode(document.text).ids)
        ids.append(end)
    return torch.tensor(ids)


@torch.no_grad()
def read_text(model: PreTrainedModel, tokens: Tensor, context: int, stride: int) -> Reading:
    """Predicts every token after the first from a window that moves by `stride`."""
    layers = int(model.config.num_hidden_layers)
    experts = int(model.config.num_experts)
    top_k = int(model.config.num_experts_per_tok)
    loads = torch.zeros(layers, experts, dtype=torch.float64)
    nats = 0.0
    done = 0
    while done < len(tokens) - 1:
        last = min(len(tokens) - 1, context if done == 0 else done + stride)
        first = max(0, last - context)
        window = tokens[first:last].unsqueeze(0)
        output = model(window, output_router_logits=True)
        fresh = last - done
        chances = output.logits[0, -fresh:].double().log_softmax(dim=-1)
        wanted = tokens[done + 1 : last + 1].unsqueeze(1)
        nats -= float(chances.gather(1, wanted).sum())
        for layer, scores in enumerate(output.router_logits):
            picks = scores.view(-1, experts)[-fresh:].topk(top_k, dim=-1).indices
            loads[layer] += torch.bincount(picks.flatten(), minlength=experts)
        done = last
    return Reading(nats=nats, tokens=done, loads=loads)


def forward_of(model: PreTrainedModel) -> Forward:
    """The model's logits and picked experts of tokens that are padded at the end."""
    experts, top_k = int(model.config.num_experts), int(model.config.num_experts_per_tok)

    def forward(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        output = model(tokens, attention_mask=mask, output_router_logits=True)
        scores = torch.stack([layer.view(*tokens.shape, experts) for layer in output.router_logits])
        return output.logits, scores.topk(top_k, dim=-1).indices

    return forward


def held_out_questions(skills: Mapping[str, Draw], count: int) -> dict[str, list[Example]]:
    """`count` held-out questions of each skill, and as many conversations of two turns."""
    rows = {name: held_out_examples(draw, name, count) for name, draw in skills.items()}
    return rows | {"conversations": held_out_conversations(skills, count)}


def skill_figures(measured: Mapping[str, SkillFigures]) -> dict[str, Any]:
    """The exact share of each skill, some missed questions, and the share of each expert by layer."""
    return {
        name: {
            "questions": figures.questions,
            "exact": figures.exact,
            "share": round(figures.share, 4),
            "missed": [{"question": question, "answer": answer} for question, answer in figures.wrong],
            "experts": [
                [round(float(x), 4) for x in layer / layer.sum()] for layer in figures.loads.double()
            ],
        }
        for name, figures in measured.items()
    }


def domain_figures(domain: Domain, reading: Reading) -> dict[str, float]:
    """Bits per byte of the model and of xz on one held-out text."""
    raw = domain.heldout_text.encode("utf-8")
    packed = lzma.compress(raw, preset=9)
    return {
        "bytes": len(raw),
        "tokens": reading.tokens,
        "bytes_per_token": round(len(raw) / reading.tokens, 3),
        "bits_per_byte": round(reading.nats / math.log(2) / len(raw), 4),
        "xz_bits_per_byte": round(8 * len(packed) / len(raw), 4),
    }


def check_texts(domains: list[Domain], checkpoint: Path) -> None:
    """Stops if the held-out texts are not those of the training run."""
    record = json.loads((checkpoint / "training.json").read_text(encoding="utf-8"))
    for domain in domains:
        wanted = record["texts"][domain.name]["heldout_sha256"]
        if domain.sources["heldout_sha256"] != wanted:
            raise SystemExit(f"the held-out {domain.name} text is not that of training.json")


def show(result: dict[str, Any]) -> None:
    """Prints the figures as tables."""
    console = Console()
    table = Table(title="Held-out text")
    for column in ("domain", "bytes", "tokens", "model bits/byte", "xz -9 bits/byte"):
        table.add_column(column, justify="left" if column == "domain" else "right")
    for name, row in result["domains"].items():
        cells = (row["bytes"], row["tokens"], row["bits_per_byte"], row["xz_bits_per_byte"])
        table.add_row(name, *map(str, cells))
    console.print(table)
    table = Table(title="Jensen-Shannon distance of the expert loads")
    table.add_column("pair")
    for layer in range(len(next(iter(result["routing"]["distances"].values())))):
        table.add_column(f"layer {layer}", justify="right")
    for name, row in result["routing"]["distances"].items():
        table.add_row(name, *(f"{value:.3f}" for value in row))
    console.print(table)
    routing = result["routing"]
    console.print(f"mean {routing['mean_distance']:.3f}, idle experts {routing['idle_experts']}")
    table = Table(title="Held-out questions of skills")
    for column in ("skill", "questions", "exact", "share"):
        table.add_column(column, justify="left" if column == "skill" else "right")
    for name, row in result["skills"].items():
        table.add_row(name, str(row["questions"]), str(row["exact"]), f"{row['share']:.1%}")
    console.print(table)


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the checkpoint on all domains."""
    torch.set_num_threads(options.threads)
    began = time.monotonic()
    domains = read_domains(text_arguments(options))
    check_texts(domains, options.checkpoint)
    tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32)
    rows = {}
    loads = {}
    for domain in domains:
        tokens = document_tokens(domain, tokenizer)
        reading = read_text(model, tokens, options.context, options.stride)
        rows[domain.name] = domain_figures(domain, reading)
        loads[domain.name] = reading.loads
    pairs = distances(loads)
    held_out = held_out_questions(list_skills(domains), options.questions)
    measured = measure_skills(forward_of(model), tokenizer, held_out, int(model.config.num_experts))
    return {
        "context": options.context,
        "stride": options.stride,
        "domains": rows,
        "routing": {
            "mean_distance": round(mean_distance(loads), 4),
            "distances": {k: [round(x, 4) for x in row] for k, row in pairs.items()},
            "idle_experts": idle_experts(loads),
        },
        "skills": skill_figures(measured),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    """Runs the evaluation command."""
    options = parse_arguments()
    result = evaluate(options)
    write_json(options.results or options.checkpoint / "evaluation.json", result)
    show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())

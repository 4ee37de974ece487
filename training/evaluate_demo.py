"""Measures a finished demo checkpoint and writes the figures next to it.

Per domain: bits per byte on the held-out text beside those of xz on the same
bytes, and how far the domains' expert loads lie apart. For Python also the
share of completions that parse. The texts are rebuilt from the same arguments
as in training, and their hashes must match those in training.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import lzma
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from demo_export import write_json
from demo_routing import distances, idle_experts, mean_distance
from demo_stream import END_OF_TEXT
from demo_texts import Domain, read_domains
from train_demo import add_text_arguments, text_arguments

COMPLETION_BATCH = 32


@dataclass(frozen=True)
class Reading:
    """What one pass over a held-out text found."""

    nats: float
    tokens: int
    loads: Tensor  # [layers, experts]


@dataclass(frozen=True)
class Completion:
    """A completion of a code prompt and whether it ended by itself."""

    prompt: str
    text: str
    ended: bool


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_text_arguments(parser)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--code-prompts", type=Path, required=True, help="HumanEval JSONL")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--stride", type=int, default=512)
    parser.add_argument("--completion-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
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


def kept_body(completion: Completion) -> str:
    """The lines that belong to the function the prompt opened.

    The text is cut before the first line that is not blank and not indented.
    If no such line came and the token limit stopped the text, its last line is
    unfinished and is dropped.
    """
    lines = completion.text.split("\n")
    for number, line in enumerate(lines):
        if line.strip() and not line[0].isspace():
            return "\n".join(lines[:number])
    if not completion.ended:
        lines = lines[:-1]
    return "\n".join(lines)


def parses(completion: Completion) -> bool:
    """Whether prompt and body parse, with a statement after the docstring."""
    try:
        tree = ast.parse(completion.prompt + kept_body(completion) + "\n")
    except (SyntaxError, ValueError):
        return False
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if not functions:
        return False
    documented = ast.get_docstring(functions[-1]) is not None
    return len(functions[-1].body) > int(documented)


@torch.no_grad()
def complete(
    model: PreTrainedModel, tokenizer: Tokenizer, prompts: list[str], limit: int, sample: bool
) -> list[Completion]:
    """Completes code prompts, greedily or with the checkpoint's own sampling."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    stops = set(model.generation_config.eos_token_id)
    found: list[Completion] = []
    for at in range(0, len(prompts), COMPLETION_BATCH):
        batch = prompts[at : at + COMPLETION_BATCH]
        rows = [[end, *tokenizer.encode(prompt).ids] for prompt in batch]
        width = max(map(len, rows))
        tokens = torch.tensor([[end] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        settings: dict[str, Any] = {"max_new_tokens": limit, "do_sample": sample}
        output = model.generate(tokens, attention_mask=mask, **settings)  # type: ignore[operator]
        for prompt, row in zip(batch, output[:, width:].tolist(), strict=True):
            length = next((n for n, token in enumerate(row) if token in stops), len(row))
            ended = length < len(row)
            found.append(Completion(prompt, tokenizer.decode(row[:length]), ended))
    return found


def code_figures(
    model: PreTrainedModel, tokenizer: Tokenizer, options: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """The share of completions that parse, greedy and sampled."""
    lines = options.code_prompts.read_text(encoding="utf-8").splitlines()
    prompts = [str(json.loads(line)["prompt"]) for line in lines]
    figures = {}
    for name, sample in (("greedy", False), ("sampled", True)):
        torch.manual_seed(options.seed)
        found = complete(model, tokenizer, prompts, options.completion_tokens, sample)
        accepted = sum(map(parses, found))
        cut = sum(not one.ended and kept_body(one) == one.text.rpartition("\n")[0] for one in found)
        figures[name] = {
            "prompts": len(found),
            "accepted": accepted,
            "share": round(accepted / len(found), 4),
            "cut_by_limit": cut,
        }
    return figures


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
    for name, row in result["python_completions"].items():
        console.print(f"{name}: {row['accepted']} of {row['prompts']} completions parse")


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
    return {
        "context": options.context,
        "stride": options.stride,
        "completion_tokens": options.completion_tokens,
        "seed": options.seed,
        "domains": rows,
        "routing": {
            "mean_distance": round(mean_distance(loads), 4),
            "distances": {k: [round(x, 4) for x in row] for k, row in pairs.items()},
            "idle_experts": idle_experts(loads),
        },
        "python_completions": code_figures(model, tokenizer, options),
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    """Runs the evaluation command."""
    options = parse_arguments()
    result = evaluate(options)
    write_json(options.checkpoint / "evaluation.json", result)
    show(result)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Trains the demo mixture-of-experts model on three domains and exports it.

The domains are grade-school maths, the Python standard library and English
prose. Every batch holds the same number of windows of each. The learning rate
follows the wall clock, so a run ends after --minutes on any machine.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo_export import export_checkpoint
from demo_model import DemoModel, DemoShape
from demo_optimizer import DemoOptimizer
from demo_routing import idle_experts, mean_distance
from demo_stream import MIXTURES, SYSTEM_SHARE, TWO_TURN_SHARE, WindowStream, train_tokenizer
from demo_texts import SPLIT_SEED, Domain, TextArguments, default_stdlib, read_domains, sha256_of


@dataclass
class Progress:
    """What a run has done so far."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_text_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--minutes", type=float, default=55.0)
    parser.add_argument("--export-minutes", type=float, default=5.0)
    parser.add_argument("--windows", type=int, default=2, help="per domain, of --length")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--long-share", type=float, default=0.15, help="last part, doubled length")
    parser.add_argument("--matrix-rate", type=float, default=0.015)
    parser.add_argument("--other-rate", type=float, default=0.004)
    parser.add_argument("--balance", type=float, default=0.005)
    parser.add_argument("--z-loss", type=float, default=0.0001)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", nargs="*", default=[], help="sizes that differ, as hidden=256")
    return parser.parse_args(arguments)


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that choose the texts; evaluation shares them."""
    parser.add_argument("--maths", type=Path, required=True, help="JSONL of question/answer")
    parser.add_argument("--prose", type=Path, nargs="+", required=True, help="HTML folders")
    parser.add_argument("--prose-source", nargs="*", default=[], help="package=version")
    parser.add_argument("--stdlib", type=Path, default=default_stdlib())
    parser.add_argument("--domain-bytes", type=int, default=4_000_000, help="Python text limit")
    parser.add_argument("--heldout-bytes", type=int, default=180_000, help="per domain")


def text_arguments(options: argparse.Namespace) -> TextArguments:
    """The text arguments of a parsed command line."""
    return TextArguments(
        maths=options.maths,
        prose=options.prose,
        stdlib=options.stdlib,
        domain_bytes=options.domain_bytes,
        heldout_bytes=options.heldout_bytes,
    )


def rate_factor(part: float) -> float:
    """Warm-up over the first 2 % of the time, then a linear fall to 1 %."""
    if part < 0.02:
        return max(part / 0.02, 0.01)
    return max(1.0 - 0.99 * (part - 0.02) / 0.98, 0.01)


@torch.no_grad()
def probe(model: DemoModel, samples: dict[str, Tensor]) -> dict[str, float]:
    """Held-out loss per domain, routing distance and idle experts."""
    loads = {}
    result = {}
    for name, windows in samples.items():
        logits, report = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        result[f"{name}_loss"] = round(loss.item(), 4)
        loads[name] = report.loads.sum(dim=1).double()
    result["js_distance"] = round(mean_distance(loads), 4)
    result["idle_experts"] = idle_experts(loads)
    return result


def heldout_samples(domains: list[Domain], tokenizer: Tokenizer, length: int) -> dict[str, Tensor]:
    """Eight held-out windows per domain for the progress report."""
    samples = {}
    for domain in domains:
        ids = torch.tensor(tokenizer.encode(domain.heldout_text[:40_000]).ids)
        count = min(8, (len(ids) - 1) // length)
        rows = [ids[at * length : at * length + length + 1] for at in range(count)]
        samples[domain.name] = torch.stack(rows)
    return samples


def run_record(
    options: argparse.Namespace, domains: list[Domain], model: DemoModel, progress: Progress
) -> dict[str, Any]:
    """Everything that goes into training.json."""
    plain = {
        key: value
        for key, value in vars(options).items()
        if key not in {"maths", "prose", "stdlib", "output", "export_minutes"}
    }
    texts = {
        domain.name: {
            "train_documents": len(domain.train),
            "train_bytes": sum(len(d.text.encode("utf-8")) for d in domain.train),
            "train_sha256": sha256_of(d.text for d in domain.train),
            "heldout_documents": len(domain.heldout),
            "heldout_bytes": len(domain.heldout_text.encode("utf-8")),
            **domain.sources,
        }
        for domain in domains
    }
    return {
        "shape": model.shape.as_dict(),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "settings": plain
        | {
            "split_seed": SPLIT_SEED,
            "system_share": SYSTEM_SHARE,
            "two_turn_share": TWO_TURN_SHARE,
            "mixtures": {name: vars(mixture) for name, mixture in MIXTURES.items()},
        },
        "texts": texts,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "steps": progress.steps,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "history": progress.history,
    }


def train_step(
    model: DemoModel,
    streams: list[WindowStream],
    options: argparse.Namespace,
    long: bool,
) -> tuple[Tensor, int]:
    """Runs one mixed batch forward and backward; returns its loss and tokens."""
    count = options.windows // 2 if long else options.windows
    length = options.length * 2 if long else options.length
    batch = torch.cat([stream.take(count, length) for stream in streams])
    logits, report = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    extra = options.balance * report.balance_loss + options.z_loss * report.z_loss
    (loss + extra).backward()
    return loss.detach(), batch.shape[0] * length


def train(options: argparse.Namespace) -> None:
    """Reads the texts, trains until the time is up and exports the model."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    domains = read_domains(text_arguments(options))
    sizes = dict(size.split("=") for size in options.shape)
    shape = DemoShape(**{name: int(size) for name, size in sizes.items()})
    tokenizer = train_tokenizer(domains, shape.vocab)
    model = DemoModel(shape)
    optimizer = DemoOptimizer(model, options.matrix_rate, options.other_rate)
    streams = [WindowStream(domain, tokenizer, options.seed) for domain in domains]
    samples = heldout_samples(domains, tokenizer, options.length)
    progress = Progress()
    limit = options.minutes * 60
    began = time.monotonic()
    next_export = min(180.0, options.export_minutes * 60)
    while progress.seconds < limit:
        part = progress.seconds / limit
        loss, tokens = train_step(model, streams, options, part > 1 - options.long_share)
        optimizer.step(rate_factor(part))
        progress.steps += 1
        progress.tokens += tokens
        progress.seconds = time.monotonic() - began
        if progress.steps % 20 == 0:
            speed = progress.tokens / progress.seconds
            passes = [stream.passes for stream in streams]
            print(
                f"{progress.steps} {progress.seconds / 60:.1f}min loss {loss.item():.3f}"
                f" {speed:.0f} tok/s passes {passes}",
                flush=True,
            )
        if progress.seconds >= next_export or progress.seconds >= limit:
            next_export = progress.seconds + options.export_minutes * 60
            found = probe(model, samples)
            progress.history.append({"minute": round(progress.seconds / 60, 1), **found})
            print(found, flush=True)
            record = run_record(options, domains, model, progress)
            export_checkpoint(model, tokenizer, options.output, options.balance, record)


def main() -> int:
    """Runs the training command."""
    train(parse_arguments())
    return 0


if __name__ == "__main__":
    sys.exit(main())

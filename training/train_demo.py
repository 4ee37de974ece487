"""Trains the demo mixture-of-experts model on three domains of text and on skills, and exports it.

The domains are grade-school maths, the Python standard library and English prose. The skills are
short conversations with one right answer, drawn anew for every step. The learning rate follows
the time trained, so a run ends after --minutes on any machine. A run that was stopped goes on
where its last saved state is, if the same command is given again.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from demo_export import export_checkpoint
from demo_model import DemoModel, DemoShape
from demo_optimizer import DemoOptimizer
from demo_probe import SkillFigures, measure_skills
from demo_routing import idle_experts, mean_distance
from demo_skill_list import list_skills
from demo_skills import Example, held_out_examples
from demo_stream import (
    TOKENIZER_CONVERSATIONS,
    Batch,
    SkillWindows,
    TextWindows,
    join_batches,
    tokenizer_texts,
    train_tokenizer,
)
from demo_texts import SPLIT_SEED, Domain, TextArguments, default_stdlib, read_domains, sha256_of

PROBE_QUESTIONS = 48
"""Held-out questions of each skill in a probe."""
PAUSE = 10.0
"""Seconds of a step. The time beyond is not counted, because the process was stopped meanwhile."""
LEAST_SHARE = 0.25
"""A mastered skill still comes this often, beside one that fails always."""


@dataclass
class Progress:
    """What a run has done so far. tokens: those of text and of skills, without padding."""

    steps: int = 0
    text_tokens: int = 0
    skill_tokens: int = 0
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_text_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, help="checkpoint folder")
    parser.add_argument(
        "--state", type=Path, required=True, help="file to save the run in and to resume it from"
    )
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument(
        "--save-minutes", type=float, default=3.0, help="between probes, exports and saved states"
    )
    parser.add_argument("--text-rows", type=int, default=1, help="windows of each domain in a step")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window of text")
    parser.add_argument("--long-share", type=float, default=0.15, help="last part, with doubled --length")
    parser.add_argument("--skill-rows", type=int, default=10, help="windows of skills in a step")
    parser.add_argument("--skill-length", type=int, default=320, help="tokens of a window of skills")
    parser.add_argument("--skill-weight", type=float, default=0.65, help="part of the loss that skills have")
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


def heldout_samples(domains: list[Domain], tokenizer: Tokenizer, length: int) -> dict[str, Tensor]:
    """Eight held-out windows per domain for the progress report."""
    samples = {}
    for domain in domains:
        ids = torch.tensor(tokenizer.encode(domain.heldout_text[:40_000]).ids)
        count = min(8, (len(ids) - 1) // length)
        rows = [ids[at * length : at * length + length + 1] for at in range(count)]
        samples[domain.name] = torch.stack(rows)
    return samples


class Run:
    """One training run: model, optimizers, streams and progress."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        self.options = options
        self.domains = read_domains(text_arguments(options))
        self.skills = list_skills(self.domains)
        sizes = dict(size.split("=") for size in options.shape)
        shape = DemoShape(**{name: int(size) for name, size in sizes.items()})
        texts = tokenizer_texts(self.domains, self.skills, options.seed, TOKENIZER_CONVERSATIONS)
        self.tokenizer = train_tokenizer(texts, shape.vocab)
        self.model = DemoModel(shape)
        self.optimizer = DemoOptimizer(self.model, options.matrix_rate, options.other_rate)
        self.texts = [TextWindows(domain, self.tokenizer, options.seed) for domain in self.domains]
        self.windows = SkillWindows(self.skills, self.tokenizer, options.seed)
        self.samples = heldout_samples(self.domains, self.tokenizer, options.length)
        self.held_out: dict[str, list[Example]] = {
            name: held_out_examples(draw, name, PROBE_QUESTIONS, seed=1) for name, draw in self.skills.items()
        }
        self.progress = Progress()

    def train_step(self, part: float) -> tuple[float, float]:
        """Learns one batch of texts and one of skills; returns their losses in nats a token.

        part: how much of the run's time is over, from 0 to 1.
        """
        options, progress = self.options, self.progress
        rows, length = options.text_rows, options.length
        if part > 1 - options.long_share:
            length *= 2
        texts = [text.take(progress.steps * rows, rows, length) for text in self.texts]
        chats = self.windows.take(progress.steps, options.skill_rows, options.skill_length)
        text_loss = self._learn(join_batches(texts), 1 - options.skill_weight)
        skill_loss = self._learn(chats, options.skill_weight)
        self.optimizer.step(rate_factor(part))
        progress.steps += 1
        progress.text_tokens += rows * length * len(texts)
        progress.skill_tokens += chats.size
        return text_loss, skill_loss

    def _learn(self, batch: Batch, weight: float) -> float:
        """Adds the gradients of one batch, times its weight; returns its loss."""
        options = self.options
        wanted = batch.targets >= 0
        logits, report = self.model(batch.tokens, batch.documents, wanted)
        loss = F.cross_entropy(logits, batch.targets[wanted])
        extra = options.balance * report.balance_loss + options.z_loss * report.z_loss
        (weight * (loss + extra)).backward()
        return loss.item()

    def _forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        logits, report = self.model(tokens)
        return logits, report.picks

    @torch.no_grad()
    def probe(self) -> None:
        """Adds held-out losses and exact shares to the history, and draws weak skills more often."""
        entry: dict[str, Any] = {"minute": round(self.progress.seconds / 60, 1)}
        loads = {}
        for name, windows in self.samples.items():
            logits, report = self.model(windows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
            entry[f"{name}_loss"] = round(loss.item(), 4)
            loads[name] = report.loads.sum(dim=1).double()
        experts = self.model.shape.experts
        figures: dict[str, SkillFigures] = measure_skills(
            self._forward, self.tokenizer, self.held_out, experts
        )
        loads |= {name: found.loads.double() for name, found in figures.items()}
        entry["exact"] = {name: round(found.share, 3) for name, found in figures.items()}
        entry["js_distance"] = round(mean_distance({name: loads[name] for name in self.samples}), 4)
        entry["idle_experts"] = idle_experts(loads)
        self.windows.shares = {name: LEAST_SHARE + 1 - found.share for name, found in figures.items()}
        self.progress.history.append(entry)
        print(entry, flush=True)

    def save(self) -> None:
        """Exports the checkpoint and saves the state; each file is put in place in one rename."""
        options = self.options
        record = self.record()
        export_checkpoint(self.model, self.tokenizer, options.output, options.balance, record)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": asdict(self.progress),
            "shares": self.windows.shares,
            "record": {name: record[name] for name in ("shape", "settings", "texts")},
        }
        options.state.parent.mkdir(parents=True, exist_ok=True)
        fresh = options.state.with_name(options.state.name + ".new")
        torch.save(state, fresh)
        fresh.replace(options.state)

    def resume(self) -> None:
        """Goes on from the saved state, if there is one. It must be of the same command."""
        if not self.options.state.exists():
            return
        state = torch.load(self.options.state, weights_only=True)
        record = self.record()
        for saved in (state["record"], record):
            saved["settings"].pop("minutes")  # more minutes go on, from the rate that they have there
        for name, value in state["record"].items():
            if value != record[name]:
                raise SystemExit(f"--state {self.options.state}: its {name} differ from this command's")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])
        self.windows.shares = state["shares"]
        print(f"resumed at step {self.progress.steps}, minute {self.progress.seconds / 60:.1f}", flush=True)

    def record(self) -> dict[str, Any]:
        """Everything that goes into training.json."""
        kept = {"maths", "prose", "stdlib", "output", "state", "save_minutes", "threads"}
        progress = asdict(self.progress)
        return {
            "shape": self.model.shape.as_dict(),
            "parameters": sum(weight.numel() for weight in self.model.parameters()),
            "settings": {
                **{key: value for key, value in vars(self.options).items() if key not in kept},
                "split_seed": SPLIT_SEED,
                "skills": list(self.skills),
            },
            "texts": {domain.name: describe_domain(domain) for domain in self.domains},
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "tokens": self.progress.text_tokens + self.progress.skill_tokens,
            **progress,
            "seconds": round(self.progress.seconds, 1),
        }

    def train(self) -> None:
        """Trains until the time is up, and probes, exports and saves now and then."""
        limit = self.options.minutes * 60
        saved = self.progress.seconds
        while self.progress.seconds < limit:
            began = time.monotonic()
            losses = self.train_step(self.progress.seconds / limit)
            self.progress.seconds += min(time.monotonic() - began, PAUSE)
            if self.progress.steps % 20 == 0:
                self._report(losses, limit)
            if (
                self.progress.seconds - saved >= self.options.save_minutes * 60
                or self.progress.seconds >= limit
            ):
                self.probe()
                self.save()
                saved = self.progress.seconds

    def _report(self, losses: tuple[float, float], limit: float) -> None:
        progress = self.progress
        speed = (progress.text_tokens + progress.skill_tokens) / progress.seconds
        left = max(limit - progress.seconds, 0) / 60
        print(
            f"step {progress.steps}, minute {progress.seconds / 60:.1f}, {left:.1f} left, "
            f"text loss {losses[0]:.3f}, skill loss {losses[1]:.3f}, {speed:.0f} tokens/s",
            flush=True,
        )


def describe_domain(domain: Domain) -> dict[str, Any]:
    """The sizes and hashes of a domain's texts."""
    return {
        "train_documents": len(domain.train),
        "train_bytes": sum(len(document.text.encode("utf-8")) for document in domain.train),
        "train_sha256": sha256_of(document.text for document in domain.train),
        "heldout_documents": len(domain.heldout),
        "heldout_bytes": len(domain.heldout_text.encode("utf-8")),
        **domain.sources,
    }


def main() -> int:
    """Runs the training command."""
    run = Run(parse_arguments())
    run.resume()
    run.train()
    return 0


if __name__ == "__main__":
    sys.exit(main())

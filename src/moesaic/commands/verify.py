"""`moesaic verify`: compares a model with transformers layer by layer, and names the first that differs."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from moesaic.commands.model_options import PROMPT, Verify
from moesaic.commands.progress import progress
from moesaic.jobs.verify.compare import Verdict, verify
from moesaic.kernels import table
from moesaic.models import files, registry
from moesaic.runtime.machine import cores
from moesaic.text.tokenizer import Tokenizer

DEQUANTIZED_NOTES = {
    "moesaic": "The checkpoint is quantised, or a GGUF file. transformers computed in float32 with the "
    "numbers that moesaic read in its files, so a mistake in reading them is not found.",
    "transformers": "The checkpoint is quantised. transformers dequantised its experts itself.",
}
"""Who read the numbers -> a sentence about what is compared with what."""


def run(options: Verify, as_json: bool) -> int:
    """Compare, and print the errors of each layer. Returns the exit code: 1 if the two sides differ.

    Raises ConfigError for a model that cannot be loaded or that transformers cannot compute, and for a prompt
    that it does not have.
    """
    path = files.resolve(options.model, options.revision, options.hf_overrides)
    tokens = list(options.prompt_tokens) or _tokens(path, options.prompt or PROMPT)
    kernels = table.pick("cpu", options.kernels)
    kernels.set_threads(options.threads or cores(), False)
    start = time.monotonic()
    with progress(Console(stderr=True), time.monotonic, "parts/s") as show:
        verdict = verify(path, kernels, tokens, options.tolerance, show)
    seconds = time.monotonic() - start
    raw = files.read_config(path)
    is_mxfp4 = raw.get("quantization_config", {}).get("quant_method") == "mxfp4"
    dequantizer = options.against if is_mxfp4 else "moesaic"
    dequantized_by = dequantizer if registry.is_quantised(raw) else None
    if as_json:
        record = _record(options, tokens, kernels.name, verdict, seconds)
        print(json.dumps(record | {"dequantised_by": dequantized_by}))
    else:
        _print(options, len(tokens), kernels.name, verdict, seconds)
        if dequantized_by is not None:
            Console(highlight=False).print(DEQUANTIZED_NOTES[dequantized_by], soft_wrap=True, markup=False)
    return 0 if verdict.equal else 1


def _tokens(path: Path, prompt: str) -> list[int]:
    tokenizer = Tokenizer(path)
    try:
        return tokenizer.encode(prompt)
    finally:
        tokenizer.close()


def _record(
    options: Verify, tokens: list[int], kernels: str, verdict: Verdict, seconds: float
) -> dict[str, object]:
    return {
        "model": options.model,
        "against": options.against,
        "kernels": kernels,
        "prompt_tokens": tokens,
        "tolerance": verdict.tolerance,
        "parts": [asdict(part) for part in verdict.parts],
        "first_different": verdict.first,
        "argmax_equal": not verdict.argmax_differs,
        "argmax_differs": list(verdict.argmax_differs),
        "equal": verdict.equal,
        "seconds": round(seconds, 3),
    }


def _print(options: Verify, count: int, kernels: str, verdict: Verdict, seconds: float) -> None:
    console = Console(highlight=False)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("after")
    for name in ("largest error", "relative"):
        table.add_column(name, justify="right")
    table.add_column("")
    for part in verdict.parts:
        mark = "[red]differs[/]" if part.different else ""
        table.add_row(part.part, f"{part.absolute:.1e}", f"{part.relative:.1e}", mark)
    console.print(table)
    for line in _lines(options, count, kernels, verdict, seconds):
        console.print(line, soft_wrap=True, markup=False)


def _lines(options: Verify, count: int, kernels: str, verdict: Verdict, seconds: float) -> list[str]:
    differs = verdict.argmax_differs
    choice = "The most likely token is the same at every position."
    if differs:
        choice = (
            f"The most likely token differs at {len(differs)} of {count} positions, first at {differs[0]}."
        )
    ending = f"(tolerance {verdict.tolerance:g}, {count} tokens, {kernels} kernels, {seconds:.1f} s)"
    lines = ["Both sides got the same input to each layer: moesaic's output of the layer before.", choice]
    if verdict.first is not None:
        return [
            *lines,
            f"Different: {options.model} differs from {options.against} first at {verdict.first} {ending}",
        ]
    word = "Different" if differs else "Equal"
    return [*lines, f"{word}: no part of {options.model} differs from {options.against} {ending}"]

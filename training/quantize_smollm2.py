"""Measures GGUF files in which llama.cpp's own quantiser wrote the padded copies of SmolLM2-135M-Instruct.

    benchmarks/setup_peer.sh llama /tmp/llama
    python training/quantize_smollm2.py WORK --llama /tmp/llama

For each type: the perplexity of held-out text in moesaic by kernels, in transformers with the numbers of the
`gguf` library, and in llama.cpp; greedy tokens beside transformers'; memory beside the bytes of the file's
tensors. WORK keeps the files, and the figures of each type as JSON. So the command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gguf
import torch

import measure_smollm2 as measure
import smollm2_checkpoint
import smollm2_texts as texts
from moesaic import LLM, SamplingParams
from moesaic.kernels import table
from moesaic.planning.sizes import read_checkpoint_sizes
from moesaic.text import gguf_tokenizer
from smollm2_dequantized import read_dense

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

from engines import Engine, start_child, venv_python  # noqa: E402
from quantize_gguf import TYPES  # noqa: E402

KERNELS = ("auto", "avx512_int8", "avx2_int8")
PROMPTS, NEW_TOKENS = 8, 24
PIECE = 512
"""Tokens of a piece of text."""
LENGTH = 1024
"""Tokens of a request at most."""
WHOLE = "f32"
"""The file that is quantised."""


@dataclass(frozen=True)
class Figures:
    """What was measured of a file."""

    kind: str
    types: dict[str, int]
    """A type of the file's tensors -> the bytes of those that have it."""
    numbers: int
    """Numbers of all tensors, with those that pad them."""
    loaded_bytes: int
    """Bytes of the weights in moesaic, as it counts them."""
    planned_bytes: float
    """The same, as `moesaic doctor` and `plan` compute them before anything is loaded."""
    memory: dict[str, int]
    """What `measure_own_memory` says."""
    losses: dict[str, float]
    """Who computed -> the mean negative log-likelihood of the text, in nats."""
    tokens: int
    """Tokens of the text."""
    num_equal: int
    """Greedy tokens that are transformers', up to near ties of its logits."""
    num_different: int
    """Answers with another token than transformers before a near tie."""

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the file's tensors."""
        return sum(self.types.values())

    @property
    def weight_memory(self) -> int:
        """Bytes of resident memory at most, without the KV cache."""
        return self.memory["peak"] - self.memory["cache"]


def prepare(work: Path) -> Path:
    """Writes the checkpoints and the float32 file that are not there yet. Returns the file."""
    source = smollm2_checkpoint.find_source(None)
    for form in ("padded", "padded-dense"):
        if not (work / form / "config.json").exists():
            smollm2_checkpoint.write(source, form, work / form)
    whole = work / f"{WHOLE}.gguf"
    if not whole.exists():
        flags = ["--type", "f32", "--tokens-of", str(source.path)]
        script = BENCHMARKS / "convert_gguf.py"
        subprocess.run([sys.executable, str(script), str(work / "padded"), str(whole), *flags], check=True)
    return whole


def quantize(whole: Path, kind: str, llama: Path) -> Path:
    """Returns the file of a type, which llama.cpp writes if it is not there yet."""
    file = whole.with_name(f"{kind}.gguf")
    if not file.exists():
        script = BENCHMARKS / "quantize_gguf.py"
        command = [venv_python(llama), str(script), str(whole), str(file), kind]
        with file.with_suffix(".log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log)
    return file


def measure_file(file: Path, dense: Path, options: argparse.Namespace) -> Figures:
    """Measures one file. dense: the checkpoint with the config of the padded dense model."""
    torch.set_num_threads(options.threads)
    reference = read_dense(file, dense)
    losses: dict[str, float] = {}
    for kernels in ["auto"] if file.stem == WHOLE else options.kernels:
        llm = LLM(str(file), threads=options.threads, kernels=kernels, max_model_len=LENGTH)
        if not losses:
            pieces = [
                piece for kind in (texts.prose(), texts.code()) for piece in held_out(llm, kind, options)
            ]
            rows = [(question, True) for question in texts.split(texts.questions())[1][:PROMPTS]]
            agreements = measure.compare_tokens(llm, reference, rows, NEW_TOKENS)
            loaded_bytes = llm._worker._executor._model.num_bytes
        losses[kernels] = measure.own_loss(llm, pieces)
    losses["transformers"] = measure.reference_loss(reference, pieces)
    child = start_child(venv_python(options.llama), "llama", str(file), str(options.threads), "f32")
    peer = Engine("llama.cpp", child)
    losses["llama.cpp"] = peer.ask(do="score", pieces=pieces)["loss"]
    peer.stop()
    entries = gguf.GGUFReader(file).tensors
    sizes: Counter[str] = Counter()
    for entry in entries:
        sizes[entry.tensor_type.name] += int(entry.n_bytes)
    return Figures(
        kind=file.stem,
        types=dict(sizes),
        numbers=sum(int(entry.n_elements) for entry in entries),
        loaded_bytes=loaded_bytes,
        planned_bytes=read_checkpoint_sizes(file, file.stem, table.pick("cpu")).weights,
        memory=measure_memory(file, options.threads),
        losses=losses,
        tokens=sum(len(piece) - 1 for piece in pieces),
        num_equal=sum(each.num_equal for each in agreements),
        num_different=sum(each.is_different for each in agreements),
    )


def held_out(llm: LLM, documents: list[str], options: argparse.Namespace) -> list[list[int]]:
    """Half of the text, in pieces."""
    return measure.cut(llm, texts.split(documents)[1], PIECE, options.tokens // 2)


def measure_memory(file: Path, threads: int) -> dict[str, int]:
    """What `measure_own_memory` says of a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure_own_memory, str(file), threads).result()


def measure_own_memory(file: str, threads: int) -> dict[str, int]:
    """Bytes of resident memory that loading and an answer add at most, and those of the KV cache.

    Libraries, threads and the heap of a tokenizer are there before: another model answered.
    """
    settings: dict[str, Any] = {"threads": threads, "max_model_len": 128, "kv_cache_memory": "16MiB"}
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompts = [list(range(start, start + 64)) for start in (20, 120)]
    LLM("demo", **settings).generate(prompts, params)
    gguf_tokenizer.read(Path(file))
    gc.collect()
    start = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    llm = LLM(file, **settings)
    llm.generate(prompts, params)
    return {"peak": resident("VmHWM") - start, "cache": llm.info.kv_bytes}


def resident(*names: str) -> int:
    """Bytes of this process that are resident: the sum of fields of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) * 1024 for name in names or ("RssAnon", "RssFile", "RssShmem"))


def format_row(figures: Figures) -> str:
    """A line of the table."""
    losses = figures.losses
    perplexities = [f"{math.exp(losses[name]):.4f}" if name in losses else "" for name in KERNELS]
    other = math.exp(losses["llama.cpp"]) if "llama.cpp" in losses else math.nan
    difference = math.expm1(losses["auto"] - losses["transformers"])
    mib = [each / 2**20 for each in (figures.tensor_bytes, figures.planned_bytes, figures.weight_memory)]
    return " | ".join(
        [
            f"| {figures.kind.upper()}",
            ", ".join(sorted(figures.types, key=lambda name: -figures.types[name])),
            *(f"{each:.1f}" for each in mib),
            f"{8 * figures.tensor_bytes / figures.numbers:.2f}",
            *perplexities,
            f"{difference:.0e}",
            f"{other:.4f}",
            f"{figures.num_equal}, {figures.num_different} |",
        ]
    )


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path, help="a folder for about 8 GB of files")
    parser.add_argument("--llama", type=Path, metavar="VENV", required=True, help="from setup_peer.sh llama")
    parser.add_argument("--types", nargs="+", choices=[WHOLE, *TYPES], default=[WHOLE, *TYPES])
    parser.add_argument("--kernels", nargs="+", default=KERNELS)
    parser.add_argument("--tokens", type=int, default=5400, help="of text, half prose and half code")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> int:
    """Runs the command."""
    options = parse_arguments()
    options.work.mkdir(parents=True, exist_ok=True)
    whole = prepare(options.work)
    for kind in options.types:
        kept = options.work / f"{kind}.json"
        if not kept.exists():
            file = whole if kind == WHOLE else quantize(whole, kind, options.llama)
            figures = measure_file(file, options.work / "padded-dense", options)
            kept.write_text(json.dumps(asdict(figures), indent=1))
        print(format_row(Figures(**json.loads(kept.read_text()))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

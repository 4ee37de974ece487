"""The engines of `peers.py`: each stays loaded in a child process, some of them with another Python."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint import Checkpoint
from machine import peak_bytes

HERE = Path(__file__).parent
BYTES = {"f32": 4, "bf16": 2, "f16": 2}
QUANTISED = ("q8_0", "q4_0", "q4_k_m")
"""What quantize_gguf.py writes."""
SHORTEST_CONTEXT = 1024
"""Tokens of a request that engines are set up for, or more if the arguments need more."""


@dataclass
class Engine:
    """A child process, and one set of its settings."""

    name: str
    process: subprocess.Popen[str]
    weight_bytes: float | None = None
    """Bytes of a weight. For moesaic they are counted instead."""
    options: dict[str, Any] = field(default_factory=dict)

    def ask(self, **order: Any) -> dict[str, Any]:
        """The child's answer, together with the most memory that its processes had."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(self.options | order) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} died; see its messages above")
        answer: dict[str, Any] = json.loads(line)
        return answer | {"peak_bytes": peak_bytes(self.process.pid)}

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def start(arguments: argparse.Namespace) -> list[Engine]:
    """Starts moesaic first, then the peers that were asked for."""
    model, threads = str(arguments.model), str(arguments.threads)
    context = str(max(SHORTEST_CONTEXT, arguments.prompt_len + arguments.gen_len))
    arguments.settings = json.dumps({"max_model_len": int(context)} | json.loads(arguments.settings))
    if arguments.quantised:
        return _quantised(arguments)
    engines = _moesaic(arguments, model)
    if arguments.compressed:
        child = start_child(sys.executable, "moesaic", str(arguments.compressed), threads, arguments.settings)
        engines.append(Engine("moesaic, compressed", child))
    if arguments.experts:
        peer = start_child(sys.executable, "transformers", model, threads)
        engines += [Engine(f"transformers {way}", peer, 4, {"experts": way}) for way in arguments.experts]
    for kind in arguments.llama_types if arguments.llama else []:
        python = venv_python(arguments.llama)
        file = _gguf(python, arguments.model, arguments.work, kind)
        peer = start_child(python, "llama", str(file), threads, kind)
        engines.append(Engine(f"llama.cpp {kind}", peer, BYTES[kind]))
    for kind in arguments.vllm_types if arguments.vllm else []:
        peer = start_child(venv_python(arguments.vllm), "vllm", model, threads, kind, context)
        engines.append(Engine(f"vLLM {kind}", peer, BYTES[kind]))
    return engines


def _quantised(arguments: argparse.Namespace) -> list[Engine]:
    """moesaic and llama.cpp on one GGUF file that llama.cpp quantised."""
    python, threads, kind = venv_python(arguments.llama), str(arguments.threads), arguments.quantised
    source = _gguf(python, arguments.model, arguments.work, "bf16")
    file = source.with_name(f"{arguments.model.name}-{kind}.gguf")
    if not file.exists() or file.stat().st_mtime < source.stat().st_mtime:
        command = [python, str(HERE / "quantize_gguf.py"), str(source), str(file), kind]
        subprocess.run(command, check=True, stdout=sys.stderr)
    bytes_of = file.stat().st_size / Checkpoint(arguments.model).numbers
    peer = Engine(f"llama.cpp {kind}", start_child(python, "llama", str(file), threads, kind), bytes_of)
    return [*_moesaic(arguments, str(file)), peer]


def _moesaic(arguments: argparse.Namespace, model: str) -> list[Engine]:
    """moesaic, and moesaic with n-grams that draft tokens if --speculate asks for them."""
    threads, settings = str(arguments.threads), json.loads(arguments.settings)
    engines = [Engine("moesaic", start_child(sys.executable, "moesaic", model, threads, arguments.settings))]
    if arguments.speculate:
        drafts = {"method": "ngram", "num_speculative_tokens": arguments.speculate}
        told = json.dumps(settings | {"speculative_config": drafts})
        engines.append(
            Engine("moesaic, drafts", start_child(sys.executable, "moesaic", model, threads, told))
        )
    return engines


def start_child(python: str, peer: str, *arguments: str) -> subprocess.Popen[str]:
    command = [python, str(HERE / f"peer_{peer}.py"), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def venv_python(path: Path) -> str:
    """The interpreter of a virtual environment, or the interpreter itself if the path names one."""
    return str(path / "bin" / "python" if path.is_dir() else path)


def _gguf(python: str, model: Path, work: Path | None, kind: str) -> Path:
    """The checkpoint as a GGUF file. It is written unless one exists that is not older than the
    checkpoint."""
    folder = work or model.with_name(f"{model.name}-gguf")
    file = folder / f"{model.name}-{kind}.gguf"
    if not file.exists() or file.stat().st_mtime < (model / "config.json").stat().st_mtime:
        folder.mkdir(parents=True, exist_ok=True)
        command = [python, str(HERE / "convert_gguf.py"), str(model), str(file), "--type", kind]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return file

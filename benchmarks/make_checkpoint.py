"""Write a random checkpoint of a published shape, to measure speed with.

    python benchmarks/make_checkpoint.py qwen3-moe-0.96b DIR

Weights are bf16, normal with a standard deviation of 0.02, from a fixed seed, one shard a layer. The
texts that it writes mean nothing; its routing is close to uniform.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from moesaic.testing import byte_tokenizer

ATTENTION = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
COMMON = {
    "hidden_size": 1024,
    "vocab_size": 16384,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 256,
    **ATTENTION,
}
SHAPES: dict[str, dict[str, object]] = {
    "qwen3-moe-0.96b": COMMON
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 12,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 384,
        "intermediate_size": 384,
        "norm_topk_prob": True,
    },
    "mixtral-0.75b": COMMON
    | {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 3584,
    },
}
Shape = dict[str, tuple[int, ...]]


def attention_shapes(prefix: str, normed: bool) -> Shape:
    """Tensors of one layer outside the experts."""
    heads, kv, width, hidden = 16, 4, 64, 1024
    shapes: Shape = {
        f"{prefix}.self_attn.q_proj.weight": (heads * width, hidden),
        f"{prefix}.self_attn.k_proj.weight": (kv * width, hidden),
        f"{prefix}.self_attn.v_proj.weight": (kv * width, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, heads * width),
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }
    if normed:
        shapes |= {f"{prefix}.self_attn.{name}_norm.weight": (width,) for name in ("q", "k")}
    return shapes


def layer_shapes(name: str, layer: int) -> Shape:
    prefix = f"model.layers.{layer}"
    if name.startswith("qwen3"):
        experts, width, where = 64, 384, f"{prefix}.mlp"
        words = ("gate_proj", "up_proj", "down_proj")
    else:
        experts, width, where = 8, 3584, f"{prefix}.block_sparse_moe"
        words = ("w1", "w3", "w2")
    shapes = attention_shapes(prefix, normed=name.startswith("qwen3"))
    shapes[f"{where}.gate.weight"] = (experts, 1024)
    for expert in range(experts):
        for word, shape in zip(words, ((width, 1024), (width, 1024), (1024, width)), strict=True):
            shapes[f"{where}.experts.{expert}.{word}.weight"] = shape
    return shapes


def shards(name: str) -> Iterator[Shape]:
    config = SHAPES[name]
    vocab, hidden = 16384, 1024
    yield {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(int(str(config["num_hidden_layers"]))):
        yield layer_shapes(name, layer)


def write(name: str, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(shards(name)):
        tensors = {}
        for tensor, shape in shapes.items():
            norm = len(shape) == 1
            values = torch.ones(shape) if norm else torch.randn(shape, generator=generator) * 0.02
            tensors[tensor] = values.to(torch.bfloat16)
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(SHAPES[name] | {"torch_dtype": "bfloat16"}, indent=2))
    byte_tokenizer(path, ["<end>"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", choices=sorted(SHAPES))
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    write(arguments.name, arguments.path)

"""Write a random checkpoint of a published shape, to measure speed with.

    python benchmarks/make_checkpoint.py qwen3-moe-0.96b DIR
    python benchmarks/make_checkpoint.py qwen3-moe-0.1b DIR --skew alternating --share 0.75
    python benchmarks/make_checkpoint.py qwen3-30b-a3b DIR --layers 7

Weights are bf16, normal with a standard deviation of 0.02, from a fixed seed, one shard a layer. The
texts that it writes are bytes and words such as w300. Its routing is close to uniform. With --skew, that
share of the pairs goes to one half of the experts in each layer; `skew.py` says how, and what was reached
is counted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import skew
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
BIG: dict[str, object] = COMMON | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 32,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "intermediate_size": 384,
    "norm_topk_prob": True,
}
MIDDLE: dict[str, object] = COMMON | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 12,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "intermediate_size": 384,
    "norm_topk_prob": True,
}
SMALL: dict[str, object] = COMMON | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 512,
    "vocab_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 8,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "intermediate_size": 256,
    "norm_topk_prob": True,
}
SHAPES: dict[str, dict[str, object]] = {
    "qwen3-moe-2.6b": BIG,
    "qwen3-moe-2.6b-mqa": BIG | {"num_key_value_heads": 1},
    "qwen3-moe-0.96b": MIDDLE,
    "qwen3-moe-0.96b-150k": MIDDLE | {"vocab_size": 151936},
    "qwen3-moe-0.1b": SMALL,
    "qwen3-moe-0.2b-deep": SMALL | {"num_hidden_layers": 16},
    "qwen3-moe-0.01b": COMMON
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 256,
        "vocab_size": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "qwen3-moe-0.2b": COMMON
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 512,
        "vocab_size": 4096,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": 4,
        "num_experts": 64,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "qwen3.5-1.1b": COMMON
    | {
        "model_type": "qwen3_5_moe_text",
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "num_hidden_layers": 12,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 384,
        "shared_expert_intermediate_size": 384,
    },
    "qwen3-30b-a3b": COMMON
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "intermediate_size": 6144,
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


def number(name: str, *keys: str) -> int:
    """The first of these settings that the shape has."""
    return next(int(str(SHAPES[name][key])) for key in keys if key in SHAPES[name])


def linear_attention_shapes(name: str, prefix: str) -> Shape:
    """The same of a layer of Qwen3.5 with linear attention, whose heads have 128 numbers."""
    keys, values = number(name, "linear_num_key_heads"), number(name, "linear_num_value_heads")
    hidden, mixed = number(name, "hidden_size"), 128 * (2 * keys + values)
    part = f"{prefix}.linear_attn"
    return {
        f"{part}.in_proj_qkv.weight": (mixed, hidden),
        f"{part}.in_proj_z.weight": (128 * values, hidden),
        f"{part}.in_proj_b.weight": (values, hidden),
        f"{part}.in_proj_a.weight": (values, hidden),
        f"{part}.conv1d.weight": (mixed, 1, 4),
        f"{part}.A_log": (values,),
        f"{part}.dt_bias": (values,),
        f"{part}.norm.weight": (128,),
        f"{part}.out_proj.weight": (hidden, 128 * values),
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }


def attention_shapes(name: str, prefix: str) -> Shape:
    """Tensors of one layer outside the experts."""
    heads, kv = number(name, "num_attention_heads"), number(name, "num_key_value_heads")
    width, hidden = number(name, "head_dim"), number(name, "hidden_size")
    shapes: Shape = {
        f"{prefix}.self_attn.q_proj.weight": ((1 + name.startswith("qwen3.5")) * heads * width, hidden),
        f"{prefix}.self_attn.k_proj.weight": (kv * width, hidden),
        f"{prefix}.self_attn.v_proj.weight": (kv * width, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, heads * width),
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
    }
    if name.startswith("qwen3"):
        shapes |= {f"{prefix}.self_attn.{which}_norm.weight": (width,) for which in ("q", "k")}
    return shapes


def layer_shapes(name: str, layer: int) -> Shape:
    prefix = f"model.layers.{layer}"
    qwen = name.startswith("qwen3")
    where = f"{prefix}.mlp" if qwen else f"{prefix}.block_sparse_moe"
    words = ("gate_proj", "up_proj", "down_proj") if qwen else ("w1", "w3", "w2")
    experts, hidden = number(name, "num_experts", "num_local_experts"), number(name, "hidden_size")
    width = number(name, "moe_intermediate_size", "intermediate_size")
    linear = name.startswith("qwen3.5") and (layer + 1) % 4
    shapes = (linear_attention_shapes if linear else attention_shapes)(name, prefix)
    if name.startswith("qwen3.5"):
        shared = number(name, "shared_expert_intermediate_size")
        shapes |= {
            f"{where}.shared_expert_gate.weight": (1, hidden),
            f"{where}.shared_expert.gate_proj.weight": (shared, hidden),
            f"{where}.shared_expert.up_proj.weight": (shared, hidden),
            f"{where}.shared_expert.down_proj.weight": (hidden, shared),
        }
    shapes[f"{where}.gate.weight"] = (experts, hidden)
    for expert in range(experts):
        for word, shape in zip(words, ((width, hidden), (width, hidden), (hidden, width)), strict=True):
            shapes[f"{where}.experts.{expert}.{word}.weight"] = shape
    return shapes


def shards(name: str) -> Iterator[Shape]:
    vocab, hidden = number(name, "vocab_size"), number(name, "hidden_size")
    yield {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(number(name, "num_hidden_layers")):
        yield layer_shapes(name, layer)


def write_tokenizer(path: Path, size: int) -> None:
    """A token a byte, one that ends answers, and words, so that a stream has text for nearly each token."""
    byte_tokenizer(path, ["<end>"])
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first_word = len(vocabulary) + len(tokenizer["added_tokens"])
    vocabulary |= {f"\u0120w{token}": token for token in range(first_word, size)}
    file.write_text(json.dumps(tokenizer))


def write(name: str, path: Path, pattern: str | None = None, share: float = 0.75) -> None:
    """A checkpoint in `path`. pattern, share: of `skew.py`; None: close to uniform."""
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    total = 0
    for shard, shapes in enumerate(shards(name)):
        tensors = {}
        for tensor, shape in shapes.items():
            norm = len(shape) == 1
            values = torch.ones(shape) if norm else torch.randn(shape, generator=generator) * 0.02
            if pattern is not None:
                skew.reserve(tensor, values)
            tensors[tensor] = values.to(torch.bfloat16)
        file = f"model-{shard:05d}.safetensors"
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(SHAPES[name] | {"torch_dtype": "bfloat16"}, indent=2))
    write_tokenizer(path, number(name, "vocab_size"))
    if pattern is not None:
        skew.calibrate(path, pattern, share)
        reached = skew.report(path, pattern)
        for where in ("prompts", "answers"):
            shares = " ".join(f"{one:.2f}" for one in reached[where].values())
            print(f"{pattern}: share of the hot half in {where}, layer by layer: {shares}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", choices=sorted(SHAPES))
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, help="so many of the layers only")
    parser.add_argument("--skew", choices=skew.PATTERNS)
    parser.add_argument("--share", type=float, default=0.75, help="of the pairs, on the hot half")
    arguments = parser.parse_args()
    if arguments.layers:
        SHAPES[arguments.name]["num_hidden_layers"] = arguments.layers
    write(arguments.name, arguments.path, arguments.skew, arguments.share)

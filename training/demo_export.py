"""Writes the trained demo model as a Hugging Face Qwen3-MoE checkpoint."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from demo_chat import CHAT_TEMPLATE, END, END_OF_TEXT, START
from demo_model import DemoModel, DemoShape

NUMBER_LIST = re.compile(r"\[\s+([-\d.,\se]+?)\s+\]")
BLOCK_NAMES = {
    "input_norm.weight": "input_layernorm.weight",
    "expert_norm.weight": "post_attention_layernorm.weight",
    "experts.router": "mlp.gate.weight",
}


def checkpoint_tensors(model: DemoModel) -> dict[str, Tensor]:
    """The weights in bfloat16 under their usual on-disk names, one per expert."""
    tensors: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        value = weight.detach().to(torch.bfloat16)
        if name == "embedding":
            tensors["model.embed_tokens.weight"] = value
        elif name == "final_norm.weight":
            tensors["model.norm.weight"] = value
        else:
            _, layer, rest = name.split(".", 2)
            prefix = f"model.layers.{layer}."
            if rest.startswith("attention."):
                tensors[prefix + rest.replace("attention.", "self_attn.")] = value
            elif rest in BLOCK_NAMES:
                tensors[prefix + BLOCK_NAMES[rest]] = value
            else:
                kind = rest.removeprefix("experts.")
                for number, expert in enumerate(value.unbind(0)):
                    key = f"{prefix}mlp.experts.{number}.{kind}_proj.weight"
                    tensors[key] = expert.clone()
    return tensors


def model_config(shape: DemoShape, tokenizer: Tokenizer, balance: float) -> dict[str, Any]:
    """The contents of config.json."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": tokenizer.token_to_id(END),
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.top_k * shape.expert_width,
        "max_position_embeddings": shape.positions,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.expert_width,
        "norm_topk_prob": True,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "output_router_logits": False,
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "rms_norm_eps": shape.norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "router_aux_loss_coef": balance,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
    }


def tokenizer_config(shape: DemoShape) -> dict[str, Any]:
    """The contents of tokenizer_config.json."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "additional_special_tokens": [START, END],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": shape.positions,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def generation_config(tokenizer: Tokenizer) -> dict[str, Any]:
    """The contents of generation_config.json."""
    return {
        "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "do_sample": True,
        "eos_token_id": [tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)],
        "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON file with each list of numbers in one line, and puts it in place in one rename."""
    fresh = path.with_name(path.name + ".new")
    text = json.dumps(value, indent=2, ensure_ascii=False)
    text = NUMBER_LIST.sub(lambda found: "[" + " ".join(found[1].split()) + "]", text)
    fresh.write_text(text + "\n", encoding="utf-8")
    fresh.replace(path)


def export_checkpoint(
    model: DemoModel, tokenizer: Tokenizer, folder: Path, balance: float, record: dict[str, Any]
) -> None:
    """Writes every file of the checkpoint, each put in place in one rename."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / "model.safetensors.new"
    save_file(checkpoint_tensors(model), fresh, metadata={"format": "pt"})
    fresh.chmod(0o644)
    fresh.replace(folder / "model.safetensors")
    fresh = folder / "tokenizer.json.new"
    tokenizer.save(str(fresh))
    fresh.replace(folder / "tokenizer.json")
    write_json(folder / "config.json", model_config(model.shape, tokenizer, balance))
    write_json(folder / "tokenizer_config.json", tokenizer_config(model.shape))
    write_json(folder / "generation_config.json", generation_config(tokenizer))
    write_json(folder / "training.json", record)

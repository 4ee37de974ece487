"""Tiny random checkpoints, written by transformers, and transformers' own answer to a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

torch.set_num_threads(1)

KINDS = {
    "dots1": (transformers.Dots1Config, transformers.Dots1ForCausalLM),
    "solar_open": (transformers.SolarOpenConfig, transformers.SolarOpenForCausalLM),
    "hy_v3": (transformers.HYV3Config, transformers.HYV3ForCausalLM),
    "ernie4_5_moe": (transformers.Ernie4_5_MoeConfig, transformers.Ernie4_5_MoeForCausalLM),
    "granitemoe": (transformers.GraniteMoeConfig, transformers.GraniteMoeForCausalLM),
    "granitemoeshared": (transformers.GraniteMoeSharedConfig, transformers.GraniteMoeSharedForCausalLM),
    "mellum": (transformers.MellumConfig, transformers.MellumForCausalLM),
    "exaone_moe": (transformers.ExaoneMoeConfig, transformers.ExaoneMoeForCausalLM),
    "minimax_m2": (transformers.MiniMaxM2Config, transformers.MiniMaxM2ForCausalLM),
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
    "olmoe": (transformers.OlmoeConfig, transformers.OlmoeForCausalLM),
    "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
    "dbrx": (transformers.DbrxConfig, transformers.DbrxForCausalLM),
    "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
    "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
    "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
    "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
    "qwen3_5_moe_text": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
    "lfm2_moe": (transformers.Lfm2MoeConfig, transformers.Lfm2MoeForCausalLM),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM),
}

AROUND = {
    "internvl": (transformers.InternVLConfig, transformers.InternVLForConditionalGeneration),
    "kimi_k25": (transformers.Kimi_K25Config, transformers.Kimi_K25ForConditionalGeneration),
    "qwen3_5_moe": (transformers.Qwen3_5MoeConfig, transformers.Qwen3_5MoeForConditionalGeneration),
    "qwen3_vl_moe": (transformers.Qwen3VLMoeConfig, transformers.Qwen3VLMoeForConditionalGeneration),
    "glm4v_moe": (transformers.Glm4vMoeConfig, transformers.Glm4vMoeForConditionalGeneration),
}
"""Models that see images, around a text model."""
KINDS |= AROUND


def build(kind: str, options: dict[str, Any], seed: int = 0, spread: float = 0.25) -> Any:
    """A transformers model with random weights of standard deviation `spread`, biases and norms too.

    The correction bias of a gate is drawn around -0.4, so that some scores become negative.
    """
    config_class, model_class = KINDS[kind]
    model = model_class(config_class(**options)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            norm = "norm" in name and parameter.dim() == 1
            parameter.copy_(1.0 + 0.2 * noise if norm else spread * noise)
        for bias in corrections(model):
            bias.copy_(spread * torch.randn(bias.shape, generator=generator) - 0.4)
    return model


def corrections(model: Any) -> list[torch.Tensor]:
    """The correction biases [E] of a transformers model's gates. They are buffers and not parameters."""
    return [
        buffer
        for name, buffer in model.named_buffers()
        if name.endswith(("e_score_correction_bias", "expert_bias"))
    ]


def text_parameters(model: Any) -> list[torch.Tensor]:
    """The parameters of a transformers model without those about images."""
    images = ("vision_tower", "visual", "projector")
    return [each for name, each in model.named_parameters() if not any(word in name for word in images)]


def save(model: Any, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes the checkpoint in `dtype`, as transformers does by default. `model` is rounded too.

    transformers gives the text model of kimi_k25 names that are in no file of its makers. So that is written
    in the form in which transformers computes.
    """
    model.to(dtype).save_pretrained(path, save_original_format=model.config.model_type != "kimi_k25")
    if model.config.model_type == "qwen3_vl_moe":
        transpose_experts(path)
    return path


def transpose_experts(path: Path) -> Path:
    """Turns a layer's two tensors of experts from rows into columns, as Qwen3-VL's makers have, or back."""
    tensors = load_file(path / "model.safetensors")
    ends = ("experts.gate_up_proj", "experts.down_proj")
    turned = {name: each.mT.contiguous() for name, each in tensors.items() if name.endswith(ends)}
    save_file(tensors | turned, path / "model.safetensors", {"format": "pt"})
    return path


def save_fused(model: Any, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Writes the checkpoint with each layer's experts in two tensors, in the form in which transformers
    computes."""
    model.to(dtype).save_pretrained(path, save_original_format=False)
    return path


def edit(path: Path, **changes: Any) -> Path:
    """Changes keys of config.json; None removes the key."""
    file = path / "config.json"
    config = json.loads(file.read_text())
    for name, value in changes.items():
        config.pop(name, None)
        if value is not None:
            config[name] = value
    file.write_text(json.dumps(config))
    return path


def prompt(length: int, vocab: int, seed: int = 1) -> list[int]:
    """Random token ids."""
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """[length, V] logits of every position."""
    return model(torch.tensor([tokens]), use_cache=False).logits[0].float()


@torch.no_grad()
def reference_greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """The next `count` tokens, the most likely one each time."""
    past, step, out = None, torch.tensor([tokens]), []
    for _ in range(count):
        answer = model(step, past_key_values=past, use_cache=True)
        past = answer.past_key_values
        out.append(int(answer.logits[0, -1].argmax()))
        step = torch.tensor([[out[-1]]])
    return out

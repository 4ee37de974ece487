"""Tiny checkpoints with a layer that predicts the token after the next one, and what it proposes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moesaic.testing import byte_tokenizer
from tests.support import model_configs, tiny_models

LAYERS = 3
"""Of the model, without the one that predicts."""
FILE = "model.safetensors"
VOCAB = 300
KINDS = {
    "deepseek_v3": {"first_k_dense_replace": 1},
    "glm4_moe": {"first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True},
}


def options(kind: str, layers: int) -> dict[str, Any]:
    _, base = model_configs.CASES["deepseek3" if kind == "deepseek_v3" else "glm4"]
    return {**base, **KINDS[kind], "num_hidden_layers": layers, "vocab_size": VOCAB}


def save(kind: str, path: Path, strength: float = 1.0, seed: int = 0) -> Path:
    """Writes a checkpoint. strength: by what attention and MLPs are multiplied.

    With little of it the next token depends mostly on the last one. The layer then proposes what the model
    would: its projection takes the token and little of the hidden state.
    """
    tiny_models.save(tiny_models.build(kind, options(kind, LAYERS + 1), seed=seed), path)
    file, generator = path / FILE, torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = strength * tensors[name]
    hidden = tensors["model.norm.weight"].shape[0]
    front = f"model.layers.{LAYERS}."
    noise = torch.randn(hidden, 2 * hidden, generator=generator)
    alike = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    weight = min(1.0, strength)
    tensors |= {
        f"{front}enorm.weight": 1 + weight * 0.2 * torch.randn(hidden, generator=generator),
        f"{front}hnorm.weight": 1 + 0.2 * torch.randn(hidden, generator=generator),
        f"{front}eh_proj.weight": alike + weight * 0.25 * noise,
        f"{front}shared_head.norm.weight": tensors["model.norm.weight"].clone(),
        f"{front}shared_head.head.weight": tensors["lm_head.weight"].clone(),
        f"{front}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    save_file(tensors, file, {"format": "pt"})
    tiny_models.edit(path, num_hidden_layers=LAYERS, num_nextn_predict_layers=1)
    byte_tokenizer(path)
    return path


@torch.no_grad()
def proposals(kind: str, path: Path, tokens: Sequence[int]) -> list[int]:
    """What the layer of the checkpoint proposes for the token after the next one, position by position.

    transformers computes the layers, over all tokens at once and without a cache. The last token only
    follows.
    """
    config_class, model_class = tiny_models.KINDS[kind]
    wanted = config_class(**options(kind, LAYERS + 1))
    model, tensors = model_class.from_pretrained(path, config=wanted).eval(), load_file(path / FILE)
    front, base = f"model.layers.{LAYERS}.", model.model
    layer, base.layers = base.layers[LAYERS], base.layers[:LAYERS]
    ids = torch.tensor([tokens])
    hidden = base(ids[:, :-1], use_cache=False).last_hidden_state

    def norm(rows: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps)
        return rows * scale * tensors[f"{front}{name}.weight"]

    both = torch.cat([norm(base.embed_tokens(ids[:, 1:]), "enorm"), norm(hidden, "hnorm")], dim=-1)
    rows = both @ tensors[f"{front}eh_proj.weight"].T
    places = torch.arange(rows.shape[1])[None]
    out = layer(rows, position_ids=places, position_embeddings=base.rotary_emb(rows, places))
    out = out[0] if isinstance(out, tuple) else out
    chosen: list[int] = (norm(out, "shared_head.norm") @ tensors["lm_head.weight"].T)[0].argmax(-1).tolist()
    return chosen

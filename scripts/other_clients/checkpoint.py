"""Writes a checkpoint for agents: a context of 256 Ki tokens, the demo's tokenizer and its chat template.

    .venv/bin/python -m scripts.other_clients.checkpoint FOLDER

Its weights are random and small, but for a preference of some tokens: a text is the word `ls`, and then ends.
Inside of JSON it writes what ends soonest. So calls that a grammar forces are short, keep to any schema, and
do no harm where an agent runs them. A window keeps the attention short, so a long prompt is read in seconds.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from moesaic.models.files import resolve

CONTEXT = 262144
HIDDEN, HEADS, WIDTH, EXPERTS = 64, 2, 32, 4
WORD = "ls"
AFTER_WORD = ('"', "}", "]", ",")
"""What follows the word where the answer cannot end: the best that the grammar allows, in this order."""
ELSEWHERE = (WORD, "<|im_end|>", "}", "]", '"', "1", "f")
"""What follows any other token."""


def write(folder: Path) -> None:
    """Writes the checkpoint into an existing folder."""
    demo = Path(resolve("demo"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, folder / name)
    tokenizer = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
    ids = tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    config = {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": len(ids),
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(make_tensors(ids), folder / "model.safetensors", metadata={"format": "pt"})


def make_tensors(ids: dict[str, int]) -> dict[str, torch.Tensor]:
    """Returns the weights of a vocabulary, by name."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(shape, generator=generator)

    layer, key = "model.layers.0", HIDDEN // HEADS
    tensors = {
        "model.embed_tokens.weight": draw(len(ids), HIDDEN),
        "lm_head.weight": draw(len(ids), HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        f"{layer}.input_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}.post_attention_layernorm.weight": torch.ones(HIDDEN),
        f"{layer}.self_attn.q_proj.weight": draw(HIDDEN, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": draw(key, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": draw(key, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": draw(HIDDEN, HIDDEN),
        f"{layer}.block_sparse_moe.gate.weight": draw(EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        prefix = f"{layer}.block_sparse_moe.experts.{expert}"
        tensors[f"{prefix}.w1.weight"] = draw(WIDTH, HIDDEN)
        tensors[f"{prefix}.w2.weight"] = draw(HIDDEN, WIDTH)
        tensors[f"{prefix}.w3.weight"] = draw(WIDTH, HIDDEN)
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    # One number of a hidden state says whether the token before ends a value, another one that it does not.
    # The norm makes that number 8, the root of HIDDEN.
    ends = [ids[text] for text in (WORD, "1", "}", "]")]
    embedding[:, 0] = HIDDEN**0.5
    embedding[ends, 0], embedding[ends, 1] = 0.0, HIDDEN**0.5
    for place, texts in enumerate((ELSEWHERE, ("<|im_end|>", *AFTER_WORD))):
        for rank, text in enumerate(texts):
            head[ids[text], place] = (120 - 16 * rank) / HIDDEN**0.5
    return tensors


if __name__ == "__main__":
    write(Path(sys.argv[1]))

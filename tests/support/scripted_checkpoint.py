"""A checkpoint that answers with known texts: after each token it says the one that follows it in a chain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from moesaic.testing import byte_tokenizer
from tests.support import tiny_models

HIDDEN = 64
SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}


def write(path: Path, chains: Sequence[Sequence[str]], special: Sequence[str], template: str) -> Path:
    """Write the checkpoint into `path`. chains: tokens that follow one another. No token is in two of them,
    except at the end. special: those of them that are special tokens; the first one ends an answer.
    """
    texts = list(dict.fromkeys([*special, *(text for chain in chains for text in chain)]))
    ids = {text: 256 + number for number, text in enumerate(texts)}
    config = {"vocab_size": 256 + len(texts), "eos_token_id": ids[special[0]], "bos_token_id": None}
    model = tiny_models.build("qwen3_moe", {**SIZES, **config})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        pairs = [pair for chain in chains for pair in pairwise([*chain, special[0]])]
        for place, (now, following) in enumerate(pairs):
            model.model.embed_tokens.weight[ids[now], place] = 1.0
            model.lm_head.weight[ids[following], place] = 1.0
    tiny_models.save(model, path, torch.float32)
    byte_tokenizer(path, texts, chat_template=template, eos_token=special[0])
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = token["content"] in special
    file.write_text(json.dumps(tokenizer))
    return path

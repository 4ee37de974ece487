"""The names of tensors in GGUF files, and what moesaic calls the same tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "token_embd_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
_INSIDE = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_WHOLE = {
    "attn_sinks.weight": "self_attn.sinks",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.decay",
}
"""Names without an ending of our own."""
_PARTS = {"gate": 0, "up": 1, "down": 2}


@dataclass(frozen=True)
class Names:
    """What the parts of a family's layer are called after "model.layers.N."."""

    gate: str = "mlp.gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    correction_axes: int = 0
    """Axes of that bias in front of the one of the experts."""
    shared_experts: str = "mlp.shared_experts"
    experts: str = "mlp.experts"
    words: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """The names of an expert's gate, up and down projection."""
    family_names: Mapping[str, str] = field(default_factory=dict)
    """Parts of a layer that this family calls otherwise: the file's word -> after "model.layers.N."."""
    linear_projections: tuple[str, str] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    """Projections of linear attention to query, key and value, and to the gate of the output."""

    def plain(self, name: str) -> str:
        """What moesaic calls the tensor `name`. A name that is not known stays as it is.

        Matrices of all experts [E, o, i] are called as one expert's, without its number.

        >>> Names().plain("blk.3.ffn_up_exps.weight")
        'model.layers.3.mlp.experts.up_proj.weight'
        """
        match = _BLOCK.fullmatch(name)
        if match is None:
            return OUTSIDE.get(name, name)
        layer, part_name = match.groups()
        plain = self._plain_part(part_name)
        return name if plain is None else f"model.layers.{layer}.{plain}"

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the tensor `name` with the axes of 1 that files leave out."""
        if name.endswith(".ffn_gate_inp_shexp.weight") and len(shape) == 1:
            return (1, *shape)
        if name.endswith(".exp_probs_b.bias"):
            return (*(1,) * self.correction_axes, *shape)
        if name.endswith((".shortconv.conv.weight", ".ssm_conv1d.weight")) and len(shape) == 2:
            return (shape[0], 1, shape[1])
        return shape

    def _plain_part(self, part_name: str) -> str | None:
        word, _, ending = part_name.rpartition(".")
        if part_name in _WHOLE:
            return _WHOLE[part_name]
        if part_name == "exp_probs_b.bias":
            return self.correction
        if word == "ffn_gate_inp":
            return f"{self.gate}.{ending}"
        if word == "ffn_gate_up_exps" and ending == "weight":
            return f"{self.experts}.gate_up_proj"
        if word in ("attn_qkv", "attn_gate"):
            return f"{self.linear_projections[word == 'attn_gate']}.{ending}"
        if word in self.family_names or word in _INSIDE:
            return f"{self.family_names.get(word) or _INSIDE[word]}.{ending}"
        expert_match = re.fullmatch(
            r"ffn_(gate|up|down)\.(\d+)", word
        )  # experts one by one, as in early files
        if expert_match is not None:
            return f"{self.experts}.{expert_match[2]}.{self.words[_PARTS[expert_match[1]]]}.{ending}"
        match = re.fullmatch(r"ffn_(gate|up|down)_(exps|shexp)", word)
        if match is None:
            return None
        part = _PARTS[match[1]]
        if match[2] == "exps":
            return f"{self.experts}.{self.words[part]}.{ending}"
        return f"{self.shared_experts}.{match[1]}_proj.{ending}"

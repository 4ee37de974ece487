"""Every model against transformers in float32: logits, and 24 greedy tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import model_configs, tiny_models
from tests.support.model_driver import Driver
from tests.support.native_kernels import LOGITS

from moesaic.kernels import table
from moesaic.kernels.table import pick
from moesaic.models import registry

LENGTH = 41
"""Of the prompts: past every window and every original context of `cases`."""
GREEDY = 24
Published = Callable[..., tuple[Any, Path]]
Answered = Callable[..., tuple[torch.Tensor, list[int]]]
KERNELS = (
    *table.instruction_sets()[:1],
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("reference", *table.instruction_sets()[1:])
        if name not in table.BY_NAME
    ),
)
"""The fastest of this machine; the others are slow to try with everything."""
SPLITTING = [
    pytest.param(name, marks=pytest.mark.slow) for name in table.instruction_sets() if name in table.SPLITTING
]
"""They differ from the fastest only where weights are bf16."""


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over largest logit."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def write(name: str, path: Path) -> tuple[Any, Path]:
    kind, options = model_configs.CASES[name]
    model = tiny_models.build(kind, options)
    return model, tiny_models.save(model, path)


@pytest.mark.parametrize(("name", "kernels"), model_configs.with_kernels(KERNELS))
def test_logits_and_greedy_tokens_are_those_of_transformers(
    name: str, kernels: str, published: Published, answered: Answered
) -> None:
    theirs, path = published(name, torch.float32)
    ours = registry.load(path, table.pick("cpu", kernels))
    tokens = tiny_models.prompt(LENGTH, model_configs.VOCAB)
    wanted, wanted_tokens = answered(name, torch.float32, LENGTH, GREEDY)
    driver = Driver(ours)
    for index, chunk in enumerate((None, 6)):
        assert error(driver.prefill(tokens, index, chunk), wanted) < 1e-4
    parameters = (*tiny_models.text_parameters(theirs), *tiny_models.corrections(theirs))
    assert ours.num_parameters == sum(part.numel() for part in parameters)
    assert len(set(wanted_tokens)) > 3  # A constant answer would prove little.
    assert Driver(ours).greedy(tokens, GREEDY, chunk=7) == wanted_tokens


@pytest.mark.parametrize("name", ["mixtral-window", "qwen3", "deepseek-full"])
def test_a_batch_of_chunks_and_single_rows_gives_each_its_own_answer(name: str, tmp_path: Path) -> None:
    theirs, path = write(name, tmp_path)
    driver = Driver(registry.load(path, pick("cpu")), num_blocks=128)
    prompts = [tiny_models.prompt(length, model_configs.VOCAB, seed=length) for length in (23, 5, 41, 12, 1)]
    wanted = [tiny_models.reference_logits(theirs, tokens)[-1] for tokens in prompts]
    driver.step({index: tokens[:-1] for index, tokens in enumerate(prompts[:2])})
    driver.step({2: prompts[2][:10], 3: prompts[3][:-1]})
    last = {0: prompts[0][-1:], 2: prompts[2][10:], 1: prompts[1][-1:], 3: prompts[3][-1:], 4: prompts[4]}
    found = driver.step(last)
    ends = torch.tensor([len(part) for part in last.values()]).cumsum(0) - 1
    for row, index in zip(ends.tolist(), last, strict=True):
        assert error(found[row], wanted[index]) < 1e-4


NARROW = ["mixtral-window", "qwen3", "deepseek-full"]
"""Cases whose checkpoints in 16 bits are tried with all kernels."""


def check_narrow(path: Path, kernels: str, answer: tuple[torch.Tensor, list[int]], few: int) -> None:
    """Logits and greedy tokens. few: an answer with no more different tokens would prove little."""
    ours = registry.load(path, pick("cpu", kernels))
    tokens = tiny_models.prompt(LENGTH, model_configs.VOCAB)
    logits, wanted = answer
    assert error(Driver(ours).prefill(tokens), logits) < LOGITS.get(kernels, 1e-4)
    assert len(set(wanted)) > few
    assert Driver(ours).greedy(tokens, GREEDY, chunk=7) == wanted


@pytest.mark.parametrize("kernels", [*KERNELS, *SPLITTING])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NARROW)
def test_narrow_checkpoints_are_widened(
    name: str, dtype: torch.dtype, kernels: str, published: Published, answered: Answered
) -> None:
    """The same rounded weights on both sides, all arithmetic in float32."""
    check_narrow(published(name, dtype)[1], kernels, answered(name, dtype, LENGTH, GREEDY), 5)


@pytest.mark.full
@pytest.mark.parametrize("kernels", [name for name in table.instruction_sets() if name in table.SPLITTING])
@pytest.mark.parametrize("name", sorted(set(model_configs.CASES) - set(NARROW)))
def test_split_rows_give_the_tokens_of_every_family(
    name: str, kernels: str, published: Published, answered: Answered
) -> None:
    """Over bf16 weights, which float32 checkpoints do not have: all products in tiles."""
    answer = answered(name, torch.bfloat16, LENGTH, GREEDY)
    check_narrow(published(name, torch.bfloat16)[1], kernels, answer, 3)


def test_narrow_weights_in_memory_are_nearly_the_same(tmp_path: Path) -> None:
    _, path = write("deepseek-full", tmp_path)
    ours = registry.load(path, pick("cpu"), dtype="bfloat16")
    assert ours.embedding.dtype == torch.bfloat16
    assert ours.logits(ours.embed(torch.tensor([1, 2]))).dtype == torch.float32
    tokens = tiny_models.prompt(LENGTH, model_configs.VOCAB)
    assert Driver(ours).prefill(tokens).isfinite().all()


def test_sharded_checkpoints_are_read(tmp_path: Path) -> None:
    theirs = tiny_models.build("mixtral", model_configs.mixtral())
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = tiny_models.prompt(LENGTH, model_configs.VOCAB)
    wanted = tiny_models.reference_logits(theirs, tokens)
    assert error(Driver(registry.load(tmp_path, pick("cpu"))).prefill(tokens), wanted) < 1e-4


@pytest.mark.parametrize("changes", [{}, {"attention_factor": 1.3}, {"factor": 3.0}])
def test_longrope_takes_the_short_factors_if_no_request_is_long(tmp_path: Path, changes: Any) -> None:
    options = model_configs.qwen3(rope_parameters=model_configs.LONGROPE | changes)
    theirs = tiny_models.build("qwen3_moe", options)
    path = tiny_models.save(theirs, tmp_path)
    original = model_configs.LONGROPE["original_max_position_embeddings"]
    tokens = tiny_models.prompt(original, model_configs.VOCAB)
    short = tiny_models.reference_logits(theirs, tokens)
    long = tiny_models.reference_logits(theirs, [*tokens, 1])[:original]
    for most, wanted in ((original, short), (original + 1, long), (None, long)):
        driver = Driver(registry.load(path, pick("cpu"), positions=most))
        assert error(driver.prefill(tokens), wanted) < 1e-4
    assert error(short, long) > 1e-2


@pytest.mark.parametrize("differs", [False, True])
def test_a_head_beside_tied_embeddings_counts_where_it_differs(tmp_path: Path, differs: bool) -> None:
    """As in transformers, which ties them only where the file's two tensors are the same."""
    untied = tiny_models.build("qwen3_moe", model_configs.qwen3())
    if not differs:
        untied.lm_head.weight.data = untied.model.embed_tokens.weight.data.clone()
    path = tiny_models.edit(tiny_models.save(untied, tmp_path), tie_word_embeddings=True)
    ours = registry.load(path, pick("cpu"))
    assert (ours.head is ours.embedding) is not differs
    assert registry.has_tied_embeddings(path) is not differs
    tokens = tiny_models.prompt(LENGTH, model_configs.VOCAB)
    theirs = type(untied).from_pretrained(path, dtype=torch.float32)
    wanted = tiny_models.reference_logits(theirs, tokens)
    assert torch.equal(wanted, tiny_models.reference_logits(untied, tokens))
    assert error(Driver(ours).prefill(tokens), wanted) < 1e-4


def test_every_second_layer_of_deepseek_can_be_dense(tmp_path: Path) -> None:
    # moe_layer_freq is a key of the makers' own code: a layer is sparse when divisible by it.
    theirs = tiny_models.build("deepseek_v2", model_configs.deepseek(num_hidden_layers=4))
    config = theirs.config
    path = tiny_models.edit(tiny_models.save(theirs, tmp_path), moe_layer_freq=2)
    mlp = type(theirs.model.layers[0].mlp)
    dense = {layer: mlp(config) for layer in (1, 3)}
    for layer, part in dense.items():
        theirs.model.layers[layer].mlp = part
    with torch.no_grad():
        for part in dense.values():
            for parameter in part.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.25)
    theirs.save_pretrained(path)
    tiny_models.edit(path, moe_layer_freq=2)
    ours = registry.load(path, pick("cpu"))
    assert ours.spec.moe_layers == (2,)
    tokens = tiny_models.prompt(LENGTH, model_configs.VOCAB)
    assert error(Driver(ours).prefill(tokens), tiny_models.reference_logits(theirs, tokens)) < 1e-4


def test_experts_and_the_rest_load_apart(tmp_path: Path) -> None:
    _, path = write("deepseek-full", tmp_path)
    kernels = pick("cpu")
    whole = registry.load(path, kernels)
    worker = registry.load(path, kernels, with_experts=False)
    assert not worker.experts
    server = registry.load_experts(path, kernels, {1: [0, 7], 2: range(12)})
    assert server[1].resident_ids == (0, 7)
    assert server[2].num_experts == 12
    for found, wanted in zip(server[1].matrices_of(7), whole.expert_weights(1).matrices_of(7), strict=True):
        assert torch.equal(found, wanted)
    held = sum(
        part.numel()
        for expert in whole.experts.values()
        for e in expert.resident_ids
        for part in expert.matrices_of(e)
    )
    assert worker.num_parameters + held == whole.num_parameters
    assert whole.num_bytes == 4 * whole.num_parameters


def test_the_spec_needs_no_weights(tmp_path: Path) -> None:
    _, path = write("deepseek-lite-yarn", tmp_path)
    (path / "model.safetensors").unlink()
    spec = registry.read_spec(path)
    assert (spec.model_type, spec.moe_layers, spec.top_k) == ("deepseek_v2", (1, 2), 6)
    assert (spec.kv.key_width, spec.kv.value_width, spec.kv.value_in_key) == (20, 16, True)
    assert spec.kv.widths == (20,)
    assert spec.max_position == 192


@pytest.mark.parametrize("name", ["mixtral", "deepseek-full"])
def test_a_step_without_rows_is_no_error(name: str, tmp_path: Path) -> None:
    model = registry.load(write(name, tmp_path)[1], pick("cpu"))
    none = torch.zeros(0, dtype=torch.int64)
    hidden = model.embed(none)
    for layer, block in enumerate(model.blocks):
        projected = block.pre_attention(hidden, none)
        attended = torch.zeros(0, block.attention_part.out_proj.weight.shape[1])
        assert len(projected.query) == len(projected.key) == 0
        gated = block.gate(hidden, block.output_projection(attended))
        rows = None
        if gated.expert_ids is not None:
            rows = model.kernels.experts(model.expert_weights(layer), gated.normed_rows, gated.expert_ids)
        hidden = block.merge(gated, block.dense(gated.normed_rows), rows)
    assert model.logits(hidden).shape == (0, model_configs.VOCAB)

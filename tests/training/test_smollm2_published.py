"""SmolLM2-135M-Instruct itself, as copies of its MLPs and split into experts, beside transformers.

With `-rP` pytest prints the figures of docs/published-model.md.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import measure_smollm2 as measure
import smollm2_texts
from moesaic import LLM, SamplingParams, StructuredOutputsParams
from moesaic.commands import cli
from moesaic.core.request import FinishReason
from smollm2_dequantized import read_dense
from tests.support import gguf_files

pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]
TOKENS = 20_000
"""Tokens of prose and code of which a perplexity is measured."""
PIECE = 512
LAYERS = 30
FEWER = 4_000
"""The same for quantised weights."""
INT8_LOSS, Q4_LOSS = 0.02, 0.10
"""The share by which perplexity may grow."""
SCHEMAS = (
    {"name": {"type": "string"}, "age": {"type": "integer"}},
    {"city": {"type": "string"}, "country": {"type": "string"}},
    {"title": {"type": "string"}, "steps": {"type": "array", "items": {"type": "string"}}},
    {"answer": {"type": "string"}, "confidence": {"type": "number"}},
    {"kind": {"enum": ["question", "order", "complaint"]}, "summary": {"type": "string"}},
)


def pieces_of(llm: LLM, tokens: int) -> list[list[int]]:
    """Texts of training/, half of them prose and half code."""
    kinds = smollm2_texts.prose(), smollm2_texts.code()
    return [piece for documents in kinds for piece in measure.cut(llm, documents, PIECE, tokens // 2)]


@pytest.mark.parametrize("form", ["copies", "moe"])
def test_tokens_are_those_of_transformers(
    form: str, published: Path, dense: PreTrainedModel, rows: list[tuple[str, bool]]
) -> None:
    """200 prompts for the copies, 24 for the split model."""
    theirs = dense
    if form == "moe":
        theirs, rows = AutoModelForCausalLM.from_pretrained(published / form, dtype=torch.float32), rows[:24]
    llm = LLM(str(published / form), dtype="float32", threads=1)
    agreements = measure.compare_tokens(llm, theirs, rows, 32)
    measure.show_agreement(form, agreements)
    assert not any(agreement.is_different for agreement in agreements)
    assert sum(agreement.num_equal for agreement in agreements) > 16 * len(rows)


def test_perplexity_is_that_of_transformers(published: Path, dense: PreTrainedModel) -> None:
    llm = LLM(str(published / "copies"), dtype="float32", threads=1)
    pieces = pieces_of(llm, TOKENS)
    own, theirs = measure.own_loss(llm, pieces), measure.reference_loss(dense, pieces)
    tokens = sum(len(piece) - 1 for piece in pieces)
    measure.show(
        f"{tokens} tokens, perplexity {math.exp(own):.5f}, difference {math.expm1(own - theirs):.1e}"
    )
    assert tokens > 0.9 * TOKENS
    assert math.exp(own - theirs) == pytest.approx(1.0, abs=1e-4)


def choose_kind(name: str) -> str:
    """The types of Q4_K_M."""
    words = name.split(".")
    if words[0] != "blk":
        return "Q6_K"
    layer, kind = int(words[1]), words[2]
    is_finer = layer < LAYERS // 8 or layer >= 7 * LAYERS // 8 or (layer - LAYERS // 8) % 3 == 2
    return "Q6_K" if is_finer and kind in ("attn_v", "ffn_down_exps") else "Q4_K"


def test_quantised_weights_cost_little(published: Path, tmp_path: Path) -> None:
    copies = published / "copies"
    llm = LLM(str(copies), threads=1)
    pieces = pieces_of(llm, FEWER)
    whole = measure.own_loss(llm, pieces)
    words = ["quantize", str(copies), str(tmp_path / "int8"), "--format", "int8", "--evaluation-tokens", "0"]
    assert cli.main([*words, "--threads", "1"]) == 0
    growth = math.expm1(measure.own_loss(LLM(str(tmp_path / "int8"), threads=1), pieces) - whole)
    measure.show(f"int8: perplexity {100 * growth:+.2f} % beside {math.exp(whole):.4f}")
    assert abs(growth) < INT8_LOSS


def test_padding_changes_no_logit(
    published: Path, dense: PreTrainedModel, rows: list[tuple[str, bool]]
) -> None:
    """Neither in transformers nor, by its tokens, in moesaic."""
    padded = AutoModelForCausalLM.from_pretrained(published / "padded-dense", dtype=torch.float32)
    llm = LLM(str(published / "padded"), threads=1)
    for piece in pieces_of(llm, 1024):
        with torch.inference_mode():
            own, theirs = (each(torch.tensor([piece])).logits for each in (padded, dense))
        difference = (own - theirs).abs().max().item()
        measure.show(f"{len(piece)} tokens: logits differ by {difference:.1e} of {theirs.abs().max():.0f}")
        assert difference < 1e-4 * theirs.abs().max()
    agreements = measure.compare_tokens(llm, dense, rows[:24], 32)
    measure.show_agreement("padded", agreements)
    assert not any(agreement.is_different for agreement in agreements)


def test_k_quants_have_the_perplexity_of_their_numbers(
    published: Path, dense: PreTrainedModel, tmp_path: Path
) -> None:
    """The types of Q4_K_M, written without llama.cpp: by ranges, which is coarser than its search."""
    file, _ = gguf_files.write(published / "padded", tmp_path / "q4", choose_kind)
    pieces = pieces_of(LLM(str(published / "padded"), threads=1), FEWER)  # the file has another tokenizer
    own = measure.own_loss(LLM(str(file), threads=1), pieces)
    theirs = measure.reference_loss(read_dense(file, published / "padded-dense"), pieces)
    whole = measure.reference_loss(dense, pieces)
    measure.show(f"Q4_K_M: perplexity {100 * math.expm1(own - whole):+.2f} % beside {math.exp(whole):.4f}")
    assert math.exp(own - theirs) == pytest.approx(1.0, abs=1e-4)
    assert math.expm1(own - whole) < Q4_LOSS


def test_answers_to_a_schema_end(published: Path) -> None:
    llm = LLM(str(published / "copies"), threads=1)
    questions = smollm2_texts.questions()[:100]
    ask = "{} Answer as JSON."
    chats = [[{"role": "user", "content": ask.format(question)}] for question in questions]
    schemas = [
        {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}
        for names in SCHEMAS
    ]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=256,
            structured_outputs=StructuredOutputsParams(json=schemas[place % len(schemas)]),
        )
        for place in range(len(chats))
    ]
    answers = llm.chat(chats, params)
    whole = [answer.text for answer in answers if answer.outputs[0].finish_reason is FinishReason.STOP]
    cuts = Counter(
        ", ".join(SCHEMAS[place % len(SCHEMAS)])
        for place, answer in enumerate(answers)
        if answer.outputs[0].finish_reason is not FinishReason.STOP
    )
    measure.show(f"{cuts.total()} of {len(answers)} answers are cut after 256 tokens: {dict(cuts)}")
    assert all(isinstance(json.loads(text), dict) for text in whole)
    assert len(whole) > len(answers) // 2


def test_the_answers_are_sensible(published: Path) -> None:
    llm = LLM(str(published / "copies"), threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    [answer] = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params)
    assert "Paris" in answer.text

"""SmolLM2-135M-Instruct itself, as copies of its MLPs and split into experts, beside transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import measure_smollm2 as measure
import smollm2_checkpoint
import smollm2_file
import smollm2_texts
from moesaic import LLM, SamplingParams
from moesaic.core.errors import CheckpointError
from smollm2_file import DenseFile

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]
QUESTIONS = 16
PIECES = 6


@pytest.fixture(scope="module")
def source() -> DenseFile:
    try:
        return DenseFile(smollm2_file.fetch(smollm2_file.cache_folder()))
    except CheckpointError as error:
        pytest.skip(f"the published file cannot be had: {error}")


@pytest.fixture(scope="module")
def folder(source: DenseFile, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of each form."""
    path = tmp_path_factory.mktemp("published")
    for form in smollm2_checkpoint.FORMS:
        smollm2_checkpoint.write(source, form, path / form)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield path
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("form", "reference"), [("copies", "dense"), ("moe", "moe")])
def test_tokens_and_perplexity_are_those_of_transformers(form: str, reference: str, folder: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(folder / reference, dtype=torch.float32)
    llm = LLM(str(folder / form), dtype="float32", threads=1)
    questions = smollm2_texts.split(smollm2_texts.questions())[1][:QUESTIONS]
    agreements = measure.compare_tokens(llm, theirs, [(question, True) for question in questions], 32)
    assert not any(agreement.is_different for agreement in agreements)
    assert sum(agreement.num_equal for agreement in agreements) > 20 * QUESTIONS
    pieces = measure.cut(llm, smollm2_texts.split(smollm2_texts.prose())[1], 256, 256 * PIECES)
    ratio = math.exp(measure.own_loss(llm, pieces) - measure.reference_loss(theirs, pieces))
    assert ratio == pytest.approx(1.0, abs=1e-4)


def test_the_answers_are_sensible(folder: Path) -> None:
    llm = LLM(str(folder / "copies"), threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    [answer] = llm.chat([{"role": "user", "content": "What is the capital of France?"}], params)
    assert "Paris" in answer.text

"""The logits of a recorded step of one row are recorded as well."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from moesaic import LLM, SamplingParams
from moesaic.core.request import TokenLogprob
from moesaic.models.model import Model

PARAMS = SamplingParams(
    temperature=0.7, seed=3, max_tokens=12, ignore_eos=True, logprobs=4, logit_bias={7: 2.0}
)


def answered(llm: LLM, prompts: list[list[int]]) -> list[Sequence[TokenLogprob] | None]:
    return [one.outputs[0].logprobs for one in llm.generate(prompts, PARAMS)]


@pytest.mark.slow
def test_they_are_the_models_own_and_python_computes_them_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    compute = Model.logits

    def counted(model: Model, hidden: torch.Tensor) -> torch.Tensor:
        calls.append(len(hidden))
        return compute(model, hidden)

    monkeypatch.setattr(Model, "logits", counted)
    recorded, eager = LLM("demo", threads=1), LLM("demo", threads=1, enforce_eager=True)
    alone, beside = [[5, 6, 7]], [[5, 6, 7], [8, 9, 10]]
    assert answered(recorded, alone) == answered(eager, alone)
    for prompts in (alone, beside, alone):
        wanted = answered(eager, prompts)
        calls.clear()
        assert answered(recorded, prompts) == wanted
        assert prompts is beside or calls == [1], "of the prompt's last row only"

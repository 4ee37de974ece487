"""Constraints in the sampler: which rows they change, what they wait for, what they refuse."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from moesaic.core.reasoning import ReasoningBudget
from moesaic.core.request import NO_ALLOWED_TOKEN, Request, SamplingParams
from moesaic.core.structured_outputs import StructuredOutputsParams
from moesaic.kernels.table import REFERENCE
from moesaic.runtime.sampling.sampler import Sampler
from moesaic.text.structured import constraints
from moesaic.text.structured.constraints import Constraints
from moesaic.text.structured.grammar import make_grammar
from moesaic.text.structured.vocabulary import Vocabulary

END, WIDTH = 256, 260
VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), b"<end>"], frozenset({END}))


def request(number: int, regex: str = "", **params: object) -> Request:
    grammar = make_grammar(StructuredOutputsParams(regex=regex), {}) if regex else ""
    own = SamplingParams(**{"temperature": 0.0, "seed": number, **params})  # type: ignore[arg-type]
    return Request(number, [1, 2, 3], own, (END,), grammar=grammar)


@pytest.fixture
def made() -> Constraints:
    return Constraints(lambda: VOCABULARY, WIDTH, REFERENCE.mask_tokens)


def answers(
    sampler: Sampler, requests: list[Request], steps: int, generated: list[list[int]] | None = None
) -> list[list[int]]:
    """`steps` tokens of each request. A request's logits depend on its number and its place only."""
    tokens = [list(given) for given in generated or [[] for _ in requests]]
    for one, given in zip(requests, tokens, strict=True):
        sampler.admit(one, given)
    for _ in range(steps):
        logits = torch.stack(
            [
                torch.randn(WIDTH, generator=torch.Generator().manual_seed(100 * one.request_id + len(given)))
                for one, given in zip(requests, tokens, strict=True)
            ]
        )
        found, _ = sampler.sample(np.array([one.request_id for one in requests]), logits)
        for given, token in zip(tokens, found, strict=True):
            given.append(int(token))
    for one in requests:
        sampler.release(one.request_id)
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_others_keep_their_tokens_and_answers_match(made: Constraints, temperature: float) -> None:
    plain = [request(number, temperature=temperature) for number in (0, 1, 2)]
    bound = [request(number, "[a-f]{2}=[0-9]{3,4}", temperature=temperature) for number in (3, 4)]
    mixed = answers(Sampler(made), [plain[0], bound[0], plain[1], bound[1], plain[2]], 6)
    assert [mixed[0], mixed[2], mixed[4]] == answers(Sampler(), plain, 6)
    assert [mixed[1], mixed[3]] == answers(Sampler(made), bound, 6)
    for tokens in (mixed[1], mixed[3]):
        text = bytes(tokens).decode()
        assert set(text[:2]) <= set("abcdef") and text[2] == "=" and text[3:].isdigit()


def test_a_constraint_follows_the_tokens_from_before_a_preemption(made: Constraints) -> None:
    one = request(5, "[a-f]{3}[0-9]{4}")
    whole = answers(Sampler(made), [one], 7)
    for cut in range(1, 7):
        assert answers(Sampler(made), [one], 7 - cut, [whole[0][:cut]]) == whole


def test_the_end_comes_when_the_answer_is_complete(made: Constraints) -> None:
    [tokens] = answers(Sampler(made), [request(1, "ab")], 3)
    assert tokens == [*b"ab", END]


def test_no_token_is_left(made: Constraints) -> None:
    """Behind "a" the grammar allows only the end, which min_tokens forbids."""
    one = request(1, "a", min_tokens=2)
    assert answers(Sampler(made), [one], 2) == [[*b"a", NO_ALLOWED_TOKEN]]
    assert answers(Sampler(made), [one, request(2)], 2)[0] == [*b"a", NO_ALLOWED_TOKEN]


def test_grammars_compile_in_a_thread_and_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()
    asked: list[int] = []

    def read() -> Vocabulary:
        asked.append(1)
        assert opened.wait(30)
        return VOCABULARY

    monkeypatch.setattr(constraints, "GRAMMARS", 2)
    made = Constraints(read, WIDTH, REFERENCE.mask_tokens)
    assert made.compile(request(1)) is None
    futures = [made.compile(request(number, regex)) for number, regex in enumerate(("a", "b", "a", "c"))]
    assert futures[0] is futures[2] is not None
    assert not any(future is not None and future.done() for future in futures)
    opened.set()
    answers(Sampler(made), [request(9, "c")], 1)
    assert asked == [1]
    assert made.compile(request(3, "c")) is futures[3]
    assert made.compile(request(4, "b")) is not futures[1], "it was dropped for the later ones"


BUDGET = ReasoningBudget(2, "<", (">",), (ord(">"),), starts_inside=True)


def test_a_budget_ends_the_reasoning_and_changes_no_neighbour(made: Constraints) -> None:
    plain, others = request(1), [request(2), request(3, "[a-f]{2}=[0-9]{3,4}")]
    limited = request(1, reasoning=BUDGET)
    free = answers(Sampler(), [plain], 6)[0]
    assert ord(">") not in free[:3]
    [found, *neighbours] = answers(Sampler(made), [limited, *others], 6)
    assert found == [*free[:2], ord(">"), *free[3:]]
    assert neighbours == answers(Sampler(made), others, 6)
    for cut in range(1, 6):
        assert answers(Sampler(made), [limited], 6 - cut, [found[:cut]]) == [found]
    form = request(1, "<[a-z]*>[a-f]{2}", reasoning=replace(BUDGET, starts_inside=False))
    [found] = answers(Sampler(made), [form], 6)
    assert found[3] == ord(">") and set(found[4:]) <= set(b"abcdef")

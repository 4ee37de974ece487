"""A tiny run of the demo model's training: it learns, goes on where it was stopped, and is measured right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import demo_probe
import demo_skill_list
import demo_skills
import demo_stream
import evaluate_demo
import train_demo
from demo_model import DemoModel, DemoShape

SIZES = {"vocab": 600, "hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16}
SIZES |= {"experts": 4, "top_k": 2, "expert_width": 16}


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command line with texts of a few kilobytes."""
    monkeypatch.setattr(train_demo, "TOKENIZER_CONVERSATIONS", 300)
    monkeypatch.setattr(train_demo, "PROBE_QUESTIONS", 4)
    rows = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}."} for n in range(40)]
    (tmp_path / "maths.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for folder in ("prose", "stdlib"):
        (tmp_path / folder).mkdir()
    for number in range(8):
        paragraph = f"Section {number} tells of packages. " * 12
        (tmp_path / "prose" / f"{number}.html").write_text(f"<h1>Part {number}</h1><p>{paragraph}</p>")
        (tmp_path / "stdlib" / f"module{number}.py").write_text(f"value = {number}\n" * 60)
    texts = ["--maths", "maths.jsonl", "--prose", "prose", "--stdlib", "stdlib"]
    texts = [str(tmp_path / text) if not text.startswith("-") else text for text in texts]
    sizes = ["--heldout-bytes", "600", "--length", "32", "--skill-rows", "2", "--threads", "1"]
    places = ["--output", str(tmp_path / "out"), "--state", str(tmp_path / "state.pt")]
    return [*texts, *sizes, *places, "--shape", *(f"{name}={size}" for name, size in SIZES.items())]


def start(arguments: list[str]) -> train_demo.Run:
    return train_demo.Run(train_demo.parse_arguments(arguments))


@pytest.mark.slow
def test_a_resumed_run_has_the_weights_of_one_that_never_stopped(arguments: list[str]) -> None:
    straight, first = start(arguments), start(arguments)
    losses = [straight.train_step(0.1) for _ in range(6)]
    for _ in range(3):
        first.train_step(0.1)
    first.probe()
    first.windows.shares = dict.fromkeys(first.skills, 1.0)
    first.save()
    second = start(arguments)
    second.resume()
    assert second.progress == first.progress and second.progress.steps == 3
    for _ in range(3):
        second.train_step(0.1)
    for one, other in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert losses[-1][1] < losses[0][1]
    with pytest.raises(SystemExit, match="its settings differ"):
        start([*arguments, "--seed", "2"]).resume()


@pytest.mark.slow
def test_transformers_gives_the_logits_and_the_experts_of_training(
    arguments: list[str], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    run = start(arguments)
    for _ in range(2):
        run.train_step(0.1)
    run.save()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        for weight in run.model.parameters():
            weight.copy_(weight.to(torch.bfloat16))
        tokens = torch.randint(600, (2, 30))
        logits, picks = evaluate_demo.forward_of(exported)(tokens, torch.ones_like(tokens))
        expected, report = run.model(tokens)
    assert torch.allclose(logits, expected, atol=1e-4)
    assert torch.equal(picks.sort(dim=-1).values, report.picks.sort(dim=-1).values)


def test_an_answer_counts_only_if_every_token_is_the_most_likely_one() -> None:
    skills = demo_skill_list.list_skills()
    tokenizer = demo_stream.train_tokenizer(demo_stream.tokenizer_texts([], skills, 1, 100), 400)
    examples = demo_skills.held_out_examples(skills["sums"], "sums", 20)

    def forward(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        best = tokens.roll(-1, dims=1)
        for row, length in enumerate(mask.sum(dim=1).tolist()):
            best[row, length - 4] += length % 2  # one token of every odd row is wrong
            best[row, 0] = 0  # a prompt's tokens do not count
        return torch.nn.functional.one_hot(best, 400), torch.zeros(2, *tokens.shape, 1, dtype=torch.int64)

    figures = demo_probe.measure_skill(forward, tokenizer, examples, 4)
    even = [len(demo_probe.encode_example(tokenizer, example)[0]) % 2 == 0 for example in examples]
    assert (figures.questions, figures.exact) == (20, sum(even)) and 0 < sum(even) < 20
    answers = [demo_probe.encode_example(tokenizer, example) for example in examples]
    assert figures.loads[:, 0].tolist() == [sum(len(ids) - prompt for ids, prompt in answers)] * 2


def test_a_mask_of_documents_keeps_them_apart_and_padding_changes_nothing() -> None:
    torch.manual_seed(1)
    model = DemoModel(DemoShape(**SIZES))
    first, second = torch.randint(600, (1, 7)), torch.randint(600, (1, 5))
    both = torch.cat((first, second, torch.zeros(1, 2, dtype=torch.int64)), dim=1)
    documents = torch.tensor([[0] * 7 + [1] * 5 + [-1] * 2])
    packed = model(both, documents)[0]
    assert torch.allclose(packed[:, :7], model(first)[0], atol=1e-5)
    assert torch.allclose(packed[:, 7:12], model(second)[0], atol=1e-5)
    wanted = documents == 1
    assert torch.allclose(model(both, documents, wanted)[0], packed[wanted], atol=1e-6)

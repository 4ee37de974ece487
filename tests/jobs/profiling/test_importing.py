"""Routing that SGLang and vLLM recorded, in files laid out as these programs write them.

The layouts follow `python/sglang/srt/eplb/expert_distribution.py` of sgl-project/sglang (`_StatAccumulator`,
`_DetailAccumulator` and the gatherers), `vllm/entrypoints/openai/completion/protocol.py` of vllm-project/vllm
(`CompletionResponseChoice.routed_experts`), and that project's `docs/training/routed_experts_replay.md` of
version 0.21.
"""

from __future__ import annotations

import base64
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moesaic.commands import cli
from moesaic.core.errors import ConfigError
from moesaic.core.placement import Placement
from moesaic.core.profile import Profile
from moesaic.core.routing import RoutedModel
from moesaic.core.tables import Tables
from moesaic.jobs.profiling import sglang_files, vllm_answers
from moesaic.jobs.profiling.routing_records import make_profile
from moesaic.models import files
from moesaic.models.registry import routed_model
from moesaic.policy.placement import balance

MODEL = RoutedModel("moe-1", vocab_size=50, num_experts=6, top_k=2, layers=(1, 2), hidden=8)
ALL_LAYERS, WIDTH = 3, 8
"""Layers of the model, of which the first has no routed experts, and the columns of SGLang's ids."""
EXTEND, DECODE = 1, 2
"""Values of SGLang's ForwardMode."""


def routes(tokens: int, model: RoutedModel = MODEL, seed: int = 0) -> np.ndarray:
    """[tokens, layers, k] different experts of each token."""
    rng = np.random.default_rng(seed)
    size = tokens, len(model.layers), model.num_experts
    return rng.random(size).argsort(axis=2)[:, :, : model.top_k]


def physical(experts: np.ndarray, places: np.ndarray, layers: tuple[int, ...], count: int) -> torch.Tensor:
    """`topk_ids_of_layer` [all layers, tokens, 8]: the first physical expert of each logical one, else -1."""
    ids = torch.full((count, len(experts), WIDTH), -1, dtype=torch.int32)
    for row, layer in enumerate(layers):
        first = {int(expert): i for i, expert in reversed(list(enumerate(places[layer])))}
        chosen = [[first[int(one)] for one in token] for token in experts[:, row]]
        ids[layer, :, : experts.shape[2]] = torch.tensor(chosen, dtype=torch.int32)
    return ids


def sglang_pass(
    number: int, tokens: list[int], ids: torch.Tensor, lengths: list[int] | None, rank: int = 0
) -> dict[str, Any]:
    """A record of mode per_token."""
    places = list(range(len(tokens)))
    return {
        "forward_pass_id": number, "rank": rank, "gatherer_key": "primary", "input_ids": tokens,
        "positions": places, "extend_seq_lens": lengths, "topk_ids_of_layer": ids, "misc_objects": [],
        "forward_mode": DECODE if lengths is None else EXTEND,
        "global_physical_count": torch.zeros(ids.shape[0], int(ids.max()) + 1, dtype=torch.int32),
    }  # fmt: skip


def places_of(model: RoutedModel, count: int, redundant: int = 2) -> np.ndarray:
    """[all layers, physical experts] the logical expert of each."""
    rows = [
        np.concatenate([np.random.default_rng(layer).permutation(model.num_experts), np.arange(redundant)])
        for layer in range(count)
    ]
    return np.stack(rows)


def dump(path: Path, records: list[dict[str, Any]], places: np.ndarray) -> Path:
    torch.save({"records": records, "last_physical_to_logical_map": torch.from_numpy(places)}, path)
    return path


# ---- SGLang


def test_tokens_of_sglang_with_redundant_experts(tmp_path: Path) -> None:
    """A prefill of two sequences and a decode step, where one row is padding. Two ranks saw the same."""
    places, chosen = places_of(MODEL, ALL_LAYERS), routes(9)
    ids = physical(chosen, places, MODEL.layers, ALL_LAYERS)
    ids[:, 8] = -1
    tokens = [3, 4, 5, 6, 7, 8, 3, 6, 0]
    files_ = [
        dump(
            tmp_path / f"expert_distribution_recorder_1764115200.5_{rank}.pt",
            [
                sglang_pass(10, tokens[:6], ids[:, :6], [4, 2], rank),
                sglang_pass(11, tokens[6:], ids[:, 6:], None, rank),
            ],
            places,
        )
        for rank in (0, 1)
    ]
    parts = sglang_files.read(files_, MODEL)
    made = make_profile(MODEL, parts)
    assert [part.left_out for part in parts] == [1, 0] and made.tokens == 8 and made.token_ids
    assert np.diff(made.routes.starts).tolist() == [4, 2] == made.routes.prompts.tolist()
    assert made.routes.tokens.tolist() == tokens[:6]
    assert (made.routes.experts == chosen[:6]).all()
    expected = [np.bincount(chosen[:8, layer].ravel(), minlength=6) for layer in (0, 1)]
    assert (made.loads == expected).all()
    assert made.transitions.sum() == 8 * 4


@pytest.mark.parametrize("mode", ["stat", "per_pass"])
def test_loads_of_sglang(mode: str, tmp_path: Path) -> None:
    rng, places = np.random.default_rng(1), places_of(MODEL, ALL_LAYERS)
    file = tmp_path / "expert_distribution_recorder_1764115200.5.pt"
    if mode == "stat":
        counts = rng.integers(0, 9, (4, ALL_LAYERS, MODEL.num_experts))
        expected = counts.sum(axis=0)[1:]
        torch.save(
            {
                "rank": 0,
                "logical_count": torch.from_numpy(counts.astype(np.int32)),
                "average_utilization_rate_over_window": None,
            },
            file,
        )
    else:
        counts = rng.integers(0, 9, (4, *places.shape)).astype(np.int32)
        expected = np.zeros((2, 6), dtype=np.int64)
        for layer in (1, 2):
            np.add.at(expected[layer - 1], places[layer], counts.sum(axis=0)[layer])
        head = {"rank": 0, "gatherer_key": "primary"}
        records = [
            {"forward_pass_id": i, **head, "global_physical_count": torch.from_numpy(one)}
            for i, one in enumerate(counts)
        ]
        dump(file, records, places)
    made = make_profile(MODEL, sglang_files.read([file], MODEL))
    assert (made.loads == expected).all() and not made.token_ids and not made.routes.requests
    made.save(tmp_path / "p.npz")
    assert not Profile.load(tmp_path / "p.npz").token_ids


class Harmful:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch harmed",)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"records": Harmful()}, "bad.pt")
    with pytest.raises(ConfigError, match=r"^bad.pt: not read: it is damaged, or holds more than tensors"):
        sglang_files.read([Path("bad.pt")], MODEL)
    assert not Path("harmed").exists()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ([1], "got 'list'; allowed: a dictionary"),
        ({"logical_count": torch.zeros(1, 3, 5)}, r"logical_count: got \[1, 3, 5\]"),
        ({"logical_count": torch.zeros(1, 1, 6, dtype=torch.int32)}, "layers: got 1; allowed: 2, those"),
        ({"records": []}, "it has no 'last_physical_to_logical_map'"),
        ({"records": [], "last_physical_to_logical_map": torch.zeros(3, 6)}, "was anything recorded"),
        ({"records": [{}], "last_physical_to_logical_map": torch.zeros(3, 6)}, "it has no 'global_phys"),
        ({"logical_count": 3}, "not a file of SGLang's"),
    ],
)
def test_wrong_files_of_sglang(contents: Any, message: str, tmp_path: Path) -> None:
    torch.save(contents, tmp_path / "x.pt")
    with pytest.raises(ConfigError, match=message) as refused:
        make_profile(MODEL, sglang_files.read([tmp_path / "x.pt"], MODEL))
    assert "\n" not in str(refused.value)


def test_experts_of_another_model_are_refused(tmp_path: Path) -> None:
    places = np.tile(np.arange(7), (ALL_LAYERS, 1))
    file = dump(
        tmp_path / "x.pt",
        [sglang_pass(1, [3], torch.full((3, 1, 8), 1, dtype=torch.int32), [1])],
        places,
    )
    with pytest.raises(ConfigError, match="last_physical_to_logical_map: got 6; allowed: experts 0 to 5"):
        sglang_files.read([file], MODEL)
    file = dump(file, [sglang_pass(1, [3], torch.full((3, 1, 8), 1, dtype=torch.int32), [1])], places % 6)
    with pytest.raises(ConfigError, match="experts of a token: got 'more'; allowed: 2"):
        sglang_files.read([file], MODEL)


def test_loads_and_tokens_do_not_mix(tmp_path: Path) -> None:
    places = places_of(MODEL, ALL_LAYERS)
    ids = physical(routes(2), places, MODEL.layers, ALL_LAYERS)
    one = dump(tmp_path / "a.pt", [sglang_pass(1, [3, 4], ids, [2])], places)
    torch.save({"rank": 0, "logical_count": torch.ones(1, 3, 6, dtype=torch.int32)}, tmp_path / "b.pt")
    with pytest.raises(ConfigError, match="FILES: got 'loads and tokens'; allowed: files of one"):
        make_profile(MODEL, sglang_files.read([one, tmp_path / "b.pt"], MODEL))


# ---- vLLM


def encoded(array: np.ndarray) -> str:
    """As vLLM writes an array into its answers: the base64 text of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getbuffer()).decode("ascii")


def answer(prompt: list[int], tokens: list[int], experts: np.ndarray, chat: bool = False) -> dict[str, Any]:
    """An answer of today's vLLM. experts: [prompt + tokens - 1, layers, k]."""
    choice: dict[str, Any] = {"index": 0, "token_ids": tokens, "routed_experts": encoded(experts)}
    found: dict[str, Any] = {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}
    (found if chat else choice)["prompt_token_ids"] = prompt
    return found


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("every_layer", [False, True])
def test_answers_of_vllm(chat: bool, every_layer: bool, tmp_path: Path) -> None:
    """The experts of all layers, or of those with routed experts; plain, and as lines of run-batch."""
    chosen = routes(6)
    given = np.concatenate([np.zeros_like(chosen[:, :1]), chosen], axis=1) if every_layer else chosen
    one = answer([3, 4, 5], [6, 7, 8, 9], given.astype(np.uint8), chat)
    line = {"id": "vllm-1", "custom_id": "a", "response": {"status_code": 200, "body": one}, "error": None}
    plain, lines = tmp_path / "one.json", tmp_path / "out.jsonl"
    plain.write_text(json.dumps(one))
    lines.write_text(json.dumps(line) + "\n\n" + json.dumps(one) + "\n")
    made = make_profile(MODEL, vllm_answers.read([plain, lines], MODEL))
    assert made.routes.requests == 3 and made.tokens == 18
    assert made.routes.prompts.tolist() == [3, 3, 3]
    assert made.routes.tokens.tolist() == 3 * [3, 4, 5, 6, 7, 8], "the last token never ran"
    assert (made.routes.experts[:6] == chosen).all()


def test_answers_of_vllm_0_21(tmp_path: Path) -> None:
    """Nested lists, with cached tokens of the prompt as -1, and no token of the answer that did not run."""
    chosen = routes(6)
    prompt = chosen[:3].copy()
    prompt[:2] = -1
    choice = {"index": 0, "token_ids": [6, 7, 8], "routed_experts": chosen[3:].tolist()}
    found = {"choices": [choice], "prompt_token_ids": [3, 4, 5], "prompt_routed_experts": prompt.tolist()}
    (tmp_path / "a.json").write_text(json.dumps(found))
    [part] = vllm_answers.read([tmp_path / "a.json"], MODEL)
    made = make_profile(MODEL, [part])
    assert part.left_out == 2 and made.routes.tokens.tolist() == [5, 6, 7, 8]
    assert made.routes.prompts.tolist() == [1] and (made.routes.experts == chosen[2:]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"routed_experts": None}, "no routed_experts; start vLLM with --enable-return-routed-experts"),
        ({"token_ids": None}, 'token_ids: missing; send requests to vLLM with "return_token_ids": true'),
        ({"routed_experts": "!"}, "not the base64 text of a .npy file"),
        ({"routed_experts": encoded(np.array([None]).astype(str))}, "routed_experts: got '<U4"),
        ({"routed_experts": encoded(routes(3))}, "allowed: whole numbers .4 or 5 tokens, layers, k"),
        ({"routed_experts": encoded(routes(4) + 6)}, "experts: got 11; allowed: 0 to 5, as in this model"),
        ({"token_ids": [1, 99, 1]}, "token ids: got 99; allowed: 0 to 49"),
        ({"token_ids": [1, "a"]}, "a list of token ids"),
    ],
)
def test_wrong_answers_of_vllm(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    found = answer([3, 4], [6, 7, 8], routes(4).astype(np.uint8))
    found["choices"][0] |= change
    (tmp_path / "a.jsonl").write_text("\n" + json.dumps(found))
    with pytest.raises(ConfigError, match=message) as refused:
        vllm_answers.read([tmp_path / "a.jsonl"], MODEL)
    assert str(refused.value).startswith(f"{tmp_path / 'a.jsonl'}, line 2: choices[0]")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"), [("[1]", "got 'list'"), ("{", "not JSON"), ("{}", "choices: got 'None'")]
)
def test_files_that_are_no_answers(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        vllm_answers.read([tmp_path / "a.json"], MODEL)


# ---- the command, up to a placement


def imported(source: str, folder: Path, *names: str) -> Path:
    out = folder / "profile.npz"
    command = ["profile", "import", *(str(folder / name) for name in names), "--from", source]
    assert cli.main([*command, "--model", "demo", "-o", str(out), "--json"]) == 0
    return out


@pytest.mark.slow
def test_answers_of_vllm_become_a_placement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = routed_model(files.resolve("demo"))
    with (tmp_path / "a.jsonl").open("w") as lines:
        for seed in range(5):
            chosen = routes(8, model, seed).astype(np.uint8)
            lines.write(json.dumps(answer([5, 6, 7, 8, 9], [seed, 3, 2, 1], chosen)) + "\n")
    file = imported("vllm", tmp_path, "a.jsonl")
    report = json.loads(capsys.readouterr().out)
    assert (report["tokens"], report["requests"], report["token_ids"]) == (40, 5, True)
    made = Profile.load(file)
    assert made.model == model.model and made.nearest is not None and made.hidden == model.hidden
    placed = tmp_path / "placement.json"
    flags = ["--ranks", "2", "--solver", "sem-moe", "-o", str(placed)]
    assert cli.main(["place", str(file), *flags]) == 0
    placement = Placement.read(str(placed), 2)
    assert Tables.load_for(str(placed), placement) is not None


@pytest.mark.slow
def test_loads_of_sglang_become_a_balanced_placement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = routed_model(files.resolve("demo"))
    counts = np.random.default_rng(0).integers(0, 99, (3, max(model.layers) + 1, model.num_experts))
    counts[:, :, :2] *= 20
    torch.save({"rank": 0, "logical_count": torch.from_numpy(counts.astype(np.int32))}, tmp_path / "a.pt")
    file = imported("sglang", tmp_path, "a.pt")
    placed = tmp_path / "placement.json"
    flags = ["--ranks", "2", "--redundant-experts", "2", "-o", str(placed)]
    capsys.readouterr()
    assert cli.main(["place", str(file), *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    placement = Placement.read(str(placed), 2)
    assert placement.tables == "" and placement.model == model.model
    loads = balance.server_loads(Profile.load(file).loads, placement, (0, 1))
    assert report["balancedness"] == pytest.approx(balance.balancedness(loads).mean())
    assert report["balancedness"] > 0.95 > report["balancedness_of_consecutive_experts"]
    for words in (["--solver", "ours"], ["--model", "demo"], ["--plot", str(tmp_path / "x.svg")]):
        assert cli.main(["place", str(file), *flags, *words]) == 2
        assert "has loads of experts and no token ids" in capsys.readouterr().err
    assert cli.main(["profile", "show", str(file)]) == 2
    assert "no token ids to examine" in capsys.readouterr().err

"""`moesaic verify` finds what differs from transformers, and where."""

from __future__ import annotations

import itertools
import json
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.test_gguf import FAMILIES, MIXES, WIDE, slow_but
from tests.models.test_quantized import CASES, FOR_EACH, FORMATS
from tests.support import gguf_files, model_configs, quantizers, tiny_models

from moesaic.commands import cli
from moesaic.jobs.verify.compare import Verdict, compare, verify
from moesaic.jobs.verify.reference import Reference
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.quantization import mxfp4

pytestmark = pytest.mark.slow

PROMPT = tiny_models.prompt(21, model_configs.VOCAB)
FIRST = {kind: name for name, (kind, _) in reversed(model_configs.CASES.items())}
"""The first case of each family."""
LINEAR = "linear, as Q4_K_M"
WORDS = ("--prompt-tokens", *map(str, PROMPT))


class Written(dict[str, Path]):
    def __init__(self, make: Callable[[str], Path]) -> None:
        self._make = make

    def __missing__(self, kind: str) -> Path:
        model = tiny_models.build(*model_configs.CASES[FIRST[kind]])
        self[kind] = tiny_models.save(model, self._make(kind), torch.bfloat16)
        return self[kind]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A tiny checkpoint of each family, in bf16."""
    return Written(tmp_path_factory.mktemp)


def verified(path: Path, tolerance: float = 1e-3) -> Verdict:
    return verify(path, table.pick("cpu"), PROMPT, tolerance, lambda *_: None)


def assert_equal(path: Path, most: float = 1e-5) -> None:
    verdict = verified(path)
    layers = registry.read_spec(path).num_layers
    names = ["embedding", *(f"layer {layer}" for layer in range(layers)), "logits"]
    assert [one.part for one in verdict.parts] == names
    assert verdict.equal and verdict.first is None and verdict.argmax_differs == ()
    assert 0 < max(one.relative for one in verdict.parts) < most


@pytest.mark.parametrize("kind", tiny_models.KINDS)
def test_every_family_is_equal_in_every_part(written: Written, kind: str) -> None:
    assert_equal(written[kind])


@pytest.mark.parametrize("case", ["granite-bias-odd-heads-k1-yarn-tied", "gpt-oss-full-first-plain-tied"])
def test_other_factors_biases_and_a_tied_head_are_equal(case: str, tmp_path: Path) -> None:
    assert_equal(tiny_models.save(tiny_models.build(*model_configs.CASES[case]), tmp_path, torch.bfloat16))


def copied(path: Path, to: Path, **changes: Any) -> Path:
    for file in path.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return tiny_models.edit(to, **changes)


@pytest.mark.parametrize("kind", tiny_models.AROUND)
@pytest.mark.parametrize(("front", "head"), [("language_model.model.", "language_model."), ("model.", "")])
def test_a_text_model_is_found_by_other_names(
    kind: str, front: str, head: str, written: Written, tmp_path: Path
) -> None:
    """Files of makers name the text model's tensors otherwise than transformers does."""
    path = copied(written[kind], tmp_path)
    plain = {
        re.sub(
            r"^(model\.language_model|language_model\.model|model)\.(?=embed|layers|norm)", front, name
        ): one
        for name, one in load_file(path / "model.safetensors").items()
    }
    renamed = {head + name if name.startswith("lm_head") else name: one for name, one in plain.items()}
    assert f"{front}layers.1.input_layernorm.weight" in renamed
    save_file(renamed, path / "model.safetensors", {"format": "pt"})
    assert_equal(path)


def test_code_of_a_checkpoint_does_not_run(written: Written, tmp_path: Path) -> None:
    """Neither that of the whole model nor that of the text model in it, as Kimi K2.5 names it."""
    code = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"}
    ran = tmp_path / "ran"
    text = json.loads((written["kimi_k25"] / "config.json").read_text())["text_config"]
    path = copied(written["kimi_k25"], tmp_path, auto_map=code, text_config={**text, "auto_map": code})
    (path / "evil.py").write_text(f"open({str(ran)!r}, 'w')\n")
    assert_equal(path)
    assert not ran.exists()


def test_a_head_beside_a_tied_embedding_counts(written: Written, tmp_path: Path) -> None:
    assert_equal(copied(written["mixtral"], tmp_path, tie_word_embeddings=True))


def test_a_verdict_is_transformers_own_forward(written: Written) -> None:
    """The reference that computes layer by layer gives what the whole model gives."""
    model = tiny_models.KINDS["mixtral"][1].from_pretrained(written["mixtral"], dtype=torch.float32).eval()
    expected = tiny_models.reference_logits(model, PROMPT)
    with torch.inference_mode():
        side = Reference(written["mixtral"], PROMPT)
        hidden = side.embed()
        for layer in range(model.config.num_hidden_layers):
            hidden = side.layer(layer, hidden)
        assert torch.allclose(side.logits(hidden), expected, atol=1e-5)


def changed(monkeypatch: pytest.MonkeyPatch, word: str, factor: float) -> None:
    """Plant a fault: on our side, tensors are `factor` times as large if a part of the name is `word`, a
    regular expression."""
    read = Checkpoint.tensor

    def tensor(self: Checkpoint, name: str, *shape: int, **how: Any) -> torch.Tensor:
        found = read(self, name, *shape, **how)
        return found * factor if re.search(word, name) and not found.is_meta else found

    monkeypatch.setattr(Checkpoint, "tensor", tensor)


@pytest.mark.parametrize(
    ("kind", "word", "part"),
    [
        ("mixtral", "model.layers.1.self_attn.o_proj", "layer 1"),
        ("mixtral", "model.layers.2.block_sparse_moe.experts", "layer 2"),
        ("mixtral", "model.layers.0.input_layernorm", "layer 0"),
        ("mixtral", "model.embed_tokens", "embedding"),
        ("mixtral", "lm_head", "logits"),
        ("gpt_oss", "model.layers.1.self_attn.sinks", "layer 1"),
        ("gpt_oss", r"model.layers.2.mlp.experts.\d+.down_proj_bias", "layer 2"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("granitemoe", "model.layers.1.self_attn.o_proj", "layer 1"),
                ("granitemoe", "model.embed_tokens", "embedding"),
                ("granitemoe", "model.norm", "logits"),
                ("internvl", "model.layers.2.mlp.gate", "layer 2"),
                ("kimi_k25", "lm_head", "logits"),
                ("glm4v_moe", "model.layers.0.self_attn.k_proj", "layer 0"),
            )
        ),
    ],
)
def test_a_planted_fault_is_found_and_named(
    kind: str, word: str, part: str, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed(monkeypatch, word, 1.02)
    verdict = verified(written[kind])
    assert not verdict.equal and verdict.first == part
    assert [one.part for one in verdict.parts if one.different] == [part], "the others get the same input"
    assert verified(written[kind], tolerance=0.5).first is None


def test_the_command_names_the_layer(
    written: Written, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["verify", str(written["mixtral"]), *WORDS]
    assert cli.main([*line, "--json"]) == 0
    good = json.loads(capsys.readouterr().out)
    assert (good["equal"], good["first_different"], good["argmax_equal"]) == (True, None, True)
    assert good["prompt_tokens"] == PROMPT and len(good["parts"]) == 5
    changed(monkeypatch, "model.layers.1.self_attn.v_proj", -1.0)
    assert cli.main([*line, "--json"]) == 1
    bad = json.loads(capsys.readouterr().out)
    assert (bad["equal"], bad["first_different"]) == (False, "layer 1")
    assert cli.main(line) == 1
    out, _ = capsys.readouterr()
    assert "differs from transformers first at layer 1" in out and "Both sides got the same input" in out
    assert [row.split()[:2] for row in out.splitlines() if row.split()[-1:] == ["differs"]] == [
        ["layer", "1"]
    ]


def test_one_layer_is_in_memory_at_a_time(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights that are alive when a tensor is read never have more bytes than the largest part."""
    alive: dict[int, int] = {}
    numbers, most = itertools.count(), 0

    def note(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal most
        if not tensor.is_meta:
            number = next(numbers)
            alive[number] = tensor.nbytes
            weakref.finalize(tensor, alive.pop, number)
            most = max(most, sum(alive.values()))
        return tensor

    read, as_stored = Checkpoint.tensor, Checkpoint.read_raw
    monkeypatch.setattr(Checkpoint, "tensor", lambda *a, **named: note(read(*a, **named)))
    monkeypatch.setattr(Checkpoint, "read_raw", lambda *a: note(as_stored(*a)))
    path = written["mixtral"]
    assert verified(path).equal
    checkpoint = Checkpoint(path)
    sizes: dict[str, int] = {}
    for name in checkpoint.names:
        part = ".".join(name.split(".")[:3]) if "layers" in name else "outside"
        sizes[part] = sizes.get(part, 0) + as_stored(checkpoint, name).nbytes
    layer = max(size for part, size in sizes.items() if part != "outside")
    assert 0.9 * layer < most < 1.5 * max(layer, sizes["outside"]) < 0.6 * sum(sizes.values())
    assert alive == {}


def test_transformers_layers_have_no_memory_when_they_are_not_used(written: Written) -> None:
    side = Reference(written["mixtral"], PROMPT)
    held = lambda: sum(one.numel() for one in side._model.parameters() if not one.is_meta)  # noqa: E731
    assert held() == 0
    with torch.inference_mode():
        side.layer(1, side.embed())
    assert held() == 0


class Fixed:
    """A side whose logits are given."""

    def __init__(self, logits: list[float], scale: float = 1.0) -> None:
        self._logits, self._scale = torch.tensor([logits]), scale

    def embed(self) -> torch.Tensor:
        return torch.ones(1, 2)

    def layer(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self._scale

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits


def test_errors_are_relative_to_what_a_layer_adds() -> None:
    verdict = compare(Fixed([1.0, 2.0], 1.1), Fixed([1.0, 2.0]), 1, 0.05, lambda *_: None)
    assert verdict.parts[1].absolute == pytest.approx(0.1) and verdict.parts[1].relative == pytest.approx(0.1)
    assert verdict.first == "layer 0"


def test_nan_differs() -> None:
    verdict = compare(Fixed([1.0, 2.0], float("nan")), Fixed([1.0, 2.0]), 1, 0.05, lambda *_: None)
    assert verdict.first == "layer 0" and not verdict.equal


def test_another_choice_differs_unless_both_are_as_good() -> None:
    def chosen(mine: list[float], theirs: list[float]) -> tuple[int, ...]:
        return compare(Fixed(mine), Fixed(theirs), 0, 0.01, lambda *_: None).argmax_differs

    assert chosen([1.0, 2.0], [2.0, 1.0]) == (0,)
    assert chosen([2.0, 1.999], [1.999, 2.0]) == ()
    assert chosen([float("nan"), 1.0], [1.0, 2.0]) == (0,)


def test_kimi_k2_is_computed_as_deepseek_v3(written: Written, tmp_path: Path) -> None:
    assert verified(copied(written["deepseek_v3"], tmp_path, model_type="kimi_k2")).equal


def test_kimi_k2_in_a_larger_model_is_computed_as_deepseek_v3(written: Written, tmp_path: Path) -> None:
    text = json.loads((written["kimi_k25"] / "config.json").read_text())["text_config"]
    assert_equal(copied(written["kimi_k25"], tmp_path, text_config={**text, "model_type": "kimi_k2"}))


@pytest.mark.slow
def test_compressed_experts_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compress", "demo", str(tmp_path / "out")]) == 1
    assert cli.main(["verify", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["equal"] and len(found["prompt_tokens"]) > 20


def test_without_transformers_one_line_says_so(
    written: Written, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert cli.main(["verify", str(written["mixtral"]), *WORDS]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "pip install 'transformers>=5.0'" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt-tokens", "1", "97"], "--prompt-tokens: got 97; allowed: 0 to 96"),
        (["--prompt-tokens", "x"], "--prompt-tokens: got 'x'; allowed: an integer"),
        (["--prompt-tokens", *["1"] * 193], "--prompt-tokens: got '193 tokens'; allowed: 1 to 192 tokens"),
        (["--prompt-tokens", "1", "--prompt", "a"], "--prompt: allowed only without --prompt-tokens"),
        (["--prompt", ""], "--prompt: got ''; allowed: a text of at least one token"),
        (["--tolerance", "2"], "--tolerance: got 2.0; allowed: a number between 0 and 1"),
        (["--against", "vllm"], "--against: got 'vllm'; allowed: transformers"),
        (["--prompt", "a"], "no tokenizer.json"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, written: Written, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written["mixtral"]
    capsys.readouterr()
    assert cli.main(["verify", str(path), *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def quantised(name: str, form: str, to: Path) -> Path:
    source = tiny_models.save(tiny_models.build(*CASES[name]), to / "source", torch.bfloat16)
    return quantizers.quantize(source, to, FORMATS[form])[0]


VERIFIED = [("deepseek3", "fp8 blocks"), ("qwen3", "packed int4"), ("gpt-oss", "mxfp4")]


@pytest.mark.parametrize(
    ("name", "form"),
    [*VERIFIED, *(pytest.param(*one, marks=pytest.mark.full) for one in FOR_EACH if one not in VERIFIED)],
)
def test_quantised_checkpoints_are_equal(name: str, form: str, tmp_path: Path) -> None:
    assert_equal(quantised(name, form, tmp_path))


def test_a_quantised_text_model_in_a_larger_one_is_equal(written: Written, tmp_path: Path) -> None:
    """Its quantization_config says so, and no matrix of the files is quantised."""
    text = json.loads((written["kimi_k25"] / "config.json").read_text())["text_config"]
    told = {**text, "quantization_config": quantizers.FORMATS["packed int4"].config}
    assert_equal(copied(written["kimi_k25"], tmp_path, text_config=told))


def test_transformers_reads_mxfp4_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = quantised("gpt-oss", "mxfp4", tmp_path)
    assert cli.main(["verify", str(path), *WORDS]) == 0
    assert "transformers dequantised its experts itself" in capsys.readouterr().out
    swapped = {"gate_proj": mxfp4.WHERE["up_proj"], "up_proj": mxfp4.WHERE["gate_proj"]}
    monkeypatch.setattr(mxfp4, "WHERE", mxfp4.WHERE | swapped)
    assert verified(path).first == "layer 0"


@pytest.mark.parametrize("family", slow_but(("qwen2",), FAMILIES))
def test_gguf_files_of_every_family_are_equal(family: str, tmp_path: Path) -> None:
    source = tiny_models.save(tiny_models.build(*FAMILIES[family]), tmp_path / "source")
    assert_equal(gguf_files.write(source, tmp_path / "made")[0])


@pytest.mark.slow
@pytest.mark.parametrize("mix", ["as Q4_K_M", "latent, as Q4_K_M", "MXFP4", "experts in BF16", LINEAR])
def test_quantised_gguf_files_are_equal(mix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, kinds = MIXES[mix]
    source = tiny_models.save(tiny_models.build(*WIDE[name]), tmp_path / "source")
    file = gguf_files.write(source, tmp_path / "made", kinds)[0]
    assert_equal(file, 2e-5)
    assert cli.main(["verify", str(file), *WORDS]) == 0
    assert "is quantised, or a GGUF file. transformers computed in float32" in capsys.readouterr().out


@pytest.mark.slow
def test_the_report_says_who_read_quantised_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = quantised("qwen3", "awq", tmp_path)
    assert cli.main(["verify", str(path), *WORDS]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "transformers computed in float32 with the numbers that moesaic read in its files" in out
    assert cli.main(["verify", str(path), *WORDS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dequantised_by"] == "moesaic"


@pytest.mark.parametrize(
    ("kind", "told", "says"),
    [
        ("mixtral", {"bits": 4}, "got quant_method 'unknown'; allowed: auto-round, awq"),
        ("mixtral", [1], "quantization_config: got quant_method"),
        ("mixtral", {"quant_method": "bitsandbytes"}, "got quant_method 'bitsandbytes'; allowed: auto-r"),
        (
            "gpt_oss",
            {"quant_method": "mxfp4"},
            "mlp.experts.gate_up_proj: got shape [12, 48, 40]",
        ),
    ],
)
def test_an_unknown_quantisation_is_refused_in_one_line(
    kind: str,
    told: object,
    says: str,
    written: Written,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = copied(written[kind], tmp_path, quantization_config=told)
    capsys.readouterr()
    assert cli.main(["verify", str(path), *WORDS]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and says in err

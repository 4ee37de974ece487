"""Whole checkpoints: what is quantised, what stays, what a stopped run continues, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.test_quantized import CASES, FORMATS
from tests.support import model_configs, quantizers, tiny_models

from moesaic.core.errors import ConfigError
from moesaic.jobs.quantizing import plan
from moesaic.jobs.quantizing.formats import Format
from moesaic.jobs.quantizing.options import QuantizeOptions
from moesaic.jobs.quantizing.rounding import Rounding
from moesaic.jobs.quantizing.run import Cost, run
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.compressing import compress
from moesaic.testing import byte_tokenizer

FAMILIES = [
    "mixtral", "qwen3-bias-dense-layers", "olmoe", "qwen2", "deepseek-lite", "deepseek3-full", "glm4",
    "dots", "solar", "ernie", "granite", "minimax", "mellum", "exaone", "hy3", "glm4-lite",
    "qwen3-next", "qwen3.5", "qwen3.5-images", "lfm2",
]  # fmt: skip
SIZES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
Save = Callable[..., Path]
kernels = table.pick("cpu", "auto")


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Writes a checkpoint with a tokenizer for bytes."""

    def write(case: str, dtype: torch.dtype = torch.bfloat16, fused: bool = False) -> Path:
        kind, config = {**model_configs.CASES, **CASES}[case]
        how = tiny_models.save_fused if fused else tiny_models.save
        path = how(tiny_models.build(kind, config), tmp_path / ("fused" if fused else "model"), dtype)
        byte_tokenizer(path)
        return path

    return write


def quantized(path: Path, to: Path, show: Any = lambda *_: None, **how: Any) -> Cost:
    options: dict[str, Any] = {"format": "int8", "evaluation_tokens": 0, "allow_growth": True, "threads": 2}
    return run(QuantizeOptions(str(path), to, **{**options, **how}), show)


def written(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of all files."""
    return {name: one for file in sorted(path.glob("*.safetensors")) for name, one in load_file(file).items()}


def check(path: Path, to: Path, form: Format) -> tuple[int, list[str]]:
    """That each matrix was rounded to nearest or stayed. Returns how many were, and the names of the rest."""
    before, after, checkpoint = written(path), written(to), Checkpoint(to)
    rounded, stayed = 0, []
    for name, tensor in before.items():
        matrix = checkpoint.find_quantized(name, *tensor.shape)
        if matrix is None:
            assert torch.equal(after.pop(name).view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8))
            stayed.append(name)
            continue
        kind = next(one for one, dtype in SIZES.items() if dtype is tensor.dtype)
        rounding = Rounding(form, kind)
        found = checkpoint.tensor(name, *tensor.shape, dtype=torch.float32)
        assert torch.equal(found, rounding.numbers(rounding.nearest(tensor.float())))
        for part in matrix.parts:
            del after[part.tensor]
        rounded += 1
    assert not after
    return rounded, stayed


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_every_family_is_read_again(save: Save, tmp_path: Path, case: str) -> None:
    path, out = save(case), tmp_path / "out"
    cost = quantized(path, out, modules=("experts", "attention", "mlp"))
    wrong = [
        name for name in written(out) if re.search(r"(norm|embed_tokens|gate\.weight|lm_head).*_packed", name)
    ]
    assert not wrong
    spec = registry.read_spec(out)
    least = spec.num_layers - len(spec.state_layers)
    assert cost.matrices >= 3 * spec.num_experts * len(spec.moe_layers) + 2 * least
    assert not [name for name in written(out) if "linear_attn" in name and name.endswith("_packed")]
    model = registry.load(out, kernels)
    assert all(weights.packed_dtype == "int8" for weights in model.experts.values())
    if case not in ("granite", "qwen3.5-images"):  # whose tensors have other names than the matrices
        assert check(path, out, Format(8, None))[0] == cost.matrices


def test_experts_alone_by_default(save: Save, tmp_path: Path) -> None:
    path, out = save("qwen3-bias-dense-layers"), tmp_path / "out"
    cost = quantized(path, out)
    rounded, stayed = check(path, out, Format(8, None))
    spec = registry.read_spec(path)
    assert rounded == cost.matrices == 3 * spec.num_experts * len(spec.moe_layers)
    assert not [name for name in stayed if ".experts." in name]
    told = json.loads((out / "config.json").read_text())
    config = told.pop("quantization_config")
    assert told == json.loads((path / "config.json").read_text())
    modules = {name.removesuffix(".weight") for name in stayed if written(path)[name].dim() == 2}
    assert set(config["ignore"]) == {*modules, "lm_head"} - {"model.embed_tokens"}
    assert "model.layers.0.self_attn.q_proj" in config["ignore"]
    assert cost.bytes_before == sum(one.nbytes for one in written(path).values())
    assert cost.bytes_after == sum(one.nbytes for one in written(out).values())


@pytest.mark.parametrize(("modules", "gone"), [(("attention",), "self_attn"), (("mlp",), "shared_experts")])
def test_other_modules_on_request(save: Save, tmp_path: Path, modules: Any, gone: str) -> None:
    path, out = save("deepseek3"), tmp_path / "out"
    quantized(path, out, modules=modules)
    _, stayed = check(path, out, Format(8, None))
    assert any(".experts." in name for name in stayed)
    assert not [name for name in stayed if gone in name and name.endswith("_proj.weight")]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", SIZES.values())
def test_fused_experts_and_all_types(save: Save, tmp_path: Path, dtype: torch.dtype) -> None:
    apart, fused = save("qwen3", dtype), save("qwen3", dtype, fused=True)
    assert len(written(fused)) < len(written(apart))
    for path in (apart, fused):
        quantized(path, tmp_path / f"{path.name} out", format="int4", group_size=32)
    check(apart, tmp_path / "model out", Format(4, 32))
    found, expected = written(tmp_path / "fused out"), written(tmp_path / "model out")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


class Stop(BaseException):
    """As Ctrl-C."""


def stopping(after: int) -> Callable[[str, int, int], None]:
    """Progress that stops the run at the call of this number."""
    calls = iter(range(after))

    def show(*_: object) -> None:
        if next(calls, None) is None:
            raise Stop

    return show


def prompts(path: Path, count: int = 12) -> Path:
    lines = [json.dumps({"prompt": tiny_models.prompt(30 + at, 60, seed=at)}) for at in range(count)]
    path.write_text("\n".join(lines))
    return path


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("calibrated", [False, True])
def test_a_stopped_run_is_continued_to_the_same_bytes(save: Save, tmp_path: Path, calibrated: bool) -> None:
    path, how = save("deepseek3"), {"modules": ("experts", "attention")}
    if calibrated:
        how["calibrate"] = (prompts(tmp_path / "p.jsonl"),)
    calls = []
    quantized(path, tmp_path / "whole", lambda *at: calls.append(at), **how)
    out = tmp_path / "out"
    for after in range(7, len(calls), max(1, len(calls) // 9)):
        with pytest.raises(Stop):
            quantized(path, out, stopping(after), **how)
        assert not (out / "config.json").exists()
        if after > len(calls) // 2:
            break
    shards = sorted(out.glob("*.safetensors"))
    assert 0 < len(shards) < len(list((tmp_path / "whole").glob("*.safetensors")))
    times = [file.stat().st_mtime_ns for file in shards]
    quantized(path, out, **how)
    assert [file.stat().st_mtime_ns for file in shards] == times  # kept, not written again
    assert files(out) == files(tmp_path / "whole")
    quantized(path, out, **how)  # it was finished
    assert files(out) == files(tmp_path / "whole")


def test_another_command_does_not_continue(save: Save, tmp_path: Path) -> None:
    path, out = save("qwen3"), tmp_path / "out"
    with pytest.raises(Stop):
        quantized(path, out, stopping(5))
    for how, says in (
        ({"group_size": 32}, "was begun with --group-size None, now 32; allowed: the same settings"),
        ({"modules": ("experts", "mlp")}, r"--modules \['experts'\], now \['experts', 'mlp'\]"),
        ({"calibrate": (prompts(tmp_path / "p.jsonl"),)}, "--calibrate None, now '"),
    ):
        with pytest.raises(ConfigError, match=says):
            quantized(path, out, **how)
    held = load_file(path / "model.safetensors")
    held["model.norm.weight"] += 1
    save_file(held, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="was begun with model '"):
        quantized(path, out)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3", "granite", "qwen2", "glm4-lite", "qwen3-next"])
def test_calibration_sees_each_expert_s_own_tokens(save: Save, tmp_path: Path, case: str) -> None:
    """All experts together see top-k times the tokens, and with too few tokens all is rounded to nearest."""
    path, file = save(case, torch.float32), prompts(tmp_path / "p.jsonl")
    most = quantized(path, tmp_path / "few", calibrate=(file,), least_tokens=10**6)
    nearest = tmp_path / "nearest"
    quantized(path, nearest)
    spec = registry.read_spec(path)
    assert len(most.few_tokens) == len(spec.moe_layers) * spec.num_experts
    for layer in spec.moe_layers:
        seen = sum(count for one, _, count in most.few_tokens if one == layer)
        assert seen == spec.top_k * most.calibration_tokens
    found, expected = written(tmp_path / "few"), written(nearest)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    counts = sorted(count for _, _, count in most.few_tokens)
    some = quantized(path, tmp_path / "some", calibrate=(file,), least_tokens=counts[len(counts) // 2])
    assert 0 < len(some.few_tokens) < len(most.few_tokens)
    found = written(tmp_path / "some")
    few = {(layer, expert) for layer, expert, _ in some.few_tokens}
    for name in expected:
        match = re.search(r"layers\.(\d+)\..*experts\.(\d+)\..*weight_packed", name)
        if match is not None:
            same = torch.equal(found[name], expected[name])
            assert same == ((int(match[1]), int(match[2])) in few), name


def test_what_is_refused(save: Save, tmp_path: Path) -> None:
    path, out = save("qwen3"), tmp_path / "out"
    with pytest.raises(ConfigError, match=r"--group-size: got 128; allowed: .*divide"):
        quantized(path, out, format="int4", group_size=128)
    narrow = tiny_models.build("qwen3_moe", model_configs.qwen3(moe_intermediate_size=1))
    grown = tiny_models.save(narrow, tmp_path / "grown", torch.bfloat16)
    with pytest.raises(ConfigError, match=r"bytes in place of \d+; allowed: fewer, or --allow-growth"):
        quantized(grown, out, allow_growth=False)
    assert not out.exists()
    cost = quantized(grown, out)
    assert cost.bytes_after > cost.bytes_before


def test_quantised_models_are_refused(save: Save, tmp_path: Path) -> None:
    path, _ = quantizers.quantize(save("qwen3"), tmp_path, FORMATS["packed int4"])
    with pytest.raises(
        ConfigError,
        match="this model is quantised; allowed: matrices in bf16, .* and those of quant_method fp8",
    ):
        quantized(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "form", "modules"),
    [
        ("qwen3", "fp8 blocks", ("experts",)),
        pytest.param("qwen3", "fp8 rows", ("experts", "attention"), marks=pytest.mark.slow),
        pytest.param("qwen3", "fp8 matrix, static", ("attention",), marks=pytest.mark.slow),
        pytest.param("deepseek3", "fp8 blocks", ("experts", "mlp"), marks=pytest.mark.slow),
    ],
)
def test_fp8_is_read_as_its_numbers(save: Save, tmp_path: Path, name: str, form: str, modules: Any) -> None:
    path, plain = quantizers.quantize(save(name), tmp_path, FORMATS[form])
    out, numbers, rounding = tmp_path / "out", written(plain), Rounding(Format(8, None), "BF16")
    cost = quantized(path, out, modules=modules)
    before = [one.nbytes for tensor, one in written(path).items() if not tensor.endswith("input_scale")]
    assert cost.bytes_before == sum(before)
    assert cost.bytes_after == sum(one.nbytes for one in written(out).values())
    assert {one.dtype for one in written(out).values()} <= {
        torch.bfloat16, torch.float32, torch.int32, torch.int64,
    }  # fmt: skip
    checkpoint, rounded = Checkpoint(out), 0
    for tensor, wanted in numbers.items():
        found = checkpoint.tensor(tensor, *wanted.shape, dtype=torch.float32)
        if checkpoint.find_quantized(tensor, *wanted.shape) is not None:
            rounded += 1
            wanted = rounding.numbers(rounding.nearest(wanted.float()))
        elif Checkpoint(path).find_quantized(tensor, *wanted.shape) is not None:
            wanted = wanted.to(torch.bfloat16)
        assert torch.equal(found, wanted.float()), tensor
    assert rounded == cost.matrices > 0
    assert registry.load(out, kernels).experts


def test_other_experts_are_refused(save: Save, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stored in columns or have biases; allowed: rows without biases"):
        quantized(save("gpt-oss"), tmp_path / "out")
    path = save("qwen3")
    compress(path, tmp_path / "compressed", 1, lambda *_: None)
    with pytest.raises(ConfigError, match="are compressed; quantise the original"):
        quantized(tmp_path / "compressed", tmp_path / "out")


def test_a_model_without_experts_is_refused_unless_others_are_named(tmp_path: Path) -> None:
    dense = tiny_models.build("qwen3_moe", model_configs.qwen3(mlp_only_layers=[0, 1, 2]))
    path = tiny_models.save(dense, tmp_path / "model", torch.bfloat16)
    with pytest.raises(ConfigError, match="this model has no experts to quantise"):
        plan.make(path, ("experts",))
    assert plan.make(path, ("mlp",)).columns == plan.make(path, ("experts", "mlp")).columns


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_numbers_that_are_not_finite_are_refused(save: Save, tmp_path: Path, number: str) -> None:
    path, name = save("qwen3"), "model.layers.1.mlp.experts.2.up_proj.weight"
    held = load_file(path / "model.safetensors")
    held[name][3, 4] = float(number)
    save_file(held, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=rf"tensor {name}: got {number}; allowed: finite numbers"):
        quantized(path, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()


def test_a_full_disk_is_refused_before_anything_is_written(
    save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("moesaic.jobs.quantizing.run.shutil.disk_usage", lambda _: free)
    with pytest.raises(ConfigError, match=r"DIRECTORY: .*out: \d+ bytes are needed, and 1000 are free"):
        quantized(save("qwen3"), tmp_path / "out")
    assert not (tmp_path / "out").exists()

"""`moesaic doctor MODEL` as a user types it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.test_published import DEEPSEEK_V3, MIXTRAL_8X7B
from tests.models.test_quantized import CASES
from tests.support import model_configs, quantizers, tiny_models
from tests.support.fake_hub import hub

from moesaic import LLM
from moesaic.commands import cli
from moesaic.config import CacheConfig, ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.core.errors import CheckpointError
from moesaic.core.weight_types import BLOCK_TYPES, NATIVE_DTYPES
from moesaic.kernels import table
from moesaic.models import files, registry
from moesaic.models.files import FoundModel
from moesaic.models.headers import Headers
from moesaic.runtime.cache_size import AUTO_SHARE, compute_cache_size
from moesaic.runtime.drafting import make_speculation
from moesaic.runtime.model_loading import load_model as load
from moesaic.testing import byte_tokenizer

GIB = 2**30
MACHINE = """
machine = {{ name = "a CPU" }}
fast = {{ name = "RAM", memory_gib = {memory}, bandwidth_gib = {bandwidth}, tflops = 0.3 }}
slow = {{ name = "disk", memory_gib = 500, bandwidth_gib = 1.5 }}
link = {{ down_gib = 1.5 }}
"""
REPOSITORY = "some-org/tiny-moe"
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 8}'


@pytest.fixture(autouse=True)
def in_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an activated environment."""
    monkeypatch.setattr("moesaic.commands.doctor_model.program", lambda: "moesaic")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    return a_machine(tmp_path / "machine.toml")


def a_machine(file: Path, memory: float = 16, bandwidth: float = 20) -> Path:
    """A machine's figures. memory: GiB that are free."""
    file.write_text(MACHINE.format(memory=memory, bandwidth=bandwidth))
    return file


def examined(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> dict[str, Any]:
    """The report as JSON."""
    assert cli.main(["doctor", *map(str, words), "--json"]) == code
    out, _ = capsys.readouterr()
    found: dict[str, Any] = json.loads(out)
    return found


def a_config(folder: Path, config: dict[str, Any], **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps(config | changes))
    return file


def a_copy(folder: Path, **tensors: torch.Tensor | None) -> Path:
    """The demo checkpoint with other tensors; None removes one."""
    demo = files.resolve("demo")
    folder.mkdir()
    for file in demo.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).symlink_to(file)
    weights = load_file(demo / files.SINGLE) | tensors
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, folder / files.SINGLE)
    return folder


def test_a_checkpoint_that_is_here(capsys: pytest.CaptureFixture[str], machine: Path) -> None:
    found, spec = examined(capsys, "demo", "--hardware", machine), registry.read_spec(files.resolve("demo"))
    assert (found["supported"], found["problems"], found["notes"]) == (True, [], [])
    assert found["model_type"] == "qwen3_moe" and found["command"] == "moesaic serve demo"
    assert (found["layers"], found["experts"], found["top_k"]) == (6, spec.num_experts, spec.top_k)
    assert found["context"] == spec.max_position and found["stored"]["type"] == "bfloat16"
    model = load(ModelConfig("demo")).model
    assert found["parameters"] == pytest.approx(model.num_parameters, rel=0.001)
    rows = {row["experts_as"]: row for row in found["formats"]}
    assert rows["bfloat16"]["weights"] == pytest.approx(model.num_bytes, rel=0.01)
    assert rows["float32"]["weights"] == 2 * rows["bfloat16"]["weights"]


def test_every_type_of_experts_has_a_row(capsys: pytest.CaptureFixture[str], machine: Path) -> None:
    found = examined(capsys, "demo", "--hardware", machine)
    listed = [dtype for dtype in NATIVE_DTYPES if dtype not in BLOCK_TYPES]
    listed.append("int4_g64")  # the widest groups of its rows
    assert [row["experts_as"] for row in found["formats"]] == listed
    assert all(row["fits"] and row["weights"] == row["experts"] + row["other"] for row in found["formats"])


def test_compressed_experts_are_counted_to_the_byte(
    capsys: pytest.CaptureFixture[str], machine: Path, tmp_path: Path
) -> None:
    out = tmp_path / "compressed"
    assert cli.main(["compress", "demo", str(out)]) == 1
    capsys.readouterr()
    found = examined(capsys, out, "--hardware", machine)
    [row] = [row for row in found["formats"] if row["experts_as"] == "compressed"]
    places = Headers(out).list_tensors().items()
    assert row["experts"] == sum(place.size for name, place in places if ".experts." in name)
    assert found["stored"]["type"] == "compressed" and found["command"] == f"moesaic serve {out}"
    assert row["loaded_as"] == ("compressed" if table.pick("cpu").can_use_quantized else "float32")


@pytest.mark.parametrize(
    ("config", "changes", "part"),
    [
        (MIXTRAL_8X7B, {"model_type": "llama"}, "model_type: got 'llama'"),
        (MIXTRAL_8X7B, {"new_idea": 3}, "new_idea: got 3"),
        (MIXTRAL_8X7B, {"hidden_act": "gelu"}, "hidden_act: got 'gelu'"),
        (
            DEEPSEEK_V3,
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "quant_method 'bitsandbytes'",
        ),
        (MIXTRAL_8X7B, {"num_hidden_layers": None}, "num_hidden_layers"),
    ],
)
def test_what_is_not_supported_is_what_the_loader_says(
    config: dict[str, Any],
    changes: dict[str, Any],
    part: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    machine: Path,
) -> None:
    file = a_config(tmp_path / "model", config, **changes)
    with pytest.raises(CheckpointError) as refused:
        registry.read_spec(file.parent)
    found = examined(capsys, file, "--hardware", machine, code=1)
    assert part in str(refused.value) and found["problems"] == [str(refused.value)]
    assert not found["supported"] and found["command"] is None and found["speeds"] == []


@pytest.mark.slow
def test_a_tensor_that_the_loader_refuses_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, machine: Path
) -> None:
    name = "model.layers.3.mlp.gate.weight"
    for folder, tensors, part in (
        ("missing", {name: None}, f"tensor {name} is missing"),
        ("shape", {name: torch.zeros(3, 3)}, f"tensor {name}: got shape [3, 3]"),
        (
            "more",
            {"model.new.weight": torch.zeros(3)},
            "tensor model.new.weight is not expected by this model",
        ),
    ):
        path = a_copy(tmp_path / folder, **tensors)
        found = examined(capsys, path, "--hardware", machine, code=1)
        assert len(found["problems"]) == 1 and part in found["problems"][0]


def test_a_tokenizer_that_cannot_be_read_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, machine: Path
) -> None:
    path = a_copy(tmp_path / "model")
    (path / "tokenizer.json").unlink()
    found = examined(capsys, path, "--hardware", machine, code=1)
    assert len(found["problems"]) == 1 and "no tokenizer.json" in found["problems"][0]


def test_a_hub_id_without_a_tokenizer_that_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = a_config(tmp_path / "model", MIXTRAL_8X7B)
    for name, problems in (
        ("tokenizer.model", ["a/b: no tokenizer.json (only fast tokenizers are read)"]),
        ("tokenizer.json", []),
        ("tiktoken.model", []),
    ):
        found = FoundModel(file, files={"config.json": 600, name: 5000, "model.safetensors": 1 << 60})
        monkeypatch.setattr(files, "find", lambda *_, found=found: found)
        report = examined(capsys, "a/b", "--hardware", machine, code=1)
        assert report["problems"] == problems
        disk = [note for note in report["notes"] if "does not fit on the disk" in note]
        assert len(disk) == (0 if problems else 1)


def run_line(command: str) -> None:
    """Parse a command as the command line does."""
    Path("in.jsonl").touch()
    words = [cli.SHORT.get(word, word) for word in command.split()[1:]]
    cli.app.parse_args(words, exit_on_error=False, print_error=False)


def test_the_command_depends_on_the_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = a_config(tmp_path / "model", MIXTRAL_8X7B)
    weights = 87.0
    found = {
        memory: examined(capsys, file, "--hardware", a_machine(tmp_path / "m.toml", memory))
        for memory in (400, weights + 12, 20)
    }
    assert found[400]["command"] == "moesaic serve MODEL"
    [shorter] = [row for row in found[weights + 12]["formats"] if row["experts_as"] == "bfloat16"]
    assert 0 < shorter["longest_request"] < 32768
    assert found[weights + 12]["command"] == (
        f"moesaic serve MODEL --max-model-len {shorter['longest_request']}"
    )
    streamed = found[20]["command"]
    assert streamed.startswith("moesaic run-batch ") and streamed.endswith("MODEL --fast-memory 18432MiB")
    assert found[20]["streamed"]["tokens_per_second"] > 0
    assert "does not fit in memory: experts are read" in found[20]["notes"][0]
    for one in found.values():
        run_line(one["command"])
    (tmp_path / "m.toml").write_text(MACHINE.format(memory=2, bandwidth=20))
    none = examined(capsys, file, "--hardware", tmp_path / "m.toml", code=1)
    assert none["command"] is None and none["notes"][0].startswith("does not run here: neither the model")


def test_the_cache_is_the_one_that_the_worker_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    memory = 0.0625 + 12.8 / 1024
    machine = a_machine(tmp_path / "m.toml", memory)
    found = examined(capsys, "demo", "--hardware", machine)
    [row] = [row for row in found["formats"] if row["experts_as"] == "bfloat16"]
    loaded = load(ModelConfig("demo"))
    left = memory * GIB - row["weights"]
    worker = WorkerConfig(ModelConfig("demo"), CacheConfig())
    blocks = compute_cache_size(worker, loaded, 2048, torch.float32, int(AUTO_SHARE * left)).num_blocks
    assert row["kv_cache_tokens"] == blocks * worker.cache.block_size


def test_speed_follows_the_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = a_config(tmp_path / "model", MIXTRAL_8X7B)
    rates = []
    for bandwidth in (20, 40):
        machine = a_machine(tmp_path / "m.toml", 400, bandwidth)
        one, many = examined(capsys, file, "--hardware", machine)["speeds"]
        assert (one["requests"], many["requests"]) == (1, 64) and many["answers"] > one["answers"]
        rates.append(one["answers"])
        assert 0.7 < rates[-1] * 2 * 12.9e9 / (bandwidth * GIB) < 1.02  # every active weight is read once
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.05)


@pytest.mark.parametrize("told", [{"torch_dtype": "float8"}, {"torch_dtype": None, "dtype": [1]}])
def test_a_type_that_is_not_known_is_no_prediction(
    told: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, machine: Path
) -> None:
    """The loader takes the type from the files, so it is no mistake."""
    file = a_config(tmp_path / "model", MIXTRAL_8X7B, **told)
    if told["torch_dtype"] is None:
        file.write_text(
            json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "torch_dtype"})
        )
    found = examined(capsys, file, "--hardware", machine)
    assert found["command"] == "moesaic serve MODEL" and found["formats"] == []
    assert found["notes"][0].startswith("memory and speed are not predicted: config.json: torch_dtype: got ")


def test_without_figures_there_is_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    found = examined(capsys, "demo", "--hardware", "none")
    assert found["command"] == "moesaic serve demo" and found["speeds"] == []
    assert found["drafts_priced_by"] == "bytes of weights"
    config = WorkerConfig(ModelConfig("demo"), scheduler=SchedulerConfig(speculative_config=DRAFTS))
    prices = make_speculation(config, load(ModelConfig("demo")).model).stats().prices
    for one in found["drafts"]:
        ratio = prices[one["requests"] * (1 + one["tokens"]) - 1] / prices[one["requests"] - 1]
        assert one["price"] == pytest.approx(ratio, rel=0.01), "a worker begins with the same prices"


def test_drafts_pay_from_an_acceptance(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = a_config(tmp_path / "model", MIXTRAL_8X7B)
    found = examined(capsys, file, "--hardware", a_machine(tmp_path / "m.toml", 400))
    assert found["drafts_priced_by"] == "the machine's figures"
    rows = {(one["requests"], one["tokens"]): one for one in found["drafts"]}
    assert list(rows) == [(1, 1), (1, 2), (1, 4), (1, 8), (8, 1), (8, 2), (16, 1)]
    # One token reads 2 of 8 experts of a layer, two tokens 3.5 of them: 6/7 of the weights read are theirs.
    read = {count: 8 * (1 - (3 / 4) ** count) * 176.2e6 * 32 + 1.6e9 for count in (1, 2, 3)}
    for tokens in (1, 2):
        assert rows[1, tokens]["price"] == pytest.approx(read[1 + tokens] / read[1], rel=0.03)
    for one in rows.values():
        if one["acceptance"] is None:
            assert one["price"] > 1 + one["tokens"]
        else:
            gained = sum(one["acceptance"] ** place for place in range(1 + one["tokens"]))
            assert gained == pytest.approx(one["price"])
    assert examined(capsys, file, "--hardware", a_machine(tmp_path / "m.toml", 20))["drafts"] == []


def test_for_people(capsys: pytest.CaptureFixture[str], machine: Path, tmp_path: Path) -> None:
    assert cli.main(["doctor", "demo", "--hardware", str(machine)]) == 0
    shown = capsys.readouterr().out
    for text in ("qwen3_moe", "6.7 million", "compressed", "fits here", "moesaic serve demo", "tokens/s"):
        assert text in shown
    priced = shown[shown.index("Acceptance from which") :]
    assert "no step was" in priced and "not drafted" in priced and "8 requests" in priced
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "50")
        assert cli.main(["doctor", "demo", "--hardware", str(machine)]) == 0
    narrow = capsys.readouterr().out
    assert "…" not in narrow and "int4_g64" in narrow and "together" in narrow
    file = a_config(tmp_path / "model", MIXTRAL_8X7B, model_type="[bold]")
    assert cli.main(["doctor", str(file)]) == 1
    out, err = capsys.readouterr()
    assert "not supported: " in out and "model_type: got '[bold]'" in out and err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["./nowhere"],
            "model: got './nowhere'; allowed: a directory with config.json, a GGUF file, a hub id, demo",
        ),
        (["demo", "--hardware", "abacus"], "--hardware: got 'abacus'; allowed: t4, "),
        (["demo", "--revision", "x"], "--revision: got 'x'; allowed: none"),
        (["--revision", "x"], "--revision: got 'x'; allowed: nothing without a MODEL"),
        (["--hardware", "l4"], "--hardware: got 'l4'; allowed: nothing without a MODEL"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a":' * 5000])
def test_a_config_that_is_no_object_is_one_line(
    text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert cli.main(["doctor", str(tmp_path / "config.json")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and f"{tmp_path / 'config.json'}: " in err


@pytest.mark.slow
def test_of_a_hub_id_only_small_files_are_fetched(tmp_path: Path, machine: Path) -> None:
    repository, home = tmp_path / "repository", tmp_path / "home"
    demo = files.resolve("demo")
    repository.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (repository / name).write_bytes((demo / name).read_bytes())
    shard = "model-00001-of-00001.safetensors"
    names = [*load_file(demo / files.SINGLE), "model.new.weight"]
    (repository / files.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    (repository / shard).write_bytes(bytes(5000))
    (repository / "pytorch_model.bin").write_bytes(bytes(7000))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    words = [sys.executable, "-m", "moesaic", "doctor", REPOSITORY, "--hardware", str(machine), "--json"]
    with hub(REPOSITORY, repository) as (endpoint, seen):
        env = {**clean, "HF_ENDPOINT": endpoint, "HF_HOME": str(home)}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    found = json.loads(done.stdout)
    assert done.returncode == 1 and len(found["problems"]) == 1
    assert "tensor model.new.weight is not expected by this model" in found["problems"][0]
    assert found["stored"]["bytes"] == 5000 and found["stored"]["files"] == 1
    assert (
        5000
        < found["stored"]["download"]
        < 5000
        + sum(file.stat().st_size for file in repository.iterdir() if file.suffix == ".json")
        + len(shard)
        + 10
    )
    fetched = {line.split("/")[-1] for line in seen if line.startswith("GET") and "/resolve/" in line}
    assert fetched == {"config.json", files.INDEX}
    assert not list(home.rglob("*.safetensors"))


@pytest.mark.parametrize("form", ["fp8 blocks", "awq"])
def test_a_quantised_checkpoint_takes_what_its_experts_take(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str, machine: Path
) -> None:
    source = tiny_models.save(tiny_models.build(*CASES["qwen3"]), tmp_path / "source", torch.bfloat16)
    byte_tokenizer(source)
    path, _ = quantizers.quantize(source, tmp_path, quantizers.FORMATS[form])
    found = examined(capsys, path, "--hardware", machine)
    layout = registry.expert_layout(path, table.pick("cpu", "auto"))
    [row] = [row for row in found["formats"] if row["experts_as"] == quantizers.STORED[form]]
    assert found["supported"] and layout.dtype == row["experts_as"]
    assert row["experts"] == layout.num_bytes and found["stored"]["type"] == layout.dtype
    loaded = load(ModelConfig(str(path), threads=1)).model
    assert row["weights"] == pytest.approx(loaded.num_bytes), "the embedding stays bf16"


@pytest.mark.slow
def test_a_quantised_checkpoint_that_does_not_fit_is_streamed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 32, "num_hidden_layers": 4}
    model = tiny_models.build("qwen3_moe", model_configs.qwen3(**sizes))
    source = tiny_models.save(model, tmp_path / "source", torch.bfloat16)
    byte_tokenizer(source)
    path, _ = quantizers.quantize(source, tmp_path, quantizers.FORMATS["packed int4"])
    found = examined(capsys, path, "--hardware", a_machine(tmp_path / "m.toml", memory=14 / 1024))
    assert found["problems"] == [] and "--fast-memory" in found["command"]
    assert found["streamed"]["tokens_per_second"] > 0
    assert any("Assumed: converting quantised experts to" in note for note in found["notes"])


@pytest.mark.slow
def test_a_quantised_hub_id_is_judged_by_its_config(tmp_path: Path, machine: Path) -> None:
    """Its index has names that only the types of tensors explain."""
    source = tiny_models.save(tiny_models.build(*CASES["qwen3"]), tmp_path / "source", torch.bfloat16)
    byte_tokenizer(source)
    path, _ = quantizers.quantize(source, tmp_path, quantizers.FORMATS["awq"])
    shard = "model-00001-of-00001.safetensors"
    names = list(load_file(path / files.SINGLE))
    (path / files.SINGLE).rename(path / shard)
    (path / files.INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    words = [sys.executable, "-m", "moesaic", "doctor", REPOSITORY, "--hardware", str(machine), "--json"]
    with hub(REPOSITORY, path) as (endpoint, _):
        env = {**clean, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["supported"] and found["stored"]["type"] == "int4_g32"


OF_LONG_ROWS = dict.fromkeys(("int8 rows", "packed int8"), "int8_g128")
OF_LONG_ROWS |= {"packed int4, zero points": "int4_g128", "int8 rows, zero points": "int8_offset_g128"}
OF_LONG_ROWS |= dict.fromkeys(("nvfp4", "nvfp4, modelopt"), "nvfp4_g128")
"""Form whose rows are one group -> its type where whole blocks of 128 numbers fit into a row."""


@pytest.mark.parametrize("form", quantizers.FORMATS)
def test_a_config_alone_tells_how_experts_are_quantised(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, form: str
) -> None:
    told = {"quantization_config": quantizers.FORMATS[form].config}
    file = a_config(tmp_path / "model", MIXTRAL_8X7B, **told)
    machine = a_machine(tmp_path / "large.toml", memory=400)
    found = examined(capsys, file, "--hardware", machine)
    assert found["supported"] and found["stored"]["type"] == OF_LONG_ROWS.get(form, quantizers.STORED[form])


def test_a_key_can_be_left_out_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, drop = tmp_path / "config.json", '{"attention_sinks": null}'
    config.write_text(json.dumps(MIXTRAL_8X7B | {"attention_sinks": 4}))
    asked = ["doctor", str(config), "--hardware", "none", "--json"]
    assert cli.main(asked) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert f"--hf-overrides '{drop}'" in problem
    assert cli.main([*asked, "--hf-overrides", drop]) in (0, 1)  # by the memory that is free here
    report = json.loads(capsys.readouterr().out)
    assert report["supported"]
    assert report["command"] is None or f"--hf-overrides '{drop}'" in report["command"]


def test_messages_name_a_changed_model_as_its_user_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in files.resolve("demo").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    layers = json.dumps({"num_hidden_layers": 99})
    assert cli.main(["doctor", str(tmp_path), "--hardware", "none", "--json", "--hf-overrides", layers]) == 1
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem.startswith(f"{tmp_path}: tensor model.layers.")


def test_a_model_whose_answers_never_end_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in files.resolve("demo").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    asked = ["doctor", str(tmp_path), "--hardware", "none", "--json"]
    cli.main(asked)
    assert json.loads(capsys.readouterr().out)["notes"] == []
    (tmp_path / "generation_config.json").unlink()
    tiny_models.edit(tmp_path, eos_token_id=None)
    byte_tokenizer(tmp_path, ["<end>"])
    cli.main(asked)
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert note.startswith("no token ends an answer")


MLX = {"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {"group_size": 64, "bits": 4}}
MODELOPT = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}}
FORMS: dict[str, tuple[dict[str, Any], str, str]] = {
    "MLX": (MLX, "", "config.json: quantization: this is an MLX checkpoint; allowed: the model itself, or"),
    "MLX, one key": (
        {"quantization_config": MLX["quantization"]},
        "",
        "config.json: quantization: this is an MLX checkpoint; allowed: the model itself, or",
    ),
    "ModelOpt": (
        MODELOPT,
        "",
        "config.json: quantization_config.quant_algo: got 'W4A8_AWQ'; allowed: NVFP4, W4A16_NVFP4, FP8, and",
    ),
    "ModelOpt, nested": (
        {"quantization_config": {"quantization": {"quant_algo": "NVFP4_AWQ"}}},
        "",
        "config.json: quantization_config.quant_algo: got 'NVFP4_AWQ'; allowed: NVFP4, W4A16_NVFP4, FP8, and",
    ),
    "older ModelOpt": (
        {},
        "hf_quant_config.json",
        "config.json: quantization_config.quant_algo: got None; allowed: NVFP4, W4A16_NVFP4, FP8, and",
    ),
    "no index": ({}, "model-00001-of-00002.safetensors", "but no model.safetensors.index.json: download it"),
    "pickles": (
        {},
        "pytorch_model.bin",
        "holds pytorch_model.bin but no safetensors; pickled weights can run code",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_files_of_another_form_are_named_by_doctor_and_by_the_loader(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, name, says = FORMS[form]
    for file in files.resolve("demo").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tiny_models.edit(tmp_path, **changes)
    if name == "hf_quant_config.json":
        (tmp_path / name).write_text("{}")
    elif name:
        (tmp_path / "model.safetensors").rename(tmp_path / name)
    with pytest.raises(CheckpointError, match=re.escape(says)) as caught:
        LLM(str(tmp_path))
    code = cli.main(["doctor", str(tmp_path), "--hardware", "none"])
    said = capsys.readouterr()
    assert code and str(caught.value) in (said.out + said.err).splitlines()[0]


def test_the_verdict_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "demo", "--hardware", "none"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "runs here: moesaic serve demo"


def test_a_supported_model_that_does_not_fit_is_said_to_be_supported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    assert cli.main(["doctor", str(tmp_path / "config.json"), "--hardware", "none"]) == 1
    assert capsys.readouterr().out.startswith("supported, but does not fit in memory")

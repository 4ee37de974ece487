"""`moesaic doctor FILE.gguf`: what would be loaded, and what it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.commands.test_doctor_model import a_machine, examined, machine
from tests.models.test_gguf import MIXES, WIDE
from tests.support import gguf_files, model_configs, tiny_models

from moesaic.commands import cli
from moesaic.config import ModelConfig
from moesaic.kernels import table
from moesaic.runtime.model_loading import load_model as load

__all__ = ["machine"]
MIX = "as Q4_K_M"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, (name, kinds) = tmp_path_factory.mktemp("gguf"), MIXES[MIX]
    source = tiny_models.save(tiny_models.build(*WIDE[name]), folder / "source")
    return gguf_files.write(source, folder / "made", kinds)[0]


def test_a_file_and_its_directory(
    file: Path, capsys: pytest.CaptureFixture[str], machine: Path, tmp_path: Path
) -> None:
    found = examined(capsys, file, "--hardware", machine)
    assert (found["supported"], found["problems"]) == (True, [])
    assert found["model_type"] == "qwen3_moe" and found["command"].endswith(f"moesaic serve {file}")
    assert found["stored"]["type"] == "q4_k+q6_k"
    assert (found["stored"]["quantization"], found["stored"]["files"]) == ("gguf", 1)
    assert found["stored"]["bytes"] == file.stat().st_size
    rows = {row["experts_as"]: row for row in found["formats"]}
    model = load(ModelConfig(str(file))).model
    packed = sum(
        one.nbytes
        for weights in model.experts.values()
        for expert in weights.resident_ids
        for one in weights.matrices_of(expert)
    )
    if table.pick(
        "cpu"
    ).can_use_quantized:  # counted as if each layer had the types of the first one, which has more
        assert packed == rows["q4_k+q6_k"]["experts"]
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "model.gguf").symlink_to(file)
    assert examined(capsys, tmp_path / "link", "--hardware", machine)["model_type"] == "qwen3_moe"


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_streamed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 32, "num_hidden_layers": 4}
    model = tiny_models.build("qwen3_moe", model_configs.qwen3(**sizes))
    source = tiny_models.save(model, tmp_path / "source")
    file, _ = gguf_files.write(source, tmp_path / "made", MIXES[MIX][1])
    found = examined(capsys, file, "--hardware", a_machine(tmp_path / "m.toml", memory=13 / 1024))
    assert found["problems"] == [] and "--fast-memory" in found["command"]
    assert found["streamed"]["tokens_per_second"] > 0
    tiny = a_machine(tmp_path / "small.toml", memory=0.0001)
    assert examined(capsys, file, "--hardware", tiny, code=1)["command"] is None


def test_what_is_not_supported(file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(file.read_bytes().replace(b"qwen3moe", b"qwen9moe"))
    assert cli.main(["doctor", str(other), "--hardware", "none"]) != 0
    says = "other.gguf: general.architecture: got 'qwen9moe'; allowed: deepseek2"
    assert says in capsys.readouterr().err.replace("\n", "")
    other.write_bytes(file.read_bytes().replace(b"blk.0.attn_k.weight", b"blk.0.attn_X.weight"))
    found = examined(capsys, other, "--hardware", "none", code=1)
    assert found["problems"] == [f"{other}: tensor model.layers.0.self_attn.k_proj.weight is missing"]
    other.write_bytes(file.read_bytes().replace(b"tokenizer.ggml.pre", b"tokenizer.ggml.PRE"))
    found = examined(capsys, other, "--hardware", "none", code=1)
    assert found["problems"][0].startswith(f"{other}: tokenizer.ggml.pre: got 'None'; allowed: ")

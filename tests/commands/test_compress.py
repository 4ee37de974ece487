"""`moesaic compress` as a user types it."""

from __future__ import annotations

import json
import math
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support import model_configs, tiny_models

from moesaic.commands import cli
from moesaic.models import files
from moesaic.models.checkpoint import SINGLE
from moesaic.models.compressing import Sizes

COMMAND = [sys.executable, "-m", "moesaic", "compress"]
HIDDEN, WIDTH, EXPERTS = 4096, 14336, 8


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert cli.main(["compress", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


def test_it_says_what_the_weights_took_and_take_and_that_they_grew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, demo = tmp_path / "out", files.resolve("demo")
    assert cli.main(["compress", "demo", str(out)]) == 1
    said, err = capsys.readouterr()
    pattern = r".*/out: [\d.]+ MiB of 12.8 MiB \([\d.]+%\), 432 matrices compressed in [\d.]+ s\n"
    assert re.fullmatch(pattern, said)
    larger = f"{out} is larger than demo, whose experts cannot be compressed so"
    assert err == f"moesaic: {larger}; serve demo itself\n"
    assert {file.name for file in out.iterdir()} == {file.name for file in demo.iterdir()}
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_only_growth_is_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for after, code in ((80, 0), (100, 0), (101, 1)):
        sizes = Sizes(100, after, 3)
        monkeypatch.setattr("moesaic.commands.compress.compress", lambda *_, sizes=sizes: sizes)
        assert cli.main(["compress", "demo", str(tmp_path / "out")]) == code
        assert capsys.readouterr().err.count("\n") == code


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.main(["compress", "demo", str(out), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said.pop("seconds") > 0
    before, after = said.pop("bytes_before"), said.pop("bytes_after")
    assert said == {"model": "demo", "directory": str(out), "matrices": 432, "share": after / before}
    for size, file in ((before, files.resolve("demo") / SINGLE), (after, out / SINGLE)):
        assert size == file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = tmp_path / "model", tmp_path / "file"
    tiny_models.save(tiny_models.build(*model_configs.CASES["mixtral"]), model)
    file.touch()
    capsys.readouterr()  # transformers' own bar
    for taken in (model, file, tmp_path / "no" / "where"):
        allowed = "allowed: a directory that does not exist yet or is empty, in an existing one"
        assert f"DIRECTORY: got '{taken}'; {allowed}" in refused(capsys, "demo", taken)
    assert "got F32" in refused(capsys, model, tmp_path / "out")
    assert "model: got './nowhere'" in refused(capsys, "./nowhere", tmp_path / "out")
    assert "--directory: got nothing" in refused(capsys, "demo")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "model"]


def write_large(path: Path) -> None:
    """A checkpoint with one layer of Mixtral 8x7B's experts. They are zeros in a sparse file, which takes no
    disk space."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_local_experts": EXPERTS}
    kind = tiny_models.KINDS["mixtral"][0]
    kind(
        **model_configs.mixtral(num_hidden_layers=1, architectures=["MixtralForCausalLM"], **sizes)
    ).save_pretrained(path)
    layer, vocab = "model.layers.0", model_configs.VOCAB
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, HIDDEN),
        "lm_head.weight": (vocab, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        f"{layer}.self_attn.q_proj.weight": (48, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (24, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (24, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, 48),
        f"{layer}.block_sparse_moe.gate.weight": (EXPERTS, HIDDEN),
    }
    for expert in range(EXPERTS):
        for word, shape in (("w1", (WIDTH, HIDDEN)), ("w2", (HIDDEN, WIDTH)), ("w3", (WIDTH, HIDDEN))):
            shapes[f"{layer}.block_sparse_moe.experts.{expert}.{word}.weight"] = shape
    header, at = {}, 0
    for name, shape in shapes.items():
        offsets = [at, at := at + 2 * math.prod(shape)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    with (path / SINGLE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    write_large(tmp_path / "model")
    with subprocess.Popen(
        [*COMMAND, "model", "out"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as started:
        deadline = time.monotonic() + 60
        while not any(file.stat().st_size > 2**20 for file in tmp_path.glob(f".out.partial-*/{SINGLE}")):
            assert started.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        started.send_signal(signal.SIGINT)
        said, _ = started.communicate(timeout=60)
    assert (started.returncode, said) == (130, "")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "demo", "out"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20)),
    )
    assert (done.returncode, done.stderr) == (2, f"moesaic: {tmp_path / 'out'}: File too large\n")
    assert list(tmp_path.iterdir()) == []

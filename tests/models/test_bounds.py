"""No number in a checkpoint's files makes moesaic allocate before it is checked against the files."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import model_configs, pairs, tiny_models

from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.kernels.table import pick
from moesaic.models import registry, rope
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.files import generation_defaults, read_json
from moesaic.models.headers import INDEX, SINGLE, Headers
from moesaic.models.shard import Shard
from moesaic.models.spec import KVLayout
from moesaic.testing import byte_tokenizer
from moesaic.text.tokenizer import Tokenizer

CASES = ("mixtral-linear", "qwen3-llama3-tied", "deepseek-full")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        case: tiny_models.save(
            tiny_models.build(*model_configs.CASES[case]), tmp_path_factory.mktemp("model") / case
        )
        for case in CASES
    }


def edited(path: Path, to: Path, **changes: Any) -> Path:
    """A checkpoint with another config, over the same weights."""
    config = json.loads((path / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **changes}))
    (to / SINGLE).symlink_to(path / SINGLE)
    return to


@pytest.mark.parametrize("case", pairs.some(CASES, CASES[:1]))
def test_no_number_allocates_before_it_is_checked(case: str, saved: dict[str, Path], tmp_path: Path) -> None:
    path = edited(saved[case], tmp_path)
    byte_tokenizer(path)
    command = [sys.executable, "-m", "tests.support.huge_configs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}


MIXTRAL, QWEN3, DEEPSEEK = CASES


@pytest.mark.parametrize(
    ("case", "name", "value", "words"),
    [
        (MIXTRAL, "num_hidden_layers", 10**9, "num_hidden_layers: got 1000000000; allowed: an integer"),
        (
            MIXTRAL,
            "num_hidden_layers",
            60_000,
            "tensor model.layers.3.block_sparse_moe.gate.weight is missing",
        ),
        (MIXTRAL, "num_hidden_layers", 10**12, "num_hidden_layers: got 1000000000000; allowed"),
        (MIXTRAL, "max_position_embeddings", 2**31, "max_position_embeddings: got 2147483648; allowed"),
        (MIXTRAL, "head_dim", 10**9, "head_dim: got 1000000000; allowed: an even integer from 2 to 65536"),
        (MIXTRAL, "num_attention_heads", 3 * 10**8, "q_proj.weight: got shape [48, 48]; allowed"),
        (MIXTRAL, "num_local_experts", 10**9, "gate.weight: got shape [5, 48]; allowed: [1000000000, 48]"),
        (MIXTRAL, "vocab_size", 10**9, "embed_tokens.weight: got shape [97, 48]; allowed"),
        (MIXTRAL, "hidden_size", 10**9, "embed_tokens.weight: got shape [97, 48]; allowed"),
        (QWEN3, "mlp_only_layers", [True], "mlp_only_layers: got [True]; allowed: a list of integers"),
        (QWEN3, "mlp_only_layers", "", "mlp_only_layers: got ''; allowed: a list of integers"),
        (DEEPSEEK, "kv_lora_rank", 10**9, "kv_b_proj.weight: got shape"),
        (DEEPSEEK, "rope_theta", 10**400, "rope_theta: got 1000000"),
        (DEEPSEEK, "rms_norm_eps", 10**400, "rms_norm_eps: got 1000000"),
        (DEEPSEEK, "a\nb", 1, "'a\\nb': got 1; allowed: keys that this model_type reads"),
    ],
)
def test_one_line_names_the_key_or_the_tensor(
    case: str, name: str, value: object, words: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as caught:
        registry.read_spec(edited(saved[case], tmp_path, **{name: value}))
    assert words in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "change",
    [
        {"beta_fast": 1e-320},
        {"beta_slow": 1e-320},
        {"factor": 1e30},
        {"original_max_position_embeddings": 2**30},
    ],
)
def test_rope_without_finite_angles_is_refused(
    change: dict[str, float], saved: dict[str, Path], tmp_path: Path
) -> None:
    yarn = {**model_configs.YARN, **change}
    path = edited(saved["mixtral-linear"], tmp_path, rope_parameters=yarn)
    with pytest.raises(CheckpointError, match="config.json: rope") as caught:
        registry.read_spec(path)
    assert "\n" not in str(caught.value)


def test_a_changed_config_is_read_again(saved: dict[str, Path], tmp_path: Path) -> None:
    path = edited(saved["mixtral-linear"], tmp_path)
    assert registry.read_spec(path).max_position == 192
    tiny_models.edit(path, max_position_embeddings=64)
    assert registry.read_spec(path).max_position == 64


def test_a_shard_of_very_many_heads_is_refused_at_once(saved: dict[str, Path]) -> None:
    spec = replace(registry.read_spec(saved["mixtral-linear"]), heads=10**9, kv=KVLayout(10**9, 8, 8))
    with pytest.raises(ConfigError, match="--tensor-parallel-size: got 7; allowed: 1, 2, 4, 5, 8"):
        Shard(0, 7).spec(spec)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3", "default"])
def test_a_shorter_rope_table_has_the_same_bits(kind: str) -> None:
    config = rope.RopeConfig(kind, 1e4, 2.0, 4096)
    whole = rope.RopeTable.build(config, 20, 5000, "cpu")
    for positions in (0, 1, 7, 64, 1021, 4999):
        part = rope.RopeTable.build(config, 20, positions, "cpu")
        assert torch.equal(part.cosine, whole.cosine[:positions])
        assert torch.equal(part.sine, whole.sine[:positions])


def test_rope_tables_are_as_long_as_requests(saved: dict[str, Path]) -> None:
    path = saved["mixtral-linear"]
    for asked, rows in ((None, 192), (40, 40), (500, 192)):
        block = registry.load(path, pick("cpu"), positions=asked).blocks[0]
        assert len(block.attention_part.rope.cosine) == rows  # type: ignore[attr-defined]


# ---- the other files


def sparse(file: Path, begin: bytes, size: int = 8 << 30) -> None:
    with file.open("wb") as opened:
        opened.write(begin)
        opened.truncate(size)


def test_a_huge_header_is_not_read(tmp_path: Path) -> None:
    sparse(tmp_path / SINGLE, struct.pack("<Q", 7 << 30))
    with pytest.raises(CheckpointError, match="header has 7516192768 bytes; allowed: at most 100000000"):
        Headers(tmp_path).find("x", 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated or corrupt"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", [INDEX, "config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_huge_json_file_is_not_read(name: str, saved: dict[str, Path], tmp_path: Path) -> None:
    path = edited(saved["mixtral-linear"], tmp_path)
    byte_tokenizer(path)
    (path / name).unlink(missing_ok=True)
    sparse(path / name, b"{}")
    with pytest.raises(CheckpointError, match="allowed: at most|more than") as caught:
        Tokenizer(path), generation_defaults(path), Headers(path)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_number_of_too_many_digits_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 1' + "0" * 5000 + "}")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        read_json(tmp_path / "config.json")


def write(path: Path, entries: Any, data: bytes) -> Path:
    header = json.dumps(entries).encode()
    (path / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def entry(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "entries",
    [
        {"x": entry([2], 0, 8), "y": entry([2], 4, 12)},
        {"x": entry([2], 0, 8), "y": entry([1], 12, 16)},
        {"x": entry([2], 4, 12)},
        {"x": entry([2**62, 8], 0, 12)},
        {"x": entry([2], 0, 2**63)},
        {"x": entry([2], 8, 0)},
        {"x": entry([-2], 0, 8)},
    ],
    ids=["overlap", "gap", "late", "overflow", "beyond", "backwards", "negative"],
)
def test_tensors_in_wrong_places_are_refused(entries: Any, tmp_path: Path) -> None:
    path = write(tmp_path, entries, bytes(16))
    for read in (lambda: Headers(path).find("x", 2), lambda: Checkpoint(path).claim("x", 2)):
        with pytest.raises(CheckpointError) as caught:
            read()
        assert "\n" not in str(caught.value) and SINGLE in str(caught.value)


@pytest.mark.parametrize("shard", ["a\nb", "a\0b", "\ud800"])
def test_a_file_name_that_cannot_be_printed_is_refused(shard: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"x": shard}}))
    for read in (Headers, Checkpoint):
        with pytest.raises(CheckpointError) as caught:
            read(tmp_path)
        assert INDEX in str(caught.value) and "\n" not in str(caught.value)
        str(caught.value).encode()


def test_a_name_with_a_newline_stays_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, {"a\nb": entry([2], 0, 8)}, bytes(8))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(path).refuse_unread()
    assert str(caught.value) == f"{path}: tensor 'a\\nb' is not expected by this model"

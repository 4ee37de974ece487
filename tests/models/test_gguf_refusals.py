"""What is wrong with a GGUF file is said in one line."""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType, GGUFReader
from tests.support import gguf_files, model_configs, tiny_models

from moesaic.commands import compress
from moesaic.commands.options import Compress
from moesaic.core.errors import CheckpointError, ConfigError
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.models.files import find, resolve
from moesaic.models.gguf import header
from moesaic.models.gguf.architectures import ARCHITECTURES
from moesaic.models.gguf.metadata import Metadata
from moesaic.models.gguf.model import Model as GgufModel
from moesaic.models.headers import Headers

kernels = table.pick("cpu", "auto")
TINY = model_configs.qwen3(
    hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1, num_experts=4, num_experts_per_tok=2
)
UP = "blk.0.ffn_up_exps.weight"
Change = Callable[[bytearray, GGUFReader], Any]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("gguf")
    source = tiny_models.save(tiny_models.build("qwen3_moe", TINY), folder / "source")
    return gguf_files.write(source, folder / "made", lambda name: "Q8_0")[0].read_bytes()


def word(at: int, letter: str, value: Any) -> Change:
    def change(data: bytearray, _: GGUFReader) -> None:
        struct.pack_into(f"<{letter}", data, at, value)

    return change


def in_tensor(name: str, part: int, value: int, letter: str) -> Change:
    """Changes the description of a tensor. part: 3 for its axes, 4 for its type, 5 for its offset."""

    def change(data: bytearray, reader: GGUFReader) -> None:
        field = next(one.field for one in reader.tensors if one.name == name)
        at = field.offset + sum(int(one.nbytes) for one in field.parts[:part])
        struct.pack_into(f"<{letter}", data, at, value)

    return change


def key(name: str, other: str) -> Change:
    """Another name for a key, of the same length."""

    def change(data: bytearray, _: GGUFReader) -> None:
        assert len(name) == len(other) and data.count(name.encode()) == 1
        data[:] = data.replace(name.encode(), other.encode())

    return change


def nan_scale(data: bytearray, reader: GGUFReader) -> None:
    tensor = next(one for one in reader.tensors if one.name == "blk.0.attn_v.weight")
    struct.pack_into("<H", data, int(tensor.data_offset), 0x7E00)


def cut(size: int) -> Change:
    def change(data: bytearray, _: GGUFReader) -> None:
        del data[len(data) - size if size > 0 else -size :]

    return change


DAMAGE: dict[str, tuple[Change, str]] = {
    "another file": (word(0, "I", 7), "not a GGUF file (it begins with b'\\x07\\x00\\x00\\x00')"),
    "a pointer": (
        lambda data, _: data.__setitem__(slice(None), b"version https://git-lfs.github.com/spec/v1\n"),
        "this is a Git LFS pointer, not the file itself: run git lfs pull there",
    ),
    "nothing": (lambda data, _: data.clear(), "not a GGUF file (it is empty)"),
    "version 1": (word(4, "I", 1), "got GGUF version 1; allowed: version 2, 3, little-endian"),
    "big-endian": (word(4, "I", 3 << 24), "got big-endian numbers; allowed: version 2, 3"),
    "many tensors": (word(8, "Q", 1 << 60), "truncated or corrupt: "),
    "much metadata": (word(16, "Q", 1 << 60), "truncated or corrupt: "),
    "a long key": (word(24, "Q", 1 << 62), "truncated or corrupt: 4611686018427387904 bytes at 32"),
    "the end is missing": (cut(100), "truncated or corrupt: tensor "),
    "only the beginning": (cut(-200), "truncated or corrupt: "),
    "a type that is not read": (
        in_tensor(UP, 4, int(GGMLQuantizationType.NVFP4), "I"),
        f"tensor {UP}: got type NVFP4; allowed: F32, F16, BF16, Q4_0, Q4_1",
    ),
    "an unknown type": (in_tensor(UP, 4, 99, "I"), f"tensor {UP}: got type number 99; allowed: F32"),
    "a tensor after the end": (
        in_tensor(UP, 5, 1 << 40, "Q"), f"truncated or corrupt: tensor {UP} has 8704 bytes at 1099511",
    ),
    "a tensor between others": (in_tensor(UP, 5, 8, "Q"), f"truncated or corrupt: tensor {UP}"),
    "odd rows": (in_tensor(UP, 3, 65, "Q"), f"tensor {UP}: got rows of 65 Q8_0 numbers; allowed: multiples"),
    "a huge axis": (in_tensor(UP, 3, 1 << 60, "Q"), "truncated or corrupt: tensor"),
    "other rows": (in_tensor(UP, 3, 32, "Q"), "up_proj.weight: got shape [4, 32, 32]; allowed: [4, 32, 64]"),
    "a scale that is NaN": (nan_scale, "self_attn.v_proj: got nan in a scale; allowed: finite numbers"),
    "another architecture": (
        key("general.architecture", "general.archived_ure"),
        "general.architecture: got None; allowed: deepseek2, dots1, ernie4_5-moe",
    ),
    "an unknown architecture": (
        lambda data, _: data.__setitem__(slice(None), data.replace(b"qwen3moe", b"qwen9moe", 1)),
        "general.architecture: got 'qwen9moe'; allowed: deepseek2, ",
    ),
    "a missing key": (
        key("qwen3moe.expert_used_count", "qwen3moe.expert_used_COUNT"),
        "qwen3moe.expert_used_count is missing",
    ),
    "an unknown key": (
        key("qwen3moe.attention.key_length", "qwen3moe.attention.KEY_LENGTH"),
        "qwen3moe.attention.",
    ),
    "a missing tensor": (
        key("blk.0.attn_k.weight", "blk.0.attn_X.weight"), "self_attn.k_proj.weight is missing",
    ),
    "a tensor twice": (
        key("blk.0.attn_k.weight", "blk.0.attn_v.weight"), "truncated or corrupt: two tensors blk.0.attn_v",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_one_line(made: bytes, tmp_path: Path, what: str) -> None:
    change, says = DAMAGE[what]
    file, data = tmp_path / "model.gguf", bytearray(made)
    file.write_bytes(made)
    change(data, GGUFReader(file))
    file.write_bytes(data)
    with pytest.raises(CheckpointError) as refused:
        registry.load(resolve(str(file)), kernels)
    assert says in str(refused.value) and "\n" not in str(refused.value)
    assert str(file) in str(refused.value) and len(str(refused.value)) < 700


@pytest.mark.slow
def test_no_byte_of_a_header_breaks_the_reader(made: bytes, tmp_path: Path) -> None:
    """Cut anywhere, or with a byte changed anywhere, a header is read or refused in one line."""
    file = tmp_path / "model.gguf"
    file.write_bytes(made)
    begin = int(GGUFReader(file).data_offset)
    for at in range(0, begin, 7):
        for data in (made[:at], made[:at] + bytes([made[at] ^ 0xFF]) + made[at + 1 :]):
            file.write_bytes(data)
            header._read.cache_clear()
            with contextlib.suppress(ConfigError):  # any other error fails
                Headers(file).list_tensors()
                registry.read_spec(file)


def test_files_that_are_missing_or_too_many(made: bytes, tmp_path: Path) -> None:
    first = tmp_path / "model-00001-of-00002.gguf"
    first.write_bytes(made)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.gguf: this file is missing, one of 2"):
        resolve(str(tmp_path))
    second = tmp_path / "model-00002-of-00002.gguf"
    second.write_bytes(made)
    with pytest.raises(CheckpointError, match=r"got part 2; allowed: the first, model-00001-of-00002\.gguf"):
        resolve(str(second))
    with pytest.raises(CheckpointError, match=r"model-00002.*: tensor .* is there twice, as model\.layers"):
        registry.read_spec(first)
    (tmp_path / "other.gguf").write_bytes(made)
    with pytest.raises(ConfigError, match=r"allowed: one GGUF file; this directory has model-00001-of-00002"):
        resolve(str(tmp_path))
    with pytest.raises(ConfigError, match="--revision"):
        resolve(str(first), "main")
    with pytest.raises(ConfigError, match=r"^model: .*third\.gguf: there is no such file$"):
        resolve(str(tmp_path / "third.gguf"))
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "folder.gguf" / "model.gguf").write_bytes(made)
    assert resolve(str(tmp_path / "folder.gguf")) == tmp_path / "folder.gguf" / "model.gguf"


def test_compress_does_not_read_gguf_and_says_so(made: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(made)
    says = re.escape(f"got {file}, a GGUF file; allowed: a directory with safetensors")
    with pytest.raises(ConfigError, match=f"compress: {says}"):
        compress.run(Compress(str(file), tmp_path / "to"), False)


def test_experts_that_are_quantised_in_part(tmp_path: Path) -> None:
    source = tiny_models.save(tiny_models.build("qwen3_moe", TINY), tmp_path / "source")
    file, _ = gguf_files.write(source, tmp_path / "made", lambda name: "BF16" if name == UP else "Q8_0")
    with pytest.raises(CheckpointError, match=r"up_proj.weight: got bfloat16; allowed: q8_0, as the layer's"):
        registry.load(file, kernels)
    assert find(str(file), tmp_path).directory == file


@pytest.mark.parametrize("keys", [2, [2], [0, 0], [2, 4]])
def test_key_heads_of_lfm2_say_which_layers_attend(keys: Any, tmp_path: Path) -> None:
    given = {
        "block_count": 2, "embedding_length": 8, "attention.head_count": 2, "attention.head_count_kv": keys,
    }  # fmt: skip
    meta = Metadata(tmp_path, "lfm2moe", {f"lfm2moe.{name}": value for name, value in given.items()})
    with pytest.raises(CheckpointError) as refused:
        ARCHITECTURES["lfm2moe"].config(meta, lambda name: True)
    assert f"attention.head_count_kv: got {keys!r}; allowed: a list of 2" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ssm.inner_size": 65}, "ssm.inner_size: got 65; allowed: a multiple of 4 value heads"),
        ({"ssm.time_step_rank": 0}, "ssm.inner_size: got 64; allowed: a multiple of 0 value heads"),
        (
            {"attention.recurrent_layers": [True]},
            "attention.recurrent_layers: got [True]; allowed: a list of 4 layers",
        ),
        ({"expert_weights_norm": False}, "expert_weights_norm: got False; allowed: True"),
        ({"expert_gating_func": 2}, "expert_gating_func: got 2; allowed: 1"),
        ({"ssm.group_count": "8"}, "ssm.group_count: got '8'; allowed: an integer of at least 0"),
    ],
)
def test_keys_of_linear_attention(change: dict[str, Any], says: str) -> None:
    keys: dict[str, Any] = {
        "attention.head_count": 4, "attention.key_length": 16, "attention.value_length": 16,
        "embedding_length": 48, "rope.dimension_count": 4, "block_count": 4, "ssm.time_step_rank": 4,
        "ssm.inner_size": 64, "ssm.group_count": 2, "ssm.state_size": 16, "ssm.conv_kernel": 4,
        "expert_count": 8, "expert_feed_forward_length": 8, "expert_shared_feed_forward_length": 8,
    }  # fmt: skip
    both = {f"qwen35moe.{key}": value for key, value in (keys | change).items()}
    with pytest.raises(CheckpointError, match=re.escape(f"a.gguf: qwen35moe.{says}")):
        ARCHITECTURES["qwen35moe"].config(Metadata("a.gguf", "qwen35moe", both), lambda name: False)


NEUTRAL = [
    *(("pooling_type", 0), ("rope.scale_linear", 1.0), ("rope.dimension_sections", [24, 20, 20, 0])),
    *(("attention.sliding_window", 0), ("logit_scale", 1.0), ("use_parallel_residual", False)),
]


@pytest.mark.parametrize(("key", "value"), NEUTRAL)
def test_a_key_that_changes_nothing_is_no_reason_to_refuse(key: str, value: object) -> None:
    Metadata("a.gguf", "qwen3moe", {f"qwen3moe.{key}": value}).refuse_unread()


@pytest.mark.parametrize(
    ("key", "value"), [("pooling_type", 1), ("rope.scale_linear", 2.0), ("logit_scale", 0.5), ("new", [1])]
)
def test_a_key_that_may_change_answers_is_refused(key: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"qwen3moe.{key}: got"):
        Metadata("a.gguf", "qwen3moe", {f"qwen3moe.{key}": value}).refuse_unread()


@pytest.mark.parametrize(("count", "good"), [(0, True), (1, True), (3, False)])
def test_a_part_of_a_split_model_says_so_under_any_name(
    made: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, good: bool
) -> None:
    file, read = tmp_path / "renamed.gguf", header.read
    file.write_bytes(made)

    def read_as_part(path: Path) -> header.Header:
        whole = read(path)
        return replace(whole, metadata={**whole.metadata, "split.count": count})

    monkeypatch.setattr(header, "read", read_as_part)
    if good:
        GgufModel(file)
        return
    with pytest.raises(CheckpointError, match="split.count: got 3; allowed: 1, the files of this model"):
        GgufModel(file)

"""A checkpoint as one GGUF file, for llama.cpp. Runs in the environment that `setup_peer.sh llama` makes.

    DIR/bin/python benchmarks/convert_gguf.py /tmp/qwen /tmp/qwen-bf16.gguf --type bf16

Knows Mixtral, Qwen3-MoE, Qwen3-Next and the text model of Qwen3.5. Norms and the gate of the experts stay in
float32. The file has a vocabulary of bytes in place of the one of the checkpoint, since `peers.py` speaks in
token ids. `--tokens-of FILE.gguf` takes the vocabulary of another file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import convert_linear
import gguf  # type: ignore[import-not-found]
import numpy as np
from checkpoint import EMBEDDING, HEAD, Checkpoint, Stored
from numpy.typing import NDArray

Floats = NDArray[np.float32]
TYPES = {
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32, 4),
    "bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16, 2),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16, 2),
}
ARCHITECTURES = {
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
    "qwen3_next": "qwen3next",
    "qwen3_5_moe_text": "qwen35moe",
}
QWEN_PARTS = "mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
MIXTRAL_PARTS = "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}
ATTENTION = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
HEAD_NORMS = {"attn_q_norm": "q_norm", "attn_k_norm": "k_norm"}


@dataclass(frozen=True)
class Entry:
    """One tensor of the GGUF file: the checkpoint's tensors that it is made of."""

    name: str
    sources: tuple[str, ...]
    """The checkpoint's tensors. If there are several, they are stacked."""
    change: convert_linear.Change | None = None
    """What becomes of the tensor; None: it stays as it is."""
    exact: bool = False
    """True: it is float32 in every file."""


def interleave(heads: int, rows: Floats) -> Floats:
    """Rows of a query or key projection, for a rotation of neighbours.

    The checkpoint's rotation pairs row i of a head with row i + d / 2; llama.cpp's `llama` architecture
    pairs rows 2i and 2i + 1.
    """
    halves = rows.reshape(heads, 2, -1, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def read(tensor: Stored) -> Floats:
    """Any tensor as float32, without rounding."""
    kind = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}[tensor.dtype]
    raw: NDArray[Any] = np.memmap(tensor.file, kind, "r", tensor.start, tensor.shape)
    if tensor.dtype == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)


def entries(checkpoint: Checkpoint) -> Iterator[Entry]:
    """The tensors of the file, in order."""
    config = checkpoint.config
    added = config["model_type"] in convert_linear.KINDS
    where, parts = MIXTRAL_PARTS if config["model_type"] == "mixtral" else QWEN_PARTS
    norm = convert_linear.one_added if added else None
    yield Entry("token_embd.weight", (EMBEDDING,))
    for layer in range(config["num_hidden_layers"]):
        block, source = f"blk.{layer}", f"model.layers.{layer}"
        after = "post_attention_norm" if added else "ffn_norm"
        yield Entry(f"{block}.attn_norm.weight", (f"{source}.input_layernorm.weight",), norm, exact=True)
        of_layer = _linear_layer if added and convert_linear.is_linear(config, layer) else _plain_layer
        yield from of_layer(checkpoint, block, source, norm)
        after_source = f"{source}.post_attention_layernorm.weight"
        yield Entry(f"{block}.{after}.weight", (after_source,), norm, exact=True)
        yield Entry(f"{block}.ffn_gate_inp.weight", (f"{source}.{where}.gate.weight",), exact=True)
        experts = range(checkpoint.setting("num_experts", "num_local_experts"))
        for name, word in parts.items():
            stacked = tuple(f"{source}.{where}.experts.{expert}.{word}.weight" for expert in experts)
            yield Entry(f"{block}.ffn_{name}_exps.weight", stacked)
        if added:
            yield from _shared(block, source)
    yield Entry("output_norm.weight", ("model.norm.weight",), norm, exact=True)
    if not config.get("tie_word_embeddings"):
        yield Entry("output.weight", (HEAD,))


def _plain_layer(
    checkpoint: Checkpoint, block: str, source: str, norm: convert_linear.Change | None
) -> Iterator[Entry]:
    """Attention with a query, keys and values."""
    turned: dict[str, convert_linear.Change] = {}
    if checkpoint.config["model_type"] == "mixtral":
        for name, key in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads")):
            turned[name] = partial(interleave, checkpoint.setting(key))
    for name, word in ATTENTION.items():
        yield Entry(f"{block}.{name}.weight", (f"{source}.self_attn.{word}.weight",), turned.get(name))
    for name, word in () if turned else HEAD_NORMS.items():
        yield Entry(f"{block}.{name}.weight", (f"{source}.self_attn.{word}.weight",), norm, exact=True)


def _linear_layer(
    checkpoint: Checkpoint, block: str, source: str, norm: convert_linear.Change | None
) -> Iterator[Entry]:
    for name, tensor, change in convert_linear.parts(checkpoint.config, f"{source}.linear_attn"):
        exact = name in ("ssm_conv1d.weight", "ssm_dt.bias", "ssm_a", "ssm_norm.weight")
        yield Entry(f"{block}.{name}", (tensor,), change, exact)


def _shared(block: str, source: str) -> Iterator[Entry]:
    """The shared expert of a layer, and its gate."""
    gate = f"{source}.mlp.shared_expert_gate.weight"
    yield Entry(f"{block}.ffn_gate_inp_shexp.weight", (gate,), lambda matrix: matrix[0], exact=True)
    for name, word in QWEN_PARTS[1].items():
        yield Entry(f"{block}.ffn_{name}_shexp.weight", (f"{source}.mlp.shared_expert.{word}.weight",))


def describe(writer: gguf.GGUFWriter, checkpoint: Checkpoint, tokens_of: Path | None) -> None:
    """Writes the keys that llama.cpp reads."""
    config, setting = checkpoint.config, checkpoint.setting
    heads = setting("num_attention_heads")
    width = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(setting("max_position_embeddings"))
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    if "intermediate_size" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(setting("num_key_value_heads"))
    writer.add_key_length(width)
    writer.add_value_length(width)
    if config["model_type"] in convert_linear.KINDS:
        convert_linear.describe(writer, config, width)
    else:
        writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(setting("num_experts", "num_local_experts"))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    if tokens_of is None:
        describe_tokens(writer, config["vocab_size"])
    else:
        copy_tokens(writer, tokens_of)


def copy_tokens(writer: gguf.GGUFWriter, file: Path) -> None:
    """Writes what another file says about tokens and the chat template."""
    for name, field in gguf.GGUFReader(file).fields.items():
        if name.startswith("tokenizer."):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, *inner)


def describe_tokens(writer: gguf.GGUFWriter, size: int) -> None:
    """Writes a vocabulary that programs want to read: a token a byte, one of two bytes, and unused ones."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    tokens = [*sorted(letters), "ab", *(f"<unused {i}>" for i in range(257, size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens[:size])
    writer.add_token_types([1] * size)
    writer.add_token_merges(["a b"])


def check(checkpoint: Checkpoint, wanted: list[Entry]) -> None:
    """Refuses a checkpoint that would be converted to another model."""
    config = checkpoint.config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", "default") != "default" or config.get("sliding_window"):
        raise SystemExit("convert_gguf: scaled rotations and sliding windows are not known here")
    normed = config.get("norm_topk_prob", config["model_type"] in convert_linear.KINDS)
    if config["model_type"] != "mixtral" and not normed:
        raise SystemExit(
            "convert_gguf: norm_topk_prob: got false; allowed: true, which llama.cpp always does"
        )
    used = {source for entry in wanted for source in entry.sources}
    held = set(checkpoint.tensors)
    odd = (used - held) | (held - used - {HEAD})  # tied embeddings are sometimes stored twice
    if odd:
        raise SystemExit(f"convert_gguf: tensors missing or not understood: {', '.join(sorted(odd)[:5])}")


def _values(checkpoint: Checkpoint, entry: Entry) -> Floats:
    tensors = [read(checkpoint.tensors[source]) for source in entry.sources]
    values = tensors[0] if len(tensors) == 1 else np.stack(tensors)
    return values if entry.change is None else np.ascontiguousarray(entry.change(values))


def _shape(checkpoint: Checkpoint, entry: Entry) -> tuple[int, ...]:
    shape = checkpoint.tensors[entry.sources[0]].shape
    if len(entry.sources) > 1:
        return len(entry.sources), *shape
    return shape if entry.change is None else entry.change(np.empty(shape, np.float32)).shape


def convert(
    path: Path,
    target: Path,
    kind: str,
    tokens_of: Path | None = None,
    told: Callable[[str], None] = print,
) -> None:
    checkpoint = Checkpoint(path)
    architecture = ARCHITECTURES.get(checkpoint.config["model_type"])
    if architecture is None:
        raise SystemExit(f"convert_gguf: model_type: allowed: {', '.join(ARCHITECTURES)}")
    wanted = list(entries(checkpoint))
    check(checkpoint, wanted)
    part = target.with_suffix(".part")
    writer = gguf.GGUFWriter(part, architecture)
    describe(writer, checkpoint, tokens_of)
    writer.add_file_type(TYPES[kind][1])
    for entry in wanted:
        shape = _shape(checkpoint, entry)
        stored, _, size = TYPES["f32" if entry.exact else kind]
        writer.add_tensor_info(entry.name, shape, np.dtype(np.float32), int(np.prod(shape)) * size, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in wanted:
        stored = TYPES["f32" if entry.exact else kind][0]
        writer.write_tensor_data(np.ascontiguousarray(gguf.quantize(_values(checkpoint, entry), stored)))
    writer.close()
    part.replace(target)
    told(f"{target}: {target.stat().st_size / 2**30:.2f} GiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face directory")
    parser.add_argument("target", type=Path)
    parser.add_argument("--type", choices=sorted(TYPES), default="bf16")
    parser.add_argument(
        "--tokens-of", type=Path, metavar="FILE", help="a GGUF file with the vocabulary to take"
    )
    arguments = parser.parse_args()
    convert(arguments.model, arguments.target, arguments.type, arguments.tokens_of)

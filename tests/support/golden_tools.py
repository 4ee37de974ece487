"""Writes tests/models/tools/: tiny checkpoints that other programs quantised, and what these make of them.

Each program needs an environment of its own, with torch 2.13.0 for the CPU:

    pip install auto-round==0.16.1 compressed-tensors==0.20.0
    python tests/support/golden_tools.py auto-round
    pip install gptqmodel==7.6.0
    python tests/support/golden_tools.py gptqmodel
    pip install llmcompressor==0.14.0.1
    python tests/support/golden_tools.py llmcompressor

A file has the tensors of one checkpoint as the program wrote them. Its metadata has its config.json, the
program's version and a digest of each matrix, in float32, that the program's own code dequantised.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parent.parent / "models" / "tools"
CONFIG, MATRICES, PROGRAM = "config.json", "matrices", "program"
"""Keys of a file's metadata. Of matrices: name -> rows, columns and digest."""
VOCAB = 16
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32, "num_experts_per_tok": 1,
    "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 2, "intermediate_size": 64, "mlp_only_layers": []},
    "glm4_moe": {
        "n_routed_experts": 2, "first_k_dense_replace": 0, "n_shared_experts": 1, "intermediate_size": 64,
    },
}  # fmt: skip
Tensors = dict[str, torch.Tensor]
Dequantise = Callable[[Tensors], torch.Tensor]
"""A matrix's tensors by the last part of their names -> the matrix [rows, columns] in float32."""


def digest(matrix: torch.Tensor) -> str:
    """Of a float32 matrix."""
    return hashlib.blake2b(matrix.contiguous().numpy().tobytes(), digest_size=16).hexdigest()


def model(family: str, path: Path) -> Path:
    """Writes a checkpoint with random weights in bf16, and a tokenizer whose words are numbers."""
    import tokenizers
    import transformers

    config = transformers.AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.1 * noise if parameter.dim() > 1 else 1 + 0.2 * noise)
    made.bfloat16().save_pretrained(path)
    words = tokenizers.models.WordLevel({str(word): word for word in range(VOCAB)}, unk_token="0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="0").save_pretrained(path)
    return path


def keep(case: str, program: str, found: Path, dequantise: Dequantise, last: str) -> None:
    """Writes the file of one case. last: the tensor by which a quantised matrix is known."""
    tensors = load_file(found / "model.safetensors")
    matrices = {}
    for name in sorted(tensors):
        if name.endswith(f".{last}"):
            prefix = name.removesuffix(last)
            parts = {key.removeprefix(prefix): one for key, one in tensors.items() if key.startswith(prefix)}
            matrix = dequantise(parts)
            assert matrix.dtype == torch.float32
            matrices[prefix[:-1]] = [*matrix.shape, digest(matrix)]
    config = json.loads((found / "config.json").read_text())
    about = {
        CONFIG: json.dumps(config), MATRICES: json.dumps(matrices),
        PROGRAM: f"{program} {version(program)}",
    }  # fmt: skip
    FOLDER.mkdir(exist_ok=True)
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, FOLDER / f"{case}.safetensors", about
    )


# ---- auto-round


def auto_round(folder: Path) -> None:
    """GPTQ, AWQ, its own format around both packings, and compressed-tensors."""
    import transformers
    from auto_round import AutoRound  # type: ignore[import-not-found]

    cases = [
        ("qwen3_moe", "auto_awq", False), ("qwen3_moe", "auto_round", True),
        ("qwen3_moe", "auto_round:auto_awq", False), ("qwen3_moe", "auto_round:gptqmodel", False),
        ("qwen3_moe", "llm_compressor", True), ("glm4_moe", "auto_gptq", False),
        ("glm4_moe", "auto_awq", False),
    ]  # fmt: skip
    for family, form, symmetric in cases:
        source = model(family, folder / family)
        case = f"{family}-auto-round-{form.replace(':', '-')}-{'symmetric' if symmetric else 'zeros'}"
        program = AutoRound(
            transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto"),
            transformers.AutoTokenizer.from_pretrained(source),
            scheme="W4A16", iters=0, device_map="cpu", sym=symmetric, group_size=32, disable_opt_rtn=True,
        )  # fmt: skip
        program.quantize_and_save(output_dir=str(folder / case), format=form)
        (found,) = (file.parent for file in (folder / case).glob("**/model.safetensors"))
        if form == "llm_compressor":
            keep(case, "auto-round", found, _compressed_tensors(found), "weight_packed")
        elif "awq" in form:
            keep(case, "auto-round", found, _auto_round_awq, "qweight")
        else:
            added = 0 if form == "auto_round:gptqmodel" else 1
            keep(case, "auto-round", found, _auto_round_gptq(added), "qweight")


def _auto_round_gptq(added: int) -> Dequantise:
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp  # type: ignore[import-not-found]

    layer = qlinear_torch_zp if added else qlinear_torch

    def dequantise(parts: Tensors) -> torch.Tensor:
        columns, rows = 8 * parts["qweight"].shape[0], parts["qweight"].shape[1]
        linear = layer.QuantLinear(4, 32, columns, rows, bias=False)
        linear.load_state_dict({name: one for name, one in parts.items() if name != "g_idx"})
        linear.scales = linear.scales.float()
        made: torch.Tensor = linear(torch.eye(columns)).T
        return made

    return dequantise


def _auto_round_awq(parts: Tensors) -> torch.Tensor:
    from auto_round.export.export_to_awq.utils import dequantize_gemm  # type: ignore[import-not-found]

    made: torch.Tensor = dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"].float(), 4, 32).T
    return made


# ---- gptqmodel


def gptqmodel(folder: Path) -> None:
    """GPTQ with columns in any order, in both conventions of zero points and both widths.

    Its AWQ needs CUDA, and it fails on glm4_moe with transformers 5.24.
    """
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # it does not start with one
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiling takes minutes
    from gptqmodel import GPTQModel, QuantizeConfig  # type: ignore[import-not-found]

    cases: list[tuple[str, str, int, dict[str, Any]]] = [
        ("qwen3_moe", "gptq", 4, {"desc_act": True, "sym": False}),
        ("qwen3_moe", "gptq_v2", 4, {"desc_act": False, "sym": False}),
        ("qwen3_moe", "gptq_v2", 8, {"desc_act": True, "sym": False}),
    ]
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (1, 64), generator=draw) for _ in range(32)]
    calibration = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in prompts]
    for family, form, bits, options in cases:
        source = model(family, folder / family)
        order = "-any-order" if options.get("desc_act") else ""
        case = f"{family}-gptqmodel-{form}-{bits}{order}"
        config = QuantizeConfig(bits=bits, group_size=32, method="gptq", format=form, **options)
        program = GPTQModel.load(str(source), config, device="cpu")
        program.quantize(calibration, batch_size=1)
        program.save(str(folder / case))
        keep(case, "gptqmodel", folder / case, _gptqmodel(bits, form), "qweight")


def _gptqmodel(bits: int, form: str) -> Dequantise:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # type: ignore[import-not-found]
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module  # type: ignore[import-not-found]

    def dequantise(parts: Tensors) -> torch.Tensor:
        columns, rows = 32 // bits * parts["qweight"].shape[0], parts["qweight"].shape[1]
        linear = TorchLinear(
            bits=bits, group_size=32, sym=False, desc_act=True, in_features=columns, out_features=rows,
            bias=False, pack_dtype=torch.int32, register_buffers=True,
        )  # fmt: skip
        linear.load_state_dict(parts, strict=False)
        if form == "gptq":
            convert_gptq_v1_to_v2_format_module(linear, bits=bits, pack_dtype=torch.int32)
        linear.scales = linear.scales.float()
        linear.post_init()
        made: torch.Tensor = linear.dequantize_weight().T
        return made

    return dequantise


# ---- llm-compressor


def llmcompressor(folder: Path) -> None:
    """compressed-tensors: int4 with zero points, and FP8 whose activations are FP8 too."""
    import transformers
    from llmcompressor import oneshot  # type: ignore[import-not-found]
    from llmcompressor.modifiers.quantization import QuantizationModifier  # type: ignore[import-not-found]

    int4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    groups = {"group_0": {"targets": ["Linear"], "weights": int4}}
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("qwen3_moe", "int4", {"config_groups": groups}),
        ("glm4_moe", "int4", {"config_groups": groups}),
        ("qwen3_moe", "fp8", {"targets": "Linear", "scheme": "FP8_DYNAMIC"}),
    ]
    for family, form, options in cases:
        source, case = model(family, folder / family), f"{family}-llmcompressor-{form}"
        made = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        recipe = QuantizationModifier(**options, ignore=["lm_head", "re:.*mlp.gate$"])
        oneshot(model=made, recipe=recipe)
        made.save_pretrained(folder / case, save_compressed=True)
        last = "weight_packed" if form == "int4" else "weight_scale"
        keep(case, "llmcompressor", folder / case, _compressed_tensors(folder / case), last)


def _compressed_tensors(found: Path) -> Dequantise:
    from compressed_tensors.compressors import (  # type: ignore[import-not-found]
        FloatQuantizationCompressor,
        PackedQuantizationCompressor,
    )
    from compressed_tensors.quantization import QuantizationScheme  # type: ignore[import-not-found]

    readers = {
        "pack-quantized": PackedQuantizationCompressor,
        "float-quantized": FloatQuantizationCompressor,
    }
    config = json.loads((found / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    scheme = QuantizationScheme.model_validate(group)

    def dequantise(parts: Tensors) -> torch.Tensor:
        exact = parts | {"weight_scale": parts["weight_scale"].float()}
        made: torch.Tensor = readers[config["format"]].decompress(exact, scheme)["weight"].float()
        return made

    return dequantise


PROGRAMS = {"auto-round": auto_round, "gptqmodel": gptqmodel, "llmcompressor": llmcompressor}


def files() -> Iterator[Path]:
    """The files of all programs."""
    yield from sorted(FOLDER.glob("*.safetensors"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as work:
        PROGRAMS[sys.argv[1]](Path(work))

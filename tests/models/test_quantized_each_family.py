"""Each family in each format: logits of the dequantised checkpoint, by transformers.

The table of docs/models.md says which pairs are compared, and is checked here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.models.test_published_whole import COMPARED, read
from tests.support import gguf_files, model_configs, quantizers, shrunk, tiny_models
from tests.support.model_driver import Driver

from moesaic.core.text_config import WRAPPERS
from moesaic.kernels import table
from moesaic.models import registry
from moesaic.models.families import MODELS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
HEADING = "| family | downloads | "
COLUMNS = {
    "FP8": "fp8 blocks", "FP8 (c-t)": "fp8 rows", "int8 (c-t)": "int8 rows", "int4 (c-t)": "packed int4",
    "GPTQ": "gptq", "AWQ": "awq",
}  # fmt: skip
"""Columns of the table -> names in quantizers.FORMATS."""
WIDE: dict[str, int] = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
OTHERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("internvl", "qwen3_vl_moe", "qwen3_vl_moe_text"), model_configs.qwen3(**WIDE)),
    "qwen3_5_moe_text": {},
}
"""Families whose published config is not here or not quantised so -> the options of their tiny model."""
UNREAD = ("dbrx", "granitemoe", "granitemoeshared", "gpt_oss")
"""Families whose files have an expert's matrices in other forms than these formats quantise."""
FAMILIES = sorted((MODELS.keys() | WRAPPERS.keys()) - set(UNREAD))
PAIRS = [(family, column) for family in FAMILIES for column in COLUMNS]


def find_published(family: str) -> dict[str, Any]:
    """A whole published config of a family, or the text model's config of one that sees images."""
    if family == "qwen3_5_moe_text":
        text: dict[str, Any] = find_published("qwen3_5_moe")["text_config"]
        return text
    return next(raw for name in COMPARED if (raw := read(name))["model_type"] == family)


def write(family: str, path: Path) -> tuple[Any, Path]:
    """Writes a tiny checkpoint of a family. Returns transformers' model over it, and its directory."""
    if family in OTHERS and family != "qwen3_5_moe_text":
        model = tiny_models.build("qwen3_moe", OTHERS[family])
        tiny_models.save(model, path, torch.float32)
        if "qwen3_vl" in family:  # quantised ones have experts one by one, as those of Qwen3-MoE
            tiny_models.edit(path, model_type="qwen3_vl_moe_text")
        if family in WRAPPERS:
            text = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps({"model_type": family, "text_config": text}))
    else:
        model, path = shrunk.write(find_published(family), path)
    tiny_models.edit(path, torch_dtype="bfloat16")
    return model, path


@pytest.mark.slow
@pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build")
@pytest.mark.parametrize(("family", "column"), PAIRS)
def test_a_family_in_a_format_has_the_logits_of_its_dequantised_weights(
    family: str, column: str, tmp_path: Path
) -> None:
    model, source = write(family, tmp_path / "source")
    form = quantizers.FORMATS[COLUMNS[column]]
    quantised, plain = quantizers.quantize(source, tmp_path, form)
    parts = load_file(quantised / "model.safetensors").keys() - load_file(plain / "model.safetensors").keys()
    assert any("experts" in part for part in parts)
    (plain / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    theirs = type(model).from_pretrained(plain, dtype=torch.float32)
    tokens = tiny_models.prompt(24, theirs.config.vocab_size)
    logits = Driver(registry.load(quantised, table.pick("cpu"))).prefill(tokens)
    wanted = tiny_models.reference_logits(theirs, tokens)  # a misread matrix changes logits by 0.1 and more
    torch.testing.assert_close(logits, wanted, rtol=5e-3, atol=5e-3)


def write_table() -> list[str]:
    """The lines of the table in docs/models.md, but for downloads."""
    lines = []
    for family in MODELS.keys() | WRAPPERS.keys():
        cells = ["yes" if (family, column) in PAIRS else "no" for column in COLUMNS]
        mxfp4 = "yes" if family == "gpt_oss" else "no"
        gguf = "yes" if family in gguf_files.ARCHITECTURES else "not compared"
        lines.append(f"`{family}` | " + " | ".join([*cells, mxfp4, gguf]))
    return lines


def test_the_page_says_which_pairs_are_compared() -> None:
    rows = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n\n")[0].splitlines()
    assert rows[0].rstrip("| ").split(" | ") == [*COLUMNS, "MXFP4", "GGUF"]
    said = [re.sub(r"^\| (`\w+`) \| [^|]+ \| ", r"\1 | ", row).rstrip("| ") for row in rows[2:]]
    assert sorted(said) == sorted(write_table())

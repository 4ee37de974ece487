"""Writes the table of models at the top of docs/models.md: `python -m scripts.models_table`.

It prices models by the config files that their makers published (tests/models/test_published.py), on the
machines of examples/*.toml, as `moesaic doctor --hardware FILE` does. No weights are read.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.models import test_published as published

from moesaic.cost.hardware import GIB, Hardware, from_tables
from moesaic.cost.reading import read
from moesaic.cost.sizes import ModelSizes
from moesaic.planning.outlook import choose_lengths, predict_speeds
from moesaic.planning.plan import NEAR_SHARE
from moesaic.planning.search import MIB, Job, JobSearch
from moesaic.planning.sizes import ROW_BYTES, in_format, read_config_sizes
from moesaic.policy.offloading.pipeline import Schedule
from moesaic.policy.offloading.planner import SearchLimits

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

from make_checkpoint import SHAPES  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- scripts/models_table.py wrote this -->", "<!-- end of what it wrote -->"
SCHEDULES: tuple[Schedule, ...] = ("on-demand",)
"""One request chooses few of the experts, so reading only those is the fastest schedule."""
CONTEXT = 4096
"""Tokens of the longest request for which there must be room. Predictions are for 512 + 128 of them."""


@dataclass(frozen=True)
class Row:
    """A published checkpoint."""

    hub_id: str
    config: Mapping[str, Any]
    """Its config.json, without a quantization_config."""
    stored: str = "bf16"
    """How its files are stored: a name of QUANTIZATIONS, or "bf16"."""

    @property
    def raw(self) -> dict[str, Any]:
        """Its config.json."""
        quantization = QUANTIZATIONS.get(self.stored)
        return (
            {**self.config} if quantization is None else {**self.config, "quantization_config": quantization}
        )


BF16, FP8, MXFP4, GPTQ, GGUF = "bf16", "FP8", "MXFP4", "int4 (GPTQ)", "GGUF Q4_K_M"
QUANTIZATIONS: Mapping[str, Mapping[str, Any]] = {
    FP8: {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    MXFP4: {"quant_method": "mxfp4"},
    GPTQ: {"bits": 4, "desc_act": False, "group_size": 128, "quant_method": "gptq", "sym": True},
}
"""How files are stored -> the quantization_config. GGUF files have none."""
ROWS = (
    Row("ibm-granite/granite-3.0-1b-a400m-instruct", published.GRANITE_3_1B),
    Row("allenai/OLMoE-1B-7B-0924-Instruct", published.OLMOE_1B_7B),
    Row("LiquidAI/LFM2-8B-A1B", published.LFM2_8B_A1B),
    Row("openai/gpt-oss-20b", published.GPT_OSS_20B, MXFP4),
    Row("Qwen/Qwen1.5-MoE-A2.7B-Chat", published.QWEN1_5_MOE_A2_7B),
    Row("deepseek-ai/DeepSeek-V2-Lite-Chat", published.DEEPSEEK_V2_LITE),
    Row("moonshotai/Moonlight-16B-A3B-Instruct", published.MOONLIGHT),
    Row("baidu/ERNIE-4.5-21B-A3B-PT", published.ERNIE_4_5_21B),
    Row("Qwen/Qwen3-30B-A3B-GPTQ-Int4", published.QWEN3_30B_A3B, GPTQ),
    Row("Qwen/Qwen3-30B-A3B-GGUF:Q4_K_M", published.QWEN3_30B_A3B, GGUF),
    Row("Qwen/Qwen3-30B-A3B-FP8", published.QWEN3_30B_A3B, FP8),
    Row("Qwen/Qwen3-30B-A3B", published.QWEN3_30B_A3B),
    Row("zai-org/GLM-4.7-Flash", published.GLM_4_7_FLASH),
    Row("Qwen/Qwen3.5-35B-A3B-FP8", published.QWEN3_5_35B_A3B, FP8),
    Row("Qwen/Qwen3.5-35B-A3B", published.QWEN3_5_35B_A3B),
    Row("mistralai/Mixtral-8x7B-Instruct-v0.1", published.MIXTRAL_8X7B),
    Row("openai/gpt-oss-120b", published.GPT_OSS_120B, MXFP4),
    Row("Qwen/Qwen3-Next-80B-A3B-Instruct-FP8", published.QWEN3_NEXT_80B_A3B, FP8),
    Row("Qwen/Qwen3-Next-80B-A3B-Instruct", published.QWEN3_NEXT_80B_A3B),
    Row("zai-org/GLM-4.5-Air-FP8", published.GLM_4_5_AIR, FP8),
    Row("zai-org/GLM-4.5-Air", published.GLM_4_5_AIR),
    Row("MiniMaxAI/MiniMax-M2", published.MINIMAX_M2, FP8),
    Row("deepseek-ai/DeepSeek-V3, DeepSeek-R1", published.DEEPSEEK_V3, FP8),
    Row("moonshotai/Kimi-K2-Instruct", published.KIMI_K2, FP8),
)


@dataclass(frozen=True)
class Measured:
    """A made checkpoint whose decode speed was measured on two cores. docs/benchmarks.md has the figure."""

    shape: str
    """A name of benchmarks/make_checkpoint.py."""
    machine: str
    """The CPU, and --kernels where they were not `auto`."""
    tokens: int
    """Decoded tokens/s of one request."""


MEASURED = (
    Measured("qwen3-moe-0.96b", "EPYC, `avx512_bf16`", 129),
    Measured("qwen3-moe-0.96b", "Xeon", 92),
    Measured("mixtral-0.75b", "Xeon", 71),
    Measured("qwen3.5-1.1b", "EPYC", 57),
)


def machine(name: str) -> Hardware:
    """The machine of examples/NAME.toml."""
    return from_tables(tomllib.loads((ROOT / "examples" / f"{name}.toml").read_text(encoding="utf-8")))


def sizes(row: Row) -> ModelSizes:
    """The sizes of a model in memory on a CPU. Half of the layers of Q4_K_M have larger experts."""
    if row.stored != GGUF:
        return replace(read_config_sizes(row.raw, "table"), activation_number=ROW_BYTES)
    larger, smaller = (in_format(read(row.raw, "table"), kind, gpu=False) for kind in ("q4_k+q6_k", "q4_k"))
    return replace(larger, mean_expert=(larger.expert_bytes + smaller.expert_bytes) / 2)


def in_memory(model: ModelSizes, hardware: Hardware) -> float | None:
    """Priced tokens/s of one request with the whole model in memory. None: it does not fit."""
    found = predict_speeds(model, hardware, ROW_BYTES, CONTEXT, (1,))
    return found[0].answers if found else None


def from_disk(model: ModelSizes, hardware: Hardware) -> float | None:
    """Priced tokens/s of one request whose experts are read from the disk. None: the rest does not fit."""
    prompt, generate = choose_lengths(CONTEXT)
    limits = SearchLimits(SCHEDULES, largest_batch=1, requests=1, tolerance=NEAR_SHARE)
    job = Job(1, prompt, generate, prompt + generate)
    found = JobSearch(model, hardware, job, ROW_BYTES, limits).find_policy(
        int(hardware.fast.room) // MIB * MIB
    )
    return None if found is None else found[1].decode_throughput


def number(value: float) -> str:
    """Two digits: prices are no better than that.

    >>> number(0.123), number(1.26), number(13.7), number(128.3)
    ('0.12', '1.3', '14', '130')
    """
    if value >= 100:
        return f"{round(value, -1):.0f}"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def cell(model: ModelSizes, hardware: Hardware) -> str:
    """The speed on a machine: plain from memory, in italics from the disk, or a dash."""
    found = in_memory(model, hardware)
    if found is not None:
        return number(found)
    found = from_disk(model, hardware)
    return "–" if found is None else f"*{number(found)}*"


def priced() -> Iterator[str]:
    """The table of published checkpoints, smallest first."""
    machines = [machine("two-cores"), machine("server")]
    yield "| model (hub id) | format | weights, GiB | two cores, tokens/s | server, tokens/s | speed is |"
    yield "|---|---|---:|---:|---:|---|"
    for row in ROWS:
        model = sizes(row)
        weights = f"{model.weights / GIB:.1f}"
        cells = " | ".join(cell(model, one) for one in machines)
        yield f"| `{row.hub_id}` | {row.stored} | {weights} | {cells} | priced |"


def measured() -> Iterator[str]:
    """The table of made checkpoints: measured speeds beside the prices of two cores."""
    hardware = machine("two-cores")
    yield "| made checkpoint | format | weights, GiB | on | measured, tokens/s | priced on two cores |"
    yield "|---|---|---:|---|---:|---:|"
    for one in MEASURED:
        model = sizes(Row(one.shape, SHAPES[one.shape]))
        weights = f"{model.weights / GIB:.1f}"
        price = cell(model, hardware)
        yield f"| `{one.shape}` | {BF16} | {weights} | {one.machine} | {one.tokens} | {price} |"


def text() -> str:
    """What stands between the marks of the page."""
    return "\n".join((*priced(), "", *measured()))


def replaced(page: str) -> str:
    """The page with the tables as they are now. Raises ValueError for a page without the two marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{text()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

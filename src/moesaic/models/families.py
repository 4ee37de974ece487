"""The model files by `model_type`, and what they have in common.

Question: Which model families are there, and how is one added?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from moesaic.models import (
    dbrx,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie4_5_moe,
    exaone_moe,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    granitemoe,
    hy_v3,
    lfm2_moe,
    mellum,
    minimax_m2,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
    qwen3_next,
    solar_open,
)
from moesaic.models.block import Block
from moesaic.models.loader import ExpertNames, Loader
from moesaic.models.spec import ModelSpec


class Config(Protocol):
    """What the configs of all models have in common."""

    @property
    def has_tied_embeddings(self) -> bool: ...
    @property
    def epsilon(self) -> float: ...
    @property
    def spec(self) -> ModelSpec: ...


class ModelFile(Protocol):
    """The functions of one model file."""

    @property
    def UNUSED_TENSORS(self) -> tuple[str, ...]: ...  # noqa: N802
    def parse(self, raw: dict[str, Any]) -> Any: ...
    def blocks(self, config: Any, loader: Loader) -> Sequence[Block]: ...
    def expert_names(self, config: Any, layer: int) -> ExpertNames: ...


MODELS: Mapping[str, ModelFile] = {
    "dbrx": dbrx,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "dots1": dots1,
    "ernie4_5_moe": ernie4_5_moe,
    "exaone_moe": exaone_moe,
    "glm4_moe": glm4_moe,
    "glm4_moe_lite": glm4_moe_lite,
    "gpt_oss": gpt_oss,
    "granitemoe": granitemoe,
    "granitemoeshared": granitemoe,
    "hy_v3": hy_v3,
    "kimi_k2": deepseek_v3,
    "lfm2_moe": lfm2_moe,
    "mellum": mellum,
    "minimax_m2": minimax_m2,
    "mixtral": mixtral,
    "olmoe": olmoe,
    "qwen2_moe": qwen2_moe,
    "qwen3_5_moe_text": qwen3_next,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
    "qwen3_vl_moe_text": qwen3_moe,
    "solar_open": solar_open,
}

"""Families in the formats in which they are published: the greedy tokens of the dequantised checkpoint.

Each pair of a family and a format is tried in one mode, so that modes are covered as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic import LLM, SamplingParams
from moesaic.commands import cli
from moesaic.core.errors import ConnectionLost
from moesaic.kernels import table
from moesaic.models import files
from moesaic.testing import byte_tokenizer
from tests.cluster.test_placements import RANKS
from tests.models.test_quantized import CASES, FORMATS
from tests.models.test_quantized_refusals import mixed
from tests.support import model_configs, quantizers, tiny_models
from tests.support.cluster_driver import cluster
from tests.support.thread_groups import group_of_threads
from tests.test_llm_families import DISK, LONGEST, prompts
from tests.test_llm_offload import POLICIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build"),
]
SHARED = {"hidden_size": 160, "num_hidden_layers": 3}
LATENT = {"moe_intermediate_size": 64, "intermediate_size": 96, "n_shared_experts": 1, **SHARED}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": (
        "deepseek_v3",
        model_configs.deepseek3(q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=8, v_head_dim=16, **LATENT),
    ),
    "kimi_k2": ("deepseek_v3", model_configs.deepseek3(n_group=1, topk_group=1, **LATENT)),
    "glm4_moe": (
        "glm4_moe", model_configs.glm4(moe_intermediate_size=64, intermediate_size=96, **SHARED),
    ),
    "qwen3_moe": ("qwen3_moe", model_configs.qwen3(moe_intermediate_size=96, **SHARED)),
    "minimax_m2": ("minimax_m2", model_configs.minimax(intermediate_size=96, **SHARED)),
    "mixtral": (
        "mixtral",
        model_configs.mixtral(intermediate_size=64, head_dim=16, num_key_value_heads=2, **SHARED),
    ),
    "hy_v3": (
        "hy_v3", model_configs.hy3(moe_intermediate_size=64, intermediate_size=96, **SHARED),
    ),
    "gpt_oss": ("gpt_oss", model_configs.gpt_oss(hidden_size=96, intermediate_size=64)),
    "olmoe": (
        "olmoe",
        model_configs.olmoe(
            intermediate_size=64, num_attention_heads=5, num_key_value_heads=5, **SHARED
        ),
    ),
    "qwen2_moe": (
        "qwen2_moe",
        model_configs.qwen2(
            moe_intermediate_size=64, shared_expert_intermediate_size=96, intermediate_size=96,
              **SHARED,
        ),
    ),
    "lfm2_moe": (
        "lfm2_moe",
        model_configs.lfm2(
            moe_intermediate_size=64, intermediate_size=96, layer_types=["conv", "full_attention", "conv"],
            **SHARED,
        ),
    ),
}  # fmt: skip
ONLY_EXPERTS = r".*(self_attn|shared_experts|mlp\.(gate|up|down)_proj).*"
"""What Kimi K2's files have as it is."""
Tokens = list[list[int]]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


def alone(path: Path, times: int = 1, **settings: Any) -> Tokens:
    """In one process. times: how often the same prompts are answered; the last answers count."""
    model = LLM(str(path), threads=1, max_model_len=LONGEST, **settings)
    for _ in range(times):
        found = model.generate(prompts(), [GREEDY] * len(prompts()))
    if "kv_cache_memory" in settings:
        assert model.stats().preemptions > 0
    return [one.outputs[0].token_ids for one in found]


def preempted(path: Path) -> Tokens:
    blocks = LONGEST // 16 + 2
    size = 3 * 16 * 2 * 2 * 16 * 4  # layers, tokens, keys and values, heads, width, float32
    return alone(path, kv_cache_memory=str(blocks * size), max_num_batched_tokens=40, max_num_seqs=8)


def reused(path: Path) -> Tokens:
    return alone(path, times=2)


def streamed(policy: str) -> Callable[[Path], Tokens]:
    offload = POLICIES[policy]
    return lambda path: alone(path, offload=offload, max_num_seqs=offload.batch, max_num_batched_tokens=23)


def on_servers(schedule: str) -> Callable[[Path], Tokens]:
    def answer(path: Path) -> Tokens:
        with cluster(str(path), expert_servers=2, schedule=schedule, max_model_len=LONGEST) as served:
            served.submit(prompts(), [GREEDY] * len(prompts()))
            return [tokens for tokens, _ in served.finish()]

    return answer


def by_ranks(**settings: Any) -> Callable[[Path], Tokens]:
    def answer(path: Path) -> Tokens:
        with group_of_threads(str(path), tensor_parallel_size=2, max_model_len=LONGEST, **settings) as (
            model,
            _,
            _,
        ):
            found = model.generate(prompts(), [GREEDY] * len(prompts()))
        return [one.outputs[0].token_ids for one in found]

    return answer


RANKS_OVER_DISK = {"offload": DISK, "max_num_seqs": DISK.batch, "max_num_batched_tokens": 23}
MODES: dict[str, Callable[[Path], Tokens]] = {
    "preempted": preempted,
    "a reused prefix": reused,
    "expert servers": on_servers("lockstep"),
    "expert servers, barrier": on_servers("barrier"),
    "expert servers, async": on_servers("async"),
    "two ranks": by_ranks(),
    "two ranks over a disk": by_ranks(**RANKS_OVER_DISK),
    "on demand": streamed("on demand, all likely ones before"),
    "padded, on demand": streamed("padded, on demand"),
    "in place": streamed("two cores, in place"),
}
PUBLISHED = [
    ("deepseek_v3", "fp8 blocks", "expert servers"),
    ("kimi_k2", "packed int4", "on demand"),
    ("glm4_moe", "fp8 rows", "two ranks"),
    ("qwen3_moe", "fp8 blocks", "preempted"),
    ("qwen3_moe", "awq", "expert servers, async"),
    ("qwen3_moe", "gptq", "padded, on demand"),
    ("minimax_m2", "fp8 blocks", "expert servers, barrier"),
    ("gpt_oss", "mxfp4", "in place"),
    ("olmoe", "gptq", "a reused prefix"),
    ("qwen2_moe", "gptq", "two ranks over a disk"),
    ("mixtral", "fp8 matrix, static", "on demand"),
    ("glm4_moe", "fp8 blocks", "a reused prefix"),
    ("lfm2_moe", "awq", "two ranks"),
    *(
        pytest.param(*one, marks=pytest.mark.full)
        for one in (
            ("mixtral", "awq", "expert servers"),
            ("mixtral", "gptq", "two ranks"),
            ("deepseek_v3", "awq", "in place"),
            ("deepseek_v3", "packed int4", "two ranks over a disk"),
            ("hy_v3", "fp8 blocks", "expert servers, async"),
            ("qwen2_moe", "awq", "padded, on demand"),
            ("minimax_m2", "awq", "two ranks"),
            ("lfm2_moe", "gptq", "on demand"),
            ("lfm2_moe", "packed int4", "expert servers, async"),
        )
    ),
]


@pytest.mark.parametrize(("family", "form", "mode"), PUBLISHED)
def test_tokens_are_those_of_the_dequantised_checkpoint(
    family: str, form: str, mode: str, tmp_path: Path, quick_workers: None
) -> None:
    source = tiny_models.save(tiny_models.build(*FAMILIES[family]), tmp_path / "source", torch.bfloat16)
    kept = ONLY_EXPERTS if family == "kimi_k2" else ""
    both = quantizers.quantize(source, tmp_path, FORMATS[form], kept)
    for path in both:
        byte_tokenizer(path)
        tiny_models.edit(path, model_type=family)
    quantised, plain = both
    assert MODES[mode](quantised) == alone(plain)


def test_a_text_model_in_a_larger_one_is_streamed(tmp_path: Path) -> None:
    """Its tensors have other names in the files, and text_config says how they are quantised."""
    vision = {"num_hidden_layers": 1, "image_size": [28, 28], "patch_size": [14, 14]}
    text = FAMILIES["qwen3_moe"][1]
    options = model_configs.around("qwen3_moe", text, vision, image_token_id=model_configs.VOCAB - 1)
    source = tiny_models.save(tiny_models.build("internvl", options), tmp_path / "source", torch.bfloat16)
    quantised, plain = quantizers.quantize(
        source, tmp_path, FORMATS["packed int4"], r".*(vision|projector).*"
    )
    for path in (quantised, plain):
        byte_tokenizer(path)
    assert MODES["on demand"](quantised) == alone(plain)


def test_a_placement_by_a_profile(tmp_path: Path, quick_workers: None) -> None:
    """Of the quantised demo, whose tokenizer profiles need."""
    quantised, plain = quantizers.quantize(files.resolve("demo"), tmp_path, FORMATS["awq"])
    profile, placement = tmp_path / "profile.npz", tmp_path / "placement.json"
    (tmp_path / "some.txt").write_text("The sea was calm.\nThe captain told a story.\nIt was late.\n")
    given = ["--prompts", str(tmp_path / "some.txt"), "-o", str(profile)]
    assert cli.main(["profile", str(quantised), *given]) == 0
    assert cli.main(["place", str(profile), "--ranks", "2", "--solver", "eplb", "-o", str(placement)]) == 0
    settings: dict[str, Any] = {"placement": str(placement), "max_model_len": LONGEST, **RANKS}
    with cluster(str(quantised), **settings) as served:
        served.submit(prompts(), [GREEDY] * len(prompts()))
        assert [tokens for tokens, _ in served.finish()] == alone(plain)


OTHERS = {
    "another expert": (
        r"experts\.2\.",
        "int8 rows",
        "experts.2.gate_proj: an expert is stored as int8; allow",
    ),
    "a plain expert": (
        r"1\.mlp\.experts\.2\.",
        None,
        "experts.2.gate_proj.weight: an expert is stored as BF16",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_cluster_refuses_experts_of_several_types(what: str, tmp_path: Path, quick_workers: None) -> None:
    """In one line that names the layer or the tensor."""
    others, other, says = OTHERS[what]
    source = tiny_models.save(tiny_models.build(*CASES["qwen3"]), tmp_path / "source", torch.bfloat16)
    path = mixed(source, tmp_path, others, other)
    byte_tokenizer(path)
    with (
        pytest.raises(ConnectionLost, match=re.escape(says)) as refused,
        cluster(str(path), expert_servers=2, max_model_len=LONGEST),
    ):
        pass
    assert "\n" not in str(refused.value) and "Traceback" not in str(refused.value)

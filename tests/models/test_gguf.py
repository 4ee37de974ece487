"""GGUF files have the bits of the checkpoint that they were made from, and its config."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import pytest
import torch
import transformers
from tests.support import gguf_files, model_configs, tiny_models
from tests.support.model_driver import Driver
from tokenizers import pre_tokenizers

from moesaic.experts.store import Store
from moesaic.kernels import table
from moesaic.models import fingerprint, registry
from moesaic.models.conversion import conversion_of
from moesaic.models.files import generation_defaults, read_config, resolve
from moesaic.models.fingerprint import ExpertDigests
from moesaic.models.gguf.architectures import ARCHITECTURES
from moesaic.models.gguf.blocks import BLOCKS
from moesaic.models.gguf.metadata import Metadata
from moesaic.models.headers import Headers

pytestmark = pytest.mark.slow

kernels = table.pick("cpu", "auto")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: model_configs.CASES[name]
        for name in (
            *("mixtral", "mixtral-odd-heads-mha", "qwen3", "qwen3-odd-heads-yarn", "olmoe", "qwen2"),
            *("olmoe-odd-heads-k1-yarn-tied", "deepseek-lite-yarn", "deepseek3", "glm4-norm-bias-groups"),
            *("dots", "ernie-layers-odd-heads-yarn-plain", "granite-bias-odd-heads-k1-yarn-tied"),
            *("minimax-odd-heads-k1-yarn-tied", "glm4-lite", "lfm2", "qwen3-next", "qwen3.5"),
        )
    },
    "deepseek-groups": (
        "deepseek_v2",
        model_configs.deepseek(
            q_lora_rank=20, routed_scaling_factor=2.5, n_shared_experts=3, **model_configs.GROUPS
        ),
    ),
    "gpt-oss": ("gpt_oss", model_configs.gpt_oss(swiglu_limit=7.0)),
}  # fmt: skip
FAST = ("mixtral", "qwen2", "deepseek3", "gpt-oss", "qwen3-next", "qwen3.5")
WIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": (
        "qwen3_moe",
        model_configs.qwen3(
            hidden_size=256, moe_intermediate_size=256, num_hidden_layers=2, num_experts=4,
            num_experts_per_tok=2,
        ),
    ),
    "deepseek3": (
        "deepseek_v3",
        model_configs.deepseek3(
            hidden_size=256, moe_intermediate_size=256, intermediate_size=256, num_hidden_layers=2,
            kv_lora_rank=256, qk_nope_head_dim=32, n_routed_experts=8, n_group=2, topk_group=1,
            num_experts_per_tok=2,
        ),
    ),
    "gpt-oss": (
        "gpt_oss",
        model_configs.gpt_oss(
            hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_local_experts=4,
            num_experts_per_tok=2, swiglu_limit=7.0,
        ),
    ),
    **{
        name: (
            kind,
            model_configs.qwen3_next(
                hidden_size=256, moe_intermediate_size=256, shared_expert_intermediate_size=256,
                num_experts=4, num_experts_per_tok=2, linear_key_head_dim=64, linear_value_head_dim=64,
                head_dim=64,
            ),
        )
        for name, kind in (("qwen3-next", "qwen3_next"), ("qwen3.5", "qwen3_5_moe_text"))
    },
}  # fmt: skip
"""Models whose rows have whole blocks."""


def like_q4_k_m(name: str) -> str:
    """As llama.cpp mixes types: the down projections of some layers and the head have more bits."""
    more = "blk.0.ffn_down" in name or "attn_v" in name or name == "output.weight"
    return "Q6_K" if more else "F16" if "attn_k_b" in name else "Q4_K"


def with_pairs(name: str) -> str:
    """As `like_q4_k_m`, but gates have another type than their ups, except for the last layer's experts."""
    if "ffn_up" in name and "blk.1.ffn_up_exps" not in name:
        return "Q6_K" if "exps" in name else "IQ4_NL"
    return like_q4_k_m(name)


UNUSUAL = ("MXFP4",)
"""Types that a Qwen3 never has."""
MIXES: dict[str, tuple[str, gguf_files.Kinds]] = {
    **{kind: ("qwen3", lambda name, kind=kind: kind) for kind in BLOCKS if kind not in UNUSUAL},  # type: ignore[misc]
    "BF16": ("qwen3", lambda name: "BF16"),
    "F16": ("qwen3", lambda name: "F16"),
    "as Q4_K_M": ("qwen3", like_q4_k_m),
    "latent, as Q4_K_M": ("deepseek3", like_q4_k_m),
    "linear, as Q4_K_M": ("qwen3.5", like_q4_k_m),
    "linear and joint, as Q4_K_M": ("qwen3-next", like_q4_k_m),
    "pairs": ("qwen3", with_pairs),
    "latent, pairs": ("deepseek3", with_pairs),
    "linear, Q8_0": ("qwen3.5", lambda name: "Q8_0"),
    "linear, F16": ("qwen3.5", lambda name: "F16"),
    "linear, BF16": ("qwen3.5", lambda name: "BF16"),
    "linear and joint, BF16": ("qwen3-next", lambda name: "BF16"),
    "MXFP4": ("gpt-oss", lambda name: "MXFP4" if "_exps" in name else "Q8_0"),
    "experts in BF16": ("gpt-oss", lambda name: "BF16" if "_exps" in name else "Q8_0"),
}  # fmt: skip


def slow_but(fast: tuple[str, ...], names: Any) -> list[Any]:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints of WIDE."""
    made: dict[str, Path] = {}

    def source(name: str) -> Path:
        if name not in made:
            made[name] = tiny_models.save(tiny_models.build(*WIDE[name]), tmp_path_factory.mktemp(name))
        return made[name]

    return source


def mixed(sources: Callable[[str], Path], to: Path, mix: str, **how: Any) -> tuple[Path, Path]:
    name, kinds = MIXES[mix]
    return gguf_files.write(sources(name), to, kinds, **how)


def logits(path: Path, tokens: list[int]) -> torch.Tensor:
    return Driver(registry.load(path, kernels)).prefill(tokens)


@pytest.mark.parametrize("family", slow_but(FAST, FAMILIES))
def test_families_have_the_bits_and_the_config_of_their_checkpoint(family: str, tmp_path: Path) -> None:
    source = tiny_models.save(tiny_models.build(*FAMILIES[family]), tmp_path / "source")
    file, plain = gguf_files.write(source, tmp_path / "made")
    tokens = tiny_models.prompt(24, model_configs.VOCAB)
    read = logits(file, tokens)
    assert torch.equal(read, logits(plain, tokens))
    assert torch.equal(read, logits(source, tokens)), "float32 loses nothing"
    found, wanted = read_config(file), json.loads((plain / "config.json").read_text())
    assert found["rope_parameters"].items() <= {"truncate": False, **wanted["rope_parameters"]}.items()
    extra = "num_nextn_predict_layers"  # layers that are not in the file
    shared = found.keys() & wanted.keys() - {"rope_parameters", "model_type", extra}
    assert {key: found[key] for key in shared if wanted[key] is not None} == {
        key: wanted[key] for key in shared if wanted[key] is not None
    }


@pytest.mark.parametrize("mix", slow_but(("Q8_0", "as Q4_K_M", "MXFP4"), MIXES))
def test_types_have_the_bits_of_the_dequantised_checkpoint(
    sources: Callable[[str], Path], tmp_path: Path, mix: str
) -> None:
    """Those in bf16 stay in the file, and kernels add their products in another order.

    A file has the decays of linear attention as -exp(A_log). On some CPUs the exponential of a logarithm is
    one unit in the last place beside the number.
    """
    file, plain = mixed(sources, tmp_path, mix)
    tokens = tiny_models.prompt(24, model_configs.VOCAB)
    found, wanted = logits(file, tokens), logits(plain, tokens)
    if "BF16" in mix or "linear" in mix:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(found, wanted)


def test_older_files_have_the_latent_s_projection_in_one_piece(
    sources: Callable[[str], Path], tmp_path: Path
) -> None:
    file, plain = mixed(sources, tmp_path, "latent, as Q4_K_M", split_heads=False)
    tokens = tiny_models.prompt(24, model_configs.VOCAB)
    assert torch.equal(logits(file, tokens), logits(plain, tokens))


@pytest.mark.parametrize("mix", ["as Q4_K_M", "pairs", "MXFP4", "experts in BF16"])
def test_experts_keep_their_types_in_memory(sources: Callable[[str], Path], tmp_path: Path, mix: str) -> None:
    file, _ = mixed(sources, tmp_path, mix)
    experts = registry.load(file, kernels).experts
    found = [
        experts[layer].packed_dtype
        if experts[layer].packed_numbers
        else experts[layer].matrices_of(0)[0].dtype
        for layer in (0, 1)
    ]
    assert (
        found
        == {
            "as Q4_K_M": ["q4_k+q6_k", "q4_k"],
            "pairs": ["int8_16_offset+q6_k", "q4_k"],
            "MXFP4": ["mxfp4_e8m0", "mxfp4_e8m0"],
            "experts in BF16": [
                torch.bfloat16 if torch.bfloat16 in kernels.unconverted_dtypes else torch.float32
            ]
            * 2,
        }[mix]
    )


@pytest.mark.skipif(not kernels.can_use_blocks, reason="these kernels read no blocks")
@pytest.mark.parametrize(
    ("mix", "types"),
    [
        ("as Q4_K_M", ["int4_offset+int8_16", "int4_offset"]),
        ("MXFP4", ["mxfp4", "mxfp4"]),
        ("Q3_K", ["int8_16", "int8_16"]),
        ("IQ1_M", ["int8_16", "int8_16"]),
        ("Q2_K", ["int8_16_offset", "int8_16_offset"]),
        ("pairs", ["int8_16_offset+int8_16", "int4_offset"]),
    ],
)
def test_kernels_that_read_no_blocks_get_types_with_the_same_numbers(
    sources: Callable[[str], Path], tmp_path: Path, mix: str, types: list[str]
) -> None:
    """As those of Triton."""
    file, _ = mixed(sources, tmp_path, mix)
    model = registry.load(file, replace(kernels, can_use_blocks=False))
    for layer, weights in model.experts.items():
        assert weights.packed_dtype == types[layer]
    layout = registry.expert_layout(file, replace(kernels, can_use_blocks=False))
    assert conversion_of(Headers(file), layout) is not None
    tokens = tiny_models.prompt(24, model_configs.VOCAB)
    assert torch.equal(Driver(model).prefill(tokens), logits(file, tokens))


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("mix", ["as Q4_K_M", "pairs", "MXFP4", "experts in BF16", "F16"])
def test_servers_hold_the_bytes_of_the_loader(
    sources: Callable[[str], Path], tmp_path: Path, mix: str, mapped: bool
) -> None:
    file, _ = mixed(sources, tmp_path, mix)
    layout = registry.expert_layout(file, kernels)
    store = Store(file, layout, mapped)
    wanted = {0: [1], 1: [0, 3]}
    store.load(wanted)
    for layer, loaded in registry.load_experts(file, kernels, wanted).items():
        for expert in wanted[layer]:
            parts = [part[expert] for part in loaded.parts]
            for mine, theirs in zip(store._matrices[layer, expert], parts, strict=True):
                assert theirs is not None
                assert mine.tobytes() == theirs.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("experts", "told", "wanted"), [(256, {}, (8, 4)), (384, {}, (1, 1)), (256, {1: 1}, (1, 1))]
)
def test_deepseek_v3_has_groups_that_early_files_do_not_name(
    experts: int, told: dict[int, int], wanted: tuple[int, int]
) -> None:
    keys: dict[str, Any] = {
        "attention.head_count": 128, "attention.key_length": 192, "attention.value_length": 128,
        "attention.kv_lora_rank": 512,
        "rope.dimension_count": 64, "expert_gating_func": 2, "expert_count": experts,
        "expert_feed_forward_length": 8, "feed_forward_length": 8,
    }  # fmt: skip
    for groups, used in told.items():
        keys |= {"expert_group_count": groups, "expert_group_used_count": used}
    metadata = Metadata("a.gguf", "deepseek2", {f"deepseek2.{key}": value for key, value in keys.items()})
    found = ARCHITECTURES["deepseek2"].config(metadata, lambda name: False)
    assert (found["n_group"], found["topk_group"]) == wanted


def test_early_files_have_joint_projections_of_linear_attention(
    sources: Callable[[str], Path], tmp_path: Path
) -> None:
    file, plain = mixed(sources, tmp_path, "linear and joint, as Q4_K_M", legacy=True)
    assert "blk.0.ssm_in.weight" in {tensor.name for tensor in gguf.GGUFReader(file).tensors}
    tokens = tiny_models.prompt(24, model_configs.VOCAB)
    torch.testing.assert_close(logits(file, tokens), logits(plain, tokens), rtol=1e-4, atol=1e-4)


def test_layers_that_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    kind, options = model_configs.CASES["qwen3.5"]
    source = tiny_models.save(tiny_models.build(kind, options), tmp_path / "source")
    file, plain = gguf_files.write(source, tmp_path / "made", extra=1)
    names = {tensor.name for tensor in gguf.GGUFReader(file).tensors}
    assert {"blk.4.attn_q.weight", "blk.4.nextn.eh_proj.weight"} <= names
    tokens = tiny_models.prompt(24, model_configs.VOCAB)
    assert torch.equal(logits(file, tokens), logits(plain, tokens))
    assert read_config(file)["num_hidden_layers"] == 4


def test_early_files_have_experts_one_by_one(tmp_path: Path) -> None:
    options = model_configs.mixtral(hidden_size=64, intermediate_size=32, num_hidden_layers=1)
    source = tiny_models.save(tiny_models.build("mixtral", options), tmp_path / "source")
    file, plain = gguf_files.write(source, tmp_path / "made", lambda name: "Q8_0", apart=True)
    tokens = tiny_models.prompt(24, model_configs.VOCAB)
    assert torch.equal(logits(file, tokens), logits(plain, tokens))
    assert registry.load(file, kernels).experts[0].packed_dtype == "q8_0"


def test_split_files_and_directories(sources: Callable[[str], Path], tmp_path: Path) -> None:
    file, plain = mixed(sources, tmp_path / "split", "as Q4_K_M", files=3)
    assert file.name == "model-00001-of-00003.gguf"
    tokens = tiny_models.prompt(24, model_configs.VOCAB)
    assert torch.equal(logits(resolve(str(file)), tokens), logits(plain, tokens))
    assert resolve(str(tmp_path / "split")) == file
    whole, _ = mixed(sources, tmp_path / "whole", "as Q4_K_M")
    assert resolve(str(whole.parent)) == whole
    assert torch.equal(logits(whole, tokens), logits(plain, tokens))


def test_fingerprints_and_digests_see_every_byte_of_an_expert(
    sources: Callable[[str], Path], tmp_path: Path
) -> None:
    file, _ = mixed(sources, tmp_path, "as Q4_K_M")
    layout, before = registry.expert_layout(file, kernels), fingerprint.compute_fingerprint(file)
    digest = ExpertDigests(file, layout).digest_of(1, 2)
    data = bytearray(file.read_bytes())
    tensor = next(one for one in gguf.GGUFReader(file).tensors if one.name == "blk.1.ffn_up_exps.weight")
    data[int(tensor.data_offset) + int(tensor.n_bytes) // 2 + 7] ^= 1  # the third of four experts
    file.write_bytes(data)
    assert fingerprint.difference(before, fingerprint.compute_fingerprint(file)) == "bytes of tensors"
    assert ExpertDigests(file, layout).digest_of(1, 2) != digest


def test_what_ends_an_answer_is_in_the_metadata(sources: Callable[[str], Path], tmp_path: Path) -> None:
    file, _ = mixed(sources, tmp_path, "as Q4_K_M")
    assert generation_defaults(file).eos_token_ids == ()
    assert generation_defaults(file).sampling == {}


@pytest.mark.full
@pytest.mark.parametrize(
    "mix", ["as Q4_K_M", "latent, as Q4_K_M", "latent, pairs", "MXFP4", "Q5_K", "IQ2_XS", "TQ1_0"]
)
def test_tokens_are_those_of_transformers_on_the_dequantised_checkpoint(
    sources: Callable[[str], Path], tmp_path: Path, mix: str
) -> None:
    file, plain = mixed(sources, tmp_path, mix)
    tokens = tiny_models.prompt(40, model_configs.VOCAB)
    theirs = tiny_models.KINDS[WIDE[MIXES[mix][0]][0]][1].from_pretrained(plain, dtype=torch.float32)
    found = logits(file, tokens)
    torch.testing.assert_close(found, tiny_models.reference_logits(theirs, tokens), rtol=1e-4, atol=1e-4)
    greedy = Driver(registry.load(file, kernels)).greedy(tokens, 24)
    assert greedy == tiny_models.reference_greedy(theirs, tokens, 24)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3", "qwen2", "minimax-odd-heads-k1-yarn-tied"])
def test_transformers_reads_the_same_weights(name: str, tmp_path: Path) -> None:
    """Those architectures whose GGUF files it reads. The config is given, since it leaves out some keys."""
    kind, options = WIDE[name] if name in WIDE else FAMILIES[name]
    tokens = len(pre_tokenizers.ByteLevel.alphabet()) + 1
    source = tiny_models.save(tiny_models.build(kind, options | {"vocab_size": tokens}), tmp_path / "source")
    file, _ = gguf_files.write(source, tmp_path / "made", like_q4_k_m)
    needed = "transformers.modeling_utils.is_accelerate_available"  # for nothing that happens here
    with mock.patch(needed, return_value=True):
        theirs = tiny_models.KINDS[kind][1].from_pretrained(
            file.parent,
            gguf_file=file.name,
            config=transformers.AutoConfig.from_pretrained(source),
            dtype=torch.float32,
        )
    prompt = tiny_models.prompt(24, tokens)
    wanted = tiny_models.reference_logits(theirs, prompt)
    torch.testing.assert_close(logits(file, prompt), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_families_have_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    model = tiny_models.build(*FAMILIES[family])
    source = tiny_models.save(model, tmp_path / "source")
    file, _ = gguf_files.write(source, tmp_path / "made")
    tokens = tiny_models.prompt(40, model_configs.VOCAB)
    wanted = tiny_models.reference_logits(model, tokens)
    torch.testing.assert_close(logits(file, tokens), wanted, rtol=1e-4, atol=4e-4)

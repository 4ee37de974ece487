"""A dense model in a GGUF file becomes checkpoints of experts: its numbers, its tokens, its partition."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import measure_smollm2 as measure
import smollm2_checkpoint
import smollm2_experts
import smollm2_file
import smollm2_texts
import split_smollm2
import tune_smollm2
from moesaic import LLM, SamplingParams
from moesaic.text.tokenizer import byte_level_alphabet
from smollm2_experts import Routing, Shape, Split
from smollm2_file import DenseFile

HIDDEN, HEADS, KEY_HEADS, NEURONS, LAYERS = 64, 4, 2, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = len(SPECIAL) + 257
SHAPE = Shape(width=8, shared=4, experts=8, top_k=3)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
PROMPTS = ["Hello there.", "def add(a, b):", "1 + 1 = 2", "The end"]
NAMES = {theirs: name for name, theirs in smollm2_file.LAYER_NAMES.items()}


def build() -> LlamaForCausalLM:
    """A random Llama whose numbers are those of bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=NEURONS,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def write_file(path: Path, model: LlamaForCausalLM, kind: GGMLQuantizationType, **keys: int) -> Path:
    """Writes a model as llama.cpp's converter does. kind: the type of matrices."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(NEURONS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*SPECIAL, *byte_level_alphabet(), "th"])
    writer.add_token_types([3] * len(SPECIAL) + [1] * 257)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for key, value in keys.items():
        writer.add_uint32(f"llama.{key}", value)
    for name, weight in model.state_dict().items():
        numbers = weight.float().numpy()
        if name == "lm_head.weight":
            continue
        if name.startswith("model.layers."):
            _, _, layer, rest = name.removesuffix(".weight").split(".", 3)
            stored_name = f"blk.{layer}.{NAMES[rest]}"
            if rest.endswith(("q_proj", "k_proj")):
                heads = numbers.reshape(-1, 2, HIDDEN // HEADS // 2, HIDDEN)
                numbers = heads.swapaxes(1, 2).reshape(-1, HIDDEN)
        else:
            stored_name = "token_embd" if "embed" in name else "output_norm"
        own = kind if numbers.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(
            f"{stored_name}.weight", gguf.quantize(np.ascontiguousarray(numbers), own), raw_dtype=own
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return build()


@pytest.fixture(scope="module")
def source(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> DenseFile:
    """The model in Q4_1, as the published file is."""
    folder = tmp_path_factory.mktemp("file")
    return DenseFile(write_file(folder / "a.gguf", model, GGMLQuantizationType.Q4_1))


def random_routing(seed: int) -> Routing:
    """Experts and a gate of SHAPE that are drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([SHAPE.width] * SHAPE.experts + [SHAPE.width * SHAPE.shared])
    experts = torch.arange(SHAPE.experts + 1).repeat_interleave(sizes)
    codes, scales = smollm2_experts.encode_rows(torch.randn(SHAPE.experts, HIDDEN, generator=generator) / 9)
    return Routing(
        experts[torch.randperm(NEURONS, generator=generator)],
        codes,
        scales,
        torch.randn(SHAPE.experts, generator=generator) / 20,
        *(1 + torch.randn(size, generator=generator) / 9 for size in (NEURONS, HIDDEN, HIDDEN)),
    )


def logits(path: Path, ids: list[int]) -> torch.Tensor:
    """What transformers computes in float32."""
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return reference(torch.tensor([ids])).logits[0]


@pytest.mark.slow
def test_the_dense_form_is_the_model(model: LlamaForCausalLM, tmp_path: Path) -> None:
    plain = DenseFile(write_file(tmp_path / "a.gguf", model, GGMLQuantizationType.F32))
    smollm2_checkpoint.write(plain, "dense", tmp_path / "dense")
    written = load_file(tmp_path / "dense" / "model.safetensors")
    expected = {name: each for name, each in model.state_dict().items() if name != "lm_head.weight"}
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], each) for name, each in expected.items())
    ids = list(range(3, 40))
    own = LlamaForCausalLM(model.config)  # in float32, with angles that were never rounded
    own.load_state_dict(model.state_dict())
    with torch.inference_mode():
        assert torch.equal(logits(tmp_path / "dense", ids), own(torch.tensor([ids])).logits[0])


def test_blocks_are_the_numbers_of_the_library(source: DenseFile) -> None:
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(source.path).tensors}
    tensors = source.tensors()
    for layer in range(LAYERS):
        for name, theirs in smollm2_file.LAYER_NAMES.items():
            entry = stored[f"blk.{layer}.{name}.weight"]
            numbers = torch.tensor(gguf.dequantize(entry.data, entry.tensor_type)).to(torch.bfloat16)
            weight = tensors[f"model.layers.{layer}.{theirs}.weight"]
            if name in ("attn_q", "attn_k"):
                numbers, weight = numbers.sort(dim=0).values, weight.sort(dim=0).values  # other rows' order
            assert torch.equal(weight, numbers)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["copies", "moe"])
def test_tokens_are_those_of_transformers(
    form: str, source: DenseFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies answer as the dense model does. The split model answers as transformers computes it."""
    file = tmp_path / "routing.safetensors"
    final_norm = torch.linspace(0.8, 1.2, HIDDEN)
    Split(SHAPE, [random_routing(1), random_routing(2)], final_norm).save(file, {})
    monkeypatch.setattr(smollm2_experts, "FILE", file)
    smollm2_checkpoint.write(source, form, tmp_path / form)
    smollm2_checkpoint.write(source, "dense", tmp_path / "dense")
    reference_path = tmp_path / ("dense" if form == "copies" else form)
    reference = AutoModelForCausalLM.from_pretrained(reference_path, dtype=torch.float32)
    llm = LLM(str(tmp_path / form), dtype="float32", threads=1)
    prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert prompts == [AutoTokenizer.from_pretrained(tmp_path / form).encode(prompt) for prompt in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    answers = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
    for prompt, answer in zip(prompts, answers, strict=True):
        agreement = measure.compare_answer(reference, prompt, answer)
        assert not agreement.is_different and agreement.num_equal > 2
    pieces = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    expected = measure.reference_loss(reference, pieces)
    assert measure.own_loss(llm, pieces) == pytest.approx(expected, rel=1e-4)
    if form == "moe":
        assert llm.info.model_type == "glm4_moe"
        ids = pieces[0]
        other = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
        assert abs(measure.reference_loss(other, [ids]) - measure.reference_loss(reference, [ids])) > 1e-3


@pytest.mark.slow
def test_padding_changes_no_answer(source: DenseFile, tmp_path: Path) -> None:
    """All rows are whole blocks, and the logits, tokens and choices of experts are those without padding."""
    for form in ("dense", "padded-dense", "copies", "padded"):
        smollm2_checkpoint.write(source, form, tmp_path / form)
    matrices = [
        each for each in load_file(tmp_path / "padded" / "model.safetensors").values() if each.ndim > 1
    ]
    assert {each.shape[1] for each in matrices} == {256, NEURONS}
    ids = list(range(3, 40))
    torch.testing.assert_close(
        logits(tmp_path / "padded-dense", ids), logits(tmp_path / "dense", ids), rtol=1e-5, atol=1e-5
    )
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    answers = [
        [each.outputs[0].token_ids for each in LLM(str(tmp_path / form), threads=1).generate(PROMPTS, params)]
        for form in ("copies", "padded")
    ]
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_all_experts_with_weight_one_are_the_dense_model(
    source: DenseFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Shape(SHAPE.width, SHAPE.shared, SHAPE.experts, SHAPE.experts)
    routings = [random_routing(3), random_routing(4)]
    for routing in routings:
        routing.codes.zero_()
        for factors in (routing.factors, routing.attention_norm, routing.mlp_norm):
            factors.fill_(1.0)
    file = tmp_path / "routing.safetensors"
    Split(shape, routings, torch.ones(HIDDEN)).save(file, {})
    monkeypatch.setattr(smollm2_experts, "FILE", file)
    smollm2_checkpoint.write(source, "moe", tmp_path / "moe")
    smollm2_checkpoint.write(source, "dense", tmp_path / "dense")
    ids = list(range(3, 40))
    torch.testing.assert_close(
        logits(tmp_path / "moe", ids), logits(tmp_path / "dense", ids), rtol=1e-3, atol=1e-3
    )


@pytest.mark.slow
def test_what_cannot_be_read_is_refused(
    source: DenseFile, model: LlamaForCausalLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["smollm2_checkpoint", str(tmp_path / "out"), *map(str, arguments)])
            patch.setenv("XDG_CACHE_HOME", str(tmp_path))
            assert smollm2_checkpoint.main() == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    assert f"--file: got {tmp_path / 'none'}; allowed: a GGUF file" in run("--file", tmp_path / "none")
    assert "feed_forward_length: got 2, 96; allowed: 30, 1536" in run("--file", source.path, "--form", "moe")
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other", "")
    assert f"{smollm2_file.FILE_NAME} is missing" in run("--file", wheel)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"a/{smollm2_file.FILE_NAME}", "another file")
    assert f"allowed: {smollm2_file.SHA256}" in run("--file", wheel)
    unknown = write_file(tmp_path / "b.gguf", model, GGMLQuantizationType.F32, expert_count=4)
    assert "llama.expert_count: got 4" in run("--file", unknown, "--form", "dense")
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.slow
def test_a_split_is_fitted_goes_on_and_is_the_same_again(
    source: DenseFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WINDOW": 64, "ANSWER": 8, "CHATS": 16, "GATE_ROUNDS": 20}.items():
        monkeypatch.setattr(split_smollm2, name, value)
    windows = 3 * (1500 // 3 // 64)
    monkeypatch.setattr(tune_smollm2, "REPORT", windows)  # means of the same windows are compared

    def run(work: str, output: str) -> list[str]:
        sizes = {"width": 8, "shared": 4, "top-k": 3, "tokens": 1500, "steps": 4 * windows, "threads": 1}
        flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
        paths = [str(tmp_path / work), "--file", str(source.path), "--output", str(tmp_path / output)]
        monkeypatch.setattr("sys.argv", ["split_smollm2", *paths, *flags])
        assert split_smollm2.main() == 0
        return capsys.readouterr().out.splitlines()

    lines = run("work", "first")
    assert sum(line.startswith("layer") for line in lines) == LAYERS
    divergences = [float(line.split()[3].strip(";")) for line in lines if "divergence" in line]
    assert divergences[-1] < divergences[0]
    (tmp_path / "work" / "8-4-8-3" / "layer-01.safetensors").unlink()
    (tmp_path / "work" / f"tuning-{4 * windows}.pt").unlink()
    assert [line[:7] for line in run("work", "second") if line.startswith("layer")] == ["layer 1"]
    save = tune_smollm2.State.save

    def save_and_stop(state: tune_smollm2.State) -> None:
        save(state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tune_smollm2.State, "save", save_and_stop)
        run("other", "third")
    capsys.readouterr()
    assert len([line for line in run("other", "third") if "divergence" in line]) == 3
    first, second, third = (load_file(tmp_path / name) for name in ("first", "second", "third"))
    assert all(torch.equal(first[name], other[name]) for other in (second, third) for name in first)
    monkeypatch.setattr(smollm2_experts, "FILE", tmp_path / "first")
    smollm2_checkpoint.write(source, "moe", tmp_path / "moe")
    split = smollm2_experts.read(tmp_path / "first")
    assert split.shape == Shape(8, 4, 8, 3)
    assert all(layer.experts.bincount().tolist() == [8] * 8 + [32] for layer in split.layers)
    assert len(LLM(str(tmp_path / "moe"), threads=1).generate("Hello")[0].text) > 0


def test_clusters_have_one_size_and_hold_what_is_alike() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.nn.functional.normalize(torch.randn(4, 16, generator=generator), dim=1)
    expected = torch.arange(4).repeat(6)
    features = centres[expected] + torch.randn(24, 16, generator=generator) / 20
    labels = split_smollm2.cluster(torch.nn.functional.normalize(features, dim=1), 4, generator)
    assert labels.bincount().tolist() == [6] * 4
    assert len({*zip(labels.tolist(), expected.tolist(), strict=True)}) == 4


@pytest.mark.slow
def test_a_gate_learns_which_experts_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, 32, generator=generator)
    planted = torch.randn(12, 32, generator=generator) / 6
    importance = (inputs @ planted.T + 3).exp()
    weight, bias = split_smollm2.fit_gate(inputs, importance, 4)
    fresh = torch.randn(512, 32, generator=generator)
    chosen, best = (
        (fresh @ each.T + more).topk(4, dim=1).indices for each, more in ((weight, bias), (planted, 3))
    )
    share = (chosen[:, :, None] == best[:, None]).any(2).float().mean().item()
    assert share > 0.9


def test_factors_undo_a_known_scale() -> None:
    """Where each expert has the weight 0.8, the factor of every neuron is 1.25."""
    generator = torch.Generator().manual_seed(0)
    mlp = split_smollm2.Mlp(
        torch.randn(16, 8, generator=generator),
        torch.randn(256, 16, generator=generator),
        torch.randn(256, 8, generator=generator),
    )
    factors = split_smollm2.fit_factors(mlp, torch.full((256, 8), 0.8))
    assert factors.mean().item() == pytest.approx(1.25, abs=0.05)


def test_texts_are_split_without_overlap() -> None:
    kept, held_out = smollm2_texts.split(smollm2_texts.questions())
    assert not set(kept) & set(held_out) and len(kept) == pytest.approx(3 * len(held_out), abs=3)
    assert len(set(kept + held_out)) == len(kept) + len(held_out)


def test_prompts_of_known_fields(tmp_path: Path) -> None:
    rows = [{"question": "a"}, {"turns": ["b", "c"]}, {"prompt": "d"}, {"text": "e"}]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    expected = [("a", True), ("b", True), ("d", False), ("e", False)]
    assert list(smollm2_texts.read_prompts(file)) == expected

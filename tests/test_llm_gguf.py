"""GGUF files through whole engines: alone, by ranks, with expert servers, with streamed experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic import LLM
from moesaic.core.errors import ConfigError
from moesaic.kernels import table
from moesaic.testing import byte_tokenizer
from tests.models.test_gguf import MIXES, WIDE
from tests.support import gguf_files, tiny_models
from tests.support.cluster_driver import Answer, cluster
from tests.support.thread_groups import group_of_threads
from tests.test_llm_families import DISK, LONGEST, answers, params, prompts
from tests.test_llm_offload import POLICIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_workers"),
    pytest.mark.skipif(not table.instruction_sets(), reason="no native kernels in this build"),
]
MIX = "as Q4_K_M"
LINEAR = "linear, as Q4_K_M"
STREAMED = [
    (MIX, "some experts stay"),
    ("experts in BF16", "pages"),
    ("latent, as Q4_K_M", "on demand, likely ones before"),
    ("MXFP4", "two cores, in place"),
    (LINEAR, "some experts stay"),
    ("pairs", "two cores, in place"),
    ("BF16", "two cores"),
    ("IQ2_XXS", "two cores, in place"),
    *(
        pytest.param(mix, policy, marks=pytest.mark.full)
        for mix in (MIX, "MXFP4", "Q5_0")
        for policy in ("padded, on demand", "two cores, s2", "serial")
    ),
]
SERVED = [
    (MIX, "lockstep"),
    (LINEAR, "async"),
    *(
        pytest.param(mix, schedule, marks=pytest.mark.full)
        for mix, schedule in ((MIX, "async"), (MIX, "barrier"), ("MXFP4", "lockstep"))
    ),
]


class Models(dict[str, Path]):
    """By mix of types, and the answers of one process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.known: dict[str, list[Answer]] = {}

    def __missing__(self, mix: str) -> Path:
        name, kinds = MIXES[mix]
        source = tiny_models.save(tiny_models.build(*WIDE[name]), self.root / f"source of {mix}")
        self[mix], plain = gguf_files.write(source, self.root / mix, kinds)
        byte_tokenizer(plain)
        return self[mix]

    def wanted(self, mix: str) -> list[Answer]:
        if mix not in self.known:
            self.known[mix] = answers(LLM(str(self[mix]), threads=1, max_model_len=LONGEST))
        return self.known[mix]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("gguf"))


@pytest.mark.parametrize("mix", [MIX, "latent, as Q4_K_M", "MXFP4", LINEAR, "linear and joint, as Q4_K_M"])
def test_answers_are_those_of_the_dequantised_checkpoint(models: Models, mix: str) -> None:
    """A file has the decays of linear attention as -exp(A_log), which some CPUs round to another last bit."""
    plain, tolerance = models[mix].parent / "plain", 1e-4 if "linear" in mix else 0.0
    found = answers(LLM(str(plain), threads=1, max_model_len=LONGEST))
    for (tokens, scores), (wanted_tokens, wanted_scores) in zip(found, models.wanted(mix), strict=True):
        assert tokens == wanted_tokens
        assert scores == pytest.approx(wanted_scores, rel=tolerance, abs=tolerance)


def test_a_worker_says_in_which_types_it_holds_weights(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    held = LLM(str(models["MXFP4"]), threads=1, max_model_len=LONGEST).info
    caplog.clear()
    wide = LLM(str(models["MXFP4"]), threads=1, max_model_len=LONGEST, kernels="reference").info
    says = "reference (torch) kernels read no weights in blocks: mxfp4_e8m0 is converted to float32"
    assert [message.startswith(says) for message in caplog.messages] == [True]
    assert (held.dtype, wide.dtype) == ("q8_0, experts mxfp4_e8m0", "float32")
    assert held.num_parameters == wide.num_parameters and 2 * held.weight_bytes < wide.weight_bytes


@pytest.mark.parametrize(("mix", "schedule"), SERVED)
def test_expert_servers_give_the_floats_of_one_process(models: Models, mix: str, schedule: str) -> None:
    with cluster(str(models[mix]), min_replicas=2, schedule=schedule, max_model_len=LONGEST) as served:
        served.submit(prompts(), params())
        assert served.finish() == models.wanted(mix)


@pytest.mark.parametrize(
    ("mix", "more"),
    [
        (MIX, {}),
        (MIX, {"expert_tensor_parallel_size": 2}),
        (LINEAR, {}),
        ("linear and joint, as Q4_K_M", {"expert_tensor_parallel_size": 2}),
    ],
    ids=str,
)
def test_two_ranks_have_the_tokens_of_one(models: Models, mix: str, more: dict[str, int]) -> None:
    settings = {"tensor_parallel_size": 2, "max_model_len": LONGEST, **more}
    with group_of_threads(str(models[mix]), **settings) as (model, _, _):
        found = answers(model)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in models.wanted(mix)]


@pytest.mark.parametrize(("mix", "policy"), STREAMED)
def test_streamed_experts_give_the_floats_of_those_in_memory(models: Models, mix: str, policy: str) -> None:
    """Layers have experts of several types, and downs another than gates and ups."""
    offload = POLICIES[policy]
    seats = {"max_model_len": LONGEST, "max_num_seqs": offload.batch, "max_num_batched_tokens": 23}
    assert answers(LLM(str(models[mix]), threads=1, offload=offload, **seats)) == models.wanted(mix)


def test_two_ranks_stream_their_experts(models: Models) -> None:
    seats = {"max_num_seqs": DISK.batch, "max_num_batched_tokens": 23, "max_model_len": LONGEST}
    with group_of_threads(str(models[MIX]), tensor_parallel_size=2, offload=DISK, **seats) as (model, _, _):
        found = answers(model)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in models.wanted(MIX)]


def test_experts_in_float16_are_not_streamed(models: Models) -> None:
    says = r"the experts of .*model\.gguf are stored as F16, which .* compute from as float32; allowed: "
    with pytest.raises(ConfigError, match=says):
        LLM(str(models["F16"]), threads=1, max_model_len=LONGEST, offload=DISK, max_num_seqs=DISK.batch)

"""--speculative-config: vLLM's names and defaults, and one line for what is wrong."""

from __future__ import annotations

import doctest

import pytest

from moesaic.config import ModelConfig, SchedulerConfig, WorkerConfig
from moesaic.config.worker import ParallelConfig
from moesaic.core import speculation
from moesaic.core.errors import ConfigError
from moesaic.core.offload import Offload
from moesaic.core.speculation import SpeculativeConfig
from moesaic.runtime.offloaded_worker import check_drafts

GOOD = {"method": "ngram", "num_speculative_tokens": 4}
MTP = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.parametrize(
    ("given", "lookup"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 2}, (2, 2)),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 1}, (1, 4)),
    ],
)
def test_lengths_have_the_defaults_of_vllm(given: dict[str, int], lookup: tuple[int, int]) -> None:
    config = SpeculativeConfig.parse(GOOD | given)
    assert config.lookup == lookup
    assert SpeculativeConfig.parse(config.to_json()) == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ngram", "--speculative-config: got 'ngram'; allowed: a JSON object with method, num_spec"),
        ("[1]", "--speculative-config: got '[1]'; allowed: a JSON object"),
        (7, "--speculative-config: got 7; allowed: a JSON object"),
        ({}, "--speculative-config: method is missing"),
        ({"method": "ngram"}, "--speculative-config: num_speculative_tokens is missing"),
        (GOOD | {"method": "eagle"}, "--speculative-config: method: got 'eagle'; allowed: ngram, mtp"),
        (GOOD | {"method": "mtp"}, "num_speculative_tokens: got 4; allowed: 1 with mtp"),
        (MTP | {"prompt_lookup_max": 3}, "prompt_lookup_max: got 3; allowed: nothing with mtp"),
        (GOOD | {"model": "x"}, "--speculative-config: unknown key 'model'; allowed: method, num_spec"),
        (
            GOOD | {"num_speculative_tokens": 0},
            "num_speculative_tokens: got 0; allowed: an integer from 1 to 32",
        ),
        (GOOD | {"num_speculative_tokens": 33}, "got 33; allowed: an integer from 1 to 32"),
        (GOOD | {"num_speculative_tokens": "4"}, "got '4'; allowed: an integer"),
        (GOOD | {"num_speculative_tokens": True}, "got True; allowed: an integer"),
        (GOOD | {"num_speculative_tokens": None}, "got None; allowed: an integer"),
        (GOOD | {"prompt_lookup_max": 0}, "prompt_lookup_max: got 0; allowed: an integer from 1"),
        (GOOD | {"prompt_lookup_min": 1.5}, "prompt_lookup_min: got 1.5; allowed: an integer from 1"),
        (
            GOOD | {"prompt_lookup_min": 3, "prompt_lookup_max": 2},
            "prompt_lookup_min: got 3; allowed: at most prompt_lookup_max, 2",
        ),
    ],
)
def test_wrong_settings_get_one_line(given: object, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.parse(given)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_it_does_not_go_with() -> None:
    given = SpeculativeConfig.parse(GOOD).to_json()
    worker = {"model": ModelConfig("m"), "scheduler": SchedulerConfig(speculative_config=given)}
    with pytest.raises(
        ConfigError, match=r"--speculative-config: got .*; allowed: nothing with --record-routing"
    ):
        WorkerConfig(**worker, record="rows")
    small = WorkerConfig(**worker, offload=Offload(1 << 30, "cgopipe", 1, 1, 1))
    check_drafts(small, is_padded=False, on_gpu=False)
    with pytest.raises(ConfigError, match="--pad: got 'true'; allowed: false with --speculative-config"):
        check_drafts(small, is_padded=True, on_gpu=False)
    with pytest.raises(ConfigError, match="allowed: nothing with --fast-memory on a GPU"):
        check_drafts(small, is_padded=False, on_gpu=True)
    with pytest.raises(ConfigError, match="--speculative-config: method is missing"):
        WorkerConfig(ModelConfig("m"), scheduler=SchedulerConfig(speculative_config="{}"))


def test_older_names_of_mtp() -> None:
    wanted = SpeculativeConfig.parse(MTP)
    for name in ("deepseek_mtp", "glm4_moe_mtp"):
        assert SpeculativeConfig.parse(MTP | {"method": name}) == wanted


def test_mtp_goes_with_servers_and_ranks_but_not_with_routes_or_a_small_memory() -> None:
    scheduler = SchedulerConfig(speculative_config=SpeculativeConfig.parse(MTP).to_json())
    worker = {"model": ModelConfig("m"), "scheduler": scheduler}
    WorkerConfig(**worker, remote_experts=True, parallel=ParallelConfig(tensor_parallel_size=2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="allowed: nothing with --record-routing"):
        WorkerConfig(**worker, record="rows")
    small = WorkerConfig(**worker, offload=Offload(1 << 30, "cgopipe", 1, 1, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="method: got 'mtp'; allowed: ngram with --fast-memory"):
        check_drafts(small, is_padded=False, on_gpu=False)


def test_examples() -> None:
    done = doctest.testmod(speculation)
    assert done.failed == 0 and done.attempted == 2

"""Groups over several hosts, with TCP between ranks that are threads: the bits of a group on one host."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.group_placements import recorded, write
from tests.support.thread_groups import group_of_threads

from moesaic import LLM, SamplingParams
from moesaic.core.errors import ConfigError
from moesaic.experts.collectives.group import Traffic
from moesaic.runtime.group.meeting import RankPlace

PROMPTS = [[5, 9, 300, 7, 1, 44], [12, 13]]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
FORMS = ("deepspeed", "all-reduce", "reduce-scatter", "shuffled")


@pytest.fixture(scope="module")
def placement(tmp_path_factory: pytest.TempPathFactory) -> str:
    _, profile = recorded("demo", PROMPTS, PARAMS)
    return write(tmp_path_factory.mktemp("placement"), profile, units=2)


def run(**settings: Any) -> tuple[list[Any], list[Traffic]]:
    """Tokens and log-probabilities, and what each rank has sent."""
    size = {"max_num_batched_tokens": 16, "max_num_seqs": 2, "kv_cache_memory": "16MiB"}
    with group_of_threads("demo", tensor_parallel_size=2, **size, **settings) as (model, _, threads):
        outputs = [completion.outputs[0] for completion in model.generate(PROMPTS, PARAMS)]
    found = [(one.token_ids, [entry and entry.logprob for entry in one.logprobs or []]) for one in outputs]
    return found, [end.traffic for end in threads.ends]


@pytest.mark.parametrize(
    "form", [pytest.param(one, marks=pytest.mark.full) for one in FORMS[:3]] + ["shuffled"]
)
def test_every_form_has_the_bits_of_one_host(form: str, placement: str) -> None:
    settings: dict[str, Any] = {"moe_collectives": form}
    if form == "shuffled":
        settings["placement"] = placement
    one, two = (run(nnodes=nodes, **settings) for nodes in (1, 2))
    assert one[0] == two[0]
    payload = [[traffic.payload for traffic in each] for each in (one[1], two[1])]
    assert payload[0] == payload[1]
    check = [two.metadata - one.metadata for one, two in zip(one[1], two[1], strict=True)]
    assert check == [4, 4], "the digests of the placement, with which the hosts agree"


def test_one_process_cannot_have_ranks_of_other_hosts() -> None:
    with pytest.raises(ConfigError, match="^--nnodes: got 2; allowed: 1 without --cluster-address"):
        LLM("demo", tensor_parallel_size=2, nnodes=2)


def test_a_place_travels_as_one_line() -> None:
    place = RankPlace("@name", "ab" * 16, 1, 2, 1, 2, "tcp:10.0.0.2:0", "tcp:10.0.0.1:5")
    line = place.to_line()
    assert line.count("\n") == 1 and RankPlace.from_line(line) == place

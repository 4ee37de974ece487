from __future__ import annotations

import pytest

from moesaic.planning.deployment import ideas
from moesaic.planning.deployment.ideas import IDEAS, Verdict
from moesaic.planning.deployment.search import Deployments
from tests.support import small_plan

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def plan() -> Deployments:
    work = small_plan.WORK | {"rate": 200.0}
    return small_plan.search(workload=work, spec=small_plan.machines(4)).run()


def verdict(plan: Deployments, idea: str) -> Verdict:
    return next(one for one in plan.verdicts if one.idea == idea)


def test_every_idea_has_a_verdict_with_figures(plan: Deployments) -> None:
    assert [one.idea for one in plan.verdicts] == list(IDEAS) and len(IDEAS) == 5
    for one in plan.verdicts:
        assert one.line().startswith(("worth it here: ", "not worth it here, because ", "not measured: "))
        assert any(letter.isdigit() for letter in one.text), one.text


def test_async_is_compared_with_lockstep_in_the_best_layout(plan: Deployments) -> None:
    found = verdict(plan, "Asynchronous Expert Parallelism")
    layout = plan.trials[0].candidate.layout
    by_schedule = {
        one.candidate.schedule: one.good_tokens
        for one in reversed(plan.trials)
        if one.candidate.layout == layout and not one.candidate.redundant_experts
    }
    assert found.gain is not None and "good tokens/s with it and" in found.text
    assert by_schedule["async"] > 0


def test_links_are_the_limit_of_placement(plan: Deployments) -> None:
    for idea in ("Speculative MoE", "Semantic Parallelism"):
        assert "what links take" in verdict(plan, idea).text and (verdict(plan, idea).gain or 0) >= 1


def test_the_death_of_a_server_is_measured(plan: Deployments) -> None:
    text = verdict(plan, "Expert-as-a-Service").text
    assert "a server that dies and stays away costs" in text or "two copies" in text or "one server" in text


def test_offloading_is_priced_for_batch_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ideas, "ENOUGH_EXPERTS", 8)
    clients = {"kind": "closed", "clients": 4, "prompt": 5, "answer": 6}
    found = small_plan.search(spec=small_plan.machines(1), workload=clients, slo=None).run()
    one = verdict(found, "MoE-Lightning")
    assert one.gain is not None and "run-batch --fast-memory" in one.text
    assert one.worth == (one.gain > 1)


def test_one_worker_and_one_server_wait_for_nobody() -> None:
    found = small_plan.search(spec=small_plan.machines(1)).run()
    text = verdict(found, "Asynchronous Expert Parallelism").line()
    assert text == "not worth it here, because one worker and one server wait for nobody else"
    assert "one server holds all experts" in verdict(found, "Semantic Parallelism").line()

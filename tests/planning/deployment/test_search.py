from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moesaic.core.errors import ConfigError
from moesaic.core.profile import Profile, Routes
from moesaic.cost.sizes import KNOWN
from moesaic.planning.deployment import demand, devices, serving, spec, trials
from moesaic.planning.deployment.estimate import Estimates
from moesaic.planning.deployment.layouts import Layout
from moesaic.planning.deployment.search import EQUAL
from moesaic.planning.deployment.trials import Candidate, Simulator
from moesaic.planning.sim import routes
from tests.support import small_plan
from tests.support.small_scenario import EXPERTS, LAYERS, MODEL, TOP_K


@pytest.mark.slow
def test_the_best_comes_first_and_a_seed_repeats_it() -> None:
    first, again = small_plan.search().run(), small_plan.search().run()
    assert first.is_complete and first.num_fitting_layouts == first.num_layouts
    assert [one.candidate for one in first.trials] == [one.candidate for one in again.trials]
    assert [one.figures.throughput for one in first.trials] == [
        one.figures.throughput for one in again.trials
    ]
    assert [one.line() for one in first.verdicts] == [one.line() for one in again.verdicts]
    best = first.trials[0]
    assert all(one.good_tokens <= best.good_tokens / (1 - EQUAL) for one in first.trials)
    schedules = {one.candidate.schedule for one in first.trials}
    assert schedules == {"lockstep", "async"}
    assert any(one.candidate.inflight_batches == 2 for one in first.trials)
    assert any(one.candidate.redundant_experts for one in first.trials)
    layouts = [one.candidate.layout for one in first.best_trials(3)]
    assert len(set(layouts)) == len(layouts) <= 3 and layouts[0] == best.candidate.layout
    assert best.price_per_million == pytest.approx(3.6 / 3600 / best.figures.throughput * 1e6)
    assert small_plan.search(seed=2).run().trials[0].figures.throughput != best.figures.throughput


@pytest.mark.slow
def test_few_devices_are_preferred_where_they_are_enough() -> None:
    work = small_plan.WORK | {"rate": 2.0}
    assert small_plan.search(workload=work).run().trials[0].candidate.layout.devices == 1
    busy = small_plan.search(workload=small_plan.WORK | {"rate": 400.0}).run()
    assert busy.trials[0].candidate.layout.devices > 1


@pytest.mark.slow
def test_a_short_budget_ends_the_search() -> None:
    found = small_plan.search(seconds=2.0, tick=0.01).run()
    assert not found.is_complete and len(found.trials) > 0
    assert any(one.worth is None and "--time-budget" in one.line() for one in found.verdicts)
    with pytest.raises(ConfigError, match="--time-budget: got 0.2; allowed: more seconds"):
        small_plan.search(seconds=0.2, tick=0.01).run()


def test_a_model_that_does_not_fit_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError) as error:
        small_plan.search(model=KNOWN["deepseek-v3"]).run()
    assert str(error.value).startswith("--cluster: got '3 x h100 on 1 host'; allowed: devices with room for")
    assert "--hardware" in str(error.value)


def test_an_estimate_by_hand() -> None:
    """8 requests of one worker on 2 servers, each with half of the pairs: 8 rows and 8 pairs for each run.

    A run of attention takes 2 ms, one of a server 1 ms and 0.25 ms for each expert that is chosen. The link
    takes 0.1 ms one way. Rows of 64 bytes take 8 * 2 * 64 / 1e6 s = 1.024 ms to two servers, and answers of 8
    pairs half of that.
    """
    shares = small_shares()
    work = small_plan.search(workload=small_plan.WORK | {"prefill": False})
    estimates = Estimates(MODEL, work.demand, shares, None)
    pool = replace(small_plan.machines().pools[0], intra_host_link=small_plan.machines().pools[0].curves.link)  # type: ignore[union-attr]
    layout = Layout(pool, 1, 1, 2)
    found = estimates.seconds(
        layout, devices.build_layout_devices(MODEL, layout, pool.intra_host_link, 10), 8
    )
    chosen = 4 * (1 - 0.75**8)
    assert found == pytest.approx(1e-3 * LAYERS * (2 + 0.2 + 1.024 + 0.512 + 1 + 0.25 * chosen))
    shares[:, 0] = 10.0
    assert Estimates(MODEL, work.demand, routes.normalize(shares), None).fullest_share(2) == pytest.approx(
        (10 + 3 / 8) / (10 + 7 / 8)
    )


def small_shares() -> routes.FloatArray:
    """[layers, E] of equally popular experts."""
    return routes.zipf(EXPERTS, 0.0)[None].repeat(LAYERS, axis=0)


def simulated(
    layers: int, schedule: str, monkeypatch: pytest.MonkeyPatch, floor: float = 0.0
) -> trials.Trial:
    work = small_plan.WORK | {"rate": 6.0}
    search = small_plan.search(model=replace(MODEL, layers=16, moe_layers=16), workload=work)
    search._estimate_layouts()
    monkeypatch.setattr(trials, "LAYERS", (layers,))
    monkeypatch.setattr(trials, "EVENTS", 1e12)
    monkeypatch.setattr(trials, "REQUESTS", 100)
    pool = search.spec.pools[0]
    estimate = search._estimate_layout(Layout(pool, 2, 1, 1))
    assert estimate is not None
    simulator = Simulator(search.model, search.spec, search.demand, search.objectives, 1, floor=floor)
    one = Candidate(estimate.layout, 16, 64, 10_000, schedule=schedule)  # type: ignore[arg-type]
    return simulator.simulate(one, estimate)


@pytest.mark.slow
def test_a_few_layers_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    few, every = (simulated(layers, "lockstep", monkeypatch) for layers in (4, 16))
    assert (few.layers, every.layers) == (4, 16)
    assert few.figures.itl.mean == pytest.approx(every.figures.itl.mean, rel=0.05)
    assert few.figures.throughput == pytest.approx(every.figures.throughput, rel=0.05)


@pytest.mark.slow
def test_async_is_simulated_with_all_layers_unless_it_lost_already(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulated(4, "async", monkeypatch).layers == 16
    assert simulated(4, "async", monkeypatch, floor=1e9).layers == 4


@pytest.mark.slow
def test_paths_of_a_workload_belong_to_its_folder(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(
        "arrival_s,input_tokens,output_tokens\n" + "".join(f"{n / 40},5,6\n" for n in range(400))
    )
    found = small_plan.search()
    found.demand = demand.load(tmp_path / "trace.csv")
    plan = found.run()
    assert plan.trials[0].figures.throughput == pytest.approx(40 * 6, rel=0.1)


@pytest.mark.slow
def test_several_kinds_of_machines_are_compared() -> None:
    fast = small_plan.machines(2).pools[0]
    assert fast.curves is not None
    slow = replace(
        fast,
        name="slow",
        curves=replace(
            fast.curves, attention=fast.curves.attention.times(9), experts=fast.curves.experts.times(9)
        ),
    )
    both = spec.ClusterSpec((slow, fast), small_plan.machines().inter_host_link)
    assert small_plan.search(spec=both).run().trials[0].candidate.layout.pool is fast


@pytest.mark.slow
def test_with_a_profile_solved_placements_are_tried(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    popular = routes.zipf(EXPERTS, 1.0)
    chosen = np.stack([routes.draw(popular, 600, TOP_K, rng) for _ in range(LAYERS)], axis=1)
    recorded = Routes(
        rng.integers(0, 64, 600).astype(np.int32),
        np.arange(0, 601, 60),
        np.full(10, 20),
        np.full(10, -1, dtype=np.int16),
        chosen,
    )
    Profile.from_routes("small", 64, EXPERTS, range(LAYERS), recorded).save(tmp_path / "profile.npz")
    found = small_plan.search(spec=small_plan.machines(3))
    tables = {"workload": small_plan.WORK, "routing": {"kind": "profile", "file": "profile.npz"}}
    found.demand = demand.parse(tables, tmp_path)
    plan = found.run()
    assert any(one.candidate.solver == "eplb" for one in plan.trials)
    assert all(one.layers == LAYERS for one in plan.trials), "a profile has the shares of each layer"
    solved = next(one.candidate for one in plan.trials if one.candidate.solver)
    assert any("moesaic place profile.npz --ranks" in note for note in serving.list_notes(plan, solved))
    assert "--placement placement.json" in serving.list_commands(plan, solved, "demo")[0]

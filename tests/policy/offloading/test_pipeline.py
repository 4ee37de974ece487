from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.policy.offloading.pipeline import AHEAD, SCHEDULES, Schedule, decode, first_layer, prefill
from moesaic.policy.offloading.tasks import Kind, Lane, Shape, Task
from moesaic.policy.offloading.timeline import run

SHAPES = st.builds(
    Shape,
    layers=st.integers(1, 5),
    micro_batches=st.integers(1, 5),
    pages=st.integers(0, 6),
    uses_pinned_memory=st.booleans(),
    slow_attention=st.booleans(),
    cache_moves=st.booleans(),
    slow_experts=st.just(True),
    fast_experts=st.booleans(),
    guesses=st.booleans(),
)
MOVES_LAYERS: tuple[Schedule, ...] = ("cgopipe", "s2", "s3", "s4", "serial")


def kinds(tasks: Sequence[Task]) -> list[str]:
    return [task.kind.value for task in tasks]


def test_worked_example() -> None:
    tasks = decode("cgopipe", Shape(layers=1, micro_batches=1, pages=1))
    assert kinds(tasks) == [
        *("pre-attention", "save qkv", "attention"),
        *("load rows", "load page", "post-attention", "head"),
    ]
    assert tasks[2].lane is Lane.SLOW and tasks[5].needs == (3,)


def test_algorithm_1_line_by_line() -> None:
    """Two layers of three micro-batches. A task is (kind, layer, micro-batch or page), counted from 0."""
    tasks = decode("cgopipe", Shape(layers=2, micro_batches=3, pages=3, uses_pinned_memory=True))
    of = {kind: [(t.layer, t.micro_batch) for t in tasks if t.kind is kind] for kind in Kind}
    both = [(layer, part) for layer in range(2) for part in range(3)]
    for kind in (Kind.PRE, Kind.SAVE_QKV, Kind.ATTENTION, Kind.LOAD_ROWS, Kind.POST_WITH_EXPERTS):
        assert of[kind] == both, kind
    assert of[Kind.LOAD_PAGE] == of[Kind.STAGE_PAGE] == [(layer + 1, part) for layer, part in both]
    assert kinds(tasks)[:8] == ["pre-attention", "save qkv", "attention", "stage page"] * 2
    first = [(t.kind, t.layer, t.micro_batch) for t in tasks[8:15]]
    assert first == [
        (Kind.LOAD_ROWS, 0, 0),
        (Kind.LOAD_PAGE, 1, 0),
        (Kind.POST_WITH_EXPERTS, 0, 0),
        (Kind.PRE, 0, 2),
        (Kind.SAVE_QKV, 0, 2),
        (Kind.ATTENTION, 0, 2),
        (Kind.STAGE_PAGE, 1, 2),
    ]


def test_two_lanes_in_virtual_time() -> None:
    tasks = [
        Task(Kind.PRE, Lane.FAST, 0, 0, ()),
        Task(Kind.LOAD_PAGE, Lane.LINK_DOWN, 0, 0, ()),
        Task(Kind.POST_WITH_EXPERTS, Lane.FAST, 0, 0, (1,)),
    ]
    line = run(tasks, [2.0, 3.0, 1.0])
    assert (line.starts, line.ends) == ([0, 0, 3], [2, 3, 4]) and line.makespan == 4
    assert line.busy[Lane.FAST] == line.busy[Lane.LINK_DOWN] == 3 and line.busy[Lane.LINK_UP] == 0
    assert run([], []).makespan == 0
    late = run(tasks, [2.0, 3.0, 1.0], handover=0.5)
    assert (late.starts, late.makespan) == ([0, 0, 3.5], 4.5) and late.busy == line.busy
    busy = run(tasks, [5.0, 3.0, 1.0], handover=0.5)
    assert busy.starts == [0, 0, 5], "known before the lane was free"
    alone = [Task(Kind.PRE, Lane.FAST, 0, 0, ()), Task(Kind.POST_WITH_EXPERTS, Lane.FAST, 0, 0, (0,))]
    assert run(alone, [1.0, 1.0], handover=0.5).starts == [0, 1], "a lane knows its own tasks"


def brute_force(tasks: Sequence[Task], seconds: Sequence[int]) -> list[int]:
    """The ends of all tasks, found by stepping a clock. At each tick every lane works on its first unfinished
    task if that may run."""
    left, ends = list(seconds), [-1] * len(tasks)
    clock = 0
    while -1 in ends:
        for place in range(len(tasks)):
            if ends[place] < 0 and not left[place] and _ready(tasks, ends, place, clock):
                ends[place] = clock
        for lane in Lane:
            mine = [place for place, task in enumerate(tasks) if task.lane is lane and ends[place] < 0]
            if mine and left[mine[0]] and _ready(tasks, ends, mine[0], clock):
                left[mine[0]] -= 1
                if not left[mine[0]]:
                    ends[mine[0]] = clock + 1
        clock += 1
    return ends


def _ready(tasks: Sequence[Task], ends: Sequence[int], place: int, clock: int) -> bool:
    before = [other for other in range(place) if tasks[other].lane is tasks[place].lane]
    return all(0 <= ends[need] <= clock for need in (*tasks[place].needs, *before))


@settings(max_examples=40, deadline=None)
@given(
    st.data(), SHAPES.filter(lambda shape: shape.layers * shape.micro_batches < 8), st.sampled_from(SCHEDULES)
)
def test_virtual_time_by_brute_force(data: st.DataObject, shape: Shape, schedule: Schedule) -> None:
    tasks = decode(schedule, shape)
    seconds = [
        0 if task.kind is Kind.SYNC else data.draw(st.integers(1, 3), label=task.kind.value) for task in tasks
    ]
    assert list(run(tasks, seconds).ends) == brute_force(tasks, seconds)


def _place(tasks: Sequence[Task]) -> dict[tuple[Kind, Lane, int, int], int]:
    return {(task.kind, task.lane, task.layer, task.micro_batch): place for place, task in enumerate(tasks)}


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(SHAPES, st.sampled_from(SCHEDULES), st.lists(st.floats(0.1, 3), min_size=20, max_size=20))
def test_no_schedule_breaks_an_order_that_the_model_needs(
    shape: Shape, schedule: Schedule, durations: list[float]
) -> None:
    """For all durations, data is ready before it is used and a buffer is free before it is filled."""
    tasks = decode(schedule, shape)
    seconds = dict(zip(Kind, durations, strict=False)) | {Kind.SYNC: 0.0}
    line = run(tasks, [seconds[task.kind] * (1 + task.micro_batch % 2) for task in tasks])
    place = _place(tasks)

    def follows(later: Task, kind: Kind, layer: int, part: int) -> None:
        for lane in Lane:
            earlier = place.get((kind, lane, layer, part))
            if earlier is not None:
                at = place[later.kind, later.lane, later.layer, later.micro_batch]
                assert line.starts[at] >= line.ends[earlier] - 1e-9, (later, tasks[earlier])

    for task in tasks:
        layer, part = task.layer, task.micro_batch
        if task.kind is Kind.PRE:
            for kind in (Kind.POST_WITH_EXPERTS, Kind.EXPERTS, Kind.LOAD_ANSWERS):
                follows(task, kind, layer - 1, part)
        elif task.kind is Kind.ATTENTION:
            for kind in (Kind.PRE, Kind.SAVE_QKV, Kind.LOAD_CACHE):
                follows(task, kind, layer, part)
        elif task.kind in (Kind.POST_WITH_EXPERTS, Kind.POST_WITHOUT_EXPERTS):
            for kind in (Kind.ATTENTION, Kind.LOAD_ROWS):
                follows(task, kind, layer, part)
            for page in range(shape.pages):
                follows(task, Kind.LOAD_PAGE, layer, page)
        elif task.kind is Kind.EXPERTS:
            for kind in (
                (Kind.POST_WITHOUT_EXPERTS, Kind.SAVE_ROWS)
                if task.lane is Lane.SLOW
                else (Kind.POST_WITHOUT_EXPERTS,)
            ):
                follows(task, kind, layer, part)
            follows(task, Kind.SPLIT, layer, 0)
            if task.lane is Lane.FAST:
                follows(task, Kind.LOAD_CHOSEN, layer, 0)
        elif task.kind in (Kind.SAVE_ROWS, Kind.SPLIT):
            for other in range(shape.micro_batches) if task.kind is Kind.SPLIT else (part,):
                follows(task, Kind.POST_WITHOUT_EXPERTS, layer, other)
        elif task.kind is Kind.LOAD_LIKELY:
            follows(task, Kind.LOAD_CHOSEN, layer - 1, 0)
            for other in range(shape.micro_batches):
                follows(task, Kind.EXPERTS, layer - 2, other)
        elif task.kind is Kind.LOAD_CHOSEN:
            follows(task, Kind.SPLIT, layer, 0)
            follows(task, Kind.LOAD_LIKELY, layer, 0)
        elif task.kind is Kind.LOAD_PAGE:
            follows(task, Kind.STAGE_PAGE, layer, part)
            for other in range(shape.micro_batches):
                follows(task, Kind.POST_WITH_EXPERTS, layer - 2, other)
        elif task.kind is Kind.STAGE_PAGE:
            follows(task, Kind.LOAD_PAGE, layer - 1, part)
        elif task.kind is Kind.HEAD:
            for kind in (Kind.POST_WITH_EXPERTS, Kind.EXPERTS, Kind.LOAD_ANSWERS):
                follows(task, kind, layer - 1, part)


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.sampled_from(SCHEDULES))
def test_every_micro_batch_passes_every_layer_once(shape: Shape, schedule: Schedule) -> None:
    tasks = decode(schedule, shape)
    counted = Counter((task.kind, task.lane, task.layer, task.micro_batch) for task in tasks)
    assert set(counted.values()) == {1}
    passes = {(layer, part) for layer in range(shape.layers) for part in range(shape.micro_batches)}
    ends = (Kind.POST_WITH_EXPERTS, Kind.EXPERTS)
    for kinds_wanted in ((Kind.PRE,), (Kind.ATTENTION,), ends):
        done = {(task.layer, task.micro_batch) for task in tasks if task.kind in kinds_wanted}
        assert done == passes, kinds_wanted
    heads = [task.micro_batch for task in tasks if task.kind is Kind.HEAD]
    assert sorted(heads) == list(range(shape.micro_batches))
    pages = {(task.layer, task.micro_batch) for task in tasks if task.kind is Kind.LOAD_PAGE}
    whole = shape.pages if schedule == "cgopipe" else min(shape.pages, 1)
    wanted = whole if schedule in MOVES_LAYERS else 0
    assert pages == {(layer + 1, page) for layer in range(shape.layers) for page in range(wanted)}
    assert all(need < place for place, task in enumerate(tasks) for need in task.needs)


SECONDS = dict.fromkeys(Kind, 0.05) | {
    Kind.ATTENTION: 1.0,
    Kind.POST_WITH_EXPERTS: 0.8,
    Kind.LOAD_PAGE: 0.9,
    Kind.LOAD_CACHE: 2.0,
    Kind.SYNC: 0.0,
    Kind.HEAD: 0.0,
}


def layer_seconds(schedule: Schedule, count: int = 8) -> float:
    """Seconds of one layer in the middle of a long pass. Whole weights of a layer take as long as all of its
    pages."""
    makespans = []
    for layers in (10, 12):
        shape = Shape(layers, count, count, cache_moves=schedule == "s4")
        tasks = decode(schedule, shape)
        whole = 1 if schedule == "cgopipe" else count
        seconds = [SECONDS[t.kind] * (whole if t.kind is Kind.LOAD_PAGE else 1) for t in tasks]
        makespans.append(run(tasks, seconds).makespan)
    return (makespans[1] - makespans[0]) / 2


def test_figure_6() -> None:
    """CGOPipe keeps its busiest lane busy. Weights that are loaded whole delay the rows behind them."""
    busiest = 8 * SECONDS[Kind.ATTENTION]
    assert layer_seconds("cgopipe") == pytest.approx(busiest)
    assert layer_seconds("s2") > 1.5 * busiest
    assert layer_seconds("serial") > layer_seconds("s3") > layer_seconds("s2")
    assert layer_seconds("s4") > 8 * SECONDS[Kind.LOAD_CACHE] > layer_seconds("cgopipe")


def test_serial_is_the_sum_of_all_tasks() -> None:
    tasks = decode("serial", Shape(3, 4, 1, uses_pinned_memory=True))
    line = run(tasks, [SECONDS[task.kind] for task in tasks])
    assert line.makespan == pytest.approx(sum(line.busy.values()))


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_few_micro_batches_do_not_wait_for_each_other_in_a_circle(micro_batches: int) -> None:
    """The lookahead is at most one layer, since attention of a layer needs the layer before."""
    tasks = decode("cgopipe", Shape(4, micro_batches, micro_batches))
    fast = [task for task in tasks if task.lane is Lane.FAST and task.kind is not Kind.HEAD]
    ahead = min(AHEAD, micro_batches)
    for done, task in enumerate(task for task in fast if task.kind is Kind.PRE):
        posts = fast.index(task) - done
        assert done - posts <= ahead


def test_attention_on_the_fast_processor_fetches_two_caches_ahead() -> None:
    shape = Shape(2, 3, 3, slow_attention=False, cache_moves=True)
    tasks = decode("cgopipe", shape)
    down = [(t.kind, t.layer, t.micro_batch) for t in tasks if t.lane is Lane.LINK_DOWN]
    assert down[:4] == [
        (Kind.LOAD_CACHE, 0, 0),
        (Kind.LOAD_CACHE, 0, 1),
        (Kind.LOAD_PAGE, 1, 0),
        (Kind.LOAD_CACHE, 0, 2),
    ]
    assert not [t for t in decode("cgopipe", replace(shape, cache_moves=False)) if t.lane is Lane.LINK_UP]


def test_prefill_saves_the_cache_and_moves_rows_where_they_do_not_fit() -> None:
    shape = Shape(2, 2, 2)
    kept = Counter(kinds(prefill(shape)))
    assert kept == {"prompt": 4, "save cache": 4, "load page": 4, "head": 2}
    moved = prefill(shape, rows_move=True)
    assert Counter(kinds(moved)) == kept + Counter({"save rows": 4, "load answers": 2})
    back = next(task for task in moved if task.kind is Kind.LOAD_ANSWERS)
    assert [moved[need].kind for need in back.needs] == [Kind.SAVE_ROWS]
    fast = prefill(replace(shape, slow_attention=False))
    assert "save cache" not in kinds(fast)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_prefill_has_two_micro_batches_on_the_fast_level(count: int, cut: bool) -> None:
    """When a micro-batch's rows and cache are loaded or computed, those of the last but one are saved."""
    tasks = prefill(Shape(3, count, count, cut=cut), rows_move=True)
    before: dict[int, set[int]] = {}
    for place, task in enumerate(tasks):
        before[place] = set().union({*task.needs}, *(before[need] for need in task.needs))
    turn = {place: task.layer * count + task.micro_batch for place, task in enumerate(tasks)}
    for place, task in enumerate(tasks):
        if task.kind in (Kind.PROMPT, Kind.LOAD_ANSWERS) and turn[place] >= AHEAD:
            gone = {(tasks[one].kind, turn[one]) for one in before[place]}
            assert (Kind.SAVE_ROWS, turn[place] - AHEAD) in gone
            if task.kind is Kind.PROMPT:
                assert (Kind.SAVE_CACHE, turn[place] - AHEAD) in gone
        if task.kind is Kind.PROMPT and task.micro_batch:
            saved = [one for one in before[place] if tasks[one].kind is Kind.SAVE_CACHE]
            assert (turn[place] - 1 in {turn[one] for one in saved}) is cut


def test_the_first_layer_is_staged_before_it_comes() -> None:
    found = first_layer(Shape(3, 2, 2, uses_pinned_memory=True))
    assert [(one.kind, one.micro_batch, one.needs) for one in found] == [
        (Kind.STAGE_PAGE, 0, ()),
        (Kind.LOAD_PAGE, 0, (0,)),
        (Kind.STAGE_PAGE, 1, ()),
        (Kind.LOAD_PAGE, 1, (2,)),
    ]
    assert kinds(first_layer(Shape(3, 2, 2))) == ["load page", "load page"]
    assert not first_layer(Shape(3, 2, 2, dense=frozenset({0})))

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.support.scheduler_replay import equal

from moesaic.policy.scheduling.microqueue import (
    Defrag,
    DefragWithHistory,
    FirstLayerFirst,
    MostTokensFirst,
    QueuePolicy,
)
from moesaic.policy.scheduling.schedulers.expert_server import (
    DECISION_RUNS,
    EnoughPairs,
    ExpertServerScheduler,
    Run,
    StartRule,
    WaitByCurves,
    WaitForSmallCalls,
    Waiting,
)

LAYERS = (3, 5)
EXPERTS = 4


def service(
    groups: int = 1, rule: StartRule | None = None, policy: QueuePolicy | None = None, clients: int = 2
) -> ExpertServerScheduler:
    subject = ExpertServerScheduler(LAYERS, policy or MostTokensFirst(), rule or EnoughPairs(), groups)
    for client in range(clients):
        subject.client_joined(client)
    return subject


def ask(
    subject: ExpertServerScheduler, call: int, client: int, layer: int, experts: list[int], now: float = 0.0
) -> None:
    subject.add_call(call, client, layer, np.array(experts, dtype=np.int32), now)


def parts(run: Run | None) -> list[tuple[int, list[int]]]:
    return [] if run is None else [(call, pairs.tolist()) for call, pairs in run.parts]


# ---- grouping


def test_worked_example() -> None:
    """Two clients call layer 3 and one calls layer 5. The three calls of layer 3 run together, in order of
    arrival."""
    subject = service()
    ask(subject, 0, 0, 3, [2, 0])
    ask(subject, 1, 1, 5, [1])
    ask(subject, 2, 1, 3, [2])
    ask(subject, 3, 0, 3, [1])
    assert subject.waiting_pairs == 5
    run = subject.next_run(0.0)
    assert run is not None and run.layer == 3
    assert parts(run) == [(0, [0, 1]), (2, [0]), (3, [0])]
    assert subject.waiting_pairs == 1
    run = subject.next_run(0.0)
    assert run is not None and (run.layer, parts(run)) == (5, [(1, [0])])
    assert subject.next_run(0.0) is None and subject.waiting_pairs == 0


def test_groups_by_expert() -> None:
    """With a queue for each expert, expert 2's pairs of both clients run together. The others run later."""
    subject = service(groups=EXPERTS)
    ask(subject, 0, 0, 3, [2, 0, 2])
    ask(subject, 1, 1, 3, [1, 2])
    runs = [subject.next_run(0.0) for _ in range(4)]
    assert [parts(run) for run in runs] == [[(0, [0, 2]), (1, [1])], [(0, [1])], [(1, [0])], []]


def test_queues_of_a_layer_run_together_where_one_alone_costs_too_much() -> None:
    """The rule sees the pairs of each queue of the chosen layer. Calls of a joint run have one part each."""
    seen: list[list[int]] = []

    def apart(pairs: Sequence[int], busy: float) -> bool:
        seen.append(sorted(pairs))
        return min(pairs) >= 2

    subject = ExpertServerScheduler(LAYERS, MostTokensFirst(), EnoughPairs(), EXPERTS, apart)
    for client in range(2):
        subject.client_joined(client)
    ask(subject, 0, 0, 3, [2, 0, 2])
    ask(subject, 1, 1, 3, [1, 2])
    ask(subject, 2, 1, 5, [3])
    assert parts(subject.next_run(0.0)) == [(0, [0, 1, 2]), (1, [0, 1])]
    assert parts(subject.next_run(0.0)) == [(2, [0])] and seen == [[1, 1, 3]]
    ask(subject, 3, 0, 3, [2, 1, 2, 1, 2])
    assert parts(subject.next_run(0.0)) == [(3, [0, 2, 4])]
    assert parts(subject.next_run(0.0)) == [(3, [1, 3])] and subject.waiting_pairs == 0


def test_the_policy_decides_between_queues() -> None:
    first, most = service(policy=FirstLayerFirst()), service(policy=MostTokensFirst())
    for subject in (first, most):
        ask(subject, 0, 0, 3, [1])
        ask(subject, 1, 1, 5, [1, 2])
    runs = [subject.next_run(0.0) for subject in (first, most)]
    assert [run.layer for run in runs if run is not None] == [3, 5]


def test_urgency_is_the_oldest_pair_of_a_queue() -> None:
    subject = service(policy=MostTokensFirst(urgency=1.0))
    ask(subject, 0, 0, 3, [1], now=0.0)
    ask(subject, 1, 0, 3, [1], now=5.0)  # joins the queue, which is no younger for it
    ask(subject, 2, 1, 5, [1, 2, 3], now=4.5)
    run = subject.next_run(5.0)
    assert run is not None and (run.layer, parts(run)) == (3, [(0, [0]), (1, [0])])


def test_a_policy_that_remembers_is_asked_every_time() -> None:
    """As in the example of DefragWithHistory, eight pairs of layer 4 run alone. They count in later
    look-aheads."""
    assert not Defrag().remembers
    for first, then in ((True, 3), (False, 5)):
        subject = ExpertServerScheduler(
            (3, 4, 5), DefragWithHistory(Defrag(lookahead=1, decay=0.5), 10), EnoughPairs()
        )
        subject.client_joined(0)
        if first:
            ask(subject, 0, 0, 4, [0] * 8)
            run = subject.next_run(0.0)
            assert run is not None and run.layer == 4
        ask(subject, 1, 0, 3, [0] * 4)
        ask(subject, 2, 0, 5, [0] * 5)
        run = subject.next_run(0.0)
        assert run is not None and run.layer == then


def test_a_call_without_pairs_runs_with_the_others_of_its_layer() -> None:
    """The client waits for all rows of the layer, although its own call has no pairs."""
    for groups in (1, EXPERTS):
        subject = service(groups, rule=EnoughPairs(pairs=10, wait=9.0))
        ask(subject, 0, 0, 3, [])
        assert subject.next_run(0.0) is None
        ask(subject, 1, 1, 3, [0])
        assert parts(subject.next_run(0.0)) == [(0, []), (1, [0])]


# ---- the start rule


def test_enough_is_pairs_or_patience_or_everybody() -> None:
    rule = EnoughPairs(pairs=4, wait=0.5)
    assert not rule.ready(Waiting(pairs=3, mean_call=9.0, clients=2, waiting_clients=1))
    assert rule.ready(Waiting(pairs=4, mean_call=0.0, clients=2, waiting_clients=1))
    assert rule.ready(Waiting(pairs=1, mean_call=0.0, clients=2, waiting_clients=2))
    assert rule.patience(took=9.0) == 0.5


def test_clients_with_small_calls_wait_for_each_other() -> None:
    rule = WaitForSmallCalls(pairs=32, wait=0.1, runs=3.0)
    assert not rule.ready(Waiting(pairs=99, mean_call=31.0, clients=2, waiting_clients=1))
    assert rule.ready(Waiting(pairs=1, mean_call=31.0, clients=2, waiting_clients=2))
    assert rule.ready(Waiting(pairs=1, mean_call=32.0, clients=2, waiting_clients=1)), (
        "larger ones come as they are"
    )
    assert [rule.patience(took) for took in (0.0, 0.01, 9.0)] == [0.0, pytest.approx(0.03), 0.1]


def test_calls_that_grow_are_not_waited_for_any_more() -> None:
    """Calls that shrink are waited for. Before the first run nobody knows what waiting costs, so nobody
    waits."""
    subject, now, call = service(rule=WaitForSmallCalls(pairs=4, wait=0.5, runs=3.0)), 0.0, 0
    waited = []
    for size in [1] * 5 + [8] * 12 + [1] * 30:
        ask(subject, call, 0, 3, [0] * size, now)
        waited.append(subject.next_run(now) is None)
        if waited[-1]:
            left = subject.wait(now)
            assert left is not None and 0 < left <= 0.5
            ask(subject, call + 1, 1, 3, [0], now)
            assert len(parts(subject.next_run(now))) == 2
        subject.client_joined(1)
        now, call = now + 0.1, call + 2
        assert subject.next_run(now) is None
    assert waited[:5] == [False] + [True] * 4 and not waited[16] and waited[-1]


def test_a_start_waits_for_the_other_client() -> None:
    subject = service(rule=EnoughPairs(pairs=10, wait=0.5))
    ask(subject, 0, 0, 3, [1], now=1.0)
    ask(subject, 1, 0, 3, [2], now=1.2)  # the same client again: the other one has nothing in
    assert subject.next_run(1.2) is None
    assert subject.wait(1.2) == pytest.approx(0.3)
    ask(subject, 2, 1, 5, [2], now=1.3)
    assert parts(subject.next_run(1.3)) == [(0, [0]), (1, [0])]
    assert subject.next_run(1.3) is None, "client 0 has nothing in now"
    assert parts(subject.next_run(1.8)) == [(2, [0])]


def test_there_is_nothing_to_wait_for_without_calls() -> None:
    subject = service(rule=EnoughPairs(pairs=10, wait=0.5))
    assert subject.wait(0.0) is None and subject.next_run(1e9) is None
    ask(subject, 0, 0, 3, [1], now=1.0)
    assert subject.wait(100.0) == 0.0


def test_a_client_waits_until_its_last_pair_runs() -> None:
    """Client 0's call runs in two groups and is half done. It still counts as waiting."""
    subject = service(groups=EXPERTS, rule=EnoughPairs(pairs=3, wait=9.0))
    ask(subject, 0, 0, 3, [0, 1, 1])
    assert parts(subject.next_run(0.0)) == [(0, [1, 2])]
    ask(subject, 1, 1, 3, [2])
    assert parts(subject.next_run(0.0)) == [(0, [0])]
    assert subject.next_run(0.0) is None, "one pair, and client 0 does not wait"


# ---- clients that leave


def test_the_calls_of_a_client_that_left_are_not_computed() -> None:
    subject = service(groups=EXPERTS)
    ask(subject, 0, 0, 3, [2, 0])
    ask(subject, 1, 1, 3, [2])
    subject.client_left(0)
    assert subject.waiting_pairs == 1
    assert parts(subject.next_run(0.0)) == [(1, [0])] and subject.next_run(0.0) is None


def test_nobody_waits_for_a_client_that_left() -> None:
    subject = service(rule=EnoughPairs(pairs=10, wait=9.0))
    ask(subject, 0, 0, 3, [1])
    assert subject.next_run(0.0) is None
    subject.client_left(1)
    assert parts(subject.next_run(0.0)) == [(0, [0])]


def test_nobody_waits_for_a_client_that_paused() -> None:
    subject = service(rule=EnoughPairs(pairs=99, wait=1.0))
    subject.client_paused(1)
    ask(subject, 0, 0, 3, [1])
    assert parts(subject.next_run(0.0)) == [(0, [0])]
    subject.client_joined(1)
    ask(subject, 1, 0, 5, [1])
    assert subject.next_run(0.0) is None


def test_a_client_leaves_in_the_middle_of_its_call() -> None:
    """One group of call 0 has run. The rest of the call is forgotten, and leaving twice changes nothing."""
    subject = service(groups=EXPERTS)
    ask(subject, 0, 0, 3, [2, 2, 0])
    assert parts(subject.next_run(0.0)) == [(0, [0, 1])]
    subject.client_left(0)
    subject.client_left(0)
    assert subject.next_run(0.0) is None and subject.waiting_pairs == 0


# ---- any traffic


@dataclass
class Asked:
    """A call that a client sent."""

    client: int
    layer: int
    experts: list[int]
    computed: Counter[int] = field(default_factory=Counter)


class ServiceMachine(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from([1, EXPERTS]),
        pairs=st.integers(1, 6),
        wait=st.sampled_from([0.0, 2.0]),
        small=st.booleans(),
        alone=st.integers(0, 3),
    )
    def start(self, groups: int, pairs: int, wait: float, small: bool, alone: int) -> None:
        """alone: pairs from which a queue runs alone."""
        rule = WaitForSmallCalls(pairs, wait, runs=2.0) if small else EnoughPairs(pairs, wait)
        self.groups = groups if alone < 2 else 1
        self.subject = ExpertServerScheduler(
            LAYERS, MostTokensFirst(), rule, groups, lambda queues, busy: min(queues) >= alone
        )
        self.now, self.calls, self.clients = 0.0, dict[int, Asked](), set[int]()

    @rule(client=st.integers(0, 3))
    def join(self, client: int) -> None:
        self.clients.add(client)
        self.subject.client_joined(client)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), layer=st.sampled_from(LAYERS))
    def call(self, data: st.DataObject, layer: int) -> None:
        client = data.draw(st.sampled_from(sorted(self.clients)))
        experts = data.draw(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=6))
        self.calls[len(self.calls)] = Asked(client, layer, experts)
        ask(self.subject, len(self.calls) - 1, client, layer, experts, self.now)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        client = data.draw(st.sampled_from(sorted(self.clients)))
        self.clients.discard(client)
        self.subject.client_left(client)
        for number, asked in self.calls.items():
            if asked.client == client:
                self.calls[number] = Asked(client, asked.layer, [])

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0]))
    def run(self, seconds: float) -> None:
        self.compute(seconds)

    def compute(self, seconds: float) -> bool:
        self.now += seconds
        run = self.subject.next_run(self.now)
        if run is None:
            return False
        assert len(run.parts) == len(dict(run.parts)) > 0
        together = set()
        for number, pairs in run.parts:
            asked = self.calls[number]
            assert asked.layer == run.layer and asked.client in self.clients
            asked.computed.update(pairs.tolist())
            together |= {asked.experts[pair] for pair in pairs.tolist()}
        assert self.groups == 1 or len(together) == 1
        return True

    @invariant()
    def counts_what_waits(self) -> None:
        if not hasattr(self, "subject"):
            return
        left = sum(len(asked.experts) - asked.computed.total() for asked in self.calls.values())
        assert self.subject.waiting_pairs == left
        assert (self.subject.wait(self.now) is None) == (left == 0)

    def teardown(self) -> None:
        if not hasattr(self, "subject"):
            return
        while self.compute(10.0):
            pass
        for asked in self.calls.values():
            assert asked.computed == Counter(range(len(asked.experts))), "each pair runs once"
        subject = self.subject
        assert not subject._queues and not subject._client and not subject._left and not subject._waiting


@pytest.mark.slow
def test_every_pair_of_clients_that_stay_runs_once() -> None:
    quiet = settings(max_examples=60, stateful_step_count=20, derandomize=True, deadline=None)
    run_state_machine_as_test(ServiceMachine, settings=quiet)


def test_a_client_that_was_waited_for_in_vain_is_not_waited_for_at_the_next_layer() -> None:
    subject = service(rule=EnoughPairs(pairs=99, wait=1.0))
    ask(subject, 0, 0, 3, [1], now=0.0)
    assert subject.next_run(0.5) is None
    assert parts(subject.next_run(1.0)) == [(0, [0])]
    ask(subject, 1, 0, 5, [1], now=1.0)
    assert parts(subject.next_run(1.0)) == [(1, [0])], "client 1 has not come back"
    subject.client_joined(1)
    ask(subject, 2, 1, 3, [1], now=2.0)
    assert subject.next_run(2.0) is None, "now there are two again"


# ---- replay


@dataclass
class Recorded:
    """A scheduler that records each method call, its arguments and its result."""

    subject: ExpertServerScheduler
    log: list[tuple[str, tuple[Any, ...], object]] = field(default_factory=list)

    def tell(self, name: str, *arguments: Any) -> Any:
        answer = getattr(self.subject, name)(*arguments)
        self.log.append((name, arguments, answer))
        return answer


def traffic(recorded: Recorded, turns: int) -> None:
    """Four clients join, call and leave at any moment. The scheduler runs whenever it can."""
    rng, now, calls, clients = Random(5), 0.0, 0, set[int]()
    for _ in range(turns):
        now += rng.choice([0.0, 0.1, 0.7])
        client = rng.randrange(4)
        if client not in clients or rng.random() < 0.05:
            clients ^= {client}
            recorded.tell("client_joined" if client in clients else "client_left", client)
        else:
            experts = np.array([rng.randrange(EXPERTS) for _ in range(rng.randrange(5))], dtype=np.int32)
            recorded.tell("add_call", calls, client, rng.choice(LAYERS), experts, now)
            calls += 1
        if rng.random() < 0.5:
            recorded.tell("next_run", now)
            recorded.tell("wait", now)


def replayed(subject: ExpertServerScheduler, log: list[tuple[str, tuple[Any, ...], object]]) -> bool:
    """Whether a new scheduler gives the recorded results."""
    return all(equal(getattr(subject, name)(*arguments), answer) for name, arguments, answer in log)


@pytest.mark.parametrize("groups", [1, EXPERTS])
@pytest.mark.parametrize("policy", [MostTokensFirst, FirstLayerFirst, Defrag])
def test_replay_gives_the_same_runs(groups: int, policy: type[QueuePolicy]) -> None:
    def fresh(pairs: int = 6) -> ExpertServerScheduler:
        return service(groups, EnoughPairs(pairs, 0.5), policy(), clients=0)

    recorded = Recorded(fresh())
    traffic(recorded, 300)
    runs = [answer for _, _, answer in recorded.log if isinstance(answer, Run)]
    assert len(runs) > 20 and max(len(run.parts) for run in runs) > 1
    assert replayed(fresh(), recorded.log)
    assert not replayed(fresh(pairs=1), recorded.log)


def test_a_server_that_waits_while_it_pays_keeps_what_it_decided_for_some_runs() -> None:
    asked: list[int] = []

    def pays(waiting: Waiting) -> bool:
        asked.append(waiting.runs)
        return not asked[1:]

    rule = WaitByCurves(pays, 0.5, 3.0, WaitForSmallCalls(8, 0.2, 1.0))
    known = Waiting(8, 8.0, 2, 1)
    assert not rule.ready(known) and rule.ready(replace(known, waiting_clients=2))
    assert [rule.patience(took) for took in (0.1, 9.0)] == [pytest.approx(0.3), 0.5]
    assert not rule.ready(replace(known, runs=DECISION_RUNS - 1)) and rule.ready(
        replace(known, runs=DECISION_RUNS)
    )
    assert asked == [0, DECISION_RUNS]
    assert not rule.ready(replace(known, mean_call=7.0, runs=DECISION_RUNS))
    assert [rule.patience(took) for took in (0.1, 9.0)] == [pytest.approx(0.1), 0.2]


def test_what_a_server_knows_of_its_clients_times() -> None:
    """Two clients are answered together and call again 2 s later, for ten runs of 1 s."""
    seen: list[Waiting] = []

    class Rule(EnoughPairs):
        def ready(self, waiting: Waiting) -> bool:
            seen.append(waiting)
            return super().ready(waiting)

    subject = ExpertServerScheduler(LAYERS, FirstLayerFirst(), Rule(99, 99.0))
    for client in range(2):
        subject.client_joined(client)
    for turn in range(10):
        for client in range(2):
            ask(subject, 2 * turn + client, client, 3, [1, 2], now=3.0 * turn)
        assert subject.next_run(3.0 * turn) is not None
        assert subject.next_run(3.0 * turn + 1.0) is None
    assert seen[0].away_seconds == 0.0 and seen[-1].away_seconds == pytest.approx(2.0)
    assert seen[-1].in_step and seen[-1].runs == 9
    assert seen[-1].calls == [2.0 * (layer == 3) for layer in LAYERS]
    assert subject._busy == pytest.approx(1 / 3, abs=0.15)

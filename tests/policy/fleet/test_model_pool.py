"""Which models are loaded: laws that hold after every event, and examples of each rule."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moesaic.policy.fleet.model_pool import (
    TAKES_ROOM,
    Action,
    Admit,
    Load,
    Measure,
    ModelPool,
    ModelState,
    Refuse,
    Unload,
)

NAMES = ("a", "b", "c", "d")
NEEDS = dict(zip(NAMES, (3, 5, 7, 20), strict=True))
CAPACITY = 12
"""Room for some pairs, and less than "d" needs."""


class Server(RuleBasedStateMachine):
    """A pool, and everything that a server would do for it, in any order."""

    @initialize(
        max_loaded=st.integers(1, 3),
        idle=st.sampled_from([None, 5.0]),
        preload=st.lists(st.sampled_from(NAMES)),
    )
    def start(self, max_loaded: int, idle: float | None, preload: list[str]) -> None:
        self.now = 0.0
        self.max_loaded = max_loaded
        self.pool = ModelPool(NAMES, max_loaded, CAPACITY, idle)
        self.measuring: set[str] = set()
        self.loading: set[str] = set()
        self.loaded: set[str] = set()
        self.ending: set[str] = set()
        self.waiting: dict[int, str] = {}
        self.running: dict[int, str] = {}
        self.count = 0
        self.carry_out(self.pool.preload(preload, self.now))

    def carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Measure(name):
                    assert not self.measuring and not self.loading  # one at a time
                    self.measuring.add(name)
                case Load(name):
                    assert not self.measuring and not self.loading
                    assert name not in self.loaded | self.ending
                    self.loading.add(name)
                case Unload(name):
                    assert name not in self.running.values(), "a running request would be cut"
                    self.loading.discard(name)
                    self.loaded.discard(name)
                    self.ending.add(name)
                case Admit(ticket, name):
                    assert self.waiting.pop(ticket) == name
                    assert name in self.loaded
                    older = [
                        other for other, model in self.waiting.items() if model == name and other < ticket
                    ]
                    assert not older, "requests of a model start in the order of their arrival"
                    self.running[ticket] = name
                case Refuse(ticket, name):
                    assert self.waiting.pop(ticket) == name

    @rule(name=st.sampled_from(NAMES))
    def arrive(self, name: str) -> None:
        self.count += 1
        self.waiting[self.count] = name
        self.carry_out(self.pool.arrive(self.count, name, self.now))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[ticket]
        self.carry_out(self.pool.leave(ticket, self.now))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[ticket]
        self.carry_out(self.pool.leave(ticket, self.now))

    @rule(name=st.sampled_from(NAMES), is_load=st.booleans())
    def command(self, name: str, is_load: bool) -> None:
        self.carry_out((self.pool.want if is_load else self.pool.unload)(name, self.now))

    @precondition(lambda self: self.measuring)
    @rule(succeeds=st.booleans())
    def measured(self, succeeds: bool) -> None:
        name = self.measuring.pop()
        if succeeds:
            self.carry_out(self.pool.record_need(name, NEEDS[name], self.now))
        else:
            self.carry_out(self.pool.record_end(name, self.now))

    @precondition(lambda self: self.loading)
    @rule(succeeds=st.booleans())
    def load(self, succeeds: bool) -> None:
        name = self.loading.pop()
        if succeeds:
            self.loaded.add(name)
            self.carry_out(self.pool.record_loaded(name, NEEDS[name], self.now))
        else:
            self.carry_out(self.pool.record_end(name, self.now))

    @precondition(lambda self: self.ending)
    @rule()
    def end(self) -> None:
        name = min(self.ending)
        self.ending.remove(name)
        self.carry_out(self.pool.record_end(name, self.now))

    @precondition(lambda self: self.loaded)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.loaded)))
        self.loaded.remove(name)
        lost = [ticket for ticket, model in self.running.items() if model == name]
        for ticket in lost:
            del self.running[ticket]
        self.carry_out(self.pool.record_end(name, self.now))
        for ticket in lost:
            self.carry_out(self.pool.leave(ticket, self.now))

    @rule(seconds=st.sampled_from([0.5, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.pool.tick(self.now))

    @invariant()
    def never_more_than_allowed(self) -> None:
        taking = [model for model in self.pool.models.values() if model.state in TAKES_ROOM]
        assert {model.name for model in taking} == self.loading | self.loaded | self.ending
        assert len(taking) <= self.max_loaded
        assert len(taking) < 2 or sum(NEEDS[model.name] for model in taking) <= CAPACITY

    @invariant()
    def somebody_is_expected(self) -> None:
        """Whoever waits, waits for something that will happen."""
        if self.waiting:
            assert self.measuring or self.loading or self.ending or self.running

    def teardown(self) -> None:
        """Nobody starves: other requests never cease, and each waiting one is answered all the same."""
        if not hasattr(self, "pool"):
            return
        strangers = set(self.waiting)
        for _ in range(200):
            if not strangers & set(self.waiting):
                break
            for name in sorted(self.loaded):  # clients that keep a loaded model busy
                self.arrive(name)
            while self.measuring:
                self.measured(True)
            while self.loading:
                self.load(True)
            for ticket in sorted(self.running)[: max(1, len(self.running) // 2)]:
                del self.running[ticket]
                self.carry_out(self.pool.leave(ticket, self.now))
            while self.ending:
                self.end()
        assert not strangers & set(self.waiting), "starved"


Server.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestLaws = pytest.mark.slow(Server.TestCase)


def loaded_pool(max_loaded: int, *names: str, idle_seconds: float | None = None) -> ModelPool:
    """A pool in which `names` were loaded one after the other, at the times 0, 1, 2..."""
    pool = ModelPool(NAMES, max_loaded, idle_seconds=idle_seconds)
    for now, name in enumerate(names):
        assert pool.want(name, now) == [Measure(name)]
        assert pool.record_need(name, 1, now) == [Load(name)]
        assert pool.record_loaded(name, 1, now) == []
    return pool


def test_the_idle_model_that_was_used_least_recently_is_unloaded() -> None:
    pool = loaded_pool(2, "a", "b")
    assert pool.arrive(1, "a", 5) == [Admit(1, "a")] and pool.leave(1, 6) == []
    assert pool.arrive(2, "c", 7) == [Measure("c")]
    assert pool.record_need("c", 1, 7) == [Unload("b")]
    assert pool.record_end("b", 8) == [Load("c")]
    assert pool.record_loaded("c", 1, 9) == [Admit(2, "c")]


def test_a_busy_model_takes_no_further_requests_while_another_waits_for_its_room() -> None:
    pool = loaded_pool(1, "a")
    assert pool.arrive(1, "a", 1) == [Admit(1, "a")]
    pool.arrive(2, "b", 2)
    assert pool.record_need("b", 1, 2) == []
    assert pool.arrive(3, "a", 3) == []
    assert pool.arrive(4, "b", 3) == []
    assert pool.leave(1, 4) == [Unload("a")]
    assert pool.record_end("a", 5) == [Load("b")]
    # Those who wait for it start together, and the one for "a" comes before later ones for "b".
    assert pool.record_loaded("b", 1, 6) == [Admit(2, "b"), Admit(4, "b")]
    assert pool.arrive(5, "b", 7) == []
    assert pool.leave(2, 8) == [] and pool.leave(4, 8) == [Unload("b")]
    assert pool.record_end("b", 9) == [Load("a")]
    assert pool.record_loaded("a", 1, 10) == [Admit(3, "a")]


def test_a_model_takes_requests_again_when_the_one_that_waited_has_left() -> None:
    pool = loaded_pool(1, "a")
    pool.arrive(1, "a", 1)
    pool.arrive(2, "b", 2)
    pool.record_need("b", 1, 2)
    assert pool.arrive(3, "a", 3) == []
    assert pool.leave(2, 4) == [Admit(3, "a")]


def test_another_model_that_becomes_idle_makes_the_room_instead() -> None:
    pool = loaded_pool(2, "a", "b")
    pool.arrive(1, "a", 5)
    pool.arrive(2, "b", 6)
    pool.arrive(3, "c", 7)
    assert pool.record_need("c", 1, 7) == []
    assert pool.arrive(4, "a", 8) == []  # used least recently, so it yields
    assert pool.leave(2, 9) == [Unload("b"), Admit(4, "a")]


def test_idle_models_make_room_for_the_bytes_of_another() -> None:
    pool = ModelPool(NAMES, 3, capacity=10)
    for name, need in (("a", 4), ("b", 4), ("c", 7)):
        pool.want(name, 0)
        actions = pool.record_need(name, need, 0)
        if name != "c":
            assert actions == [Load(name)]
            pool.record_loaded(name, need, 0)
    assert actions == [Unload("a")]
    assert pool.record_end("a", 1) == [Unload("b")]
    assert pool.record_end("b", 1) == [Load("c")]


def test_preloading_unloads_nothing() -> None:
    pool = ModelPool(NAMES, 3, capacity=10)
    assert pool.preload(("a", "b", "c"), 0) == [Measure("a")]
    assert pool.record_need("a", 6, 0) == [Load("a")]
    assert pool.record_loaded("a", 6, 0) == [Measure("b")]
    assert pool.record_need("b", 6, 0) == []  # neither "b" nor what follows it
    assert pool.arrive(1, "b", 1) == [Unload("a")]


def test_a_failed_load_refuses_those_who_wait_for_it_and_the_next_request_tries_again() -> None:
    pool = loaded_pool(1)
    pool.arrive(1, "a", 0)
    pool.arrive(2, "b", 0)
    assert pool.record_need("a", 1, 0) == [Load("a")]
    assert pool.record_end("a", 1) == [Refuse(1, "a"), Measure("b")]
    pool.record_need("b", 1, 1)
    pool.record_loaded("b", 1, 1)
    pool.leave(2, 2)
    assert pool.arrive(3, "a", 3) == [Unload("b")]


def test_an_idle_model_is_unloaded_at_its_time() -> None:
    pool = loaded_pool(2, "a", "b", idle_seconds=10)
    assert pool.next_time == 10
    pool.arrive(1, "a", 9)
    assert pool.next_time == 11
    assert pool.tick(11) == [Unload("b")]
    assert pool.next_time is None
    pool.leave(1, 20)
    assert pool.tick(29) == [] and pool.tick(30) == [Unload("a")]


def test_unloading_waits_for_running_requests_and_later_ones_load_it_again() -> None:
    pool = loaded_pool(1, "a")
    pool.arrive(1, "a", 1)
    assert pool.unload("a", 2) == []
    assert pool.models["a"].state is ModelState.DRAINING
    assert pool.arrive(2, "a", 3) == []
    assert pool.leave(1, 4) == [Unload("a")]
    assert pool.record_end("a", 5) == [Load("a")]
    assert pool.record_loaded("a", 1, 6) == [Admit(2, "a")]


def test_unloading_ends_a_load() -> None:
    pool = ModelPool(NAMES, 1)
    pool.want("a", 0)
    pool.record_need("a", 1, 0)
    assert pool.unload("a", 1) == [Unload("a")]
    assert pool.record_loaded("a", 1, 2) == []
    assert pool.record_end("a", 3) == [] and pool.models["a"].state is ModelState.UNLOADED

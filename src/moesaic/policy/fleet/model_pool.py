"""Decides which of several models are loaded: which loads next, which is unloaded, and which requests wait.

The rules:

- A request whose model is loaded starts at once. Any other request waits.
- One model loads at a time. It is the model of the request that has waited longest.
- If there is no room for it, the idle model that was used least recently is unloaded.
- If no model is idle, the busy model that was used least recently takes no further requests until it is idle
  or another model has made the room. So nobody waits for longer than the requests that run.
- Once a model is loaded, all requests that wait for it start, also those behind requests for other models.

A model with a running request is never unloaded.

Question: Which model is unloaded when another one is needed?
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field


class ModelState(enum.Enum):
    UNLOADED = "unloaded"
    MEASURING = "measuring"
    """Somebody finds out how much memory it needs. It has no process yet."""
    LOADING = "loading"
    LOADED = "loaded"
    DRAINING = "draining"
    """It was told to unload, and its last requests run."""
    UNLOADING = "unloading"
    """The process of the model ends."""


TAKES_ROOM = (ModelState.LOADING, ModelState.LOADED, ModelState.DRAINING, ModelState.UNLOADING)


@dataclass(frozen=True)
class Measure:
    """Find out how many bytes a model needs, and call `record_need`."""

    name: str


@dataclass(frozen=True)
class Load:
    """Start the process of a model, and call `record_loaded` or `record_end`."""

    name: str


@dataclass(frozen=True)
class Unload:
    """End the process of a model, which runs no request, and call `record_end`."""

    name: str


@dataclass(frozen=True)
class Admit:
    """Pass a request on to its model."""

    ticket: int
    name: str


@dataclass(frozen=True)
class Refuse:
    """Answer a request with an error: its model could not be loaded."""

    ticket: int
    name: str


Action = Measure | Load | Unload | Admit | Refuse


@dataclass
class PooledModel:
    """What the pool knows of one model."""

    name: str
    state: ModelState = ModelState.UNLOADED
    need: int | None = None
    """Bytes that it takes. None: nobody has measured it."""
    running: set[int] = field(default_factory=set)
    """The tickets of requests that it computes."""
    last_used: float = -math.inf
    """Time at which a request of it began or ended last, or at which it was loaded."""

    @property
    def is_idle(self) -> bool:
        return self.state is ModelState.LOADED and not self.running


class ModelPool:
    """The models of one server. Every method that takes `now` returns what is to be done, in order.

    Tickets are numbers of requests, each used once. The caller calls `leave` when a request has ended or was
    given up, whether it ran or waited. Tickets that the pool no longer knows are ignored.

    >>> pool = ModelPool(["a", "b"], max_loaded=1)
    >>> pool.arrive(1, "a", now=0.0), pool.record_need("a", 8, now=0.0), pool.record_loaded("a", 8, now=1.0)
    ([Measure(name='a')], [Load(name='a')], [Admit(ticket=1, name='a')])
    >>> pool.arrive(2, "b", now=2.0), pool.record_need("b", 8, now=2.0)
    ([Measure(name='b')], [])
    >>> pool.leave(1, now=3.0), pool.record_end("a", now=4.0)
    ([Unload(name='a')], [Load(name='b')])
    """

    def __init__(
        self,
        names: Sequence[str],
        max_loaded: int,
        capacity: float = math.inf,
        idle_seconds: float | None = None,
    ) -> None:
        """capacity: bytes that all loaded models may take together. A model that needs more is loaded when it
        is alone. idle_seconds: seconds after which an idle model is unloaded; None: it stays."""
        self.models = {name: PooledModel(name) for name in names}
        self._max_loaded = max_loaded
        self._capacity = capacity
        self._idle_seconds = idle_seconds
        self._waiting: dict[int | str, str] = {}
        """Ticket -> model, in the order of arrival. A wish of `want` has the model's name as its ticket."""
        self._preloads: list[str] = []
        """Models to load while nobody waits and there is room."""
        self._yielding: str | None = None
        """The busy model that takes no further requests, so that the next model gets its room."""

    def count_waiting(self, name: str) -> int:
        """The number of requests that wait for a model."""
        return sum(model == name and not isinstance(key, str) for key, model in self._waiting.items())

    def preload(self, names: Sequence[str], now: float) -> list[Action]:
        """Load these models in this order while there is room. Nothing is unloaded for them."""
        self._preloads = list(names)
        return self._decide(now)

    def arrive(self, ticket: int, name: str, now: float) -> list[Action]:
        """A request for a model has arrived."""
        model = self.models[name]
        if model.state is ModelState.LOADED and name != self._yielding:
            return [self._admit(ticket, model, now)]
        self._waiting[ticket] = name
        return self._decide(now)

    def leave(self, ticket: int, now: float) -> list[Action]:
        """A request has ended, or its client is gone. A load that has begun goes on."""
        self._waiting.pop(ticket, None)
        for model in self.models.values():
            if ticket in model.running:
                model.running.remove(ticket)
                model.last_used = now
                if model.state is ModelState.DRAINING and not model.running:
                    return [self._unload(model), *self._decide(now)]
        return self._decide(now)

    def want(self, name: str, now: float) -> list[Action]:
        """Load a model as if a request waited for it."""
        if self.models[name].state is not ModelState.LOADED:
            self._waiting.setdefault(name, name)
        return self._decide(now)

    def unload(self, name: str, now: float) -> list[Action]:
        """Unload a model once its running requests have ended. Requests that wait for it load it again."""
        model = self.models[name]
        self._waiting.pop(name, None)
        self._drop_preload(name)
        if name == self._yielding:
            self._yielding = None
        actions: list[Action] = []
        if model.state is ModelState.LOADING or model.is_idle:
            actions.append(self._unload(model))
        elif model.state is ModelState.LOADED:
            model.state = ModelState.DRAINING
        return [*actions, *self._decide(now)]

    def record_need(self, name: str, need: int, now: float) -> list[Action]:
        """A model needs so many bytes."""
        model = self.models[name]
        model.need = need
        if model.state is ModelState.MEASURING:
            model.state = ModelState.UNLOADED
        return self._decide(now)

    def record_loaded(self, name: str, need: int, now: float) -> list[Action]:
        """A model is loaded, and takes so many bytes. Whoever waits for it starts."""
        model = self.models[name]
        if model.state is not ModelState.LOADING:
            return []  # it was told to unload while it loaded
        model.state, model.need, model.last_used = ModelState.LOADED, need, now
        return [*self._admit_waiting(model, now), *self._decide(now)]

    def record_end(self, name: str, now: float) -> list[Action]:
        """The process of a model has ended, or could not be started.

        Those who waited for its load are refused. Requests that it computed are forgotten: the caller tells
        them.
        """
        model = self.models[name]
        has_failed = model.state in (ModelState.MEASURING, ModelState.LOADING)
        model.state = ModelState.UNLOADED
        model.running.clear()
        if name == self._yielding:
            self._yielding = None
        actions: list[Action] = []
        if has_failed:
            tickets = [key for key, model_name in self._waiting.items() if model_name == name]
            for key in tickets:
                del self._waiting[key]
            self._drop_preload(name)
            actions = [Refuse(key, name) for key in tickets if not isinstance(key, str)]
        return [*actions, *self._decide(now)]

    def tick(self, now: float) -> list[Action]:
        """Unload models that were idle for long enough. Call it at `next_time`."""
        idle_seconds = self._idle_seconds
        if idle_seconds is None:
            return []
        idle_models = [model for model in self.models.values() if model.is_idle]
        return [self._unload(model) for model in idle_models if now - model.last_used >= idle_seconds]

    @property
    def next_time(self) -> float | None:
        """Time at which `tick` will have something to do. None if it never will as things are."""
        times = [model.last_used for model in self.models.values() if model.is_idle]
        return None if self._idle_seconds is None or not times else min(times) + self._idle_seconds

    def _decide(self, now: float) -> list[Action]:
        """What can be done for the request that has waited longest."""
        if any(model.state in (ModelState.MEASURING, ModelState.LOADING) for model in self.models.values()):
            return self._reopen(now)
        next_model = self._find_next()
        if next_model is None:
            return [*self._reopen(now), *self._preload_next()]
        if next_model.need is None:
            next_model.state = ModelState.MEASURING
            return [*self._reopen(now), Measure(next_model.name)]
        if self._has_room(next_model):
            next_model.state = ModelState.LOADING
            return [Load(next_model.name), *self._reopen(now)]
        if any(model.state is ModelState.UNLOADING for model in self.models.values()):
            return []  # what it leaves may be enough
        return self._make_room(now)

    def _find_next(self) -> PooledModel | None:
        """The model that the longest waiting request needs and that has no process."""
        wanted_models = (self.models[name] for name in self._waiting.values())
        return next((model for model in wanted_models if model.state is ModelState.UNLOADED), None)

    def _has_room(self, model: PooledModel) -> bool:
        neighbours = [neighbour for neighbour in self.models.values() if neighbour.state in TAKES_ROOM]
        num_bytes = (model.need or 0) + sum(neighbour.need or 0 for neighbour in neighbours)
        fits = not neighbours or num_bytes <= self._capacity
        return len(neighbours) < self._max_loaded and fits

    def _make_room(self, now: float) -> list[Action]:
        """Unload the idle model that was used least recently, or let a busy one become idle."""
        loaded_models = [model for model in self.models.values() if model.state is ModelState.LOADED]
        idle_models = [model for model in loaded_models if model.is_idle]
        if idle_models:
            oldest = min(idle_models, key=lambda model: model.last_used)
            unloading: list[Action] = [self._unload(oldest)]
            return [*unloading, *self._reopen(now)]
        if self._yielding is None and loaded_models:
            self._yielding = min(loaded_models, key=lambda model: model.last_used).name
        return []

    def _preload_next(self) -> list[Action]:
        """Load the next model of `preload`, if there is room. Otherwise none of the rest is loaded."""
        while self._preloads:
            model = self.models[self._preloads[0]]
            if model.state is not ModelState.UNLOADED:
                self._preloads.pop(0)
            elif model.need is None:
                model.state = ModelState.MEASURING
                return [Measure(model.name)]
            elif self._has_room(model):
                model.state = ModelState.LOADING
                return [Load(model.name)]
            else:
                self._preloads.clear()
        return []

    def _drop_preload(self, name: str) -> None:
        self._preloads = [preload for preload in self._preloads if preload != name]

    def _reopen(self, now: float) -> list[Action]:
        """Let the model that took no further requests take them again."""
        name, self._yielding = self._yielding, None
        return [] if name is None else self._admit_waiting(self.models[name], now)

    def _admit_waiting(self, model: PooledModel, now: float) -> list[Action]:
        if model.state is not ModelState.LOADED:
            return []
        keys = [key for key, name in self._waiting.items() if name == model.name]
        for key in keys:
            del self._waiting[key]
        return [self._admit(key, model, now) for key in keys if not isinstance(key, str)]

    def _admit(self, ticket: int, model: PooledModel, now: float) -> Action:
        model.running.add(ticket)
        model.last_used = now
        return Admit(ticket, model.name)

    def _unload(self, model: PooledModel) -> Action:
        model.state = ModelState.UNLOADING
        return Unload(model.name)

"""Renderers that are ready before they are needed."""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from moesaic.core.errors import ConnectionLost, RendererError, RequestError, TemplateError
from moesaic.text.templates import frames
from moesaic.text.templates.renderer import Limits, Renderer

MAX_RENDERINGS = 4
"""Maximum number of conversations that are rendered at a time."""
_ATTEMPTS = 2
"""Number of renderers that a conversation may lose. Somebody else may have killed the first."""


class Renderers:
    """Processes that render one chat template, each for one conversation at a time. Any thread may use them.

    At the first conversation a second process is started, and further ones as long as all others are busy.
    So a process that is ended for one conversation is replaced before the next one needs it. All of them end
    with this object.
    """

    def __init__(self, source: str, limits: Limits = Limits()) -> None:
        """Compile the template `source` in a first process.

        Raises TemplateError if it cannot be compiled, and RendererError if no process can be started.
        """
        self.limits = limits
        self._source = source
        self._turns = threading.BoundedSemaphore(MAX_RENDERINGS)  # one process stays ready
        self._condition = threading.Condition()
        self._warm: list[Renderer] = []
        self._count = 0
        """Number of processes that run or start."""
        self._starting = 0
        self._failure: RendererError | TemplateError | None = None
        """Why the last start failed."""
        self._alive: set[Renderer] = set()
        self._ending = weakref.finalize(self, _end, self._alive)
        first = Renderer(source, limits)
        self._alive.add(first)
        self._warm.append(first)
        self._count = 1

    def render(self, variables: Mapping[str, Any], max_characters: int | None = None) -> str:
        """The text of the template with `variables`. max_characters: its maximum length in characters.

        Waits while AT_ONCE other conversations are rendered. Raises TemplateError if the template fails or
        reaches a limit, RequestError for a variable that is not JSON, and RendererError if no process can be
        started. If a process is killed meanwhile, another one renders the conversation again, once.
        """
        max_characters = self.limits.characters if max_characters is None else max_characters
        request = _message(variables, max_characters)
        with self._turns:
            return self._render(request, max_characters)

    def close(self) -> None:
        """End all processes. A conversation that is rendered now, or later, gets a RendererError."""
        with self._condition:
            self._ending()
            self._warm.clear()
            self._condition.notify_all()

    def _render(self, request: bytes, max_characters: int) -> str:
        end_reason = ""
        for _ in range(_ATTEMPTS):
            renderer = self._take()
            try:
                text = renderer.render(request, max_characters)
            except ConnectionLost as lost:
                self._discard(renderer)
                end_reason = str(lost)
            except TemplateError as error:
                (self._discard if error.fatal else self._give_back)(renderer)
                raise
            except BaseException:  # such as Ctrl-C: its answer is still on the way
                self._discard(renderer)
                raise
            else:
                self._give_back(renderer)
                return text
        raise TemplateError(f"ended {_ATTEMPTS} processes; the last one: {end_reason}", fatal=True)

    def _take(self) -> Renderer:
        with self._condition:
            if self._ending.alive:
                self._prepare()
            while not self._warm:
                if not self._ending.alive:
                    raise RendererError("the processes that render chat templates have been ended")
                if not self._count:
                    raise RendererError(f"no process can render chat templates: {self._failure}")
                self._condition.wait()
            if self._ending.alive:
                self._prepare()  # again: others may have come while this conversation waited
            return self._warm.pop()

    def _prepare(self) -> None:
        """Start a process in the background if this conversation takes the last one that is ready."""
        if len(self._warm) + self._starting < 2 and self._count < MAX_RENDERINGS + 1:
            self._count += 1
            self._starting += 1
            threading.Thread(target=self._start, name="renderer-start", daemon=True).start()

    def _start(self) -> None:
        renderer: Renderer | None = None
        failure: RendererError | TemplateError | None = None
        try:
            renderer = Renderer(self._source, self.limits)
        except (RendererError, TemplateError) as error:
            failure = error
        finally:
            with self._condition:
                self._starting -= 1
                self._count -= renderer is None
                self._failure = failure
                self._condition.notify_all()
        if renderer is not None:
            self._add(renderer)

    def _add(self, renderer: Renderer) -> None:
        with self._condition:
            if self._ending.alive:
                self._alive.add(renderer)
                self._warm.append(renderer)
                self._condition.notify()
                return
        renderer.end()

    def _give_back(self, renderer: Renderer) -> None:
        with self._condition:
            if self._ending.alive:
                self._warm.append(renderer)
                self._condition.notify()

    def _discard(self, renderer: Renderer) -> None:
        """End a process and start another in its place."""
        renderer.end()
        with self._condition:
            self._alive.discard(renderer)
            self._count -= 1
            if self._ending.alive:
                self._prepare()
            self._condition.notify_all()


def _end(renderers: set[Renderer]) -> None:
    for renderer in list(renderers):
        renderer.end()


def _message(variables: Mapping[str, Any], max_characters: int) -> bytes:
    """The request of a rendering."""
    try:
        body = json.dumps({"most": max_characters, "variables": variables}, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        choices = "text, numbers, true, false, null, lists and objects"
        raise RequestError(f"messages: {error}; allowed: {choices}", "messages") from error
    return frames.pack(frames.RENDER, body.encode(*frames.CODING))

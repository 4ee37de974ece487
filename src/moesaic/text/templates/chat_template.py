"""A checkpoint's chat template: messages into the text of a prompt, in which every text of them arrives.

Question: What happens to a message that the chat template leaves out?
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moesaic.core.errors import RequestError, TemplateError
from moesaic.text.templates import content
from moesaic.text.templates.arrangement import Arrange, list_arrangements, list_missing, mark_texts
from moesaic.text.templates.pool import Renderers
from moesaic.text.templates.probe import (
    CONTENT_BESIDE_CALLS,
    INSTRUCTION_ROLES,
    SYSTEM,
    Arrivals,
    Message,
    probe,
)
from moesaic.text.templates.renderer import Limits


@dataclass(frozen=True)
class Options:
    """How a conversation is rendered."""

    add_generation_prompt: bool = True
    """End with the header of the answer."""
    continue_final_message: bool = False
    """End with the text of the last message, which the model then continues."""
    max_characters: int | None = None
    """Maximum length of the text."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""

    @property
    def tools(self) -> Sequence[Any]:
        tools = self.variables.get("tools")
        return tools if isinstance(tools, list | tuple) else ()


class ChatTemplate:
    """Renders conversations in processes of their own. Any thread may use it."""

    def __init__(self, source: str, limits: Limits, constants: Mapping[str, str]) -> None:
        """constants: variables that no request sets, such as bos_token.

        Raises TemplateError if the template cannot be compiled, and RendererError if no process can be
        started.
        """
        self._constants = constants
        self._renderers = Renderers(source, limits)
        self._probing = threading.Lock()
        self._arrivals: Arrivals | None = None

    @property
    def arrivals(self) -> Arrivals:
        """What the template does with messages. The template is tried when this is first asked for."""
        with self._probing:
            if self._arrivals is None:
                self._arrivals = probe(self._try)
            return self._arrivals

    def render(self, messages: Sequence[Message], options: Options) -> tuple[str, list[Message]]:
        """The text of a conversation, and the messages as the template got them.

        Instructions that the template would not take are moved (`arrangement`). Raises RequestError if the
        template refuses the messages, leaves the text of one out or reaches a limit.
        """
        self._check(messages, options)
        options = self._with_known_effort(options)
        refusal: RequestError | None = None
        fewest_missing: list[str] | None = None
        attempts: list[list[Message]] = []
        for arrange in self._list_arrangements(messages):
            arrange = _keep_last(arrange) if options.continue_final_message else arrange
            arrangement = arrange(messages)
            if arrangement in attempts:
                continue
            attempts.append(arrangement)
            try:
                text = self._render(arrangement, options)
            except TemplateError as error:
                if not error.is_refusal:
                    raise _make_error(error, options) from error
                refusal = refusal or _make_error(error, options)
                continue
            missing = self._list_missing(messages, options, text, arrange)
            if not missing:
                return text, arrangement
            if fewest_missing is None or len(missing) < len(fewest_missing):
                fewest_missing = missing
        if refusal is None:
            assert fewest_missing is not None
            refusal = _make_missing_error(fewest_missing[0], messages)
        raise refusal

    def render_exactly(self, messages: Sequence[Message], options: Options) -> str:
        """The text of messages that `render` has arranged."""
        try:
            return self._render(messages, self._with_known_effort(options))
        except TemplateError as error:
            raise _make_error(error, options) from error

    def close(self) -> None:
        """End the processes. Afterwards no conversation can be rendered."""
        self._renderers.close()

    def _check(self, messages: Sequence[Message], options: Options) -> None:
        """Raise RequestError for options that contradict each other or the conversation."""
        if options.continue_final_message:
            if options.add_generation_prompt:
                raise RequestError(
                    "continue_final_message: allowed only with add_generation_prompt false",
                    "continue_final_message",
                )
            content.mark_end(messages)
        for name in options.variables:
            if name in self._constants or name == "add_generation_prompt":
                raise RequestError(f"chat_template_kwargs: {name!r} cannot be set", "chat_template_kwargs")

    def _render(self, messages: Sequence[Message], options: Options) -> str:
        is_continued = options.continue_final_message
        # transformers always sets tools and documents
        variables = {"tools": None, "documents": None, **options.variables, **self._constants}
        text = self._renderers.render(
            variables
            | {
                "add_generation_prompt": options.add_generation_prompt,
                "messages": content.mark_end(messages) if is_continued else list(messages),
            },
            options.max_characters,
        )
        return content.cut_at_mark(text) if is_continued else text

    def _with_known_effort(self, options: Options) -> Options:
        """`options` with an effort that the template does not refuse."""
        effort = options.variables.get("reasoning_effort")
        known_effort = self.arrivals.efforts.get(effort) if isinstance(effort, str) else None
        if known_effort is None:
            return options
        return replace(options, variables={**options.variables, "reasoning_effort": known_effort})

    def _list_arrangements(self, messages: Sequence[Message]) -> Iterator[Arrange]:
        """Ways to arrange a conversation. The template is tried only if the first one may not do."""
        roles = [message.get("role") for message in messages]
        if not any(
            role in INSTRUCTION_ROLES and (number or role != SYSTEM) for number, role in enumerate(roles)
        ):
            yield list
        if any(role in INSTRUCTION_ROLES for role in roles):
            yield from list_arrangements(self.arrivals)

    def _try(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        return self._render(messages, Options(variables=variables))

    def _list_missing(
        self, messages: Sequence[Message], options: Options, text: str, arrange: Arrange
    ) -> list[str]:
        """The paths of texts that do not arrive, although the template does not leave out their kind."""
        paths = list_missing(messages, options.tools, text)
        if not paths:
            return []
        marked_messages, marked_tools, marks = mark_texts(messages, options.tools, paths)
        variables = {**options.variables, "tools": marked_tools} if options.tools else options.variables
        try:
            marked_options = replace(options, variables=variables)
            marked_text = self._render(arrange(marked_messages), marked_options).casefold()
        except TemplateError:  # the markers made the text too long, or the template refuses them
            marked_text = ""
        paths = [path for path in paths if marks[path] not in marked_text]
        if paths and CONTENT_BESIDE_CALLS in self.arrivals.left_out:
            beside_calls = {
                f"messages[{number}]" for number, message in enumerate(messages) if message.get("tool_calls")
            }
            paths = [path for path in paths if path not in beside_calls]
        return paths


def _keep_last(arrange: Arrange) -> Arrange:
    """`arrange` for a conversation whose last message the model continues: it stays where it is."""
    return lambda messages: [*arrange(messages[:-1]), *messages[-1:]]


def _make_error(error: TemplateError, options: Options) -> RequestError:
    outcome = f"refuses them: {error}" if error.is_refusal else str(error)
    code = "context_length_exceeded" if error.too_long and options.max_characters is not None else None
    return RequestError(f"messages: the chat template {outcome}", "messages", code)


def _make_missing_error(path: str, messages: Sequence[Message]) -> RequestError:
    field = path.partition("[")[0]
    number = path.removeprefix("messages[").partition("]")[0]
    role = f" of the role {str(messages[int(number)].get('role'))!r}" if field == "messages" else ""
    reason = f"the chat template of this model leaves this text{role} out"
    return RequestError(f"{path}: {reason}; allowed: a request without it, or --chat-template", field)

"""Every error that moesaic raises on purpose.

    MoesaicError
    ├── ConfigError         a flag, a field or a file is wrong: names it, its value, what is allowed
    │   └── CheckpointError a checkpoint is not understood: names the key or the tensor
    ├── RequestError        one request is wrong (HTTP 400)
    ├── TemplateError       a chat template failed or reached a limit; it becomes one of the errors above
    ├── RendererError       no process could be started to render a chat template (HTTP 503)
    ├── OverloadedError     the queue is full, try again later (HTTP 429)
    ├── ScalingError        the cluster could not be changed and is as before (HTTP 409 or 503)
    ├── ConnectionLost      the peer of a transport is gone
    │   └── DamagedMessage  the peer sent invalid data and is dropped
    ├── NonFiniteLogitsError the model's logits of one request were NaN or infinite (HTTP 500)
    └── EngineDeadError     the worker died: no request can be served any more (HTTP 503)

Any other exception that escapes is a bug in moesaic and keeps its traceback.
"""

from __future__ import annotations


class MoesaicError(Exception):
    """Base of all errors whose message is one clear line for the user."""


class ConfigError(MoesaicError):
    """A setting is wrong. The command line exits with code 2."""

    @classmethod
    def field(cls, name: str, value: object, allowed_values: str) -> ConfigError:
        """The one-line form: the field, its value, and what is allowed."""
        return cls(f"{name}: got {value!r}; allowed: {allowed_values}")


class CheckpointError(ConfigError):
    """A checkpoint lacks a key or a tensor, or has one that is not understood."""


class RequestError(MoesaicError):
    """The request is wrong. `field` is the parameter at fault, as the client spelled it."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class ContextLengthError(RequestError):
    """A prompt is too long for the context of the model.

    The texts have the words that clients look for, to compact a conversation or to read the numbers.
    """

    def __init__(
        self, prompt_tokens: int, new_tokens: int, limit: int, field: str = "prompt", is_bound: bool = False
    ) -> None:
        """new_tokens: of the answer. limit: the context length. is_bound: prompt_tokens is an upper bound."""
        self._numbers = (prompt_tokens, new_tokens, limit)
        self._is_bound = is_bound
        bound = "up to " if is_bound else ""
        super().__init__(
            f"{field}: this model's maximum context length is {limit} tokens. However, you requested {bound}"
            f"{prompt_tokens + new_tokens} tokens ({prompt_tokens} in the {field}, {new_tokens} in the "
            f"completion); shorten the {field} or the completion",
            field,
            "context_length_exceeded",
        )

    def in_field(self, field: str) -> ContextLengthError:
        """The same error about the field by which the client sent the prompt."""
        return ContextLengthError(*self._numbers, field, self._is_bound)

    @property
    def anthropic_message(self) -> str:
        """The error in the words of Anthropic's API."""
        prompt_tokens, new_tokens, limit = self._numbers
        bound = "up to " if self._is_bound else ""
        return f"prompt is too long: {bound}{prompt_tokens} tokens > {limit - new_tokens} maximum"


class TemplateError(MoesaicError):
    """A chat template failed. The message is a predicate, such as "ran for more than 5 seconds".

    is_refusal: the template or Jinja raised an error, and the message says which. too_long: the rendered text
    is longer than allowed. fatal: the process that rendered it is of no more use.
    """

    def __init__(
        self, message: str, *, is_refusal: bool = False, too_long: bool = False, fatal: bool = False
    ) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal
        self.too_long = too_long
        self.fatal = fatal


class RendererError(MoesaicError):
    """No process could be started to render a chat template."""


class OverloadedError(MoesaicError):
    """The waiting queue is full. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ScalingError(MoesaicError):
    """The cluster could not be changed and is as before.

    conflict: the requested change contradicts the cluster's state.
    """

    def __init__(self, message: str, conflict: bool = False) -> None:
        super().__init__(message)
        self.conflict = conflict


class ConnectionLost(MoesaicError):
    """The other end of a transport closed, died or sent invalid data."""

    def copy(self) -> ConnectionLost:
        """A copy of this error to raise.

        A stored error that is raised again would keep references to the frames of every traceback.
        """
        return type(self)(*self.args)


class DamagedMessage(ConnectionLost):
    """The other end sent invalid data. It is not moesaic, or it cannot be trusted any more."""


class NonFiniteLogitsError(MoesaicError):
    """The model's logits of one request were NaN or infinite. Other requests are not affected."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not finite (NaN or infinite), so no token can be sampled; "
            "the checkpoint may be damaged: see the log of the worker"
        )


class EngineDeadError(MoesaicError):
    """The worker is gone, and requests in flight cannot be finished."""

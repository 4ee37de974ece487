"""Every error that moesaic raises on purpose.

    MoesaicError
    ├── ConfigError         a flag, a field or a file is wrong: name it, its value, what is allowed
    │   └── CheckpointError a checkpoint is not understood: the key or the tensor is named
    ├── RequestError        one request is wrong (HTTP 400)
    ├── OverloadedError     the queue is full, try again later (HTTP 429)
    ├── ScalingError        the cluster could not be changed and is as it was (HTTP 409 or 503)
    ├── ConnectionLost      the peer of a transport is gone
    │   └── DamagedMessage  it is dropped: what it sent is no message
    └── EngineDeadError     the worker died: nothing can be served any more (HTTP 503)

Anything else that escapes is a bug of ours and keeps its traceback.
"""

from __future__ import annotations


class MoesaicError(Exception):
    """Base of all errors whose message is meant for a person: one clear line."""


class ConfigError(MoesaicError):
    """A setting is wrong. Exit code 2 on the command line."""

    @classmethod
    def field(cls, name: str, value: object, allowed: str) -> ConfigError:
        """The one-line form: which field, which value, what is allowed."""
        return cls(f"{name}: got {value!r}; allowed: {allowed}")


class CheckpointError(ConfigError):
    """A checkpoint holds a key or a tensor that is not understood, or lacks one."""


class RequestError(MoesaicError):
    """One request is wrong; `field` is the parameter to blame, as the client spelled it."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class OverloadedError(MoesaicError):
    """The waiting queue is full. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ScalingError(MoesaicError):
    """The cluster could not be changed and is as it was. `conflict`: what was asked contradicts its state."""

    def __init__(self, message: str, conflict: bool = False) -> None:
        super().__init__(message)
        self.conflict = conflict


class ConnectionLost(MoesaicError):
    """The other end of a transport closed, died or sent what is no message."""

    def again(self) -> ConnectionLost:
        """Its like, to raise. The traceback of an error that is kept would keep all who saw it raised."""
        return type(self)(*self.args)


class DamagedMessage(ConnectionLost):
    """The other end sent what is no message: none of ours, or not to be trusted any more."""


class EngineDeadError(MoesaicError):
    """The worker is gone; requests in flight cannot be finished."""

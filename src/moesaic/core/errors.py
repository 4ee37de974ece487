"""Every error that moesaic raises on purpose.

    MoesaicError
    ├── ConfigError         a flag, a field or a file is wrong: it names the value and what is allowed
    │   └── CheckpointError a checkpoint is not supported: it names the key or the tensor
    ├── RequestError        one request is wrong (HTTP 400)
    ├── OverloadedError     the queue is full, try again later (HTTP 429)
    ├── ScalingError        the cluster could not be changed and is as before (HTTP 409 or 503)
    ├── ConnectionLost      the peer of a transport is gone
    │   └── DamagedMessage  the peer sent something that is not a message, and is disconnected
    └── EngineDeadError     the worker died: nothing can be served any more (HTTP 503)

Any other exception that escapes is a bug of moesaic and keeps its traceback.
"""

from __future__ import annotations


class MoesaicError(Exception):
    """Base of all errors with a message for people: one clear line."""


class ConfigError(MoesaicError):
    """A setting is wrong. Exit code 2 on the command line."""

    @classmethod
    def field(cls, name: str, value: object, allowed: str) -> ConfigError:
        """An error of one line that names the field, the value and what is allowed."""
        return cls(f"{name}: got {value!r}; allowed: {allowed}")


class CheckpointError(ConfigError):
    """A checkpoint holds a key or a tensor that moesaic does not support, or lacks one that it needs."""


class RequestError(MoesaicError):
    """One request is wrong. `field` is the name of the wrong parameter, as the client wrote it."""

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
    """The cluster could not be changed and is as before. `conflict`: the request contradicts its state."""

    def __init__(self, message: str, conflict: bool = False) -> None:
        super().__init__(message)
        self.conflict = conflict


class ConnectionLost(MoesaicError):
    """The other end of a transport closed, died or sent something that is not a message."""

    def again(self) -> ConnectionLost:
        """A copy of the error, to be raised. A stored error that is raised again would keep its tracebacks
        alive."""
        return type(self)(*self.args)


class DamagedMessage(ConnectionLost):
    """The other end sent something that is not a message, or that cannot be trusted."""


class EngineDeadError(MoesaicError):
    """The worker is gone. Requests in flight cannot be finished."""

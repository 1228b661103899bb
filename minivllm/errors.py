"""Every exception that minivllm raises on purpose.

    MinivllmError
    ├── ConfigError                a setting is wrong: names the field and the value
    │   └── UnknownConfigKeyError  no such setting; offers the nearest name
    ├── ModelError                 a model cannot be used: names the file, tensor or architecture
    │   ├── ModelNotFoundError
    │   ├── CorruptFileError       a truncated or damaged safetensors or GGUF file
    │   ├── WeightsError           a tensor is missing, unexpected or of the wrong shape
    │   └── UnsupportedArchitectureError
    ├── RequestError               one request is invalid: names the field and the value
    │   ├── EmptyPromptError
    │   ├── TokenIdError
    │   ├── PromptTooLongError     longer than the model's context
    │   ├── RequestTooLargeError   could never fit in the KV cache
    │   └── DuplicateRequestError
    ├── EngineBusyError            the queue is full: nothing was done, try again later
    ├── EngineClosedError          not started, shut down, or asleep: nothing can be asked now
    ├── EngineDead                 the engine stopped for a reason that is not the caller's
    ├── WorkerError                a worker died or failed; carries the end of its stderr
    └── ServerError                a server that was asked refused, failed or cannot be reached

Whoever catches `MinivllmError` has caught them all. A `RequestError` costs nobody but its sender
anything; a `ConfigError` or `ModelError` ends a start, or a later call that then changes nothing.
Errors cross the process wall by name and text (`to_wire`, `from_wire`): nothing is pickled.
"""

from __future__ import annotations

from typing import Any

_MAX_SHOWN = 200  # characters of a value


class MinivllmError(Exception):
    """Base of the tree drawn above."""


class _FieldError(MinivllmError):
    """An error about one field: `field`, `value` and the rule that was broken.

    >>> str(ConfigError("block_size", 0, "must be at least 1"))
    'block_size must be at least 1, got 0'
    """

    def __init__(self, field: str, value: Any, rule: str) -> None:
        is_long = isinstance(value, str | bytes | list | tuple) and len(value) > _MAX_SHOWN
        shown = repr(value[:_MAX_SHOWN] if is_long else value)  # the rest would not be shown
        if len(shown) > _MAX_SHOWN:
            shown = shown[:_MAX_SHOWN] + "..."
        super().__init__(f"{field} {rule}, got {shown}")
        self.field = field
        self.value = value


class ConfigError(_FieldError):
    """A setting has a value that cannot work."""


class UnknownConfigKeyError(ConfigError):
    """A setting that does not exist."""


class ModelError(MinivllmError):
    """A model's files cannot be used as they are."""


class ModelNotFoundError(ModelError):
    """Neither a directory, nor a GGUF file, nor a repository that can be fetched."""


class CorruptFileError(ModelError):
    """A weight file or a recording that ends early or contradicts itself."""


class WeightsError(ModelError):
    """The tensors in the files are not the tensors of the architecture."""


class UnsupportedArchitectureError(ModelError):
    """`config.json` names an architecture that is not in the table."""


class RequestError(_FieldError):
    """One request is invalid."""


class EmptyPromptError(RequestError):
    """A prompt without a single token."""


class TokenIdError(RequestError):
    """A token id outside the vocabulary."""


class PromptTooLongError(RequestError):
    """A prompt that leaves no room for one new token in the model's context."""


class RequestTooLargeError(RequestError):
    """A prompt whose KV could never fit in the whole block pool."""


class DuplicateRequestError(RequestError):
    """A request id that is in use."""


class EngineBusyError(MinivllmError):
    """The engine has as many requests, or prompt tokens, as its config lets it queue: as many as
    the setting `limit` says."""

    def __init__(self, limit: str, text: str) -> None:
        super().__init__(text)
        self.limit = limit


class EngineClosedError(MinivllmError):
    """The engine has not been started, was shut down, or sleeps."""


class EngineDead(MinivllmError):
    """The engine cannot go on; the cause is chained."""


class WorkerError(MinivllmError):
    """A worker process (or the inline worker) failed."""


class ServerError(MinivllmError):
    """A server that was asked over HTTP refused, failed or could not be reached."""


def to_wire(error: BaseException) -> tuple[str, str]:
    """Name and text of `error`, for a frame on a socket."""
    return type(error).__name__, str(error)


def from_wire(name: str, text: str) -> MinivllmError:
    """The error that `to_wire` described; an unknown class becomes a `WorkerError`.

    >>> from_wire("CorruptFileError", "x.gguf ends early")
    CorruptFileError('x.gguf ends early')
    >>> from_wire("KeyError", "'x'")
    WorkerError("KeyError: 'x'")
    """
    cls = globals().get(name)
    if isinstance(cls, type) and issubclass(cls, MinivllmError):
        error = cls.__new__(cls)  # past __init__: field errors are built from parts, this is whole
        Exception.__init__(error, text)
        return error
    return WorkerError(f"{name}: {text}" if text else name)

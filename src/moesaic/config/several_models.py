"""Several models behind one server: which are given, and when they are loaded and unloaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from moesaic.config.values import at_least
from moesaic.core.errors import ConfigError


@dataclass(frozen=True)
class NamedModel:
    """A model as a command line gives it."""

    names: tuple[str, ...]
    """The names of the model in the API. The first one is in answers."""
    source: str
    """Where it is, as `ModelConfig.model` takes it."""

    @classmethod
    def parse(cls, text: str) -> NamedModel:
        """Read MODEL, NAME=MODEL or NAME,NAME=MODEL. Raises ConfigError for an empty name or model.

        A path with = in it is a path: a name has no slash, and nothing may be there under the whole text.

        >>> NamedModel.parse("coder,default=org/coder-moe")
        NamedModel(names=('coder', 'default'), source='org/coder-moe')
        """
        name_text, equals, source = text.partition("=")
        if not equals or "/" in name_text or Path(text).exists():
            return cls((text,), text)
        names = tuple(name.strip() for name in name_text.split(","))
        if not source or not all(names):
            raise ConfigError.field("MODEL", text, "MODEL, NAME=MODEL or NAME,NAME=MODEL")
        return cls(names, source)


@dataclass(frozen=True)
class SeveralModelsConfig:
    """Further models of `moesaic serve`, and which are in memory."""

    models: tuple[str, ...] = ()
    """Further models, each in a process of its own that gets the same flags. A request names its model. MODEL
    and these may have the form NAME=MODEL, or NAME,NAME=MODEL; a model without a name is called as it is
    given."""
    _: KW_ONLY
    max_loaded: int | None = None
    """Maximum number of models that are loaded at the same time. For another one the idle model that was used
    least recently is unloaded. None: all, as far as they fit into memory; one on a GPU whose
    --kv-cache-memory is auto."""
    load_wait: float | None = None
    """Maximum seconds that a request waits until its model is loaded. Then it gets status 503. 0: at once.
    None: as long as its client waits."""
    idle_unload: float | None = None
    """Seconds after its last request after which a model is unloaded, also the only one. The next request
    loads it again. None: models stay."""
    preload: bool = True
    """Load models at the start, in their order, as far as there is room. Otherwise the first request of each
    loads it."""

    def __post_init__(self) -> None:
        if self.max_loaded is not None:
            at_least("--max-loaded", self.max_loaded, 1)
        if self.load_wait is not None and not 0 <= self.load_wait < math.inf:
            raise ConfigError.field("--load-wait", self.load_wait, "a number of seconds of at least 0")
        if self.idle_unload is not None and not 0 < self.idle_unload < math.inf:
            raise ConfigError.field("--idle-unload", self.idle_unload, "a positive number of seconds")

    @property
    def is_wanted(self) -> bool:
        """Whether models are loaded and unloaded. Otherwise one model is loaded and stays."""
        return self != SeveralModelsConfig()


def parse_models(texts: Sequence[str]) -> list[NamedModel]:
    """The models of a command line. Raises ConfigError for a name that two of them have."""
    models = [NamedModel.parse(text) for text in texts]
    names = [name for model in models for name in model.names]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError.field("MODEL", name, "models with different names, such as a=MODEL b=MODEL")
    return models

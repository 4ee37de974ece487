"""moesaic: serves Mixture-of-Experts language models, with the experts as services.

Each public name is loaded on first use, so importing the package is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from moesaic.core.version import __version__

if TYPE_CHECKING:
    from moesaic.core.errors import MoesaicError
    from moesaic.core.request import RequestOutput, SamplingParams
    from moesaic.core.structured_outputs import StructuredOutputsParams
    from moesaic.llm import LLM

__all__ = ["LLM", "MoesaicError", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__"]

_MODULES = {
    "LLM": "moesaic.llm",
    "MoesaicError": "moesaic.core.errors",
    "RequestOutput": "moesaic.core.request",
    "SamplingParams": "moesaic.core.request",
    "StructuredOutputsParams": "moesaic.core.structured_outputs",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'moesaic' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

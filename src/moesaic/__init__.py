"""moesaic: Mixture-of-Experts language models served with the experts as services.

Public names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moesaic.core.errors import MoesaicError
    from moesaic.core.request import RequestOutput, SamplingParams
    from moesaic.llm import LLM

__version__ = "0.2.0"
__all__ = ["LLM", "MoesaicError", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "moesaic.llm",
    "MoesaicError": "moesaic.core.errors",
    "RequestOutput": "moesaic.core.request",
    "SamplingParams": "moesaic.core.request",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'moesaic' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

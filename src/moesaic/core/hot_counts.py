"""The text of a list of hot experts: how often each expert of a model was chosen, layer by layer.

    {"format": 1, "model": "8c1f...", "counts": {"0": [12.5, 0, ...], ...}}

The model is the fingerprint of its checkpoint (`models.fingerprint.origin`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

FORMAT = 1
CountsByLayer = dict[int, list[float]]


def to_text(model: str, counts: Mapping[int, Sequence[float]]) -> str:
    """The text of the list. counts: layer -> [E]."""
    layers = {str(layer): [round(count, 3) for count in numbers] for layer, numbers in counts.items()}
    return json.dumps({"format": FORMAT, "model": model, "counts": layers})


def parse(text: str, model: str, layers: Sequence[int], num_experts: int) -> CountsByLayer:
    """The counts in a list of this model. Some layers may be missing.

    layers: those with routed experts. Raises ValueError with one line for what is no list of this model.
    """
    content: Any = json.loads(text)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"got no format; allowed: a list of hot experts of format {FORMAT}")
    if content.get("model") != model:
        raise ValueError(f"model: got {content.get('model')!r}; allowed: {model}, which is served")
    names = {str(layer): layer for layer in layers}
    counts = content.get("counts")
    if not isinstance(counts, dict) or not counts.keys() <= names.keys():
        raise ValueError("counts: got other layers; allowed: those with routed experts")
    for layer, numbers in counts.items():
        if not _are_counts(numbers, num_experts):
            allowed_counts = f"{num_experts} numbers of at least 0"
            raise ValueError(f"counts of layer {layer}: got something else; allowed: {allowed_counts}")
    return {names[name]: [float(count) for count in numbers] for name, numbers in counts.items()}


def _are_counts(numbers: Any, num_experts: int) -> bool:
    return (
        isinstance(numbers, list)
        and len(numbers) == num_experts
        and all(type(number) in (int, float) and 0 <= number < math.inf for number in numbers)
    )

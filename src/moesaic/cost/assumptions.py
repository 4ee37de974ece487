"""What a prediction assumes where a machine's file has no figure of quantised experts."""

from __future__ import annotations

from moesaic.core.weight_types import is_packed
from moesaic.cost.hardware import Hardware
from moesaic.cost.sizes import ModelSizes


def list_assumptions(model: ModelSizes, hardware: Hardware) -> list[str]:
    """Return one sentence for each assumption about experts that are quantised or converted."""
    sentences, processor, kind = [], hardware.fast.processor, model.quantized_dtype
    if kind is not None and is_packed(kind) and processor is not None and not processor.has_rates(kind):
        rates = "the roofline of their bytes: the machine's file has no rates of experts"
        if processor.experts:
            rates = f"the rates of unquantised ones: the machine's file has none of {kind} (fast.experts)"
        sentences.append(f"Assumed: experts in {kind} compute at {rates}.")
    if model.conversion is not None and model.conversion not in dict(hardware.link.conversions):
        plain = {"columns": "columns", "decompressed": "compressed experts"}
        conversion_name = plain.get(model.conversion, f"quantised experts to {model.conversion}")
        sentences.append(
            f"Assumed: converting {conversion_name} takes no time when they are loaded: "
            f"the machine's file has no rate of it (link.convert_gib.{model.conversion})."
        )
    return sentences

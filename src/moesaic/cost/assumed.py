"""What a prediction assumes where a machine's file has no figure of quantised experts."""

from __future__ import annotations

from moesaic.core.weight_types import is_packed, split_dtype
from moesaic.cost.hardware import Hardware
from moesaic.cost.sizes import ModelSizes


def assumed(model: ModelSizes, hardware: Hardware) -> list[str]:
    """One sentence for each assumption about experts that are quantised or converted."""
    found, processor, kind = [], hardware.fast.processor, model.quantized
    packed = kind is not None and is_packed(kind)
    known = {} if processor is None else dict(processor.packed)
    measured = kind is not None and all(one in known for one in split_dtype(kind))
    if packed and processor is not None and not measured:
        rates = "the roofline of their bytes: the machine's file has no rates of experts"
        if processor.experts:
            rates = f"the rates of unquantised ones: the machine's file has none of {kind} (fast.experts)"
        found.append(f"Assumed: experts in {kind} compute at {rates}.")
    if model.conversion is not None and model.conversion not in dict(hardware.link.conversions):
        plain = {"columns": "columns", "decompressed": "compressed experts"}
        what = plain.get(model.conversion, f"quantised experts to {model.conversion}")
        found.append(
            f"Assumed: converting {what} takes no time when they are loaded: the machine's file has no rate "
            f"of it (link.convert_gib.{model.conversion})."
        )
    return found

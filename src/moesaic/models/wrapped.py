"""Files of models that see images around a text model: names of tensors, and which of these are skipped."""

from __future__ import annotations

from collections.abc import Collection

FRONTS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""How a name begins in such files, and in those of the text model alone."""
IMAGES = (r"(model\.)?(vision_tower|visual|multi_modal_projector|mm_projector)\..*",)
"""Names of the tensors about images."""


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Returns the name in the text model's own files -> the name here, for each of `names`.

    >>> plain_names(["model.language_model.norm.weight"])
    {'model.norm.weight': 'model.language_model.norm.weight'}
    """
    found = {name: name for name in names}
    for name in sorted(names):
        plain = _plain(name)
        if plain not in found:
            found[plain] = found.pop(name)
    return found


def _plain(name: str) -> str:
    for front, plain in FRONTS:
        if name.startswith(front):
            return plain + name.removeprefix(front)
    return name

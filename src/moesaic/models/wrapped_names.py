"""Names of tensors in files that call a text model's parts otherwise, and which tensors are skipped.

They are files of models that see images around a text model, and those of DBRX and LFM2.
"""

from __future__ import annotations

from collections.abc import Collection

FRONTS = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("transformer.blocks.", "model.layers."),
    ("transformer.wte.", "model.embed_tokens."),
    ("transformer.norm_f.", "model.norm."),
    ("model.embedding_norm.", "model.norm."),
)
"""How a name begins in such files, and how moesaic calls it."""
IN_WRAPPED = ("model.language_model.", "language_model.")
"""How names begin in files of models that see images."""
IMAGES = (r"(model\.)?(vision_tower|visual|multi_modal_projector|mm_projector)\..*",)
"""Names of the tensors about images."""


def plain_names(names: Collection[str]) -> dict[str, str]:
    """Returns the name in the text model's own files -> the name here, for each of `names`.

    >>> plain_names(["model.language_model.norm.weight"])
    {'model.norm.weight': 'model.language_model.norm.weight'}
    """
    file_names = {name: name for name in names}
    for name in sorted(names):
        plain = _plain(name)
        # If the files have both names, the longer one stays and is refused as a tensor that is not expected.
        if plain not in file_names:
            file_names[plain] = file_names.pop(name)
    return file_names


def file_prefix(prefix: str, plain_name: str, file_name: str) -> str:
    """How files call `prefix`. plain_name, file_name: what moesaic and the files call a tensor near it.

    >>> file_prefix("model.layers.3.mlp", "model.layers.3.mlp.up", "language_model.model.layers.3.mlp.up")
    'language_model.model.layers.3.mlp'
    """
    for front, own_front in FRONTS:
        if file_name == front + plain_name.removeprefix(own_front) and plain_name.startswith(own_front):
            return front + prefix.removeprefix(own_front)
    return prefix


def _plain(name: str) -> str:
    for front, plain in FRONTS:
        if name.startswith(front):
            return plain + name.removeprefix(front)
    return name

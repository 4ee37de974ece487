"""Finds the best rank of each token, given the ranks of the experts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moesaic.core.coclusters import Coclusters
from moesaic.core.profile import Counts, Profile, SmallArray
from moesaic.core.tokens import IntArray


def label_tokens(
    profile: Profile, experts: SmallArray, worth: npt.NDArray[np.float64] | None = None
) -> Coclusters:
    """Clusters of `experts` and of the tokens that fit them. experts: [layers, E] ranks from 0.

    worth: [R, R] of `link_prices.worth_of`. A token id then belongs to the rank where its choices are worth
    most. None: only choices on its own rank count.

    A token id belongs to the rank with most of its choices, the lowest of equal ones. Its confidence is the
    share of its choices there. An id that the profile has never seen has confidence 0 and the label of its
    nearest known id. Without a nearest id, its label is the rank with most choices of the layer.

    Example: experts 0 1 | 2 3 are on two ranks. Token 5 chose expert 0 three times and expert 2 once. Its
    rank is 0 and its confidence 0.75.
    """
    ranks = int(experts.max()) + 1
    labels = np.empty((len(experts), profile.vocab_size), dtype=np.int16)
    confidence = np.zeros(labels.shape, dtype=np.float32)
    for layer, counts in enumerate(profile.counts):
        choices = rank_choices(counts, experts[layer], ranks)
        total = choices.sum(axis=1)
        is_known = total > 0
        values = choices if worth is None else choices @ worth
        labels[layer] = np.where(is_known, values.argmax(axis=1), values.sum(axis=0).argmax())
        if profile.nearest is not None:
            labels[layer] = np.where(is_known, labels[layer], labels[layer][profile.nearest])
        own_choices = np.take_along_axis(choices, labels[layer, :, None].astype(np.int64), axis=1)[:, 0]
        confidence[layer] = np.where(is_known, own_choices, 0) / np.maximum(total, 1)
    return Coclusters(ranks, experts.astype(np.int16), labels, confidence)


def rank_choices(counts: Counts, experts: SmallArray, ranks: int) -> IntArray:
    """[V, ranks] how often each token id chose experts of each rank. experts: [E] their ranks."""
    vocab_size = len(counts.starts) - 1
    keys = counts.tokens * ranks + experts[counts.experts]
    choices = np.bincount(keys, weights=counts.counts, minlength=vocab_size * ranks)
    return choices.astype(np.int64).reshape(vocab_size, ranks)

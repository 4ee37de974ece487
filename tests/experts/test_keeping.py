"""What a server has loaded stays for the next supervisor, unless its settings or files are others."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest

from moesaic.config import ExpertServerConfig
from moesaic.core.experts import ExpertLayout
from moesaic.core.metrics import ResidencyStats
from moesaic.experts.keeping import BackendAndStats, KeptExperts

LAYOUT = ExpertLayout({0: "a"}, "g", "u", "d", 8, 4, 2, 1, "float32", weights="w")
CONFIG = ExpertServerConfig("m", LAYOUT, "unix:@")


class Backend:
    """Has no experts."""


def made(config: ExpertServerConfig) -> BackendAndStats:
    return Backend(), ResidencyStats  # type: ignore[return-value]


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"schedule": "async", "queue_policy": "eager", "log_level": "debug"},
        {"address": "unix:other", "remote_address": "tcp:10.0.0.3:0"},
    ],
)
def test_the_same_weights_stay(others: dict[str, Any]) -> None:
    kept = KeptExperts()
    first = kept.get(CONFIG, "stamp", made)
    assert kept.get(replace(CONFIG, **others), "stamp", made)[0] is first[0] and kept.num_loads == 1


@pytest.mark.parametrize(
    ("others", "stamp"),
    [
        ({"model": "other"}, "stamp"),
        ({"layout": replace(LAYOUT, weights="v")}, "stamp"),
        ({"kernels": "reference"}, "stamp"),
        ({"threads": 2}, "stamp"),
        ({"device": "cuda"}, "stamp"),
        ({"fast_memory": 1 << 20}, "stamp"),
        ({"mmap": False}, "stamp"),
        ({}, "of files that were replaced"),
    ],
)
def test_others_are_loaded_once_the_old_ones_are_gone(others: dict[str, Any], stamp: str) -> None:
    kept = KeptExperts()
    old = weakref.ref(kept.get(CONFIG, "stamp", made)[0])

    def make(config: ExpertServerConfig) -> BackendAndStats:
        assert old() is None, "the weights would be in memory twice"
        return made(config)

    kept.get(replace(CONFIG, **others), stamp, make)
    assert kept.num_loads == 2

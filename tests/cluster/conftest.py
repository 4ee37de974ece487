"""Attention workers start quickly in all tests of clusters; a cluster that servers can join."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module", autouse=True)
def quick(quick_workers: None) -> None:
    """Processes start as forks in every file."""


@pytest.fixture
def door(tmp_path: Path) -> dict[str, Any]:
    """Settings of a cluster that expert servers can join."""
    return {
        "cluster_address": "tcp:127.0.0.1:0",
        "cluster_secret_file": str(tmp_path / "secret"),
        "expert_servers": 1,
        "rebalance_interval": 0.0,
    }

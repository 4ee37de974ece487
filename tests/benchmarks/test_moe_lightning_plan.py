"""The report of the searches that MoE-Lightning and FlexGen published, for people and for programs."""

from __future__ import annotations

import json
import re
import sys

import pytest

from .conftest import FOLDER

sys.path.append(str(FOLDER / "papers"))

import moe_lightning_plan
from moe_lightning_settings import FLEXGEN, settings


@pytest.mark.slow
def test_the_paper_for_people_and_for_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output has three settings. test_moe_lightning_search.py checks all of them."""
    names = ("S1 MTBench padded, n 32", "S8 MTBench, n 32", "S1 MTBench, n 64")
    few = sorted((one for one in settings() if one.name in names), key=lambda one: names.index(one.name))
    monkeypatch.setattr(moe_lightning_plan, "settings", lambda: iter(few))
    monkeypatch.setattr(moe_lightning_plan, "FLEXGEN", FLEXGEN[-1:])
    paper = moe_lightning_plan.reproduce()
    text = moe_lightning_plan.as_text(paper)
    assert "36 x 14" in text and "equal" in text and "m_c 184.29, b_c 100, residual on GPU" in text
    assert "N 2652" in text and "equal throughput" in text and "8 x 36" in text
    assert re.search(r"S1 MTBench, n 64 +N \? +164 x 19 not known", text)
    assert "Among policies with equal predictions this search takes the first" in text
    found = json.loads(moe_lightning_plan.as_json(paper))
    first, second, third = found["settings"]
    assert first["found"] == [36, 14, 504] and first["verdict"] == "equal" and first["measured"] == 15.6
    assert second["published"] == [None, None, 2652] and second["plateau_to"] == 42
    assert third["published"] == [None, None, None] and third["measured"] == 101.3
    assert round(first["with_prefill"] / first["measured"], 1) == 4.4
    assert [one["found"] for one in found["flexgen"]] == [[8, 36]]
    cross = {(one["policy"], one["schedule"]): one for one in found["cross"]}
    assert len(cross) == 6
    assert cross["FlexGen's", "s4"]["measured"] == 9.5
    assert cross["MoE-Lightning's", "cgopipe"]["fitted"] > cross["MoE-Lightning's", "s4"]["fitted"]

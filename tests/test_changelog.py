"""CHANGELOG.md names the version of the package, and its sections are in order."""

from __future__ import annotations

import re
from pathlib import Path

import moesaic

TEXT = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()
HEADINGS = re.findall(r"(?m)^## (.*)$", TEXT)


def test_unreleased_changes_stand_first() -> None:
    assert HEADINGS[0] == "[Unreleased]"


def test_the_newest_release_is_the_version_of_the_package() -> None:
    releases = [re.fullmatch(r"\[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)", line) for line in HEADINGS[1:]]
    assert all(releases)
    dates = [release[2] for release in releases if release]
    assert dates == sorted(dates, reverse=True)
    assert releases[0] and releases[0][1] == moesaic.__version__


def test_a_section_has_each_kind_of_change_once() -> None:
    for section in re.split(r"(?m)^## ", TEXT)[1:]:
        kinds = re.findall(r"(?m)^### (.*)$", section)
        assert kinds == [kind for kind in ("Added", "Changed", "Removed", "Fixed") if kind in kinds]


def test_entries_of_one_kind_are_one_list() -> None:
    assert not re.findall(r"(?m)^- .*\n\n- ", TEXT)

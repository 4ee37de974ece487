"""scripts/names.py finds names that say nothing, and docstrings that begin as fragments."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from scripts import names


@pytest.mark.parametrize("name", ["held", "of", "_found", "before_that", "Lost", "whole", "sent", "pays"])
def test_a_word_that_points_says_nothing(name: str) -> None:
    assert names.says_nothing(name)


@pytest.mark.parametrize(
    "name",
    ["server", "held_rows", "is_closed", "on_sent", "__all__", "_", "k", "seed", "hidden", "all_to_all"],
)
def test_a_noun_says_something(name: str) -> None:
    assert not names.says_nothing(name) or name.strip("_") in names.ALLOWED


SOURCE = '''
class Held:
    "Of it."
    lost: int
    "With this. It is a fragment."

    def kept(self, other, *found, rows):
        """Return the rows."""
        self._sent = chosen = rows
        return [one for one in self._sent]

    def __eq__(self, other):
        return (lambda more: more)(other)

def moved_rows(x): ...
'''


def test_every_kind_of_name_is_found_where_it_is_bound() -> None:
    bound = [(item.kind, item.name) for item in names.bound_names(ast.parse(SOURCE))]
    silent = [(kind, name) for kind, name in bound if names.says_nothing(name)]
    assert silent == [
        ("class", "Held"),
        ("attribute", "lost"),
        ("function", "kept"),
        ("parameter", "other"),
        ("parameter", "found"),
        ("attribute", "_sent"),
        ("local", "chosen"),
        ("local", "one"),
        ("local", "more"),
    ]


def test_fragments_are_found_in_docstrings_of_classes_and_attributes() -> None:
    assert [text for _, text in names.fragments(ast.parse(SOURCE))] == [
        "Of it.",
        "With this. It is a fragment.",
    ]


def test_a_count_that_grows_is_a_problem(tmp_path: Path) -> None:
    room = tmp_path / "cluster"
    room.mkdir()
    (room / "x.py").write_text(SOURCE)
    rooms = names.read_rooms(tmp_path)
    allowed = names.counts(rooms)
    assert allowed["cluster"] == {"interfaces": 6, "locals": 3, "participle_functions": 1, "fragments": 2}
    assert list(names.problems(rooms, allowed)) == []
    allowed["cluster"]["locals"] -= 1
    (complaint,) = names.problems(rooms, allowed)
    assert complaint.startswith("cluster: 3 locals; allowed: 2")


def test_a_new_room_has_no_such_names(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(SOURCE)
    assert len(list(names.problems(names.read_rooms(tmp_path), {}))) == 4


def test_what_is_kept_exists() -> None:
    """An exception whose name is gone goes, too."""
    for place in names.KEPT:
        path, _, name = place.partition(": ")
        tree = ast.parse((names.PACKAGE / path).read_text())
        assert name in {item.name for item in names.bound_names(tree)}, place

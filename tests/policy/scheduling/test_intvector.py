from __future__ import annotations

from moesaic.policy.scheduling.intvector import IntVector


def test_grows_by_one_and_by_many() -> None:
    vector = IntVector([1, 2])
    for value in range(3, 40):
        vector.append(value)
    vector.extend(list(range(40, 100)))
    assert vector.array.tolist() == list(range(1, 100))
    assert len(vector) == 99


def test_starts_empty_and_owns_its_values() -> None:
    values = [7, 8]
    vector = IntVector(values)
    vector.array[0] = 5
    assert values == [7, 8]
    empty = IntVector()
    empty.extend([])
    assert len(empty) == 0
    empty.append(3)
    assert empty.array.tolist() == [3]

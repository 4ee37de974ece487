from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moesaic.policy.offloading.microbatch import divide


def test_worked_example() -> None:
    divided = divide([5, 9, 3, 8, 4], [2] * 5, micro_batches=2, largest=2, cache=17)
    assert divided.micro_batches == [[1, 4], [3, 0]] and divided.left == [2]


def test_partitions_that_never_fill_are_kept() -> None:
    """As printed, Algorithm 2 returns only the partitions that reach their largest size. Here none does."""
    divided = divide([7, 6, 5], [1, 1, 1], micro_batches=2, largest=4, cache=100)
    assert divided.micro_batches == [[0], [1, 2]] and divided.left == []


def test_what_does_not_fit_comes_back_in_its_order() -> None:
    divided = divide([4, 90, 4, 4, 80], [1] * 5, micro_batches=1, largest=2, cache=10)
    assert divided.micro_batches == [[0, 2]] and divided.left == [1, 3, 4]


def test_a_fuller_micro_batch_takes_what_the_emptiest_cannot() -> None:
    """The partition with fewer prompt tokens has promised more generated ones."""
    divided = divide([6, 5, 3], [1, 9, 1], micro_batches=2, largest=2, cache=14)
    assert divided.micro_batches == [[0, 2], [1]] and divided.left == []


def test_nothing_to_do() -> None:
    assert divide([], [], 3, 4, 10).micro_batches == []
    assert divide([5], [5], 3, 4, 9).left == [0]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), max_size=30),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 90),
)
def test_every_request_is_somewhere_and_nothing_overflows(
    requests: list[tuple[int, int]], micro_batches: int, largest: int, cache: int
) -> None:
    prompts, generate = [p for p, _ in requests], [g for _, g in requests]
    divided = divide(prompts, generate, micro_batches, largest, cache)
    placed = [place for one in divided.micro_batches for place in one]
    assert sorted(placed + divided.left) == list(range(len(requests)))
    assert len(divided.micro_batches) <= micro_batches
    held = [sum(prompts[i] + generate[i] for i in one) for one in divided.micro_batches]
    assert all(one <= cache for one in held)
    assert all(0 < len(one) <= largest for one in divided.micro_batches)
    counts = [len(one) for one in divided.micro_batches] + [0] * (micro_batches - len(held))
    room = [cache - one for one in held] + [cache] * (micro_batches - len(held))
    for place in divided.left:
        need = prompts[place] + generate[place]
        assert all(n == largest or free < need for n, free in zip(counts, room, strict=True))

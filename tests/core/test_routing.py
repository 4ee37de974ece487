from __future__ import annotations

import numpy as np

from moesaic.core.profile import NO_TOPIC
from moesaic.core.routing import Assembly, RoutedModel, Rows, draw, ending, join_routes

MODEL = RoutedModel("moe-x", 100, 9, 2, (1, 3))


def rows(request: int, *positions: int, token: int = 10, expert: int = 0) -> Rows:
    """Rows whose token at position p is token + p. Its experts of layer i are expert + i and expert
    + i + 1."""
    made = np.zeros(len(positions), MODEL.row)
    made["request"], made["position"] = request + 1, positions
    made["token"] = token + np.array(positions)
    made["experts"] = expert + np.array([[0, 1], [1, 2]])
    return made


def test_draws_are_even_and_depend_on_the_seed() -> None:
    drawn = [draw(number, 0) for number in range(10000)]
    assert sum(one < 0.05 for one in drawn) == 513
    assert all(900 < count < 1100 for count in np.histogram(drawn, 10, (0, 1))[0])
    assert abs(np.corrcoef(drawn, [draw(number, 1) for number in range(10000)])[0, 1]) < 0.05


def test_rows_become_requests_in_position_order() -> None:
    assembly = Assembly(MODEL, 1 << 20)
    assembly.add(rows(4, 0, 1))
    assembly.add(rows(3, 2, 3))
    assembly.add(rows(3, 0, 1))
    assembly.add(ending(MODEL, 3, 3))
    ids, routes = assembly.take()
    assert ids.tolist() == [3]
    assert routes.tokens.tolist() == [10, 11, 12, 13]
    assert (routes.starts.tolist(), routes.prompts.tolist()) == ([0, 4], [3])
    assert routes.topics.tolist() == [NO_TOPIC]
    assert routes.experts.tolist() == [[[0, 1], [1, 2]]] * 4
    assembly.add(ending(MODEL, 4, 2))
    ids, routes = assembly.take()
    assert (ids.tolist(), routes.tokens.tolist()) == ([4], [10, 11])


def test_what_was_computed_again_counts_once_as_computed_last() -> None:
    assembly = Assembly(MODEL, 1 << 20)
    assembly.add(rows(0, 0, 1, 2))
    assembly.take()
    assembly.add(rows(0, 0, 1, expert=5))
    assembly.add(ending(MODEL, 0, 2))
    _, routes = assembly.take()
    assert routes.tokens.tolist() == [10, 11, 12]
    assert routes.experts[:, 0, 0].tolist() == [5, 5, 0]


def test_a_request_without_rows_is_none() -> None:
    assembly = Assembly(MODEL, 1 << 20)
    assembly.add(ending(MODEL, 7, 2))
    ids, routes = assembly.take()
    assert (len(ids), routes.requests, routes.experts.shape) == (0, 0, (0, 2, 2))


def test_rows_that_lack_are_left_out_of_the_prompt() -> None:
    """A prompt of 5 tokens. The prefix cache had three of them."""
    assembly = Assembly(MODEL, 1 << 20)
    assembly.add(rows(0, 3, 4, 5))
    assembly.add(ending(MODEL, 0, 5))
    _, routes = assembly.take()
    assert (routes.tokens.tolist(), routes.prompts.tolist()) == ([13, 14, 15], [2])


def test_the_longest_are_given_up_when_too_much_is_open() -> None:
    assembly = Assembly(MODEL, 8 * MODEL.row.itemsize)
    assembly.add(rows(0, 0, 1, 2, 3, 4, 5))
    assembly.add(rows(1, 0))
    assembly.add(rows(2, 0, 1))
    assert assembly.is_full
    assert assembly.take()[1].requests == 0
    assert (assembly.is_full, assembly.num_discarded) == (False, 1)
    assembly.add(rows(0, 6))  # nobody wants these any more
    for request, prompt in ((0, 6), (1, 1), (2, 2)):
        assembly.add(ending(MODEL, request, prompt))
    ids, routes = assembly.take()
    assert (ids.tolist(), routes.tokens.tolist()) == ([1, 2], [10, 10, 11])
    assembly.add(rows(0, 0))  # another one with that id
    assembly.add(ending(MODEL, 0, 1))
    assert assembly.take()[0].tolist() == [0]


def test_routes_one_after_another() -> None:
    assembly = Assembly(MODEL, 1 << 20)
    for request in range(2):
        assembly.add(rows(request, 0, 1, expert=request))
        assembly.add(ending(MODEL, request, 2))
    _, both = assembly.take()
    again = join_routes(MODEL, [both.select([0]), both.select([1])])
    assert again.starts.tolist() == both.starts.tolist() == [0, 2, 4]
    assert (again.experts == both.experts).all() and (again.tokens == both.tokens).all()
    assert join_routes(MODEL, []).requests == 0

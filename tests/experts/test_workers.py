from __future__ import annotations

from typing import Any

import pytest

from moesaic.experts.workers import Workers


class Service:
    """The clients that a scheduler waits for."""

    def __init__(self) -> None:
        self.waited: set[int] = set()
        self.gone: set[int] = set()

    def client_joined(self, client: int) -> None:
        self.waited.add(client)

    def client_paused(self, client: int) -> None:
        self.waited.discard(client)

    def client_left(self, client: int) -> None:
        self.waited.discard(client)
        self.gone.add(client)


ANNA, BERT = 71, 72
"""Workers."""


@pytest.fixture
def service() -> Service:
    return Service()


def workers(service: Any) -> Workers:
    """Connections 0 and 1 of two workers, which have called, and 2 and 3 of two relays."""
    made = Workers(service)
    assert [made.add_connection() for _ in range(4)] == [0, 1, 2, 3]
    made.mark_relay(2)
    made.mark_relay(3)
    assert made.caller(0, ANNA) == 0 and made.caller(1, BERT) == 1
    assert (
        service.waited == {0, 1} and made.relays == 2 and made.is_from_relay(3) and not made.is_from_relay(0)
    )
    return made


def test_a_worker_is_waited_for_by_its_last_way(service: Service) -> None:
    made = workers(service)
    assert made.caller(2, ANNA) == 4 and service.waited == {4, 1}
    assert made.caller(3, ANNA) == 5 and service.waited == {5, 1}
    assert made.caller(2, BERT) == 6 and service.waited == {5, 6}
    assert made.caller(2, ANNA) == 4 and service.waited == {4, 6}
    assert made.caller(0, ANNA) == 0 and service.waited == {0, 6}


def test_the_barrier(service: Service) -> None:
    made = workers(service)
    made.caller(2, ANNA)
    made.pause(0, ANNA)
    assert service.waited == {1}
    made.pause(1, BERT)
    made.begin_step()
    assert service.waited == {0, 1}, "relays take no part"


def test_the_connection_of_a_worker_whose_call_came_through_a_relay(service: Service) -> None:
    made = workers(service)
    assert [made.own_connection(at, ANNA) for at in (0, 2, 3)] == [0, 0, 0]
    assert made.own_connection(2, BERT) == 1 and made.own_connection(2, 73) is None


def test_calls_of_a_relay_that_goes_are_dropped(service: Service) -> None:
    made = workers(service)
    numbers = {made.caller(2, ANNA), made.caller(2, BERT)}
    made.remove_connection(2)
    assert service.gone >= numbers and not service.waited & numbers and made.relays == 1


def test_calls_through_a_relay_outlive_the_connection_of_their_worker(service: Service) -> None:
    """Its relay waits for their answers. Nobody waits for the worker."""
    made = workers(service)
    number = made.caller(2, ANNA)
    made.remove_connection(0)
    assert number not in service.gone and service.waited == {1}
    assert made.caller(2, ANNA) == number and service.waited == {1}

"""Requests in flight: counted for each client, and a server that drains waits for the last of them."""

import pytest

from mlx_backend.api.errors import ApiError
from mlx_backend.errors import EngineBusy
from mlx_backend.server.limits import RequestsInFlight


def test_a_request_is_in_flight_until_it_has_been_answered() -> None:
    requests = RequestsInFlight(9, 9)
    ended = requests.begin("a")
    assert not requests.wait_until_idle(0)
    ended()
    assert requests.wait_until_idle(0)


def test_draining_admits_no_more_requests() -> None:
    requests = RequestsInFlight(9, 9)
    ended = requests.begin("a")
    requests.drain()
    with pytest.raises(ApiError) as raised:
        requests.begin("a")
    assert raised.value.status == 503
    assert raised.value.code == "shutting_down"
    assert not requests.wait_until_idle(0)
    ended()
    assert requests.wait_until_idle(0)


def test_one_client_never_has_all_there_are() -> None:
    requests = RequestsInFlight(4, 3)
    ended, *_ = [requests.begin("a") for _ in range(3)]
    with pytest.raises(EngineBusy, match="3 of your requests"):
        requests.begin("a")
    requests.begin("b")
    with pytest.raises(EngineBusy, match="Too many requests"):
        requests.begin("c")
    ended()
    requests.begin("c")

"""Requests in flight: each has a lease, and a server that drains waits for the last of them."""

import pytest

from mlx_backend.api.errors import ApiError
from mlx_backend.registry.base import Lease
from mlx_backend.server.in_flight import InFlightRequests


class CountedLease(Lease[str]):
    """A lease on a service that is only a name."""

    def __init__(self) -> None:
        self.releases = 0
        super().__init__("a", "model", self._count)

    def _count(self) -> None:
        self.releases += 1


def test_a_lease_is_released_when_its_request_ends() -> None:
    lease, requests = CountedLease(), InFlightRequests()
    with requests.admit(lambda: lease) as admitted:
        assert admitted.service == "model"
        assert not requests.wait_until_idle(0)
        before = lease.releases
    assert (before, lease.releases) == (0, 1)
    assert requests.wait_until_idle(0)


def test_a_request_whose_model_cannot_be_leased_is_not_in_flight() -> None:
    def fail() -> CountedLease:
        raise ValueError("no such model")

    requests = InFlightRequests()
    with pytest.raises(ValueError, match="no such model"), requests.admit(fail):
        pass
    assert requests.wait_until_idle(0)


def test_draining_admits_no_more_requests_and_leases_nothing_for_them() -> None:
    lease, requests = CountedLease(), InFlightRequests()
    with requests.admit(lambda: lease):
        requests.drain()
        with pytest.raises(ApiError) as raised, requests.admit(CountedLease):
            pass
        assert raised.value.status == 503
        assert raised.value.code == "shutting_down"
        assert not requests.wait_until_idle(0)
    assert requests.wait_until_idle(0)

"""Where a request comes from: a proxy is believed if the operator trusts it, and nobody else is."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from running_server import HELLO, running
from scripted_engine import ScriptedEngine
from scripted_server import ANSWER

from mlx_backend.server.auth import TrustedProxies, network_of

PROXIES = TrustedProxies(tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "192.0.2.1/32", "2001:db8::/32"))))


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("203.0.113.9", "", "203.0.113.9"),
        ("203.0.113.9", "198.51.100.7", "203.0.113.9"),  # written by the client itself
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("::ffff:10.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "1.1.1.1, 198.51.100.7", "198.51.100.7"),  # 1.1.1.1 is what the client wrote
        ("10.0.0.1", "198.51.100.7, 192.0.2.1", "198.51.100.7"),  # by way of two proxies
        ("10.0.0.1", "10.0.0.3 , 10.0.0.2", "10.0.0.3"),  # of the proxies' own network
        ("2001:db8::1", "2a00:1:2:3::4", "2a00:1:2:3::4"),
        ("10.0.0.1", "198.51.100.7:4711", "198.51.100.7"),
        ("10.0.0.1", "[2a00::1]:4711", "2a00::1"),
        ("10.0.0.1", "unknown", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.7, bad\x1b[31m", "10.0.0.1"),
        ("10.0.0.1", ",,", "10.0.0.1"),
        ("", "198.51.100.7", ""),
    ],
)
def test_the_client_is_the_nearest_that_no_trusted_proxy_is(peer: str, forwarded: str, address: str) -> None:
    assert PROXIES.client_address(peer, forwarded) == address
    assert TrustedProxies().client_address(peer, forwarded) == peer


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%en0", "fe80::/64"),
        ("", ""),
        ("not one", "not one"),
    ],
)
def test_whoever_has_an_ipv6_address_has_its_network(address: str, network: str) -> None:
    assert network_of(address) == network


@pytest.mark.parametrize(("trusted", "shown"), [(("127.0.0.1",), "198.51.100.7"), ((), "127.0.0.1")])
def test_the_log_shows_whom_a_trusted_proxy_connects_for(
    trusted: tuple[str, ...], shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mlx_backend.requests")
    networks: Any = tuple(map(ipaddress.ip_network, trusted))
    with running(ScriptedEngine(lambda _: ANSWER), trusted_proxies=networks) as server:
        request = {"X-Forwarded-For": "198.51.100.7", "X_Forwarded_For": "1.1.1.1"}
        assert server.call("/v1/chat/completions", {"messages": HELLO}, **request)[0] == 200
    assert {record.fields["client"] for record in caplog.records} == {shown}  # type: ignore[attr-defined]  # the log's own

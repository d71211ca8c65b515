"""The address in the start-up lines works from where it is read: never 0.0.0.0."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING, Any

import pytest

from mlx_backend.commands import start_lines
from mlx_backend.commands.start_lines import own_address, reachable_url

if TYPE_CHECKING:
    from collections.abc import Mapping

LAN: Mapping[int, str | None] = {socket.AF_INET: "192.168.1.20", socket.AF_INET6: "fd00::20"}
NONE: Mapping[int, str | None] = dict.fromkeys(LAN)


@pytest.mark.parametrize(
    ("url", "host", "addresses", "shown"),
    [
        ("http://127.0.0.1:8080", "127.0.0.1", LAN, "http://127.0.0.1:8080"),
        ("http://studio.local:80", "studio.local", LAN, "http://studio.local:80"),
        (
            "http://0.0.0.0:8080",
            "0.0.0.0",
            LAN,
            "http://192.168.1.20:8080 (and every other address of this machine)",
        ),
        (
            "http://0.0.0.0:1",
            "0.0.0.0",
            LAN,
            "http://192.168.1.20:1 (and every other address of this machine)",
        ),
        ("http://[::]:8080", "::", LAN, "http://[fd00::20]:8080 (and every other address of this machine)"),
        (
            "http://[::]:8080",
            "::",
            {**LAN, socket.AF_INET6: None},
            "http://192.168.1.20:8080 (and every other address of this machine)",
        ),
        (
            "http://0.0.0.0:8080",
            "0.0.0.0",
            NONE,
            "http://127.0.0.1:8080 (no other address was found: this machine seems to be on no network)",
        ),
        (
            "http://[::]:8080",
            "::",
            NONE,
            "http://[::1]:8080 (no other address was found: this machine seems to be on no network)",
        ),
    ],
)
def test_what_is_shown_for_a_server(
    url: str, host: str, addresses: Mapping[int, str | None], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_lines, "own_address", addresses.__getitem__)
    assert "".join(reachable_url(url, host)) == shown


def test_this_machines_own_address_can_be_listened_on() -> None:
    for family in (socket.AF_INET, socket.AF_INET6):
        if (address := own_address(family)) is not None:
            assert not ipaddress.ip_address(address).is_loopback
            with socket.socket(family) as listening:
                listening.bind((address, 0))


@pytest.mark.parametrize(
    ("from_route", "from_name", "found"),
    [
        (OSError("unreachable"), ["127.0.1.1", "169.254.3.4", "10.0.0.7"], "10.0.0.7"),
        ("0.0.0.0", ["10.0.0.7"], "10.0.0.7"),
        (OSError("unreachable"), ["127.0.1.1"], None),
        (OSError("unreachable"), socket.gaierror("unknown"), None),
        ("10.1.1.1", ["10.0.0.7"], "10.1.1.1"),
    ],
)
def test_without_a_way_out_the_machines_name_may_say_its_address(
    from_route: Any, from_name: Any, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Probe:
        def __init__(self, *_: Any) -> None: ...

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *_: object) -> None: ...

        def connect(self, _: Any) -> None:
            if isinstance(from_route, OSError):
                raise from_route

        def getsockname(self) -> Any:
            return (from_route, 1)

    def names(*_: Any) -> Any:
        if isinstance(from_name, OSError):
            raise from_name
        return [(0, 0, 0, "", (each, 0)) for each in from_name]

    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(socket, "getaddrinfo", names)
    assert own_address(socket.AF_INET) == found

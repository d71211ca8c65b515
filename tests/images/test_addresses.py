"""Which addresses images may be fetched from: public ones, and those that are named."""

import pytest

from mlx_backend.images.fetch import AllowedAddresses, is_public

PRIVATE = [
    *(
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
    ),
    *("100.64.0.1", "192.0.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "239.255.255.250", "240.0.0.1"),
    "255.255.255.255",
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12:3456::1", "fec0::1", "ff02::1", "2001:db8::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
    *("64:ff9b:1::808:808", "2002:7f00:1::", "2002:c0a8:101::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2"),
]
PUBLIC = [
    *("8.8.8.8", "1.1.1.1", "93.184.216.34", "172.32.0.1", "100.128.0.1"),
    *("2606:4700:4700::1111", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::808:808"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_inside_is_not_public_in_whatever_form_it_is_written(address: str) -> None:
    assert not is_public(address)
    assert not AllowedAddresses().allows("example.com", address)


@pytest.mark.parametrize("address", PUBLIC)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public(address)
    assert AllowedAddresses().allows("example.com", address)


@pytest.mark.parametrize(
    ("named", "host", "address", "is_allowed"),
    [
        ("nas.local", "NAS.local.", "192.168.1.5", True),
        ("nas.local", "other.local", "192.168.1.5", False),
        ("nas.local", "evil.nas.local", "192.168.1.5", False),
        ("192.168.1.5", "192.168.1.5", "192.168.1.5", True),
        ("192.168.1.5", "any.example", "192.168.1.5", True),
        ("192.168.1.5", "any.example", "192.168.1.6", False),
        ("192.168.1.0/24", "any.example", "192.168.1.6", True),
        ("192.168.1.7/24", "any.example", "192.168.1.6", True),
        ("192.168.1.0/24", "any.example", "192.168.2.6", False),
        ("192.168.1.0/24", "any.example", "::1", False),
        ("[fd00::]/8", "any.example", "fd12::1", False),  # brackets belong around an address alone
        ("fd00::/8", "any.example", "fd12::1", True),
        ("[::1]", "::1", "::1", True),
    ],
)
def test_a_host_or_network_that_is_named_may_be_private(
    named: str, host: str, address: str, is_allowed: bool
) -> None:
    assert AllowedAddresses([named]).allows(host, address) is is_allowed

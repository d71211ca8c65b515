"""What the tests of every SDK use. They run in the SDK's own environment, against servers that test_sdks.py starts."""

import os

import pytest


@pytest.fixture(scope="session")
def url() -> str:
    """The address of a server with the demonstration models."""
    return os.environ["SERVER_URL"]


@pytest.fixture(scope="session")
def scripted_url() -> str:
    """The address of a server whose model fails when it is told to."""
    return os.environ["SCRIPTED_URL"]


@pytest.fixture(scope="session")
def key() -> str:
    """The servers' key."""
    return os.environ["SERVER_KEY"]


@pytest.fixture(scope="session")
def red_square() -> str:
    """The picture of a red square, as a PNG in base64."""
    return os.environ["RED_SQUARE"]

"""What every test of a real client gets: a scripted server, and a sandbox for the client."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from clients.client_process import Sandbox, missing
from clients.scripted_models import ScriptedServer, scripted_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose `client` is not installed."""
    for item in items:
        for marker in item.iter_markers("client"):
            if reason := missing(marker.args):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def server() -> Iterator[Callable[..., ScriptedServer]]:
    """`server(script, family="harmony")` serves a scripted model until the test ends."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(scripted_server(*args, **kwargs))


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    """A home and a workspace for a client."""
    made = Sandbox(tmp_path / "home", tmp_path / "workspace")
    made.home.mkdir()
    made.workspace.mkdir()
    return made

"""Requests that come one after the other are answered by the same threads, however many there are."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from running_server import running
from scripted_engine import ScriptedEngine

from mlx_backend.server.app import App

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest
    from _typeshed.wsgi import StartResponse, WSGIEnvironment


def test_requests_one_after_the_other_use_few_of_the_servers_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[str] = set()
    answer = App.__call__

    def noted(app: App, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        used.add(threading.current_thread().name)
        return answer(app, environ, start_response)

    monkeypatch.setattr(App, "__call__", noted)
    with running(ScriptedEngine(lambda _prompt: "")) as server:
        for _ in range(60):
            assert server.call("/health")[0] == 200
    assert 1 <= len(used) <= 10, "a client may send before the thread that answered it is idle again"

"""Runs chatflows on Dify's own workflow engine and collects what a user of the app, and its designer, would see."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from running_server import running
from scripted_engine import ScriptedEngine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bridge import Bridge

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = ROOT / ".venv-dify/bin/python"


@dataclass
class Run:
    """A flow's run: every event, and every request to the plugin."""

    events: list[dict[str, Any]]
    invocations: list[dict[str, Any]] = field(default_factory=list)

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The events of one type."""
        return [event for event in self.events if event["event"] == kind]

    def outputs(self, node: str) -> dict[str, Any]:
        """A node's outputs."""
        (done,) = [event for event in self.of("NodeRunSucceededEvent") if event["node_id"] == node]
        outputs: dict[str, Any] = done["outputs"]
        return outputs

    def streamed(self, kind: str, selector: list[str]) -> str:
        """The text a page would have shown while it was written."""
        return "".join(event["chunk"] for event in self.of(kind) if event["selector"] == selector)

    @property
    def answer(self) -> str:
        """The text the user reads at the end, also if a node has failed and something took its place."""
        (done,) = self.of("GraphRunSucceededEvent") or self.of("GraphRunPartialSucceededEvent")
        text: str = done["outputs"]["answer"]
        return text

    @property
    def error(self) -> str:
        """The text the user reads if the run fails."""
        (failed,) = self.of("GraphRunFailedEvent")
        text: str = failed["error"]
        return text


class Dify:
    """Runs flows against one server."""

    def __init__(self, bridge: Bridge, credentials: dict[str, str]) -> None:
        self._bridge = bridge
        self.credentials = credentials

    def play(self, flow: str, query: str, history: Sequence[Sequence[str]] = (), **form: str) -> Run:
        """Run a flow of flows/ with one question."""
        settings = {"credentials": {**self.credentials, **form}, "query": query, "history": history}
        seen = len(self._bridge.invocations)
        environment = {
            "PATH": os.environ["PATH"],
            "SLIM_BINARY_PATH": str(HERE / "slim.py"),
            "PLUGIN_BRIDGE": self._bridge.address,
        }
        done = subprocess.run(
            [PYTHON, HERE / "play.py", HERE / "flows" / f"{flow}.yaml"],
            input=json.dumps(settings),
            env=environment,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        events = [json.loads(line) for line in done.stdout.splitlines()]
        return Run(events, self._bridge.invocations[seen:])


@contextmanager
def scripted(bridge: Bridge, *transcripts: str) -> Iterator[Dify]:
    """Dify with the real server, and a scripted model that writes these texts in its own format."""
    with ScriptedEngine(transcripts) as engine, running(engine) as served:
        yield Dify(bridge, {"endpoint_url": served.url, "api_key": ""})

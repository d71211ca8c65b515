"""Run a Dify app's DSL on Dify's own workflow engine and print its events: `play.py FLOW < settings.json`.

Runs in the environment of `make test-dify` (.venv-dify), apart from the project's. Settings: `credentials` for the
provider, `query`, and `history`, the earlier turns as [question, answer] pairs. Every line printed is an event of the
engine: its type, its node, and its fields.

graphon leaves two things to Dify. It finds no plugin for a provider named `author/plugin/provider` if `plugin` and
`provider` differ, so the dependency is listed under the provider's name too. And it has no memory: Dify reads a
conversation's earlier answers from its database, as they were shown, thinking included; `Memory` stands for that.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml
from graphon.dsl import importer
from graphon.dsl.node_factory import SlimDslNodeFactory
from graphon.model_runtime.entities.message_entities import AssistantPromptMessage, UserPromptMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

PRINTED = ("selector", "chunk", "error", "outputs", "node_id", "node_type")


class Memory:
    """The earlier turns, as Dify's TokenBufferMemory returns them."""

    def __init__(self, turns: Sequence[Sequence[str]]) -> None:
        self._messages = [
            message
            for question, answer in turns
            for message in (UserPromptMessage(content=question), AssistantPromptMessage(content=answer))
        ]

    def get_history_prompt_messages(
        self, max_token_limit: int = 2000, message_limit: int | None = None
    ) -> Sequence[Any]:
        """Return the messages; these histories are short."""
        return self._messages


def main(flow: Path, settings: dict[str, Any]) -> None:
    """Run the flow to its end."""
    memory = Memory(settings.get("history", []))

    class Factory(SlimDslNodeFactory):  # type: ignore[misc]  # graphon has no types here
        def _create_llm_node(self, request: Any) -> Any:
            node = super()._create_llm_node(request)
            node._memory = memory
            return node

        NODE_BUILDERS: ClassVar = {**SlimDslNodeFactory.NODE_BUILDERS, "llm": _create_llm_node}

    importer.SlimDslNodeFactory = Factory
    app = yaml.safe_load(flow.read_text(encoding="utf-8"))
    (named,) = app["dependencies"]
    author, _, rest = named["value"]["plugin_unique_identifier"].partition("/")
    under_provider = f"{author}/mlx:{rest.partition(':')[2]}"
    app["dependencies"].append({"type": "package", "value": {"plugin_unique_identifier": under_provider}})
    engine = importer.loads(
        yaml.safe_dump(app, allow_unicode=True),
        credentials={"model_credentials": [{"vendor": "mlx", "values": settings["credentials"]}]},
        start_inputs={"query": settings["query"]},
    )
    # A failed run says so in its last event; the engine then raises the same error.
    with contextlib.suppress(RuntimeError):
        for event in engine.run():
            fields = event.model_dump(mode="json")
            printed = {key: fields[key] for key in PRINTED if key in fields}
            if "node_run_result" in fields:
                printed["outputs"] = fields["node_run_result"]["outputs"]
            print(json.dumps({"event": type(event).__name__, **printed}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.load(sys.stdin))

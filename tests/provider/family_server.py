"""mlx-backend with a scripted model of a family, a process of its own; what the model was told is written to a file.

    python family_server.py SPECIFICATION.json PROMPTS.jsonl

The specification holds the model's `template` and `markers`, and `replies`: what it writes, in that order.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Event

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from running_server import running

from mlx_backend.engine.scripted import ScriptedEngine

specification = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
replies = iter(specification["replies"])


def reply(prompt: str) -> str:
    """Write the prompt down, and return the next reply."""
    with Path(sys.argv[2]).open("a", encoding="utf-8") as prompts:
        prompts.write(json.dumps(prompt) + "\n")
    return str(next(replies))


engine = ScriptedEngine(reply, chat_template=specification["template"], markers=specification["markers"])
with running(engine) as server:
    host, port = server.address
    print(f"Listening on http://{host}:{port}", flush=True)
    Event().wait()

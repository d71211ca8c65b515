"""mlx-backend with a scripted model of a family, a process of its own; what the model was told is written to a file.

    python family_server.py SPECIFICATION.json PROMPTS.jsonl

The specification holds the model's `template` and `markers`, and `replies`: what it writes, in that order. With markers
for images it is shown images. `settings` are the server's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from threading import Event

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from running_server import running
from scripted_engine import IMAGE_MARKERS, ScriptedEngine, ScriptedImageProcessor, ScriptedTokenizer

specification = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
replies = iter(specification["replies"])


def reply(prompt: str) -> str:
    """Write the prompt down, and return the next reply."""
    with Path(sys.argv[2]).open("a", encoding="utf-8") as prompts:
        prompts.write(json.dumps(prompt) + "\n")
    return str(next(replies))


tokenizer = ScriptedTokenizer(specification["markers"], specification["template"])
sees = set(IMAGE_MARKERS) <= set(specification["markers"])
engine = ScriptedEngine(
    reply, tokenizer=tokenizer, image_processor=ScriptedImageProcessor(tokenizer) if sees else None
)
with running(engine, **specification.get("settings", {})) as server:
    host, port = server.address
    print(f"Listening on http://{host}:{port}", flush=True)
    Event().wait()

"""`mlx-backend` where the system allows few threads: a sentence at the start, and none for a request.

The limit is in the place of Python's own function: the system's (`ulimit -u`) does not hold for root.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request

import pytest
from server_process import ENVIRONMENT

LIMITED = """
import runpy, sys, threading
allowed = int(sys.argv.pop(1))
name = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
start = getattr(threading, name)
def limited(*arguments, **options):
    if threading.active_count() > allowed:
        raise RuntimeError("can't start new thread")
    return start(*arguments, **options)
setattr(threading, name, limited)
runpy.run_module("mlx_backend", run_name="__main__", alter_sys=True)
"""
BODY = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}).encode()


def command(allowed: int) -> list[str]:
    return [sys.executable, "-c", LIMITED, str(allowed), "serve", "--port", "0", "--max-queue", "1"]


@pytest.mark.parametrize("allowed", [30, 120])
def test_too_few_for_requests_or_for_all_else_are_a_sentence_at_the_start(allowed: int) -> None:
    done = subprocess.run(command(allowed), capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode == 1
    assert "too few threads for " in done.stderr
    assert "ulimit -u" in done.stderr
    assert "Traceback" not in done.stderr


def test_with_as_many_as_are_asked_for_chats_are_answered() -> None:
    process = subprocess.Popen(
        command(160), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT
    )
    with process:
        try:
            assert process.stdout is not None
            url = next(line.split()[-1] for line in process.stdout if line.startswith("Listening on "))
            with urllib.request.urlopen(f"{url}/v1/chat/completions", BODY, timeout=120) as response:
                assert response.status == 200
        finally:
            process.kill()

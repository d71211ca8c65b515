"""The bare loop of mlx-lm: what a token costs without a server.

Reads lines of `{"streams": 8, "tokens": 256}` and answers each with the seconds it took and the processor time. The
prompt is cached already, as it is for a server that caches prompts.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from pathlib import Path

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache


def main() -> None:
    """Run a job per line until the input ends."""
    model, tokenizer = mlx_lm.load(str(Path(sys.argv[1])))
    messages = [{"role": "user", "content": sys.argv[2]}]
    prompt: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array(prompt[:-1])[None], cache), [part.state for part in cache])
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        streams, tokens = job["streams"], job["tokens"]
        started, worked = time.perf_counter(), time.process_time()
        generator = BatchGenerator(model)
        generator.insert(
            [prompt[-1:]] * streams,
            max_tokens=[tokens] * streams,
            caches=[copy.deepcopy(cache) for _ in range(streams)],
            all_tokens=[prompt[:-1] for _ in range(streams)],
        )
        count = 0
        while count < streams * tokens:
            count += len(generator.next()[1])
        generator.close()
        print(time.perf_counter() - started, time.process_time() - worked, flush=True)


if __name__ == "__main__":
    main()

"""Change a copy of the demo model so that it never ends a reply: every server then generates exactly `max_tokens`.

The output rows of the end tokens are set to zero.

    python endless.py FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

folder = Path(sys.argv[1])
weights: Any = mx.load(str(folder / "model.safetensors"))
ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
weights["lm_head.weight"][mx.array(ends)] = 0
mx.eval(weights)
mx.save_safetensors(str(folder / "endless.safetensors"), weights, {"format": "mlx"})
(folder / "endless.safetensors").replace(folder / "model.safetensors")

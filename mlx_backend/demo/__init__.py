"""The small models that ship with the project. Importing this is free: it only says where they are.

`mlx-demo` is a gpt_oss that chats; `mlx-demo-vision` a qwen3_vl that sees simple shapes and numbers;
`mlx-demo-embedding` a modernbert for searching a knowledge base.
"""

from pathlib import Path
from typing import Final

MODEL_PATH: Final = Path(__file__).parent / "model"
MODEL_NAME: Final = "mlx-demo"
VISION_MODEL_PATH: Final = Path(__file__).parent / "vision" / "model"
VISION_MODEL_NAME: Final = "mlx-demo-vision"
EMBEDDING_MODEL_PATH: Final = Path(__file__).parent / "embedding" / "model"
EMBEDDING_MODEL_NAME: Final = "mlx-demo-embedding"

_PATHS: Final = {
    MODEL_NAME: MODEL_PATH,
    VISION_MODEL_NAME: VISION_MODEL_PATH,
    EMBEDDING_MODEL_NAME: EMBEDDING_MODEL_PATH,
}

DEMOS: Final = tuple(_PATHS)
"""Their names."""


def demo_path(name: str) -> Path | None:
    """Return the folder of the demonstration model of this name; None if the name is none's."""
    return _PATHS.get(name)

"""The small gpt_oss model that ships with the project. Importing this is free: it only says where the model is."""

from pathlib import Path
from typing import Final

MODEL_PATH: Final = Path(__file__).parent / "model"
MODEL_NAME: Final = "mlx-demo"

"""An OpenAI-compatible MLX server for reasoning models. Importing the package costs nothing."""

__version__ = "0.1.0"

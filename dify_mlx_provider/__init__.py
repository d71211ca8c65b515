"""The Dify model-provider plugin for MLX servers."""

"""The small qwen3_vl model that sees shapes and numbers: its pictures, words and training."""

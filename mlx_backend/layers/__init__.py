"""Layers that are faster than MLX's own for many tokens at once, for engines and embedding models alike.

    many_rows ─▶ dequantize

Knows no models, no caches and no requests: it replaces layers of a network by ones with the same outputs, apart from
rounding.
"""

"""Layers that are faster than MLX's own for many tokens at once, for engines and embedding models alike.

    many_rows ─▶ dequantize, expert_blocks       other packages import only many_rows and unread_outputs

Knows no models, no caches and no requests: it replaces layers of a network by ones with the same outputs, apart from
rounding.
"""

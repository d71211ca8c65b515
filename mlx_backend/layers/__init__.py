"""Layers that compute faster than MLX's own for many tokens at once, for engines and embedding models alike.

    many_rows ─▶ dequantize, expert_blocks       only it is used from elsewhere

Knows no models, no caches and no requests: layers of a network are replaced, and give the same outputs as before.
"""

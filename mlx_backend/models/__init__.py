"""What is known of a model without loading it: its settings, and what the files in its folder say.

Plain data and small files. Knows nothing of engines, of HTTP or of MLX; importing it is free.
"""

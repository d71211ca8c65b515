"""The only place that imports mlx and mlx_lm."""

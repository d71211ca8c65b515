"""The subcommands of `mlx-backend`, one module each."""

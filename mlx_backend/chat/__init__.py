"""A chat request becomes a history, an effort, a prompt, a generation and events. Knows no HTTP and no MLX."""

"""Which models a server has, and which of them are in memory.

    models.toml ─config_file─▶ specs ─catalogue─▶ what can be served ─model_pool─▶ what is in memory

`registry` joins these to engines and services for the HTTP server. Knows nothing of HTTP and nothing of MLX; importing
it is free.
"""

"""Several models behind one server: which there are, what each is set to, and which are in memory.

    models.toml ─configuration─▶ specs ─catalogue─▶ what can be served ─residency─▶ what is in memory

Knows engines and services by protocol; nothing of HTTP and nothing of MLX. Importing it is free.
"""

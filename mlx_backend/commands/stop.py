"""`mlx-backend stop MODEL`: have a running server unload a model, once it is not in use."""

from __future__ import annotations

from functools import partial

from mlx_backend.commands import load

configure = load.configure
run = partial(load.run, what="unload")

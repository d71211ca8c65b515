"""One model on several machines: how the ranks connect, what they send each other, and the batch that leads them.

Here is only whether this process was started as one of several, as the environment says: the variables that launchers
such as mlx.launch and mpirun set; no MLX and no connections.
"""

from __future__ import annotations

import os

LAUNCHERS = {
    "ring": ("MLX_RANK", "MLX_HOSTFILE"),
    "jaccl": ("MLX_RANK", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR"),
    "nccl": ("MLX_RANK", "MLX_WORLD_SIZE", "NCCL_HOST_IP"),
    "mpi": ("OMPI_COMM_WORLD_SIZE",),
}
"""The variables that launchers set, by MLX's name of the backend that reads them."""


def distributed_backend() -> str | None:
    """Return MLX's name of the backend that the environment asks for; None if this process was started alone."""
    for backend, variables in LAUNCHERS.items():
        if all(os.environ.get(variable) for variable in variables):
            return backend
    return None

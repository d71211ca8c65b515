"""`python -m mlx_backend` is `mlx-backend`."""

import sys

from mlx_backend.cli import main

if __name__ == "__main__":
    sys.exit(main())

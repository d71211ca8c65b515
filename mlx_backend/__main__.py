"""`python -m mlx_backend` is `mlx-backend`."""

import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while Python imports is no traceback

    from mlx_backend.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())

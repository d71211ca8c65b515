"""`python -m mlx_backend` is `mlx-backend`."""

import signal
import sys

if __name__ == "__main__":
    # Ctrl-C ends the process without a traceback. A command that has something to stop first says so itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    from mlx_backend.cli import main

    sys.exit(main())

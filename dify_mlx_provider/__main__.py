"""The entry point: Dify's daemon runs `python -m dify_mlx_provider` in the folder of the unpacked plugin."""

# The SDK patches sockets and threads when it is imported, so it comes first.
from dify_plugin import DifyPluginEnv, Plugin  # isort: split

import logging
from pathlib import Path

from dify_plugin.config.logger_format import plugin_logger_handler

from dify_mlx_provider.servers.discovery import keep_descriptions
from mlx_backend import version_and_commit

MAX_REQUEST_SECONDS = 3600
"""Seconds of one call: a long prompt takes long on a small machine. Dify's daemon has a limit of its own."""

CACHE = Path.cwd() / ".cache"
"""A folder in the plugin's own, which Dify's daemon keeps in a volume: it outlives the process and the container.

The daemon takes the checksum of the package and not of this folder; an updated plugin has another folder, and begins
anew. What runs without a disk (serverless) remembers only in memory.
"""

if __name__ == "__main__":
    # Modules log as usual; the daemon writes it into its own log. Nothing of a conversation belongs in it.
    logging.getLogger("dify_mlx_provider").setLevel(logging.INFO)
    logging.getLogger("dify_mlx_provider").addHandler(plugin_logger_handler)
    logging.getLogger("dify_mlx_provider").info("MLX plugin %s", version_and_commit())
    keep_descriptions(CACHE)
    Plugin(DifyPluginEnv(MAX_REQUEST_TIMEOUT=MAX_REQUEST_SECONDS)).run()

"""The entry point: Dify's daemon runs `python -m dify_mlx_provider` in the folder of the unpacked plugin."""

# The SDK patches sockets and threads when it is imported, so it comes first.
from dify_plugin import DifyPluginEnv, Plugin

MAX_REQUEST_SECONDS = 3600
"""A long prompt takes long on a small machine; Dify's daemon has a limit of its own."""

if __name__ == "__main__":
    Plugin(DifyPluginEnv(MAX_REQUEST_TIMEOUT=MAX_REQUEST_SECONDS)).run()

"""The plugin's log, which Dify's daemon writes into its own. Nothing of a conversation belongs in it.

Modules log as usual, with `logging.getLogger(__name__)`.
"""

from __future__ import annotations

import logging

from dify_plugin.config.logger_format import plugin_logger_handler


def send_log_to_daemon() -> None:
    """Write what the plugin's modules log to standard output, in the daemon's form."""
    logger = logging.getLogger("dify_mlx_provider")
    logger.setLevel(logging.INFO)
    logger.addHandler(plugin_logger_handler)

"""The plugin's log, which Dify's daemon writes into its own. Nothing of a conversation belongs in it."""

from __future__ import annotations

import logging

from dify_plugin.config.logger_format import plugin_logger_handler

logger = logging.getLogger("dify_mlx_provider")
logger.setLevel(logging.INFO)
logger.addHandler(plugin_logger_handler)
logger.propagate = False

"""Which versions of mlx-backend this plugin works with: the one place where versions are compared.

The plugin and `mlx-backend` come from one project and share one version number. A server of the same major version
only adds to what the plugin needs; one older than OLDEST_SERVER lacks something the plugin relies on.
"""

from __future__ import annotations

import re

from mlx_backend import __version__ as PLUGIN  # noqa: N812  # a constant here

OLDEST_SERVER = (0, 1)
"""The oldest server that answers what this plugin asks: major, minor."""

_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})")


def incompatibility(
    server: str, *, plugin: str = PLUGIN, oldest: tuple[int, int] = OLDEST_SERVER
) -> str | None:
    """Return a sentence on what to update, or None if the versions fit. An unreadable version fits."""
    server_version, plugin_version = _major_minor(server), _major_minor(plugin)
    if server_version is None or plugin_version is None:
        return None
    if server_version < oldest:
        return (
            f"The server is mlx-backend {server}, and this plugin ({plugin}) needs {oldest[0]}.{oldest[1]} or newer. "
            "Update the server."
        )
    if server_version[0] > plugin_version[0]:
        return (
            f"The server is mlx-backend {server}, newer than this plugin ({plugin}) understands. Update the plugin "
            "in Dify."
        )
    return None


def _major_minor(version: str) -> tuple[int, int] | None:
    match = _VERSION.match(version)
    return (int(match[1]), int(match[2])) if match else None

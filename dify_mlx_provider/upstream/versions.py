"""Which servers this plugin understands: the one place where versions are compared.

The plugin and `mlx-backend` come from one project and carry one number. A server of the same major version only ever
learns more than the plugin asks for; one that is older than OLDEST lacks something the plugin relies on.
"""

from __future__ import annotations

import re

from mlx_backend import __version__ as PLUGIN  # noqa: N812

OLDEST = (0, 1)
"""The oldest server, as major and minor, that answers what this plugin asks."""

_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})")


def complaint(server: str, *, plugin: str = PLUGIN, oldest: tuple[int, int] = OLDEST) -> str | None:
    """Return what to do about a server's version, in a sentence, or None if it suits. An unknown one suits."""
    theirs, ours = _read(server), _read(plugin)
    if theirs is None or ours is None:
        return None
    if theirs < oldest:
        return (
            f"The server is mlx-backend {server}, and this plugin ({plugin}) needs {oldest[0]}.{oldest[1]} or newer. "
            "Update the server."
        )
    if theirs[0] > ours[0]:
        return (
            f"The server is mlx-backend {server}, newer than this plugin ({plugin}) understands. Update the plugin "
            "in Dify."
        )
    return None


def _read(version: str) -> tuple[int, int] | None:
    match = _VERSION.match(version)
    return (int(match[1]), int(match[2])) if match else None

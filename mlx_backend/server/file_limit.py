"""How many connections the process may have open, given the system's limit on open files."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

FILES_BESIDE = 192
"""Open files other than connections: a model's shards, caches on disk, sockets between threads, standard streams."""
MIN_CONNECTIONS = 16


def connections_within_file_limit(wanted: int) -> int:
    """Raise the soft limit on open files as far as needed and allowed; return how many connections fit.

    A Mac starts programs with a soft limit of 256. Logs a warning if that is fewer than `wanted`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + FILES_BESIDE
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        except (OSError, ValueError):  # a Mac has a limit of its own beside the hard one
            pass
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    fitting = max(soft - FILES_BESIDE, MIN_CONNECTIONS)
    log.warning(
        "The system allows this process %d open files, so at most %d connections are accepted at once; "
        "`ulimit -n %d` before the start allows %d.",
        soft,
        fitting,
        needed,
        wanted,
    )
    return fitting

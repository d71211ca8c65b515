"""Tokens: engines, generations and the one thread that runs them. Knows no HTTP and no channels.

Read `mlx/plain.py` first, a whole engine on a page (it is in `mlx/`, which alone imports mlx-lm); then `scheduler.py`,
which drives it, and `mlx/batch.py`, the engine that is served.

Where a request waits: in the `fair_queue` until there is room for it, then in `mlx/prefill_queue` until its prompt is
prefilled, and again if it is preempted (`mlx/batch`).

When memory is short: cached prefixes are evicted first (`mlx/prefix_cache`); a request that does not fit stays in the
queue, or is refused if it never will (`kv_cache_budget`); a reply that outgrows its reservation preempts the least
urgent one. `device/memory` counts what all models take together, `registry/model_pool` decides which to unload.
"""

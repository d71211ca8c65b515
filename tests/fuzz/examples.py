"""How much these tests draw: a little and always the same in the test run, as much as time allows in `make fuzz`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import Callable

_ALWAYS = {
    "deadline": None,  # machines differ; a test that hangs is ended by pytest-timeout
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    "print_blob": True,
}
settings.register_profile("tests", max_examples=40, derandomize=True, database=None, **_ALWAYS)
settings.register_profile("fuzz", max_examples=int(os.environ.get("FUZZ_EXAMPLES", "500")), **_ALWAYS)
settings.load_profile("fuzz" if "FUZZ_EXAMPLES" in os.environ else "tests")


def examples(share: float) -> Callable[[Any], Any]:
    """Return a decorator: a test that is slow draws less, one that is fast draws more."""
    decorator: Callable[[Any], Any] = settings(max_examples=max(5, int(settings().max_examples * share)))
    return decorator

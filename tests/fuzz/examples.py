"""How much these tests draw: a little and always the same in the test run, as much as time allows in `make fuzz`.

What `make fuzz` has found is tried first in its next rounds, from .hypothesis, and in every test run once it is written
down: as an `@example` of its test, in `FELL_ONCE` (test_requests.py), or as a case of tests/conversation/cases.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]
_ALWAYS = {
    "deadline": None,  # machines differ; a test that hangs is ended by pytest-timeout
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    "print_blob": True,
}
settings.register_profile("tests", max_examples=15, derandomize=True, database=None, **_ALWAYS)
# Said, since in CI hypothesis would by itself draw the same each time, and store nothing.
_NEW_EACH_TIME = {
    "derandomize": False,
    "database": DirectoryBasedExampleDatabase(ROOT / ".hypothesis/examples"),
}
settings.register_profile(
    "fuzz", max_examples=int(os.environ.get("FUZZ_EXAMPLES", "500")), **_ALWAYS, **_NEW_EACH_TIME
)
settings.load_profile("fuzz" if "FUZZ_EXAMPLES" in os.environ else "tests")


def examples(share: float) -> Callable[[Any], Any]:
    """Return a decorator: a test that is slow draws less, one that is fast draws more."""
    decorator: Callable[[Any], Any] = settings(max_examples=max(3, int(settings().max_examples * share)))
    return decorator

"""What mlx-lm does to the limit on open files when it is imported lowers none, and works where few are allowed.

That it can be imported there is tested by serving: tests/commands/test_process_faults.py.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from mlx_backend.device.importing import file_limit_only_raised
with file_limit_only_raised():
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, 4096))  # as mlx_lm.utils does
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("before", "after"), [((200, 256), "256 256"), ((3000, 4096), "3000 4096"), ((256, 4096), "2048 4096")]
)
def test_the_limit_is_raised_as_far_as_allowed_and_never_lowered(before: tuple[int, int], after: str) -> None:
    script = SCRIPT.format(soft=before[0], hard=before[1])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == after, done.stderr

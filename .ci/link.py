"""Link this clone into the environment whose Python runs this: its packages, and the command `mlx-backend`.

`make setup` runs it. An editable install would do the same through a `.pth` file, but macOS marks what lies in a
dot-folder below iCloud's folders (Documents, Desktop) as hidden, and Python skips hidden `.pth` files. Links are found
wherever the clone lies, by scripts, isolated processes (`python -I`) and `mlx.launch` too, and never hold an old copy.
"""

import shlex
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mlx_backend", "dify_mlx_provider")
# -P: a file in the folder where somebody stands, such as json.py, must not be imported instead of Python's own.
COMMAND = """#!/bin/sh
# Written by `make setup`: runs the server of the clone that this environment belongs to.
exec {python} -P -m mlx_backend "$@"
"""


def main() -> int:
    """Write the links and the command. Exits with a sentence if something else is in the way."""
    if sys.prefix == sys.base_prefix:
        sys.exit("not linked: this Python belongs to no virtual environment (`make setup` makes one)")
    for package in PACKAGES:
        link = Path(sysconfig.get_path("purelib"), package)
        if link.is_symlink():
            link.unlink()
        elif link.exists():
            sys.exit(f"not linked: {link} is an installed copy. Run `make clean`, then `make setup`.")
        link.symlink_to(ROOT / package, target_is_directory=True)
    command = Path(sysconfig.get_path("scripts"), "mlx-backend")
    command.write_text(COMMAND.format(python=shlex.quote(sys.executable)), encoding="utf-8")
    command.chmod(0o755)
    return 0


if __name__ == "__main__":
    sys.exit(main())

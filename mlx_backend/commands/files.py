"""Writes a text file as a whole or not at all, for commands that change files of the user or of the system."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.commands.errors import CommandError

if TYPE_CHECKING:
    from pathlib import Path


def write_file(file: Path, text: str, *, newline: str = "\n", is_secret: bool = False) -> None:
    """Write it; its mode stays, and one with a secret is for its owner alone. Raises CommandError.

    Of a link, as in a folder of dotfiles, the file that it leads to is written.
    """
    file = file.resolve()
    part = file.with_name(f"{file.name}.new")
    try:
        mode = 0o600 if is_secret else file.stat().st_mode & 0o777 if file.exists() else 0o644
        file.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        part.touch(mode=mode, exist_ok=False)
        part.write_text(text, encoding="utf-8", newline=newline)
        part.chmod(mode)
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise CommandError(f"{file} cannot be written: {error.strerror or error}.") from None

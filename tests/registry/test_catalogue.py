"""The catalogue: which models can be served, under which names, and that requests select only among them."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download
from model_folders import ManualTime, age, names, put_model, put_snapshot, refusal

from mlx_backend.models.spec import ModelDefaults, ModelSpec
from mlx_backend.registry.catalogue import RESCAN_SECONDS, Catalogue
from mlx_backend.registry.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("cache")


# -- finding models ---------------------------------------------------------------------------------------


def test_models_are_found_directly_in_a_folder_or_below_their_owner(root: Path) -> None:
    catalogue = Catalogue([], models_dirs=[root])
    assert names(catalogue) == ["other/large", "owner/large", "small"]
    assert catalogue.find("owner/large") == ModelSpec(name="owner/large", source=str(root / "owner/large"))


def test_of_two_folders_of_one_name_the_first_is_served_and_the_log_says_so(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    second = tmp_path / "second" / "small"
    put_model(second)
    catalogue = Catalogue([], models_dirs=[root, second.parent])
    assert catalogue.find("small").source == str(root / "small")
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == f"{second} is left out. The name 'small' is already that of {root / 'small'}."


def test_models_that_are_not_configured_get_the_settings_of_the_others(root: Path) -> None:
    others = ModelSpec(name="", source="", ttl=60, defaults=ModelDefaults(top_k=3))
    catalogue = Catalogue([], models_dirs=[root], others=others, allow_download=True)
    assert catalogue.find("small") == replace(others, name="small", source=str(root / "small"))
    assert catalogue.find("new/one") == replace(others, name="new/one", source="new/one")


def test_a_configured_model_is_not_listed_again_under_its_folder(root: Path) -> None:
    mine = ModelSpec(name="mine", source=str(root / "small"), aliases=("m",))
    also = ModelSpec(name="also", source=str(root / "small"))
    catalogue = Catalogue([mine, also], models_dirs=[root, root])
    assert names(catalogue) == ["mine", "also", "other/large", "owner/large"]
    for name in ("mine", "m", "small", str(root / "small"), "./small"):
        assert catalogue.find(name) is mine


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").rename(folder / "adapters.safetensors"),
        lambda folder: (folder / "model.safetensors").rename(folder / "model.safetensors.incomplete"),
    ],
    ids=["no configuration", "no weights", "other weights", "unfinished download"],
)
def test_an_incomplete_model_is_not_listed(damage, root: Path) -> None:  # type: ignore[no-untyped-def]  # any function of a folder
    damage(root / "small")
    assert "small" not in names(Catalogue([], models_dirs=[root]))


@pytest.mark.parametrize(
    "index",
    [
        *("{", "[]", "{}", '{"weight_map": 7}', '{"weight_map": {"a": {}}}'),
        '{"weight_map": {"a": 7, "b": "model-2.safetensors"}}',
    ],
)
def test_a_model_with_an_unreadable_index_is_not_listed(index: str, root: Path) -> None:
    (root / "small" / "model.safetensors").rename(root / "small" / "model-1.safetensors")
    (root / "small" / "model.safetensors.index.json").write_text(index)
    assert "small" not in names(Catalogue([], models_dirs=[root]))


def test_a_split_model_is_listed_when_its_last_part_is_there(root: Path) -> None:
    folder, parts = root / "small", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (folder / "model.safetensors").rename(folder / parts[0])
    index = {"weight_map": {"a": parts[0], "b": parts[1], "c": parts[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "small" not in names(Catalogue([], models_dirs=[root]))
    (folder / parts[1]).touch()
    assert "small" in names(Catalogue([], models_dirs=[root]))


@pytest.mark.parametrize(
    ("parts", "index", "whole"),
    [
        (
            ["model-00001-of-00002", "model-00002-of-00002"],
            ["model-00001-of-00004", "model-00004-of-00004"],
            True,
        ),
        (["model-00001-of-00002", "model-00002-of-00002"], None, True),
        (["model-00001-of-00002", "model-00002-of-00002", "model-00003-of-00004"], None, True),
        (["model"], ["model-00001-of-00004", "model-00004-of-00004"], True),
        (["model", "model-00001-of-00002"], None, True),
        (["model-00001-of-00002"], None, False),
        (["model-00001-of-00004"], ["model-00001-of-00004", "model-00004-of-00004"], False),
    ],
)
@pytest.mark.parametrize("where", ["folder", "cache"])
def test_weights_are_whole_by_their_own_names_if_the_index_is_of_another_version(
    where: str, parts: list[str], index: list[str] | None, whole: bool, root: Path
) -> None:
    if where == "folder":
        folder = root / "small"
        (folder / "model.safetensors").unlink()
        for part in parts:
            (folder / f"{part}.safetensors").write_bytes(bytes(10))
    else:
        folder = put_snapshot("maker/small", [f"{part}.safetensors" for part in parts])
    if index is not None:
        listed = {str(at): f"{part}.safetensors" for at, part in enumerate(index)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    catalogue = Catalogue([], models_dirs=[root], hugging_face_cache=True)
    assert ({"folder": "small", "cache": "maker/small"}[where] in names(catalogue)) == whole


def test_what_cannot_be_served_is_not_listed_and_says_why_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "small" / "config.json").write_text('{"model_type": "whisper"}')
    (root / "quantised").mkdir()
    (root / "quantised" / "model-Q4_K_M.gguf").touch()
    (root / "notes").mkdir(exist_ok=True)
    clock = ManualTime()
    with caplog.at_level(logging.WARNING):
        catalogue = Catalogue([], models_dirs=[root], clock=clock)
        (root / "more").mkdir()
        clock.now += RESCAN_SECONDS
        assert names(catalogue) == ["other/large", "owner/large"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert (
        f"{root / 'small'} is left out. The model 'small' cannot be served: it is a model for speech"
        in said[1]
    )
    assert "is in GGUF" in said[0]
    assert "it is a model for speech or sound (whisper)" in refusal(catalogue, "small")
    assert "is in GGUF" in refusal(catalogue, "quantised")


def test_a_cache_of_hugging_face_is_a_folder_of_models_too(cache: Path) -> None:
    put_snapshot("maker/whole")
    put_snapshot("maker/part", ["model-00001-of-00002.safetensors"])
    catalogue = Catalogue([], models_dirs=[cache])
    assert names(catalogue) == ["maker/whole"]
    assert "The weights of 'maker/part' are not complete: of 2 files 1 are there." in refusal(
        catalogue, "maker/part"
    )


@pytest.mark.parametrize("may_download", [True, False])
def test_of_what_is_cached_but_cannot_be_served_the_reason_is_told(may_download: bool, cache: Path) -> None:
    folder = put_snapshot("maker/ear")
    (folder / "config.json").resolve().write_text('{"model_type": "whisper"}')
    catalogue = Catalogue([], hugging_face_cache=True, allow_download=may_download)
    assert names(catalogue) == []
    if may_download:
        assert catalogue.may_download(catalogue.find("maker/ear")), "what there is now may be another version"
    else:
        for name in ("maker/ear", "ear"):
            assert "it is a model for speech or sound (whisper)" in refusal(catalogue, name)


def test_a_model_with_pytorchs_own_weights_alone_is_not_listed(root: Path) -> None:
    (root / "small" / "model.safetensors").rename(root / "small" / "pytorch_model.bin")
    (root / "small" / "config.json").write_text('{"model_type": "xlm-roberta"}')
    assert "small" not in names(Catalogue([], models_dirs=[root]))


def test_the_hugging_face_cache_is_listed_if_enabled(cache: Path) -> None:
    folder = put_snapshot("mlx-community/whole")
    parts = put_snapshot("mlx-community/parts", ["model-1.safetensors", "model.safetensors.index.json"])
    (parts / "model.safetensors.index.json").resolve().write_text(
        '{"weight_map": {"a": "model-2.safetensors"}}'
    )
    put_snapshot("someone/tokenizer-only", [])
    (put_snapshot("someone/interrupted") / "model.safetensors").resolve().unlink()
    (cache / "datasets--a--b").mkdir()
    (cache / "models--nothing--here").mkdir()
    catalogue = Catalogue([], hugging_face_cache=True)
    assert names(catalogue) == ["mlx-community/whole"]
    spec = catalogue.find("whole")
    assert spec.source == "mlx-community/whole"
    assert catalogue.folder(spec) == folder
    assert snapshot_download(spec.source, cache_dir=cache, local_files_only=True) == str(folder)
    assert names(Catalogue([])) == []


def test_a_configured_repository_is_not_listed_again_as_cached() -> None:
    put_snapshot("mlx-community/whole")
    mine = ModelSpec(name="mine", source="mlx-community/whole")
    catalogue = Catalogue([mine], hugging_face_cache=True)
    assert names(catalogue) == ["mine"]
    assert catalogue.find("mlx-community/whole") is catalogue.find("whole") is mine


def test_the_size_of_weights_is_that_of_their_files(root: Path) -> None:
    (root / "owner" / "large" / "model-2.safetensors").write_bytes(bytes(500))
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (root / "owner" / "large" / "model.safetensors.index.json").write_text(json.dumps(index))
    catalogue = Catalogue([], models_dirs=[root])
    large = catalogue.find("owner/large")
    assert catalogue.weight_bytes(large) == 1500
    assert catalogue.weight_bytes(replace(large, engine={"draft_model": str(root / "small")})) == 1510
    assert catalogue.weight_bytes(ModelSpec(name="x", source="not/here")) == 0


# -- caching the listing -----------------------------------------------------------------------------------


def test_a_new_model_appears_and_a_removed_one_disappears(root: Path) -> None:
    age(root)
    clock = ManualTime()
    catalogue = Catalogue([], models_dirs=[root], clock=clock)
    put_model(root / "owner" / "new")
    (root / "small" / "config.json").unlink()
    assert names(catalogue) == ["other/large", "owner/large", "small"], "not checked again yet"
    clock.now += RESCAN_SECONDS
    assert names(catalogue) == ["other/large", "owner/large", "owner/new"]


def test_without_changes_nothing_is_scanned_again(root: Path) -> None:
    age(root)
    clock = ManualTime()
    catalogue = Catalogue([], models_dirs=[root], clock=clock)
    before = catalogue.find("small")
    clock.now += RESCAN_SECONDS
    assert catalogue.find("small") is before
    (root / "another").mkdir()
    clock.now += RESCAN_SECONDS
    assert catalogue.find("small") is not before


def test_a_change_within_the_resolution_of_modification_times_is_detected(root: Path) -> None:
    clock = ManualTime()
    catalogue = Catalogue([], models_dirs=[root], clock=clock)
    mtime = root.stat().st_mtime_ns
    put_model(root / "quick")
    os.utime(root, ns=(mtime, mtime))
    clock.now += RESCAN_SECONDS
    assert "quick" in names(catalogue)


def test_a_finished_download_is_listed(cache: Path) -> None:
    weights = put_snapshot("a/b") / "model.safetensors"
    target = weights.readlink()
    weights.unlink()
    age(cache)
    clock = ManualTime()
    catalogue = Catalogue([], hugging_face_cache=True, clock=clock)
    assert names(catalogue) == []
    weights.symlink_to(target)
    clock.now += RESCAN_SECONDS
    assert names(catalogue) == ["a/b"]


def test_a_folder_that_has_disappeared_holds_nothing(root: Path) -> None:
    clock = ManualTime()
    catalogue = Catalogue([], models_dirs=[root], clock=clock)
    root.rename(root.with_name("elsewhere"))
    clock.now += RESCAN_SECONDS
    assert names(catalogue) == []


# -- names --------------------------------------------------------------------------------------------------


def test_the_last_part_of_a_name_is_enough_if_it_is_unique(root: Path) -> None:
    put_model(root / "owner" / "alone")
    catalogue = Catalogue([], models_dirs=[root])
    assert catalogue.find("alone").name == "owner/alone"
    assert refusal(catalogue, "large") == (
        "The model 'large' could be 'other/large' or 'owner/large': send the whole name."
    )


def test_names_that_people_know_from_elsewhere_are_understood_if_they_mean_one_model(root: Path) -> None:
    put_model(root / "mlx-community" / "gpt-oss-20b-MXFP4-Q8")
    catalogue = Catalogue(
        [ModelSpec(name="x", source=str(root), aliases=("Qwen3.5-4B",))], models_dirs=[root]
    )
    for name in ("gpt-oss:20b", "gpt-oss-20b", "GPT-OSS:20B:latest", "gpt-oss"):
        assert catalogue.find(name).name == "mlx-community/gpt-oss-20b-MXFP4-Q8"
    assert catalogue.find("qwen3.5:4b").name == "x"
    put_model(root / "mlx-community" / "gpt-oss-120b-MXFP4-Q8")
    both = Catalogue([], models_dirs=[root])
    assert both.find("gpt-oss:120b").name == "mlx-community/gpt-oss-120b-MXFP4-Q8"
    assert refusal(both, "gpt-oss").startswith(
        "The model 'gpt-oss' could be 'mlx-community/gpt-oss-120b-MXFP4-Q8' or"
    )
    assert refusal(both, "gpt-4o").startswith("The model 'gpt-4o' is not served here.")


def test_a_whole_name_wins_over_the_last_part_of_another(root: Path) -> None:
    put_model(root / "owner" / "small")
    assert Catalogue([], models_dirs=[root]).find("small").source == str(root / "small")


def test_a_configured_name_wins_over_the_source_of_another_model(root: Path) -> None:
    first = ModelSpec(name="first", source="a/b", named_on_command_line=True)
    second = ModelSpec(name="a/b", source="c/d", named_on_command_line=True)
    catalogue = Catalogue([first, second])
    assert catalogue.find("a/b") is second
    assert names(catalogue) == ["first", "a/b"]


def test_the_error_for_an_unknown_name_lists_the_models_most_similar_first(root: Path) -> None:
    catalogue = Catalogue([ModelSpec(name="x", source=str(root), aliases=("gpt-oss",))], models_dirs=[root])
    assert refusal(catalogue, "smal") == (
        "The model 'smal' is not served here. There is 'small', 'other/large', 'owner/large', 'x'."
    )
    assert refusal(catalogue, "GPT-OS").endswith("There is 'x', 'other/large', 'owner/large', 'small'.")
    assert refusal(Catalogue([]), "x").endswith("There is no model here at all.")


def test_a_long_list_and_a_long_name_are_truncated() -> None:
    specs = [ModelSpec(name=f"m{i}", source=f"/m{i}") for i in range(30)]
    message = refusal(Catalogue(specs), "m" * 10_000)
    assert len(message) < 600
    assert message.endswith("and 10 more.")


# -- downloads ----------------------------------------------------------------------------------------------


def test_a_repository_that_a_request_names_is_downloaded_only_if_allowed() -> None:
    message = refusal(Catalogue([]), "mlx-community/new")
    assert "does not download what a request names (--allow-download)" in message
    catalogue = Catalogue([], allow_download=True)
    spec = catalogue.find("mlx-community/new")
    assert spec.source == "mlx-community/new"
    assert catalogue.may_download(spec)


def test_a_configured_repository_that_is_not_downloaded_is_neither_listed_nor_served() -> None:
    spec = ModelSpec(name="big", source="mlx-community/big", aliases=("b",))
    catalogue = Catalogue([spec])
    assert names(catalogue) == []
    for name in ("big", "b", "mlx-community/big"):
        assert refusal(catalogue, name).startswith(
            "The model 'big' is not on this machine: 'mlx-community/big' has not been downloaded, "
            "and that is not allowed (--allow-download)."
        )
    assert names(Catalogue([spec], allow_download=True)) == ["big"]


def test_a_configured_repository_is_served_once_it_is_downloaded(cache: Path) -> None:
    age(cache)
    clock = ManualTime()
    catalogue = Catalogue([ModelSpec(name="big", source="mlx-community/big")], clock=clock)
    put_snapshot("mlx-community/big")
    clock.now += RESCAN_SECONDS
    assert names(catalogue) == ["big"]
    assert not catalogue.may_download(catalogue.find("big"))


def test_a_model_named_on_the_command_line_may_always_be_downloaded() -> None:
    spec = ModelSpec(name="big", source="mlx-community/big", named_on_command_line=True)
    catalogue = Catalogue([spec])
    assert catalogue.find("big") is spec
    assert catalogue.may_download(spec)


# -- the folders ------------------------------------------------------------------------------------------


def test_a_models_dir_must_exist_and_must_not_be_a_model(root: Path) -> None:
    with pytest.raises(ConfigurationError, match="nowhere: there is no such folder"):
        Catalogue([], models_dirs=[root / "nowhere"])
    with pytest.raises(ConfigurationError, match="small: this is a model itself"):
        Catalogue([], models_dirs=[root / "small"])

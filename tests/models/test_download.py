"""Downloads from a Hub on loopback: whole, interrupted and gone on with, and each way in which they fail."""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hub_server import Fault, HubServer, hub

from mlx_backend.errors import EngineError, EngineStopped
from mlx_backend.models import download as download_module
from mlx_backend.models.download import download, downloaded, explain_download_errors, find_folder
from mlx_backend.models.folders import cached_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "maker/model"
WEIGHTS = random.Random(1).randbytes(300_000)
SHA256 = hashlib.sha256(WEIGHTS).hexdigest()
CONFIG = b'{"model_type": "llama"}'
TOKENIZER = b'{"model": {}}'
FILES: dict[str, bytes | int | None] = {
    "config.json": CONFIG,
    "tokenizer.json": TOKENIZER,
    "README.md": b"Not needed.",
    "model.safetensors": WEIGHTS,
    "original/model.safetensors": bytes(2000),
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with hub({NAME: FILES}) as server:
        server.piece = 50_000
        constants = "huggingface_hub.constants."
        monkeypatch.setattr(constants + "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants + "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants + "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants + "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("mlx_backend.models.download.REPORTED_BYTES", 10_000)
        monkeypatch.setattr(download_module, "pause", lambda _seconds: None)
        yield server


def partial(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models--maker--model" / "blobs" / f"{SHA256}.incomplete"


class Reports:
    """What is reported of a download; raises `error` when so many bytes are there."""

    def __init__(self, error: Exception | None = None, at: int = 0) -> None:
        self.all: list[tuple[int, int]] = []
        self._error, self._at = error, at

    def __call__(self, done: int, total: int) -> None:
        self.all.append((done, total))
        if self._error is not None and done >= self._at:
            raise self._error


def test_what_a_model_needs_is_downloaded_and_its_bytes_are_reported(server: HubServer) -> None:
    reports = Reports()
    folder = download(NAME, reports)
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    total = len(CONFIG) + len(WEIGHTS) + len(TOKENIZER)
    assert {each for _, each in reports.all} == {total}
    counts = [done for done, _ in reports.all]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (len(CONFIG), total)
    assert len(counts) > 3
    assert downloaded(NAME) == folder == find_folder(NAME, allow_download=False)[0]


def test_what_is_there_is_not_downloaded_again(server: HubServer) -> None:
    first = download(NAME, Reports())
    server.paths.clear()
    reports = Reports()
    assert download(NAME, reports) == first
    assert reports.all == []
    assert not [path for path in server.paths if "/resolve/" in path], (
        "two or three looks at the listing, no file"
    )


def test_a_download_that_was_stopped_goes_on_where_it_stopped(server: HubServer, tmp_path: Path) -> None:
    with pytest.raises(EngineStopped):
        download(NAME, Reports(EngineStopped("The server is stopping."), at=120_000))
    there = partial(tmp_path).stat().st_size
    assert 100_000 < there < 300_000
    reports = Reports()
    folder = download(NAME, reports)
    assert server.ranges == [("model.safetensors", 0), ("model.safetensors", there)]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert reports.all[0][0] == there + len(CONFIG), "the small file is there too"
    assert not partial(tmp_path).exists()


@pytest.mark.parametrize("stop_after", [1, 9_999, 10_000, 10_001, 299_999])
def test_a_connection_that_breaks_is_made_again_and_nothing_is_sent_twice(
    server: HubServer, stop_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.faults["model.safetensors"] = Fault(stop_after=stop_after, times=3)
    folder = download(NAME, Reports())
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    starts = [begin for _, begin in server.ranges]
    assert starts[:2] == [0, stop_after]
    assert starts == sorted(starts)
    assert "The download of model.safetensors stopped (" in caplog.text


def test_a_server_that_ignores_where_to_begin_sends_all_of_it(server: HubServer, tmp_path: Path) -> None:
    server.faults["model.safetensors"] = Fault(stop_after=100_000, times=1)
    with pytest.raises(EngineStopped):
        download(NAME, Reports(EngineStopped("enough"), at=50_000))
    server.faults["model.safetensors"] = Fault(ignores_range=True)
    reports = Reports()
    assert (download(NAME, reports) / "model.safetensors").read_bytes() == WEIGHTS
    assert reports.all[-1][0] <= reports.all[-1][1]
    assert min(done for done, _ in reports.all) < 50_000, "what was thrown away is not counted"


def test_a_server_that_sends_another_part_than_it_was_asked_for_is_asked_again(
    server: HubServer, tmp_path: Path
) -> None:
    partial(tmp_path).parent.mkdir(parents=True)
    partial(tmp_path).write_bytes(WEIGHTS[:1000])
    server.faults["model.safetensors"] = Fault(headers={"Content-Range": "bytes 7-299999/300000"}, times=1)
    assert (download(NAME, Reports()) / "model.safetensors").read_bytes() == WEIGHTS
    assert [begin for _, begin in server.ranges] == [1000, 0]


@pytest.mark.parametrize(
    "there",
    [b"x" * 5000, WEIGHTS + b"and more", bytes(len(WEIGHTS)), WEIGHTS],
    ids=["wrong", "long", "all wrong", "all"],
)
def test_what_an_earlier_download_left_is_checked(server: HubServer, tmp_path: Path, there: bytes) -> None:
    partial(tmp_path).parent.mkdir(parents=True)
    partial(tmp_path).write_bytes(there)
    reports = Reports()
    assert (download(NAME, reports) / "model.safetensors").read_bytes() == WEIGHTS
    assert all(0 <= done <= total for done, total in reports.all)
    assert (server.ranges == []) is (there == WEIGHTS)


def test_a_file_that_arrives_damaged_twice_is_not_used(server: HubServer, tmp_path: Path) -> None:
    partial(tmp_path).parent.mkdir(parents=True)
    partial(tmp_path).write_bytes(WEIGHTS[:1000])
    server.faults["model.safetensors"] = Fault(damage=True)
    with pytest.raises(
        EngineError, match=r"model.safetensors arrives damaged, with a wrong checksum: try again later"
    ):
        download(NAME, Reports())
    assert not (tmp_path / "cache" / "models--maker--model" / "blobs" / SHA256).exists()


def test_a_file_whose_parts_do_not_fit_each_other_is_downloaded_anew(server: HubServer) -> None:
    parts = iter([Fault(stop_after=100_000, damage=True), Fault()])
    server.on_fault = lambda name: server.faults.__setitem__(name, next(parts, Fault()))
    server.faults["model.safetensors"] = Fault(status=503)
    assert (download(NAME, Reports()) / "model.safetensors").read_bytes() == WEIGHTS
    assert server.ranges == [("model.safetensors", begin) for begin in (0, 0, 100_000, 0)]


def test_a_server_that_always_begins_anew_and_never_ends_is_given_up(server: HubServer) -> None:
    lengths = itertools.cycle([50_000, 100_000])
    server.on_fault = lambda name: server.faults.__setitem__(
        name, Fault(ignores_range=True, stop_after=next(lengths))
    )
    server.faults["model.safetensors"] = Fault(ignores_range=True, stop_after=100_000)
    with pytest.raises(EngineError, match="Hugging Face cannot be reached"):
        download(NAME, Reports())
    assert len(server.ranges) <= 10


def test_an_answer_that_ends_early_without_an_error_is_the_networks_fault(
    server: HubServer, tmp_path: Path
) -> None:
    partial(tmp_path).parent.mkdir(parents=True)
    partial(tmp_path).write_bytes(WEIGHTS[:1000])
    server.faults["model.safetensors"] = Fault(headers={"Content-Range": "bytes 7-299999/300000"}, times=1)
    server.on_fault = lambda name: server.faults.__setitem__(name, Fault(status=416))
    with pytest.raises(EngineError, match=r"Hugging Face cannot be reached \(the connection ended early\)"):
        download(NAME, Reports())


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_hub_that_is_busy_is_asked_again(server: HubServer, status: int) -> None:
    server.faults["model.safetensors"] = Fault(status=status, times=2)
    assert (download(NAME, Reports()) / "model.safetensors").read_bytes() == WEIGHTS
    assert len(server.ranges) == 3


GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model maker/model is restricted."}


@pytest.mark.parametrize(
    ("name", "fault", "message"),
    [
        (
            "api",
            Fault(401, {"X-Error-Code": "RepoNotFound"}),
            "There is no folder and no Hugging Face repository",
        ),
        (
            "api",
            Fault(404, {"X-Error-Code": "RepoNotFound"}),
            "check the spelling, or set HF_TOKEN to a token",
        ),
        (
            "api",
            Fault(401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
            "Hugging Face refuses the token it was sent",
        ),
        ("api", Fault(403), "Hugging Face does not let this token read 'maker/model'"),
        (
            "api",
            Fault(403, {"X-Error-Message": "Access to this resource is disabled."}),
            "has disabled the repository",
        ),
        ("api", Fault(500), "could not deliver 'maker/model' (HTTP status 500): try again later"),
        ("config.json", Fault(403, GATED), "to those who have accepted its terms: do so on its page"),
        ("model.safetensors", Fault(401, GATED), "to those who have accepted its terms: do so on its page"),
        ("model.safetensors", Fault(403), "Hugging Face does not let this token read 'maker/model'"),
        ("model.safetensors", Fault(404), "could not deliver 'maker/model' (HTTP status 404)"),
        ("model.safetensors", Fault(503), "What has been downloaded is kept."),
        ("model.safetensors", Fault(stop_after=0), "Hugging Face cannot be reached"),
    ],
)
def test_each_failure_is_one_sentence_with_what_to_do(
    server: HubServer, name: str, fault: Fault, message: str
) -> None:
    server.faults[name] = fault
    with pytest.raises(EngineError) as caught:
        download(NAME, Reports())
    assert message in str(caught.value)
    assert "maker/model" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "http" not in str(caught.value).replace("HTTP status", ""), "no address"


def test_a_network_that_is_down_is_said_to_be(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EngineError) as caught:
        download(NAME, Reports())
    assert re.fullmatch(
        rf"Hugging Face cannot be reached \(.*\), and '{NAME}' is not, or not completely, on this machine. "
        "Check the network, or name a folder that holds the model.",
        str(caught.value),
    )


def test_what_answers_in_place_of_a_hub_is_said_to_be_none() -> None:
    with (
        pytest.raises(EngineError, match=r"What answers is not Hugging Face.*Check HF_ENDPOINT"),
        explain_download_errors(NAME),
    ):
        raise KeyError("id")  # as of a router's page of JSON


@pytest.mark.parametrize("fault", [Fault(401, {"X-Error-Code": "RepoNotFound"}), Fault(500), None])
def test_what_has_been_downloaded_is_used_when_the_hub_cannot_be(
    server: HubServer, fault: Fault | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    folder = download(NAME, Reports())
    if fault is None:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    else:
        server.faults["api"] = fault
    assert download(NAME, Reports()) == folder
    assert "Hugging Face did not list maker/model (" in caplog.text
    assert "its files here are used." in caplog.text


@pytest.mark.parametrize("offline", [True, False])
def test_with_the_index_of_another_version_a_download_is_whole_without_a_network_too(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, *, offline: bool
) -> None:
    index = b'{"weight_map": {"a": "model-00001-of-00009.safetensors"}}'
    server.repositories = {NAME: FILES | {"model.safetensors.index.json": index}}
    folder = download(NAME, Reports())
    if offline:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert downloaded(NAME) == find_folder(NAME, allow_download=True)[0] == cached_snapshot(NAME) == folder


def test_what_is_for_another_task_is_refused_before_it_is_downloaded(server: HubServer) -> None:
    server.repositories = {NAME: FILES | {"config.json": b'{"model_type": "whisper"}'}}
    with pytest.raises(EngineError, match=r"for speech or sound \(whisper\), and this server serves chat, "):
        download(NAME, Reports())
    assert server.ranges == []


def test_a_disk_without_room_is_noticed_before_anything_is_fetched(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(EngineError) as caught:
        download(NAME, Reports())
    assert "There is no room for 'maker/model' on the disk of " in str(caught.value)
    assert "(300 kB more are needed, and 1 kB are free): free some, or set HF_HOME" in str(caught.value)
    assert server.ranges == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_disk_that_fills_up_meanwhile_is_one_sentence(server: HubServer, tmp_path: Path) -> None:
    partial(tmp_path).parent.mkdir(parents=True)
    partial(tmp_path).symlink_to("/dev/full")
    with pytest.raises(
        EngineError, match=r"There is no room for 'maker/model' .* What has been downloaded is kept\."
    ):
        download(NAME, Reports())


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_cache_that_cannot_be_written_is_named(server: HubServer, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(EngineError, match=r"could not be written to .*cache .*: make that folder writable"):
        download(NAME, Reports())


def test_two_programs_that_want_the_same_file_fetch_it_once(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "LOCK_SECONDS", 0.01)
    begun, gate = threading.Event(), threading.Event()

    def pause(name: str, sent: int) -> None:
        if name == "model.safetensors" and sent:
            begun.set()
            assert gate.wait(60)

    server.on_body = pause
    reports = [Reports(), Reports()]
    threads = [threading.Thread(target=download, args=(NAME, each)) for each in reports]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    while not any(done > 40_000 for done, _ in reports[1].all):  # it sees how far the first one is
        threads[1].join(0.01)
    gate.set()
    for thread in threads:
        thread.join(60)
    assert server.ranges == [("model.safetensors", 0)]
    total = len(WEIGHTS) + len(CONFIG) + len(TOKENIZER)
    assert [each.all[-1] for each in reports] == [(total, total)] * 2


def test_of_several_files_the_failure_that_came_first_is_told(server: HubServer) -> None:
    parts = {f"model-{n}.safetensors": random.Random(n).randbytes(200_000) for n in range(8)}
    server.repositories = {NAME: {"config.json": CONFIG, **parts}}
    server.faults["model-0.safetensors"] = Fault(status=403)
    refused = threading.Event()
    server.on_body = lambda name, sent: refused.wait(60) if "safetensors" in name and sent else None
    server.on_fault = lambda _name: refused.set()
    with pytest.raises(EngineError, match="does not let this token read"):
        download(NAME, Reports())


def test_a_failure_is_told_while_another_file_is_silent(server: HubServer) -> None:
    parts = {f"model-{n}.safetensors": random.Random(n).randbytes(200_000) for n in range(2)}
    server.repositories = {NAME: {"config.json": CONFIG, **parts}}
    server.faults["model-0.safetensors"] = Fault(status=403)
    silent, told = threading.Event(), threading.Event()
    waited: list[bool] = []

    def stop_sending(name: str, sent: int) -> None:
        if name == "model-1.safetensors" and sent:
            silent.set()
            waited.append(not told.wait(60))

    server.on_body = stop_sending
    server.on_fault = lambda _name: silent.wait(60)
    with pytest.raises(EngineError, match="does not let this token read"):
        download(NAME, Reports())
    assert waited == [], "it was told before the other file went on"
    told.set()


@pytest.mark.parametrize("name", ["~nobody-of-this-name/model", "owner/" + "x" * 5000, "x" * 5000])
def test_what_can_be_no_path_is_no_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EngineError, match="There is no folder"):
        find_folder(name, allow_download=True)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model-Q4_K_M.gguf"], "is in GGUF, the format of llama.cpp, which MLX cannot read"),
        (["config.json", "model-Q4_K_M.gguf"], "is in GGUF, the format of llama.cpp, which MLX cannot read"),
        (["config.json", "pytorch_model-00001-of-00002.bin"], "has weights in PyTorch's format only"),
        (["config.json", "consolidated.safetensors"], "has weights in PyTorch's format only"),
        (["config.json", "tokenizer.json"], "has no weights: there is no model*.safetensors in"),
        (
            ["adapter_config.json", "adapters.safetensors"],
            "holds a LoRA adapter: name the model that it is for",
        ),
        (["unet.safetensors"], "holds no model: there is no config.json in"),
        ([], "is empty: there is no config.json in"),
    ],
)
@pytest.mark.parametrize("kind", ["repository", "folder"])
def test_what_is_no_model_that_mlx_can_run_is_told_as_what_it_is(
    server: HubServer, tmp_path: Path, kind: str, names: list[str], message: str
) -> None:
    from mlx_backend.engine.mlx.loading import load_model

    files: dict[str, Any] = {name: CONFIG if name == "config.json" else bytes(5000) for name in names}
    (tmp_path / "folder").mkdir()
    for name, content in files.items():
        (tmp_path / "folder" / name).write_bytes(content)
    server.repositories = {NAME: files}
    with pytest.raises(EngineError) as caught:
        load_model(NAME if kind == "repository" else tmp_path / "folder")
    assert message in str(caught.value)
    assert server.ranges == [], "nothing large was downloaded for it"


def test_a_gguf_file_is_told_as_that(tmp_path: Path) -> None:
    (tmp_path / "model.Q4.GGUF").write_bytes(b"GGUF")
    with pytest.raises(EngineError, match=r"model.Q4.GGUF' is in GGUF, the format of llama.cpp"):
        find_folder(str(tmp_path / "model.Q4.GGUF"), allow_download=True)


@pytest.mark.parametrize("address", ["https://huggingface.co/maker/model", "hf.co/maker/model/tree/main"])
def test_the_address_of_a_repository_is_answered_with_its_name(address: str) -> None:
    with pytest.raises(EngineError, match="name the repository as maker/model"):
        find_folder(address, allow_download=True)


def test_of_an_encoder_pytorchs_own_files_are_left_where_they_are(server: HubServer) -> None:
    encoder: dict[str, bytes | int | None] = {
        "config.json": b'{"model_type": "bert"}',
        "1_Pooling/config.json": b"{}",
        "2_Dense/model.safetensors": bytes(10),
        "2_Dense/pytorch_model.bin": bytes(10),
        "pytorch_model.bin": WEIGHTS,
        "model.safetensors": WEIGHTS[:2000],
    }
    server.repositories = {NAME: encoder}
    folder = download(NAME, Reports())
    assert {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} == {
        name for name in encoder if not name.endswith(".bin")
    }


def test_a_checksum_that_is_a_path_leads_nowhere(server: HubServer, tmp_path: Path) -> None:
    server.checksums["model.safetensors"] = "../../../../outside"
    download(NAME, Reports())
    assert server.ranges == [("model.safetensors", 0)], "the library fetched it, under the name of its own"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]

"""Filling in the middle: the markers of each family, found in its vocabulary, and the order it was trained with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from engine_models import byte_level, write_model, write_tokenizer
from engine_requests import engine_and_batch
from scripted_engine import ScriptedEngine
from scripted_server import client_of
from tokenizers import AddedToken

from mlx_backend.chat.capabilities import FolderDescriber
from mlx_backend.chat.infill import FORMATS
from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.request import CompletionRequest
from mlx_backend.chat.service import Service
from mlx_backend.models.engine_options import EngineOptions

if TYPE_CHECKING:
    from pathlib import Path

# what the model knows | the prompt for "before" and "after"
FAMILIES = {
    "Qwen-Coder": (
        ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
        "<|fim_prefix|>before<|fim_suffix|>after<|fim_middle|>",
    ),
    "DeepSeek-Coder": (
        ("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"),
        "<｜fim▁begin｜>before<｜fim▁hole｜>after<｜fim▁end｜>",
    ),
    "StarCoder": (
        ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"),
        "<fim_prefix>before<fim_suffix>after<fim_middle>",
    ),
    "CodeLlama": (("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"), "▁<PRE>before▁<SUF>after▁<MID>"),
    "Codestral": (("[PREFIX]", "[MIDDLE]", "[SUFFIX]"), "[SUFFIX]after[PREFIX]before"),
    "Seed-Coder": (
        ("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"),
        "<[fim-suffix]>after<[fim-prefix]>before<[fim-middle]>",
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_suffix_is_written_as_the_family_was_trained(name: str) -> None:
    markers, prompt = FAMILIES[name]
    with ScriptedEngine(lambda _: "between", markers=markers, chat_template=None) as engine:
        client = client_of(engine)
        for before in ("before", engine.tokenizer.encode("before", control_tokens=False)):
            reply = client.post("/v1/completions", json={"prompt": before, "suffix": "after"}).get_json()
            assert engine.requests[-1].prompt == prompt
            assert reply["choices"][0]["text"] == "between"
            assert reply["usage"]["prompt_tokens"] == len(engine.requests[-1].request.prompt)
        assert client.post("/api/generate", json={"suffix": "after"}).status_code == 200
        body = {"prompt": "before", "suffix": "after", "stream": False}
        assert client.post("/api/generate", json=body).get_json()["response"] == "between"
        assert engine.requests[-1].prompt == prompt
        shown = client.post("/api/show", json={"model": engine.model_id}).get_json()
        assert "insert" in shown["capabilities"]
        assert ".Suffix" in shown["template"]  # by which editors know it


def test_a_gap_ends_where_the_model_says_so_also_with_a_marker_that_is_no_end_token() -> None:
    markers = FAMILIES["Qwen-Coder"][0]
    with ScriptedEngine(lambda _: "x = 1<|fim_pad|>def", markers=markers, chat_template=None) as engine:
        client = client_of(engine)
        filled = client.post("/v1/completions", json={"prompt": "a", "suffix": "b"}).get_json()["choices"][0]
        assert (filled["text"], filled["finish_reason"]) == ("x = 1", "stop")
        plain = client.post("/v1/completions", json={"prompt": "a", "suffix": ""}).get_json()["choices"][0]
        assert plain["text"] == "x = 1<|fim_pad|>def"


def test_a_tokenizer_need_not_call_the_markers_special(tmp_path: Path) -> None:
    write_model(tmp_path)
    backend = byte_level()
    backend.add_tokens([AddedToken(each, special=False) for each in FAMILIES["StarCoder"][0]])
    write_tokenizer(tmp_path, backend)
    with engine_and_batch(tmp_path) as (engine, _):
        reply = Service(engine).complete(CompletionRequest(prompt="a", suffix="b", max_tokens=1))
        list(reply.events())
        assert reply.usage.prompt_tokens == len("ab") + 3
        assert "insert" in Service(engine).description().capabilities
    in_folder = FolderDescriber().describe(tmp_path, EngineOptions(), ModelSettings.of())
    assert "insert" in in_folder.capabilities


def test_no_two_families_share_their_markers() -> None:
    assert len({(each.prefix, each.suffix, each.middle) for each in FORMATS}) == len(FORMATS)


def test_a_model_without_such_tokens_says_so() -> None:
    with ScriptedEngine(lambda _: "x", model_id="someone/chatty") as engine:
        response = client_of(engine).post("/v1/completions", json={"prompt": "a", "suffix": "b"})
        error = response.get_json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "suffix", "unsupported_value")
        assert "someone/chatty cannot fill in text before a suffix" in error["message"]

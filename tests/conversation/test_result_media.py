"""Media in tools' results: images become parts wherever they stand, all else a sentence, and base64 never a prompt."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from scripted_server import CHAT, USER, client_of

from mlx_backend.conversation.history import sanitise
from mlx_backend.conversation.result_media import result_content, result_text

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(9000) + b"\0\0\0\0IEND\xaeB`\x82").decode()
JPEG = base64.b64encode(b"\xff\xd8\xff\xe0" + bytes(range(256)) * 8 + b"\xff\xd9").decode()
OPAQUE = base64.b64encode(bytes(range(256)) * 117).decode()
PDF = base64.b64encode(b"%PDF-1.7 " + bytes(3000)).decode()
WAV = base64.b64encode(b"RIFF\0\0\0\0WAVEfmt " + bytes(30_000)).decode()


def shown(data: str, media_type: str = "image/png") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


MCP = {"type": "image", "data": PNG, "mimeType": "image/png"}
HERE = text("here")

IMAGES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "MCP's part": ([HERE, MCP], [HERE, shown(PNG)]),
    "several of them": (
        [MCP, HERE, {**MCP, "data": JPEG, "mimeType": "image/jpeg"}],
        [shown(PNG), HERE, shown(JPEG, "image/jpeg")],
    ),
    "one part that is no list": (MCP, [shown(PNG)]),
    "without a type of its own": ([{"mime_type": "image/png", "data": PNG}], [shown(PNG)]),
    "a wrong media type": ([{**MCP, "mimeType": "application/octet-stream"}], [shown(PNG)]),
    "a data URI as its data": ([{**MCP, "data": f"data:image/png;base64,{PNG}"}], [shown(PNG)]),
    "a blob of a resource": (
        [{"type": "resource", "resource": {"uri": "screen://1", "mimeType": "image/png", "blob": PNG}}],
        [shown(PNG)],
    ),
    "Anthropic's part": (
        [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}],
        [shown(PNG)],
    ),
    "an address that is stated": (
        [{"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}],
        [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}],
    ),
    "OpenAI's part": ([HERE, shown(PNG)], [HERE, shown(PNG)]),
    "parts as JSON": (json.dumps([HERE, MCP]), [HERE, shown(PNG)]),
    "an object as JSON": (json.dumps(MCP), [shown(PNG)]),
    "MCP's result as JSON": (
        json.dumps({"content": [HERE, MCP], "isError": False}, indent=1),
        [HERE, shown(PNG)],
    ),
    "JSON in a text part": ([text(json.dumps({"content": [MCP]}))], [shown(PNG)]),
    "JSON in JSON": (
        json.dumps({"output": json.dumps([HERE, MCP])}),
        [text('{"output": "here [image 1]"}'), shown(PNG)],
    ),
    "deep in other JSON": (
        json.dumps(
            {"page": 1, "shots": [{"at": 2, "image": MCP}, {"at": 3, "image": shown(JPEG, "image/jpeg")}]}
        ),
        [
            text('{"page": 1, "shots": [{"at": 2, "image": "[image 1]"}, {"at": 3, "image": "[image 2]"}]}'),
            shown(PNG),
            shown(JPEG, "image/jpeg"),
        ],
    ),
    "base64 that begins as a picture": (
        json.dumps({"b64_json": JPEG}),
        [text('{"b64_json": "[image 1]"}'), shown(JPEG, "image/jpeg")],
    ),
    "a part of some other type": (
        [{"type": "json", "json": {"screenshot": f"data:image/png;base64,{PNG}"}}],
        [text('{"type": "json", "json": {"screenshot": "[image 1]"}}'), shown(PNG)],
    ),
    "a data URI in prose": (
        f"![a](data:image/png;base64,{PNG}) done",
        [text("![a]("), shown(PNG), text(") done")],
    ),
    "nothing but base64": (PNG, [shown(PNG)]),
    "as Python writes it": (
        str([MCP]),
        [text("[{'type': 'image', 'data': '"), shown(PNG), text("', 'mimeType': 'image/png'}]")],
    ),
}


@pytest.mark.parametrize(("content", "parts"), IMAGES.values(), ids=IMAGES)
def test_an_image_becomes_a_part_where_it_stood(content: Any, parts: list[dict[str, Any]]) -> None:
    assert result_content(content) == parts
    assert result_content(parts) is parts, "a second time changes nothing"
    assert PNG not in result_text(content)
    assert JPEG not in result_text(content)


SENTENCES: dict[str, tuple[Any, str]] = {
    "audio": (
        [HERE, {"type": "audio", "data": WAV, "mimeType": "audio/wav"}],
        "here\n[audio/wav, 30 kB, not shown: this model does not hear]",
    ),
    "OpenAI's audio": (
        [{"type": "input_audio", "input_audio": {"data": WAV, "format": "mp3"}}],
        "[audio/wav, 30 kB, not shown: this model does not hear]",
    ),
    "audio in JSON": (
        json.dumps({"content": [{"type": "audio", "data": WAV, "mimeType": "audio/wav"}]}),
        "[audio/wav, 30 kB, not shown: this model does not hear]",
    ),
    "a blob": (
        [{"type": "resource", "resource": {"uri": "a.pdf", "mimeType": "application/pdf", "blob": PDF}}],
        "[application/pdf, 3 kB, not shown: only text and images are]",
    ),
    "a file": (
        [{"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}}],
        "[application/pdf, 3 kB, not shown: only text and images are]",
    ),
    "a file in JSON": (
        json.dumps({"pdf": PDF}),
        '{"pdf": "[application/pdf, 3 kB, not shown: only text and images are]"}',
    ),
    "a video": (
        [{"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}],
        "[video, not shown: this model does not watch videos]",
    ),
    "an image of another format": (
        [{"type": "image", "data": "PHN2Zz48L3N2Zz4=", "mimeType": "image/svg+xml"}],
        "[image/svg+xml, 12 bytes, not shown: its format is none of PNG, JPEG, WebP and GIF]",
    ),
    "a result that its client has cut": (
        json.dumps([MCP])[:-400],
        '[{"type": "image", "data": "[image/png, 9 kB, not shown: a part of it is missing]',
    ),
    "much base64 of no known kind": (
        json.dumps({"pcm": OPAQUE}),
        '{"pcm": "[application/octet-stream, 30 kB, not shown: only text and images are]"}',
    ),
    "the same as Python writes it": (
        str({"type": "audio", "data": OPAQUE}),
        "{'type': 'audio', 'data': '[application/octet-stream, 30 kB, not shown: only text and images are]'}",
    ),
    "a document of Anthropic's": (
        [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Four."}}],
        "Four.",
    ),
    "a text as a blob": (
        [
            {
                "type": "resource",
                "resource": {"mimeType": "text/plain", "blob": base64.b64encode("né".encode()).decode()},
            }
        ],
        "né",
    ),
}


@pytest.mark.parametrize(("content", "said"), SENTENCES.values(), ids=SENTENCES)
def test_what_is_no_image_becomes_a_sentence(content: Any, said: str) -> None:
    assert result_content(content) == said
    history = sanitise([USER, CALLING, {"role": "tool", "tool_call_id": "c1", "content": content}])
    assert history[-1]["content"] == said


@pytest.mark.parametrize(
    "content",
    [
        "",
        None,
        5,
        [],
        "The file is image/png, in base64, and its mimeType is not known.",
        '{"mimeType": "image/png", "data": "see the next page, please"}',
        '{"mimeType": "text/csv", "data": "abcd"}',
        '{"base64": "aGVsbG8="}',
        '{"dna": "' + "ACGT" * 500 + '", "mimeType": "text/plain"}',
        '[{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]',
        f"base64 {'ACGT' * 10_000}",
        OPAQUE[:10_000],
        '{"a": 1} and base64',
        json.dumps({"listing": "Makefile 12 src\n" * 2000}),
        '[{"type": "image", "image": 7}, "base64"]',
        '{"mimeType": null, "files": [{"type": "file", "name": "a", "data": "words"}]}',
        [{"type": "resource", "resource": {"uri": "a.txt", "mimeType": "text/plain", "text": "hello"}}],
        [{"type": "resource_link", "uri": "file:///a.png", "mimeType": "image/png"}],
        [{"type": "json", "json": {"image": "x.png"}}],
        [{"type": "text", "text": "{}", "cache_control": {"type": "ephemeral"}}],
        [[[1]], None, "a"],
        "[" * 5000 + '"base64"' + "]" * 5000,
    ],
)
def test_a_result_without_media_is_the_same_object(content: Any) -> None:
    assert result_content(content) is content


CALL = {"id": "c1", "type": "function", "function": {"name": "screenshot", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
USES = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "screenshot", "input": {}}]}
RESULTS: dict[str, list[dict[str, Any]]] = {
    "of a tool": [CALLING, {"role": "tool", "tool_call_id": "c1", "content": json.dumps([HERE, MCP])}],
    "of a function": [CALLING, {"role": "function", "name": "screenshot", "content": [HERE, shown(PNG)]}],
    "in a user's message": [
        USES,
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [HERE, MCP]}]},
    ],
    "in a user's message, as OpenAI's part": [
        USES,
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [HERE, shown(PNG)]}, HERE],
        },
    ],
}


def test_what_is_written_about_an_image_stays_with_it() -> None:
    table = {"rows": [{**MCP, "title": "Sales", "pages": 2}]}
    said, image = result_content(json.dumps(table))
    assert json.loads(said["text"]) == {"rows": [{"title": "Sales", "pages": 2, "data": "[image 1]"}]}
    assert image == shown(PNG)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "file", "name": "a.txt", "data": "two words"}, "two words"),
        ({"type": "file", "mimeType": "text/plain", "data": "words"}, "words"),
        ({"type": "document", "source": {"type": "content", "content": "A page."}}, "A page."),
    ],
)
def test_a_part_with_a_text_for_its_data_is_that_text(part: dict[str, Any], said: str) -> None:
    assert result_content([part]) == said


@pytest.mark.parametrize("messages", RESULTS.values(), ids=RESULTS)
def test_images_in_results_stay_in_a_history_for_whoever_knows_the_model(
    messages: list[dict[str, Any]],
) -> None:
    history = sanitise([USER, *messages])
    [result] = [message for message in history if message["role"] == "tool"]
    assert result["content"] == [HERE, shown(PNG)]
    assert result["tool_call_id"] == "c1"


@pytest.mark.parametrize("messages", [RESULTS["of a tool"], RESULTS["of a function"]])
def test_a_model_that_cannot_see_reads_a_sentence_in_the_place_of_an_image(
    messages: list[dict[str, Any]],
) -> None:
    with ScriptedEngine(lambda _: "<|channel|>final<|message|>Yes.<|return|>") as engine:
        answer = client_of(engine).post(CHAT, json={"messages": [USER, *messages]})
        assert answer.status_code == 200, answer.get_data(as_text=True)
        [request] = engine.requests
    assert "here\n[image/png, 9 kB, not shown: this model does not see]" in request.prompt
    assert len(request.prompt) < 3000


def test_a_users_image_is_refused_beside_one_of_a_result() -> None:
    asked = {"role": "user", "content": [shown(PNG)]}
    with ScriptedEngine([]) as engine:
        refused = client_of(engine).post(CHAT, json={"messages": [USER, *RESULTS["of a tool"], asked]})
    assert refused.status_code == 400
    assert refused.get_json()["error"]["param"] == "messages[3].content[0]"


def test_a_displayed_result_of_a_page_holds_no_base64() -> None:
    result = json.dumps(json.dumps({"shot": f"data:image/png;base64,{PNG}"})).replace('"', "&quot;")
    display = (
        '<details type="tool_calls" done="true" id="1" name="screenshot" arguments="&quot;{}&quot;" '
        f'result="{result}" files="">\n<summary>Tool Executed</summary>\n</details>\nDone.'
    )
    history = sanitise([USER, {"role": "assistant", "content": display}, USER])
    assert PNG not in json.dumps(history)
    assert "not shown" in json.dumps(history)

"""Images over HTTP: what the engine is given of them, what they count, and what is refused before it hears of them."""

from __future__ import annotations

import base64
import gc
import json
import tempfile
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
from chat_templates import QWEN_VL, QWEN_VL_MARKERS
from picture_files import data_uri, encoded, png, png_claiming, with_red_corner
from picture_site import PictureSite, found, moved
from running_server import RunningServer, running
from scripted_engine import ScriptedEngine, ScriptedImageProcessor, ScriptedTokenizer

from mlx_backend.api.openai.chat_body import ChatBody
from mlx_backend.chat.service import Service
from mlx_backend.engine.images import ImageSupport
from mlx_backend.images.loader import ImageLimits, ImageLoader

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from picture_site import Answer

    from mlx_backend.chat.reply import Reply
    from mlx_backend.engine.base import GenerationRequest

ANSWER = "A corner.<|im_end|>"
PICTURE = png(56, 56)
"""Four tokens."""
LARGE = png(2800, 28)
"""A hundred."""


def seeing_engine() -> ScriptedEngine:
    tokenizer = ScriptedTokenizer(QWEN_VL_MARKERS, QWEN_VL)
    processor = ScriptedImageProcessor(tokenizer)
    return ScriptedEngine(lambda _: ANSWER, tokenizer=tokenizer, image_processor=processor)


def blind_engine(support: ImageSupport = ImageSupport.NONE) -> ScriptedEngine:
    return ScriptedEngine(
        lambda _: ANSWER, markers=QWEN_VL_MARKERS, chat_template=QWEN_VL, image_support=support
    )


def image(file: bytes = PICTURE, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(file), **more}}


def at(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str = "What is this?") -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def assistant(words: str) -> dict[str, Any]:
    return {"role": "assistant", "content": words}


@pytest.fixture
def engine() -> ScriptedEngine:
    return seeing_engine()


@pytest.fixture
def server(engine: ScriptedEngine) -> Iterator[RunningServer]:
    with running(engine) as server:
        yield server


def started(engine: ScriptedEngine) -> GenerationRequest:
    """The only request that the engine was given."""
    (only,) = engine.requests
    return only.request


def refused(server: RunningServer, *parts: Any, **fields: Any) -> dict[str, Any]:
    """The error, in OpenAI's shape, of a question that is a 400."""
    status, body = server.call("/v1/chat/completions", {"messages": [user(*parts)], **fields})
    assert status == 400, body
    assert body["error"]["type"] == "invalid_request_error"
    error: dict[str, Any] = body["error"]
    return error


# -- what the engine is given ----------------------------------------------------------------------------------


def test_the_engine_is_given_the_pictures_and_where_they_stand(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    server.chat([user(text(), image(), image(LARGE)), assistant("Two."), user(image(), text("And now?"))])
    request = started(engine)
    pad = request.prompt[request.images[0].start]
    assert [each.image.num_tokens for each in request.images] == [4, 100, 4]
    for each in request.images:
        assert set(request.prompt[each.start : each.end]) == {pad}
    assert list(request.prompt).count(pad) == 108
    first, second, third = (each.image.digest for each in request.images)
    assert first == third != second


def test_a_reply_holds_no_files_of_its_images(engine: ScriptedEngine) -> None:
    class Address(str):
        pass

    def start() -> tuple[Reply, weakref.ref[Address]]:
        address = Address(data_uri(PICTURE))
        part = {"type": "image_url", "image_url": {"url": address}}
        written = {"messages": [user(text(), part)], "user": "ann"}
        request = ChatBody.parse(written).request()
        assert request.images[0].url is address
        return Service(engine, images=ImageLoader(ImageLimits())).chat(request), weakref.ref(address)

    reply, address = start()
    gc.collect()
    assert address() is None
    reply.close()
    engine.stop()


def test_the_next_turn_is_prepared_with_the_images_of_this_one(
    server: RunningServer, engine: ScriptedEngine
) -> None:
    server.chat([user(image(), text())])
    [plan] = engine.warmups
    start, request = plan(), started(engine)
    assert start is not None
    written = engine.tokenizer.decode(start.tokens)
    assert "assistant\nA corner.<|im_end|>\n<|im_start|>" in written
    [image_then], [image_now] = start.images, request.images
    assert (image_then.start, image_then.image.digest) == (image_now.start, image_now.image.digest)
    assert image_now.image.can_be_seen
    assert not image_then.image.can_be_seen, "it is not held in memory until there is time"


def test_what_is_counted_is_the_same_everywhere(server: RunningServer) -> None:
    messages = [user(text(), image(), image(LARGE))]
    whole = server.chat(messages)["usage"]
    *_, last = server.chunks(messages, stream_options={"include_usage": True})
    status, tokenized = server.call("/v1/tokenize", {"messages": messages})
    assert status == 200
    assert whole["prompt_tokens"] == last["usage"]["prompt_tokens"] == tokenized["count"]
    assert whole["prompt_tokens_details"]["image_tokens"] == 104
    without = server.chat([user(text())])["usage"]
    assert "image_tokens" not in without["prompt_tokens_details"]
    assert whole["prompt_tokens"] == without["prompt_tokens"] + 104 + 2 * 2  # and what stands around each


def test_the_detail_decides_how_large_a_picture_is_shown(server: RunningServer) -> None:
    file = encoded(with_red_corner(2000, 2000))
    tokens = [
        server.chat([user(image(file, detail=each))])["usage"]["prompt_tokens_details"]["image_tokens"]
        for each in ("low", "auto", "high")
    ]
    assert tokens == [19**2, 36**2, 72**2]


def test_a_picture_at_an_address_is_the_one_that_was_sent(engine: ScriptedEngine) -> None:
    with (
        PictureSite({"/old": moved("/a.png"), "/a.png": found(PICTURE)}) as site,
        running(engine, allow_image_urls=True, image_hosts=("127.0.0.1",)) as server,
    ):
        server.chat([user(at(site.url("/old")), image())])
    fetched, sent = started(engine).images
    assert fetched.image.digest == sent.image.digest


@pytest.mark.parametrize("sees", [True, False], ids=["seeing", "blind"])
def test_an_agents_view_image_shows_the_image_or_says_that_the_model_cannot_see_it(sees: bool) -> None:
    items = [
        {"role": "user", "content": "Look at a.png."},
        {"type": "function_call", "call_id": "c1", "name": "view_image", "arguments": '{"path": "a.png"}'},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_image", "image_url": data_uri(PICTURE), "detail": "high"}],
        },
    ]
    with seeing_engine() if sees else blind_engine() as engine, running(engine) as server:
        status, body = server.call("/v1/responses", {"input": items})
        assert status == 200, body
        prompt = engine.requests[0].prompt
    assert ("<|vision_start|>" in prompt) == sees
    assert ("this model does not see" in prompt) != sees


@pytest.mark.parametrize("form", ["part", "JSON"])
def test_a_tools_result_shows_its_images(server: RunningServer, engine: ScriptedEngine, form: str) -> None:
    data = base64.b64encode(png(200, 100)).decode()
    parts = [text("a photo"), image(), {"type": "image", "data": data, "mimeType": "image/png"}]
    call = {"id": "c1", "type": "function", "function": {"name": "camera", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c1", "content": json.dumps(parts) if form == "JSON" else parts}
    server.chat([user(text("Look.")), {"role": "assistant", "content": None, "tool_calls": [call]}, result])
    assert len(started(engine).images) == 2
    assert data not in engine.requests[0].prompt
    assert "a photo" in engine.requests[0].prompt.partition("<|vision_start|>")[0]


def test_a_model_that_sees_says_so() -> None:
    for engine, sees in ((seeing_engine(), True), (blind_engine(), False)):
        with running(engine) as server:
            _, listed = server.call("/v1/models")
            assert ("vision" in listed["data"][0]["capabilities"]) is sees


# -- models that cannot see -------------------------------------------------------------------------------------

BLIND = {
    ImageSupport.NONE: (
        "This model cannot see images. Remove the image, or choose a model with vision.",
        None,
    ),
    ImageSupport.NOT_INSTALLED: ("`make vision` in the server's clone", "vision_not_installed"),
    ImageSupport.UNKNOWN_FAMILY: ("does not support images for models of this family yet", None),
    ImageSupport.NOT_HERE: ("the server's log says why", None),
}


@pytest.mark.parametrize("support", BLIND, ids=lambda each: each.name)
def test_an_image_is_refused_in_words_that_say_why(support: ImageSupport) -> None:
    says, code = BLIND[support]
    engine = blind_engine(support)
    with running(engine) as server:
        error = refused(server, text(), image())
    assert says in error["message"]
    assert (error["param"], error["code"]) == ("messages[0].content[1]", code or "unsupported_content")
    assert not engine.requests


def test_a_conversation_goes_on_with_a_model_that_cannot_see(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mlx_backend.chat")
    engine = blind_engine()
    history = [user(text(), image(), image(b"broken")), assistant("A corner."), user(text("Why?"))]
    with running(engine) as server:
        server.chat(history)
        server.chat(history)
        status, body = server.call(
            "/v1/chat/completions", {"messages": [*history, assistant("So."), user(image())]}
        )
    assert "What is this?\n[image]\n[image]<|im_end|>" in engine.requests[0].prompt
    assert (status, body["error"]["param"]) == (400, "messages[4].content[0]")
    assert "scripted cannot see images: those of earlier turns (2) are the text [image]." in caplog.messages


def test_what_follows_the_last_answer_is_asked_now() -> None:
    """A question in two messages, and one whose answer is begun."""
    with running(blind_engine()) as server:
        for messages in (
            [user(image()), user(text())],
            [user(image()), assistant("It shows")],
            [user(text()), assistant("What?"), user(image()), user(text())],
        ):
            status, body = server.call("/v1/chat/completions", {"messages": messages})
            assert (status, body["error"]["code"]) == (400, "unsupported_content")


# -- what is wrong with an image --------------------------------------------------------------------------------

PHOTO = encoded(with_red_corner(400, 300), "JPEG")
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no image": (image(b"just words"), "is no image", "unsupported_image_format"),
    "nothing": (at("data:image/png;base64,"), "is empty", "invalid_image"),
    "a hundred megapixels": (image(png_claiming(10_000, 10_000)), "100 million", "image_too_large"),
    "a truncated JPEG": (image(PHOTO[: len(PHOTO) // 2]), "damaged or incomplete", "invalid_image"),
    "an animated bomb": (
        image(
            b"GIF89a"
            + b"\xff\xff\xff\xff"
            + b"\xf7\0\0"
            + b"\0" * 768
            + b",\0\0\0\0\xff\xff\xff\xff\0" * 1000
        ),
        "4295 million",
        "image_too_large",
    ),
    "SVG": (image(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "SVG drawing", "unsupported_image_format"),
    "a data URI without base64": (at("data:image/svg+xml;utf8,<svg/>"), "not in base64", "invalid_image"),
    "base64 that is none": (at("data:image/png;base64,*"), "not base64", "invalid_image"),
    "an address": (at("https://example.com/a.png"), "--allow-image-urls", "image_url_refused"),
    "a file": (
        at("file:///etc/passwd"),
        "is neither a data URI nor an http or https address",
        "image_url_refused",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/tokenize"])
def test_a_bad_image_is_a_400_of_which_the_engine_hears_nothing(
    case: str, path: str, engine: ScriptedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    part, says, code = BAD[case]
    with running(engine) as server:
        status, body = server.call(path, {"messages": [user(text(), image(), part)], "stream": True})
        assert server.chat([user(image())])["choices"][0]["message"]["content"] == "A corner."
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, "messages[0].content[2]", code)
    assert says in body["error"]["message"]
    assert body["error"]["message"].startswith("Image 2 of 2: ")
    assert len(engine.requests) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "parts", "says"),
    [
        ({"max_images": 1}, [image(), image()], "has 2 images; this server takes at most 1"),
        ({"max_image_bytes": 100}, [image()], "which is this server's limit"),
        ({"max_image_pixels": 1000}, [image()], "56 x 56 pixels"),
    ],
)
def test_limits_are_the_servers_settings(
    settings: dict[str, Any], parts: list[dict[str, Any]], says: str, engine: ScriptedEngine
) -> None:
    with running(engine, **settings) as server:
        assert says in refused(server, *parts)["message"]


def turns(count: int) -> list[dict[str, Any]]:
    """Questions about an image each; the last is not answered."""
    return [message for _ in range(count - 1) for message in (user(image()), assistant("A."))] + [
        user(image())
    ]


@pytest.mark.parametrize(("count", "named"), [(4, 0), (5, 1), (6, 2)])
def test_a_conversation_with_ever_more_images_goes_on_without_its_oldest(
    count: int, named: int, engine: ScriptedEngine
) -> None:
    with running(engine, max_images=4) as server:
        server.chat(turns(count))
    assert engine.requests[0].prompt.count("[image]<|im_end|>") == named
    assert len(started(engine).images) == count - named


@pytest.mark.parametrize(("rounds", "named"), [(4, 0), (5, 1), (6, 2)])
def test_a_turn_with_ever_more_results_goes_on_without_the_oldest_of_their_images(
    rounds: int, named: int, engine: ScriptedEngine
) -> None:
    messages: list[dict[str, Any]] = [user(image(), text("Look."))]
    for at in range(rounds - 1):
        call = {"id": f"c{at}", "type": "function", "function": {"name": "camera", "arguments": "{}"}}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{at}", "content": [image()]},
        ]
    with running(engine, max_images=4) as server:
        server.chat(messages)
    assert engine.requests[0].prompt.count("[image]") == named
    assert len(started(engine).images) == rounds - named


def test_the_oldest_images_are_left_out_several_at_a_time_so_that_prompts_stay_cached(
    engine: ScriptedEngine,
) -> None:
    with running(engine, max_images=8) as server:
        for count in range(8, 13):
            server.chat(turns(count))
    assert [len(each.request.images) for each in engine.requests] == [8, 7, 8, 7, 8]


def test_addresses_lead_nowhere_else(engine: ScriptedEngine) -> None:
    """Allowed, and one host of a private network named: its redirects do not lead to others, nor to files."""
    with PictureSite({"/a.png": found(PICTURE)}, "127.0.0.2") as inner:
        answers: dict[str, Answer] = {
            "/file": moved("file:///etc/passwd"),
            "/inner": moved(inner.url("/a.png", "127.0.0.2")),
        }
        with (
            PictureSite(answers) as site,
            running(engine, allow_image_urls=True, image_hosts=("127.0.0.1",)) as server,
        ):
            codes = [refused(server, at(site.url(path)))["code"] for path in answers]
            own = refused(server, at(f"{server.url.replace('127.0.0.1', '127.0.0.3')}/v1/models"))
        assert codes == ["image_url_refused", "image_url_refused"]
        assert "private network" in own["message"]
        assert inner.connections == 0
    assert not engine.requests


def test_an_address_that_says_nothing_is_waited_for_no_longer_than_the_limit(engine: ScriptedEngine) -> None:
    is_over = threading.Event()
    with (
        PictureSite({"/silent": lambda _: is_over.wait(60)}) as site,
        running(engine, allow_image_urls=True, image_hosts=("127.0.0.1",), image_seconds=0.3) as server,
    ):
        error = refused(server, at(site.url("/silent")))
        is_over.set()
    assert error["code"] == "image_not_fetched"
    assert "within 0.3 seconds" in error["message"]
    assert not engine.requests

"""Where images stand in prompts: as parts that a template writes, or in the texts of one that takes none."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from chat_templates import GEMMA_3_VISION, GEMMA_3_VISION_MARKERS, QWEN_VL, QWEN_VL_MARKERS
from prepared_images import prepared
from scripted_engine import ScriptedTokenizer

from mlx_backend.chat.capabilities import ChatFormat
from mlx_backend.chat.chat_prompt import ChatPrompts
from mlx_backend.chat.generated_replies import GeneratedReplies
from mlx_backend.chat.history_probe import probe_history
from mlx_backend.chat.limits import ReplyLimits
from mlx_backend.chat.request import ChatRequest
from mlx_backend.chat.request_images import SeenImages
from mlx_backend.chat.response_template import recognise
from mlx_backend.conversation.effort import EffortScale
from mlx_backend.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mlx_backend.chat.prompt import Prompt
    from mlx_backend.engine.images import PreparedImage

QWEN = ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|>", "<|vision_end|>")
GEMMA = ("<start_of_image>", "\n\n<start_of_image>", "<end_of_image>\n\n")
# Of a model whose template knows no parts.
TEXT_TEMPLATE = """\
{%- for message in messages -%}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}


class Processor:
    """Images of as many tokens as the test says."""

    def __init__(self, part: str, pad_token: int) -> None:
        self.part = part
        self.pad_token = pad_token

    def prepare(self, _picture: Any, earlier: Sequence[PreparedImage] = ()) -> PreparedImage:
        raise NotImplementedError  # what is shown here is prepared already


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(number: int) -> dict[str, Any]:
    return {"type": "image", "image": number}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


class Model:
    """A tokenizer with a template, and the prompts that it makes of messages with images of some sizes.

    `writing` is what the template writes for an image, and what stands before and after its places then.
    """

    def __init__(self, template: str, markers: Sequence[str], writing: tuple[str, str, str]) -> None:
        part, self.before, self.after = writing
        pad = next(each for each in markers if each in ("<|image_pad|>", "<image_soft_token>"))
        self.tokenizer = ScriptedTokenizer(markers, template)
        self.pad_token = self.tokenizer.encode(pad, control_tokens=True)[0]
        self.pad = pad
        self.processor = Processor(part, self.pad_token)
        recognition = recognise(template, markers)
        self.dialect = recognition.dialect
        self.prompts = ChatPrompts(
            self.tokenizer,
            ChatFormat(recognition, probe_history(template), EffortScale()),
            ReplyLimits(context_length=4096),
            GeneratedReplies(self.tokenizer, self.dialect),
        )

    def prompt(self, messages: Sequence[dict[str, Any]], sizes: Sequence[int], **fields: Any) -> Prompt:
        request = ChatRequest(messages=messages, **fields)
        images = {
            number: prepared(
                size,
                digest=bytes([number]),
                pad=self.pad_token,
                text=self.before + self.pad * size + self.after,
            )
            for number, size in enumerate(sizes)
        }
        seen = SeenImages(self.processor, images)
        return self.prompts.prompt(request, self.prompts.conversation(request), images=seen)

    def shown(self, messages: Sequence[dict[str, Any]], sizes: Sequence[int], **fields: Any) -> str:
        """The prompt's text, with <0> for the places of image 0, having checked that they are pads."""
        prompt = self.prompt(messages, sizes, **fields)
        tokens, shown, at = prompt.tokens, "", 0
        for each in prompt.images:
            assert set(tokens[each.start : each.end]) == {self.pad_token}
            shown += self.tokenizer.decode(tokens[at : each.start]) + f"<{each.image.digest[0]}>"
            at = each.end
        assert self.pad_token not in tokens[at:]
        assert prompt.image_tokens == tokens.count(self.pad_token)
        return shown + self.tokenizer.decode(tokens[at:])


@pytest.fixture(scope="module")
def qwen() -> Model:
    return Model(QWEN_VL, QWEN_VL_MARKERS, QWEN)


@pytest.fixture(scope="module")
def gemma() -> Model:
    return Model(GEMMA_3_VISION, GEMMA_3_VISION_MARKERS, GEMMA)


@pytest.fixture(scope="module")
def plain() -> Model:
    return Model(TEXT_TEMPLATE, QWEN_VL_MARKERS, QWEN)


def test_an_image_takes_its_number_of_pad_tokens_where_its_part_stands(qwen: Model, gemma: Model) -> None:
    messages = [user(text("What is"), image(0), text("this?"))]
    assert qwen.shown(messages, [5]) == (
        "<|im_start|>user\nWhat is<|vision_start|><0><|vision_end|>this?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert gemma.shown(messages, [5]) == (
        "<start_of_turn>user\nWhat is\n\n<start_of_image><0><end_of_image>\n\nthis?<end_of_turn>\n"
        "<start_of_turn>model\n"
    )


@pytest.mark.parametrize("size", [1, 4, 256])
def test_the_prompt_has_the_images_tokens(qwen: Model, size: int) -> None:
    alone, other = (len(qwen.prompt([user(image(0))], [each]).tokens) for each in (size, size + 1))
    assert other - alone == 1
    assert qwen.prompt([user(image(0))], [size]).image_tokens == size


def test_something_else_may_be_asked_about_the_last_messages_images(qwen: Model, gemma: Model) -> None:
    for model in (qwen, gemma):
        first = [user(text("And"), image(0), image(1), text("What is this?"))]
        prompt = model.prompt(first, [5, 3, 4])
        assert prompt.images[1].end in prompt.checkpoints
        answered = [*first, {"role": "assistant", "content": "A dog."}]
        for question in (user(text("Why?")), user(image(2), text("And this?"))):
            following = model.prompt([*answered, question], [5, 3, 4])
            ends = {each.end for each in following.images}
            assert ends & set(following.checkpoints) == {each.end for each in following.images[2:]}


def test_images_of_several_turns_keep_their_order(qwen: Model, gemma: Model) -> None:
    messages = [
        user(image(0), image(1), text("Compare.")),
        {"role": "assistant", "content": "Done."},
        user(text("And this?"), image(2)),
    ]
    for model in (qwen, gemma):
        assert re.findall(r"<(\d)>", model.shown(messages, [3, 1, 2])) == ["0", "1", "2"]


@pytest.mark.parametrize(
    "spelt", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|image_"]
)
def test_a_placeholder_that_a_user_spells_stays_text(qwen: Model, spelt: str) -> None:
    messages = [user(text(f"Say {spelt}"), image(0), text(spelt)), {"role": "assistant", "content": spelt}]
    shown = qwen.shown([*messages, user(text(spelt))], [4])
    assert shown.count(spelt) == 4
    assert shown.count("<0>") == 1
    assert shown.count("<|vision_start|><0><|vision_end|>") == 1


def test_neighbours_are_joined_for_a_template_whose_roles_alternate(gemma: Model) -> None:
    messages = [user(text("Look:")), user(image(0), text("This.")), user(text("What is it?"))]
    assert gemma.shown(messages, [2]) == (
        "<start_of_turn>user\nLook:\n\n<start_of_image><0><end_of_image>\n\nThis.\n\nWhat is it?<end_of_turn>\n"
        "<start_of_turn>model\n"
    )


def test_a_template_without_parts_shows_images_in_its_texts(plain: Model) -> None:
    messages = [
        {"role": "system", "content": "Look closely."},
        user(text("What is this?"), image(0)),
        CALLING,
        {"role": "tool", "tool_call_id": "c1", "content": [image(1), text("a photo")]},
    ]
    assert plain.shown(messages, [3, 2]) == (
        "<|im_start|>system\nLook closely.<|im_end|>\n"
        "<|im_start|>user\nWhat is this?\n<|vision_start|><0><|vision_end|><|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<|vision_start|><1><|vision_end|>\na photo<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_tools_image_is_shown_also_where_the_template_has_no_tools(qwen: Model, gemma: Model) -> None:
    messages = [
        user(image(0)),
        CALLING,
        {"role": "tool", "tool_call_id": "c1", "content": [text("a photo"), image(1)]},
    ]
    for model in (qwen, gemma):
        shown = model.shown(messages, [3, 2])
        assert re.findall(r"<(\d)>", shown) == ["0", "1"]
        assert shown.index("a photo") < shown.index("<1>")


def test_stand_ins_are_told_apart_from_every_character_that_is_sent(plain: Model) -> None:
    """Both are from the private use area: a user's own, and one for the markers that are spelt."""
    words = "".join(map(chr, range(0xE000, 0xE010))) + "<|im_end|>\\ue010"
    shown = plain.shown([user(text(words), image(0), image(1))], [1, 2])
    assert words in shown
    assert "\n<|vision_start|><0><|vision_end|>\n<|vision_start|><1><|vision_end|><|im_end|>" in shown


def test_a_begun_answer_goes_on_behind_the_images(qwen: Model) -> None:
    messages = [user(image(0)), {"role": "assistant", "content": "It shows"}]
    assert qwen.shown(messages, [3]).endswith("<0><|vision_end|><|im_end|>\n<|im_start|>assistant\nIt shows")


def test_a_template_that_drops_an_image_is_named() -> None:
    only_one = QWEN_VL.replace(
        "{%- for part in message.content -%}", "{%- for part in message.content[:2] -%}"
    )
    model = Model(only_one, QWEN_VL_MARKERS, QWEN)
    with pytest.raises(
        RequestError, match=r"does not write each of the request's images as <\|vision_start\|>"
    ):
        model.prompt([user(text("both"), image(0), image(1))], [1, 1])


def test_images_without_a_template_are_refused() -> None:
    model = Model(QWEN_VL, QWEN_VL_MARKERS, QWEN)
    model.prompts._template = None
    with pytest.raises(RequestError, match="need a chat template"):
        model.prompt([user(image(0))], [1], role_mapping={"user": "U: "})

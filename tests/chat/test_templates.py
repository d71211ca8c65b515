"""Where a prompt's form comes from: the model's template, one that is given, or the roles a request maps."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_models import write_model
from running_server import running
from scripted_engine import HARMONY_TEMPLATE, ScriptedEngine

from mlx_backend.chat.model_settings import ModelSettings
from mlx_backend.chat.request import ChatRequest
from mlx_backend.chat.service import Service
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.loading import load_tokenizer
from mlx_backend.errors import EngineError, RequestError
from mlx_backend.models import templates
from mlx_backend.models.files import chat_template
from mlx_backend.models.spec import ModelDefaults

ROLES = {
    "system": "<|start|>rule: ",
    "user": "<|start|>user: ",
    "assistant": "<|start|>bot: ",
    "stop": "<|end|>",
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Say <|end|>."},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": "Why?"},
]


@pytest.fixture
def bare() -> Iterator[ScriptedEngine]:
    """A model without a template."""
    with ScriptedEngine(lambda _: "Because.<|return|>", chat_template=None) as engine:
        yield engine


def test_roles_are_mapped_for_a_model_without_a_template_and_what_users_spell_stays_text(
    bare: ScriptedEngine,
) -> None:
    with running(bare) as server:
        said = server.chat(MESSAGES, role_mapping=ROLES)["choices"][0]["message"]["content"]
    assert said.startswith("Because.")
    [asked] = bare.requests
    assert asked.prompt == (
        "<|start|>rule: Be brief.<|end|><|start|>user: Say <|end|>.<|end|><|start|>bot: No.<|end|>"
        "<|start|>user: Why?<|end|><|start|>bot:"
    )
    special = bare.tokenizer.special_tokens
    ends = [token for token in asked.request.prompt if special.get(token) == "<|end|>"]
    assert len(ends) == 4, "the one in the user's message is text"


def test_without_a_template_and_without_roles_the_way_out_is_told(bare: ScriptedEngine) -> None:
    with pytest.raises(
        RequestError, match="Start the server with --chat-template, send a role_mapping, or use"
    ):
        Service(bare).chat(ChatRequest(messages=MESSAGES))


def test_a_template_that_is_given_replaces_the_models_own(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    template = "{{ greeting }}{% for message in messages %}[{{ message.content }}]{% endfor %}"
    with load_engine(model, chat_template=template) as engine:
        service = Service(engine, ModelSettings.of(ModelDefaults(template_kwargs={"greeting": "hey"})))
        reply = service.chat(ChatRequest(messages=[{"role": "user", "content": "fox"}], max_tokens=1))
        list(reply.events())
        assert engine.tokenizer.chat_template == template
        rendered = engine.tokenizer.render([{"role": "user", "content": "fox"}], None, greeting="hey")
        assert rendered == "hey[fox]"
        assert reply.usage.prompt_tokens == len(engine.tokenizer.encode(rendered, control_tokens=True))


PLAIN, WITH_TOOLS = "\n  {{ messages[0].content }}\n  \n", "\n {{ tools[0].function.name }}?\n"
JSON = {"chat_template.json": {"chat_template": PLAIN}}
LIST = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]


@pytest.mark.parametrize(
    ("files", "with_tools"),
    [
        ({"chat_template.jinja": PLAIN}, PLAIN),
        (JSON, PLAIN),
        ({"processor_config.json": {"chat_template": PLAIN}}, PLAIN),
        ({"tokenizer_config.json": {"chat_template": LIST}}, WITH_TOOLS),
        ({"tokenizer_config.json": {"chat_template": LIST[1:]}, "chat_template.jinja": PLAIN}, WITH_TOOLS),
        ({"chat_template.json": {"chat_template": LIST}}, WITH_TOOLS),
        ({"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": WITH_TOOLS}, WITH_TOOLS),
        (JSON | {"additional_chat_templates/tool_use.jinja": WITH_TOOLS}, WITH_TOOLS),
        (JSON | {"chat_template.jinja": "not this one"}, "not this one"),
        (JSON | {"tokenizer_config.json": {"chat_template": "not this one"}}, "not this one"),
    ],
)
def test_templates_are_found_wherever_they_lie_and_the_one_for_tools_is_used_with_tools(
    files: dict[str, Any], with_tools: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    for name, content in {"tokenizer_config.json": {}, **files}.items():
        text = json.dumps(settings | content if name == "tokenizer_config.json" else content)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if name.endswith(".jinja") else text)
    tokenizer, _ = load_tokenizer(folder)
    tool = {"type": "function", "function": {"name": "look"}}
    alone = PLAIN if with_tools == WITH_TOOLS else with_tools
    for given, template in ((None, alone), ([tool], with_tools)):
        expected = templates.render(template, MESSAGES, {}, tools=given)
        assert tokenizer.render(MESSAGES, given) == expected
    assert chat_template(folder) == tokenizer.chat_template, "what is listed is what is loaded"


def test_a_requests_template_arguments_win_over_the_servers() -> None:
    template = HARMONY_TEMPLATE + "{{ mood }}"
    with ScriptedEngine(lambda _: "x<|return|>", chat_template=template) as engine:
        service = Service(engine, ModelSettings.of(ModelDefaults(template_kwargs={"mood": "calm"})))
        for kwargs, shown in (({}, "calm"), ({"mood": "wild"}, "wild")):
            list(service.chat(ChatRequest(messages=MESSAGES, template_kwargs=kwargs)).events())
            assert engine.requests[-1].prompt.endswith(shown)


def test_code_that_comes_with_a_model_is_not_run_unless_it_is_trusted(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", model_file="evil.py")
    (model / "evil.py").write_text("from mlx_lm.models.gpt_oss import Model, ModelArgs\nprint('run')\n")
    with pytest.raises(EngineError, match="comes with Python code of its own; --trust-remote-code runs it"):
        load_engine(model)
    with load_engine(model, trust_remote_code=True) as engine:
        assert engine.is_healthy()

"""The requests of coding agents, as the agents were seen to send them: their fields and sizes, with texts made up here.

A first request, one in the middle of a task (what the model said comes back as that agent writes it), and the one that
compacts the conversation. Each is answered whole and streamed, and nothing but what is listed is ignored.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import requests
from clients.scripted_models import FAMILIES, Call, scripted_server

from mlx_backend.api.sealed_reasoning import seal, sign

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clients.scripted_models import ScriptedServer

type Body = dict[str, Any]
type Case = tuple[str, Body, str]
"""The address, the request, and the header of ignored fields."""

OBJECT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
PATCH_GRAMMAR = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
PATCH = "*** Begin Patch\n*** Add File: a.txt\n+one\n*** End Patch\n"


def words(size: int) -> str:
    """A text of so many bytes."""
    return ("Work in small steps, and say what was done. " * (size // 44 + 1))[:size]


# -- Codex, over /v1/responses ----------------------------------------------------------------------------------


def codex_function(name: str) -> Body:
    return {
        "type": "function",
        "name": name,
        "description": words(800),
        "strict": False,
        "parameters": {**OBJECT, "additionalProperties": False},
    }


CODEX_TOOLS = [
    *map(codex_function, ("exec_command", "write_stdin", "request_user_input", "view_image")),
    *map(codex_function, ("get_goal", "create_goal", "update_goal")),
    {
        "type": "namespace",
        "name": "multi_agent_v1",
        "description": words(300),
        "tools": [codex_function(name) for name in ("spawn_agent", "send_input", "wait_agent")],
    },
    {
        "type": "namespace",
        "name": "mcp__demo",
        "description": "Tools of demo.",
        "tools": [codex_function("lookup")],
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Changes files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
    },
    {"type": "web_search", "external_web_access": True},
]


def codex_message(role: str, text: str) -> Body:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


CODEX_START = [
    codex_message("developer", words(17_600)),
    codex_message("developer", words(2_000)),
    codex_message("user", f"<environment_context>\n{words(400)}\n</environment_context>"),
    codex_message("user", "Add a file with one line."),
]
CODEX_ITEMS: list[Body] = [
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Look first."}],
        "encrypted_content": seal("Look first."),
    },
    {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "I look."}],
        "phase": "commentary",
    },
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "exec_command",
        "arguments": '{"text": "ls"}',
    },
    {
        "type": "function_call",
        "id": "fc_2",
        "call_id": "call_2",
        "name": "lookup",
        "namespace": "mcp__demo",
        "arguments": '{"text": "a"}',
    },
    {"type": "function_call_output", "call_id": "call_1", "output": "Chunk ID: 1\nnotes.txt"},
    {"type": "function_call_output", "call_id": "call_2", "output": "found"},
    {
        "type": "custom_tool_call",
        "id": "ctc_1",
        "call_id": "call_3",
        "name": "apply_patch",
        "input": PATCH,
        "status": "completed",
    },
    {"type": "custom_tool_call_output", "call_id": "call_3", "output": "Success."},
]


def codex(items: list[Body], **fields: Any) -> Case:
    body = {
        "model": "scripted",
        "input": items,
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019a-thread",
        "client_metadata": {"session_id": "019a", "turn": json.dumps({"ids": words(1_000)})},
        **fields,
    }
    hosted = ", tools.web_search" if body["tools"] else ""
    return "/v1/responses", body, f"client_metadata{hosted}"


# -- Claude Code, over /v1/messages -----------------------------------------------------------------------------


CACHED = {"cache_control": {"type": "ephemeral"}}
LOOKUP = {
    "name": "mcp__demo__lookup",
    "description": "Looks up.",
    "input_schema": OBJECT,
    "defer_loading": True,
}
PLACEHOLDER = {
    "name": "DeferredToolPlaceholder",
    "description": "",
    "input_schema": OBJECT,
    "defer_loading": True,
}
CLAUDE_TOOLS: list[Body] = [
    {"name": name, "description": words(2_800), "input_schema": OBJECT}
    for name in ("Agent", "Bash", "Edit", "ListAgents", "Read", "Skill", "ToolSearch", "Workflow", "Write")
]
CLAUDE_START: list[Body] = [
    {"role": "user", "content": [{"type": "text", "text": "Look it up, and note it.", **CACHED}]},
    {"role": "system", "content": words(9_200)},
]
CLAUDE_TURNS: list[Body] = [
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Find the tool.", "signature": sign("Find the tool.")},
            {
                "type": "tool_use",
                "id": "toolu_1",
                "name": "ToolSearch",
                "input": {"text": "select:mcp__demo__lookup"},
            },
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [{"type": "tool_reference", "tool_name": "mcp__demo__lookup"}],
            }
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "Two at once."},
            {"type": "tool_use", "id": "toolu_2", "name": "mcp__demo__lookup", "input": {"text": "a"}},
            {
                "type": "tool_use",
                "id": "toolu_3",
                "name": "Edit",
                "input": {"text": "a", "replace_all": False},
            },
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": "found"},
            {
                "type": "tool_result",
                "tool_use_id": "toolu_3",
                "content": "No such text.",
                "is_error": True,
                **CACHED,
            },
        ],
    },
]


def claude(messages: list[Body], tools: list[Body], **fields: Any) -> Case:
    body = {
        "model": "scripted",
        "messages": messages,
        "system": [
            {
                "type": "text",
                "text": "x-anthropic-billing-header: cc_version=2.1.332.a1b; cc_entrypoint=sdk-cli;",
            },
            {"type": "text", "text": words(100), **CACHED},
            {"type": "text", "text": words(5_900), **CACHED},
        ],
        "tools": tools,
        "metadata": {"user_id": json.dumps({"session_id": "019a"})},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive", "display": "updates"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        **fields,
    }
    return "/v1/messages?beta=true", body, "metadata"


# -- OpenCode, over each of the three ---------------------------------------------------------------------------


NAMES = ("bash", "edit", "glob", "grep", "read", "skill", "task", "todowrite", "write", "demo_lookup")


def opencode_function(name: str) -> Body:
    return {"name": name, "description": words(1_800), "parameters": OBJECT}


OPENCODE_CHAT: Body = {
    "model": "scripted",
    "max_tokens": 32_000,
    "messages": [
        {"role": "system", "content": words(10_000)},
        {"role": "user", "content": "Look it up."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "Both at once.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "bash", "arguments": '{"text":"ls"}'},
                },
                {
                    "id": "call_2",
                    "type": "function",
                    "function": {"name": "demo_lookup", "arguments": '{"text":"a"}'},
                },
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "notes.txt"},
        {"role": "tool", "tool_call_id": "call_2", "content": "found"},
    ],
    "tools": [{"type": "function", "function": opencode_function(name)} for name in NAMES],
    "tool_choice": "auto",
    "stream_options": {"include_usage": True},
}
OPENCODE_TITLE: Body = {
    "model": "scripted",
    "max_tokens": 32_000,
    "reasoning_effort": "low",
    "messages": [
        {"role": "system", "content": words(2_000)},
        {"role": "user", "content": "Write a title for this conversation:\n"},
        {"role": "user", "content": "Look it up."},
    ],
}
OPENCODE_RESPONSES: Body = {
    "model": "scripted",
    "input": [
        {"role": "developer", "content": words(10_000)},
        {"role": "user", "content": [{"type": "input_text", "text": "Look it up."}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "Look."}],
            "encrypted_content": seal("Look."),
        },
        {"type": "function_call", "call_id": "call_1", "name": "bash", "arguments": '{"text":"ls"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "notes.txt"},
    ],
    "tools": [{"type": "function", "strict": False, **opencode_function(name)} for name in NAMES],
    "tool_choice": "auto",
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "ses_1",
    "max_output_tokens": 32_000,
}
OPENCODE_MESSAGES: Body = {
    "model": "scripted",
    "max_tokens": 32_000,
    "system": [{"type": "text", "text": words(10_000), **CACHED}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Look it up.", **CACHED}]}],
    "tools": [{"name": name, "description": words(1_800), "input_schema": OBJECT} for name in NAMES],
    "tool_choice": {"type": "auto"},
}
SUMMARY = "Respond with TEXT ONLY: a summary of all that was done, for whoever goes on."
CASES: dict[str, Case] = {
    "codex, first": codex(CODEX_START),
    "codex, later": codex(CODEX_START + CODEX_ITEMS),
    "codex, compaction": codex(
        [*CODEX_START, *CODEX_ITEMS, codex_message("user", SUMMARY)], tools=[], parallel_tool_calls=False
    ),
    "claude, first": claude(CLAUDE_START, [*CLAUDE_TOOLS, PLACEHOLDER]),
    "claude, later": claude(
        CLAUDE_START + CLAUDE_TURNS, [*CLAUDE_TOOLS[:-1], LOOKUP, CLAUDE_TOOLS[-1], PLACEHOLDER]
    ),
    "claude, compaction": claude(
        [*CLAUDE_START, *CLAUDE_TURNS, {"role": "user", "content": [{"type": "text", "text": SUMMARY}]}],
        [*CLAUDE_TOOLS, LOOKUP, PLACEHOLDER],
    ),
    "opencode, chat": ("/v1/chat/completions", OPENCODE_CHAT, ""),
    "opencode, title": ("/v1/chat/completions", OPENCODE_TITLE, ""),
    "opencode, responses": ("/v1/responses", OPENCODE_RESPONSES, ""),
    "opencode, messages": ("/v1/messages", OPENCODE_MESSAGES, ""),
}
ENDS = {
    "/v1/responses": "event: response.completed",
    "/v1/messages": "event: message_stop",
    "/v1/chat/completions": "data: [DONE]",
}


@pytest.fixture(scope="module", params=FAMILIES)
def server(request: pytest.FixtureRequest) -> Iterator[ScriptedServer]:
    family = FAMILIES[request.param]

    def reply(prompt: str) -> str:
        # A compaction has the tools in its prompt too; its grammar, which no scripted engine has, forbids calls.
        if family.offers_tools(prompt) and "apply_patch" in prompt and SUMMARY not in prompt:
            return family.calls(Call("apply_patch", {"input": PATCH}), thinking="Add it.")
        return family.says("Done.", thinking="Nothing is left.")

    with scripted_server(reply, request.param) as server:
        yield server


@pytest.mark.parametrize(("path", "body", "ignored"), CASES.values(), ids=CASES)
def test_what_an_agent_sends_is_answered_whole_and_streamed(
    server: ScriptedServer, path: str, body: Body, ignored: str
) -> None:
    whole = requests.post(server.url + path, json=body, timeout=60)
    assert whole.status_code == 200, whole.text
    unread = {"stream_options"} if "stream_options" in body else set()  # which only a stream has
    assert set(whole.headers.get("x-mlx-backend-ignored", "").split(", ")) - unread - {""} == (
        set(ignored.split(", ")) - {""}
    )
    streamed = requests.post(server.url + path, json={**body, "stream": True}, timeout=60)
    end = ENDS[path.partition("?")[0]]
    assert end in streamed.text
    assert "error" not in streamed.text.replace('"error":null', "")
    if "apply_patch" in json.dumps(body.get("tools")):
        [call] = [item for item in whole.json()["output"] if item["type"] == "custom_tool_call"]
        assert (call["name"], call["input"]) == ("apply_patch", PATCH)
    else:
        assert "Done." in whole.text


def test_marks_of_the_cache_billing_and_deferred_tools_are_no_part_of_a_prompt(
    server: ScriptedServer,
) -> None:
    path, body, _ = CASES["claude, first"]
    requests.post(server.url + path, json=body, timeout=60)
    prompt = server.prompts[-1].prompt
    for absent in ("cache_control", "ephemeral", "cc_version", "DeferredToolPlaceholder", "session_id"):
        assert absent not in prompt

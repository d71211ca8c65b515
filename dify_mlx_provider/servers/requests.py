"""One request to a server of any kind: for the right model, in fields this kind knows, without those it refused.

`chat`       a conversation; the answer comes in chunks
`post_json`  vectors or a ranking; the answer is one object

A chat request is built once, in mlx-backend's fields, and `adapt_request` fits it to the server: OpenAI's protocol says
nothing of reasoning, so every server has fields of its own for it, and some refuse the others'.

    effort              `reasoning_effort`, inside `chat_template_kwargs` or beside it, or an object `reasoning`
    structured output   any `response_format`; JSON schemas only; or none, so that the prompt has to ask
    reasoning           the field that carries a turn's reasoning back while its tools run
    stop words          sent only where they end an answer, and not its reasoning
    other fields        those of mlx-backend alone are left out; those with another name are renamed

Some servers refuse a request for a field they do not know. If it is a field that the plugin added by itself, the
request is sent once more without it, and for a while the server does not get the field again. The HTTP is
`upstream.client`'s.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from dify_mlx_provider.servers import discovery
from dify_mlx_provider.servers.base import last_part
from dify_mlx_provider.servers.efforts import nearest
from dify_mlx_provider.upstream.client import OpenAIClient
from dify_mlx_provider.upstream.errors import (
    ModelNotFound,
    NoSuchEndpoint,
    Refused,
    ServerError,
    from_error_object,
    join_names,
    quote,
    shortened_name,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from dify_mlx_provider.servers.base import ServerInfo, ServerProfile
    from dify_mlx_provider.upstream.credentials import Credentials

_CANNOT = {"embedding": "makes no embeddings", "rerank": "does not rerank"}

PROTECTED_FIELDS = ("messages", "stream", "stream_options", "model")
"""What the extra body may not replace: the plugin would misread the answer, or get one to another question."""

# Words in a refusal that point to a field without being its name.
_REFUSAL_PHRASES = {
    "reasoning_effort": ("does not support thinking", "think value", "invalid reasoning", "reasoning effort"),
    "chat_template_kwargs": ("enable_thinking", "chat template"),
    "reasoning": ("reasoning.effort", "'reasoning'", '"reasoning"', "`reasoning`"),
    "stream_options": ("include_usage",),
}
_REMOVABLE_FIELDS = (
    *("reasoning_effort", "chat_template_kwargs", "reasoning", "stream_options", "logprobs"),
    *sorted(discovery.OWN_FIELDS),
)


def chat(credentials: Credentials, body: Mapping[str, Any]) -> Generator[dict[str, Any], None, None]:
    """Send a request of `messages.chat_request`; return the answer's chunks, as `OpenAIClient.chat` does.

    Raises what the client raises, and ValueError for a setting that this kind of server does not have.
    """
    server = discovery.find_server(credentials)
    client = OpenAIClient(credentials)
    body = {**body, "model": _model_id(str(body["model"]), server, "llm")}
    refused_before = discovery.fields_refused_before(credentials, body["model"])
    omitted = frozenset(refused_before)
    while True:
        request = adapt_request(body, discovery.PROFILES[server.kind], omit=omitted)
        try:
            chunks = client.chat(request)
        except ModelNotFound as error:
            server = discovery.find_server_after_refusal(credentials, body["model"])
            served = server.names("llm") if server.models else _served_models(client)
            candidates = [name for name in served if name != "default"]
            if body["model"] != "default" or not candidates:
                raise _not_found(error, body["model"], credentials, server, served) from error
            # A server that discovery learnt nothing of, and that has no model named `default`.
            body["model"] = candidates[0]
            continue
        except Refused as error:
            unwanted = refused_fields(str(error), request) - omitted
            if not unwanted:
                raise
            omitted |= unwanted
            continue
        refused_before |= omitted  # only now that the request was accepted without them
        return chunks


def post_json(
    credentials: Credentials, model: str, path: str, body: Mapping[str, Any], kind: str
) -> dict[str, Any]:
    """Send a request to a model of a kind and return the answer, an object. Raises a ServerError."""
    server = discovery.find_server(credentials)
    try:
        answer = OpenAIClient(credentials).post_json(path, {"model": _model_id(model, server, kind), **body})
    except NoSuchEndpoint as error:
        raise _unsupported(server, credentials, kind, path) or error from error
    except ModelNotFound as error:
        server = discovery.find_server_after_refusal(credentials, model)
        raise _not_found(error, model, credentials, server, server.names(kind), kind) from error
    if isinstance(answer, dict) and (error_object := answer.get("error")):
        # LM Studio sends its errors with status 200.
        is_missing = "endpoint" in str(error_object).lower()
        unsupported = _unsupported(server, credentials, kind, path) if is_missing else None
        raise unsupported or from_error_object(error_object)
    if isinstance(answer, dict):
        return answer
    raise Refused(f"what answers at {credentials.base_url}{path} is not an OpenAI-compatible server.")


def _model_id(name: str, server: ServerInfo, kind: str) -> str:
    """The model's name for this server: `default` is replaced for servers that do not know it."""
    if name != "default" or discovery.PROFILES[server.kind].default_model:
        return name
    first = server.model(name, kind)
    return name if first is None else first.name


def _not_found(
    error: ModelNotFound,
    name: str,
    credentials: Credentials,
    server: ServerInfo,
    served: list[str],
    kind: str = "llm",
) -> ModelNotFound:
    """Return the error as a sentence that says where the model is missing, what there is, and what to choose.

    What the server says of a model that it lists is left as it is: that it has yet to be downloaded, or which of two is
    meant.
    """
    if name == "default" or any(last_part(name) == last_part(other) for other in served):
        return error
    is_ours = discovery.PROFILES[server.kind].always_has_default and bool(served)
    has_default = is_ours and kind == "llm"  # Dify's model Default is a chat model
    own_words = "" if is_ours else quote(str(error)).removesuffix(".")  # ours would name the models again
    there_is = f"It has: {join_names(served)}. Choose one of these, or " if served else ""
    default = "Default, which always works, or " if has_default else ""
    start = "start the server with the model you want."
    return ModelNotFound(
        f"the server at {credentials.base_url} does not have the model {shortened_name(name)!r}{own_words}. "
        f"{there_is}{default}{start if served else start.capitalize()}"
    )


def _served_models(client: OpenAIClient) -> list[str]:
    try:
        return client.models()
    except ServerError:
        return []


def _unsupported(server: ServerInfo, credentials: Credentials, kind: str, path: str) -> ServerError | None:
    if not server.answered:
        return None
    profile = discovery.PROFILES[server.kind]
    return Refused(
        f"{profile.display_name} at {credentials.base_url} {_CANNOT[kind]}: it has no {path}. {profile.remedy}"
    )


# -- fitting a chat request to a kind of server ------------------------------------------------------------------


def adapt_request(
    body: Mapping[str, Any], profile: ServerProfile, *, omit: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return a chat request as a kind of server expects it, without the fields in `omit`.

    Raises ValueError for a setting that the user chose and this kind does not have.
    """
    request = dict(body)
    extra = request.pop("extra_body", None) or {}
    if request.get("model") == "default":
        request["model"] = profile.default_model or "default"
    request.setdefault("reasoning_format", "separate")
    omit |= discovery.OWN_FIELDS - profile.own_fields
    if (effort := request.pop("reasoning_effort", None)) is not None:
        request = merge_fields(request, _effort_fields(effort, profile))
    _set_thinking_budget(request, profile)
    for name, other_name in profile.renamed_fields.items():
        if name in request:
            request[other_name] = request.pop(name)
    _set_response_format(request, profile)
    request["messages"] = [
        _with_reasoning_fields(message, profile) for message in request.get("messages") or ()
    ]
    if not profile.separates_reasoning:
        request.pop("stop", None)
    if profile.calls_in_logprobs and request.get("tools"):
        request["logprobs"] = True
    if profile.has_one_seed:
        request.setdefault("seed", secrets.randbelow(2**31))
    for name in omit:
        request.pop(name, None)
    return merge_fields(request, extra)


def parse_extra_body(value: Any) -> dict[str, Any]:
    """Parse the setting Extra body. Raises ValueError with a sentence for the user."""
    fields = value
    if isinstance(value, str):
        try:
            fields = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"the setting Extra body is not valid JSON ({error}). Write an object such as "
                '{"logit_bias": {"42": -100}}, or leave it empty.'
            ) from error
    if not isinstance(fields, Mapping):
        raise ValueError(
            f'the setting Extra body must be a JSON object such as {{"top_k": 20}}, not {str(value)[:60]!r}.'
        )
    for name in PROTECTED_FIELDS:
        if name in fields:
            raise ValueError(f"the setting Extra body may not hold {name!r}: Dify sets it. Remove it.")
    parsed = dict(fields)
    if isinstance(kwargs := parsed.get("chat_template_kwargs"), str):  # as some form writes an object
        try:
            parsed["chat_template_kwargs"] = json.loads(kwargs or "{}", parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"chat_template_kwargs in the setting Extra body is not valid JSON ({error}). Write an object."
            ) from error
    return parsed


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def merge_fields(body: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body with the user's own fields in it; objects such as chat_template_kwargs are merged."""
    merged = dict(body)
    for name, value in extra.items():
        present = merged.get(name)
        if isinstance(present, Mapping) and isinstance(value, Mapping):
            merged[name] = {**present, **value}
        else:
            merged[name] = value
    return merged


def refused_fields(message: str, request: Mapping[str, Any]) -> frozenset[str]:
    """Return the fields that a refusal names and that we added by ourselves: the request can do without them."""
    text = message.lower()
    return frozenset(
        name
        for name in _REMOVABLE_FIELDS
        if name in request
        # `reasoning` alone is a word of any sentence; it counts in quotation marks.
        and (
            (name != "reasoning" and name in text)
            or any(phrase in text for phrase in _REFUSAL_PHRASES.get(name, ()))
        )
    )


def _effort_fields(effort: str, profile: ServerProfile) -> dict[str, Any]:
    word = nearest(effort, profile.efforts)
    switch = {"enable_thinking": effort != "none"}
    template_fields = {"reasoning_effort": "low" if word == "none" else word, **switch}
    ways: dict[str, dict[str, Any]] = {
        "reasoning_effort": {} if effort == "none" != word else {"reasoning_effort": word},
        "reasoning": {"reasoning": {"effort": word}},
        "enable_thinking": {"chat_template_kwargs": switch},
        "template_fields": template_fields,
        "chat_template_kwargs": {"chat_template_kwargs": template_fields},
    }
    fields: dict[str, Any] = {}
    for name in profile.effort_fields:
        fields |= ways[name]
    return fields


def _set_thinking_budget(request: dict[str, Any], profile: ServerProfile) -> None:
    budget = request.pop("thinking_budget", None)
    if budget is None:
        return
    if not profile.thinking_budget_field:
        raise ValueError(
            f"{profile.display_name} takes no thinking budget. Switch the setting Thinking budget off, or send the "
            "server's own field in Extra body."
        )
    request[profile.thinking_budget_field] = budget


def _set_response_format(request: dict[str, Any], profile: ServerProfile) -> None:
    wanted = request.get("response_format")
    if not isinstance(wanted, Mapping) or profile.structured_output in ("formats", "unknown"):
        return
    if profile.structured_output == "schemas":
        if wanted.get("type") == "json_object":
            schema = {"name": "answer", "schema": {"type": "object"}}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        return
    del request["response_format"]
    request["messages"] = _with_json_instruction(request.get("messages") or (), wanted)


def _with_json_instruction(messages: Any, wanted: Mapping[str, Any]) -> list[Any]:
    """Ask for JSON in the system prompt, for servers that cannot constrain the model."""
    instruction = "Answer with one JSON object and nothing else: no explanation, no code fence."
    schema = (wanted.get("json_schema") or {}).get("schema")
    if schema is not None:
        instruction += (
            f"\nIt must be valid against this JSON schema:\n{json.dumps(schema, ensure_ascii=False)}"
        )
    history = list(messages)
    if history and history[0].get("role") == "system" and isinstance(history[0].get("content"), str):
        return [{**history[0], "content": f"{history[0]['content']}\n\n{instruction}"}, *history[1:]]
    return [{"role": "system", "content": instruction}, *history]


def _with_reasoning_fields(message: Mapping[str, Any], profile: ServerProfile) -> dict[str, Any]:
    copy = dict(message)
    reasoning = copy.pop("reasoning_content", None)
    if reasoning is None:
        return copy
    if profile.calls_have_one_text and copy.get("tool_calls") and isinstance(copy.get("content"), str):
        reasoning = "\n\n".join(filter(None, (reasoning, copy["content"])))
        copy["content"] = ""
    return copy | dict.fromkeys(profile.reasoning_fields, reasoning)

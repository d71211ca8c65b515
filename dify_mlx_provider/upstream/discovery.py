"""What a server says of itself: of which kind it is, and what its models can do. Asked seldom, and never raising.

Dify asks for a model's schema several times a call and makes a new object each time; so what was found is kept here,
by address and key, for a while, whether good or bad (`kept`). A server that was known and falls silent is described
by what it said last.

    mlx-backend      owned_by, the header Server; /v1/models says everything
    vLLM, llama.cpp  owned_by; max_model_len, meta.n_ctx
    LM Studio        /api/v0/models: type, context, capabilities
    Ollama           /api/version; /api/show, asked for one model: capabilities, num_ctx
    mlx_lm.server    Python's own HTTP server, whose /health says {"status": "ok"}
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dify_mlx_provider.upstream.cache import Kept
from dify_mlx_provider.upstream.effort_levels import LEVELS, SWITCH
from dify_mlx_provider.upstream.probe import Asker
from dify_mlx_provider.upstream.server_kinds import Kind

if TYPE_CHECKING:
    from dify_mlx_provider.upstream.credentials import Credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a server says of one of its models; None is what it does not say."""

    name: str
    type: str | None = None
    state: str | None = None
    context_size: int | None = None
    max_output_tokens: int | None = None
    capabilities: frozenset[str] | None = None
    efforts: tuple[str, ...] | None = None
    default_effort: str | None = None
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What answers at an address. `version` is mlx-backend's."""

    kind: Kind = Kind.OTHER
    version: str = ""
    models: tuple[Model, ...] = ()
    answered: bool = False

    def model(self, name: str, kind: str = "llm") -> Model | None:
        """The model of that name; also by its last part, as servers understand it.

        `default` is the first one of a kind; what does not say of which kind it is comes after those that do.
        """
        if name == "default":
            fit = self.of_kind(kind)
            ready = [model for model in fit if model.state in (None, "ready", "loaded")]
            return next(iter(ready or fit), None)
        for same in (_whole, _last_part, _untagged):
            for model in self.models:
                if same(model.name) == same(name):
                    return model
        return None

    def of_kind(self, kind: str) -> list[Model]:
        """The models of a kind; where none says of which kind it is, all that do not say."""
        return [model for model in self.models if model.type == kind] or [
            model for model in self.models if model.type is None
        ]


_servers: Kept[Server] = Kept()
_shown: Kept[Model] = Kept(most=256)


def server(credentials: Credentials) -> Server:
    """Return what is known of the server at an address; never raises. A kind set in the form is believed."""
    found = _servers.get(_key(credentials), lambda: _ask(credentials)) or Server()
    kind = credentials.server_kind
    return found if kind is None else replace(found, kind=kind)


def model(name: str, credentials: Credentials, kind: str = "llm") -> Model | None:
    """Return what the server says of a model, None if it says nothing; never raises."""
    there = server(credentials)
    found = there.model(name, kind)
    if found is not None and there.kind is Kind.OLLAMA:
        listed = found
        return _shown.get(
            f"{_key(credentials)} {listed.name}", lambda: _ollama_model(Asker(credentials), listed)
        )
    return found


def ask_again() -> None:
    """Forget what was found, as when a user saves a form: the server may just have been started."""
    _servers.forget()
    _shown.forget()


def _key(credentials: Credentials) -> str:
    secret = hashlib.sha256(credentials.api_key.encode()).hexdigest()[:16]
    return f"{credentials.base_url} {secret} {credentials.server_kind}"


# -- asking ------------------------------------------------------------------------------------------


def _ask(credentials: Credentials) -> Server | None:
    asker = Asker(credentials)
    answer = asker.models()
    if answer is None:
        # mlx_lm.server drops the connection when there is no folder of downloads to list.
        return Server(kind=Kind.MLX_LM, answered=True) if _is_mlx_lm(asker) else None
    if answer.status >= 400 and not answer.header.startswith("mlx-backend"):
        return None
    listed = entries(answer.data)
    owners = {_word(entry.get("owned_by")) for entry in listed}
    if answer.header.startswith("mlx-backend") or "mlx-backend" in owners:
        version = answer.header.partition("/")[2].split(" ")[0]
        if not version and (health := asker.get("/health")) is not None and isinstance(health.data, Mapping):
            version = _word(health.data.get("version")) or ""
        return Server(
            kind=Kind.MLX_BACKEND,
            version=version,
            models=tuple(map(_own_model, listed)),
            answered=answer.status < 400,
        )
    models = tuple(map(_listed_model, listed))
    if "vllm" in owners:
        return Server(kind=Kind.VLLM, models=models, answered=True)
    if "llamacpp" in owners or answer.header.startswith("llama.cpp"):
        return Server(kind=Kind.LLAMA_CPP, models=models, answered=True)
    if "organization_owner" in owners or not listed:
        told = asker.get("/api/v0/models")
        if (
            told is not None
            and (described := entries(told.data))
            and any("type" in entry for entry in described)
        ):
            return Server(kind=Kind.LM_STUDIO, models=tuple(map(_lm_studio_model, described)), answered=True)
    if owners <= {None} and _is_mlx_lm(asker):
        return Server(kind=Kind.MLX_LM, models=models, answered=True)
    version_told = asker.get("/api/version")
    if version_told is not None and isinstance(version_told.data, dict) and "version" in version_told.data:
        return Server(kind=Kind.OLLAMA, models=models, answered=True)
    return Server(models=models, answered=isinstance(answer.data, dict))


def _is_mlx_lm(asker: Asker) -> bool:
    health = asker.get("/health")
    return health is not None and health.header.startswith("BaseHTTP/") and health.data == {"status": "ok"}


# -- reading -----------------------------------------------------------------------------------------


def entries(data: Any) -> list[Mapping[str, Any]]:
    """The models of a list as OpenAI's protocol has it; empty if it is none."""
    listed = data.get("data") if isinstance(data, Mapping) else None
    return [
        entry
        for entry in (listed if isinstance(listed, list) else ())
        if isinstance(entry, Mapping) and isinstance(entry.get("id"), str)
    ]


def _own_model(entry: Mapping[str, Any]) -> Model:
    reasoning = entry.get("reasoning")
    efforts = _words(reasoning.get("efforts")) if isinstance(reasoning, Mapping) else None
    default = reasoning.get("default") if isinstance(reasoning, Mapping) else None
    capabilities = _words(entry.get("capabilities"))
    if efforts is None and capabilities is not None:
        efforts = ()  # a server that says what a model can do says it of reasoning too
    sampling = entry.get("sampling_defaults")
    return Model(
        name=entry["id"],
        type=_word(entry.get("type")),
        state=_word(entry.get("state")),
        context_size=_size(entry.get("context_length")) or _size(entry.get("max_model_len")),
        max_output_tokens=_size(entry.get("max_output_tokens")),
        capabilities=None if capabilities is None else frozenset(capabilities),
        efforts=efforts,
        default_effort=_word(default),
        sampling=dict(sampling) if isinstance(sampling, Mapping) else {},
    )


def _listed_model(entry: Mapping[str, Any]) -> Model:
    meta = entry.get("meta")
    told = meta if isinstance(meta, Mapping) else {}
    size = _size(entry.get("max_model_len")) or _size(told.get("n_ctx")) or _size(told.get("n_ctx_train"))
    return Model(name=entry["id"], context_size=size)


_LM_STUDIO_TYPES = {"llm": "llm", "vlm": "llm", "embeddings": "embedding"}


def _lm_studio_model(entry: Mapping[str, Any]) -> Model:
    told = _words(entry.get("capabilities"))
    capabilities: frozenset[str] | None = None
    if told is not None:
        # The list says nothing of reasoning, so nothing is concluded of it.
        capabilities = frozenset({"completion", "structured_output"})
        capabilities |= {"tools"} if "tool_use" in told else set()
        capabilities |= {"vision"} if entry.get("type") == "vlm" else set()
    return Model(
        name=entry["id"],
        type=_LM_STUDIO_TYPES.get(str(entry.get("type"))),
        state=_word(entry.get("state")),
        context_size=_size(entry.get("loaded_context_length")) or _size(entry.get("max_context_length")),
        capabilities=capabilities,
    )


def _ollama_model(asker: Asker, listed: Model) -> Model | None:
    answer = asker.post("/api/show", {"model": listed.name})
    if answer is None or not isinstance(answer.data, Mapping):
        return None
    told = _words(answer.data.get("capabilities"))
    # What a model could read is not what Ollama lets it: only a size that was set is certain.
    size = re.search(r"^num_ctx\s+(\d+)", str(answer.data.get("parameters") or ""), re.MULTILINE)
    efforts: tuple[str, ...] | None = None
    if told is not None:
        details = answer.data.get("details")
        family = str(details.get("family", "")) if isinstance(details, Mapping) else ""
        if "thinking" not in told:
            efforts = ()
        else:
            efforts = LEVELS if "gptoss" in family.replace("-", "") else SWITCH
    return replace(
        listed,
        type="embedding" if told == ("embedding",) else "llm",
        context_size=int(size[1]) if size else None,
        capabilities=None if told is None else frozenset({*told, "structured_output"}),
        efforts=efforts,
    )


def _words(value: Any) -> tuple[str, ...] | None:
    return tuple(word for word in value if isinstance(word, str)) if isinstance(value, list) else None


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _whole(name: str) -> str:
    return name


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2]


def _untagged(name: str) -> str:
    return _last_part(name).removesuffix(":latest")

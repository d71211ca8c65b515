"""The JSON objects of Ollama's API as types, for /openapi.json. Durations are in nanoseconds."""

from typing import Any, Literal, NotRequired, TypedDict

from mlx_backend.api.openai.objects import PrefillObject


class OllamaError(TypedDict):
    """What went wrong; also the last line of a stream that breaks."""

    error: str


class OllamaFunction(TypedDict):
    """What is called. The index counts the calls of a reply."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(TypedDict):
    """A call."""

    id: str
    function: OllamaFunction


class OllamaMessage(TypedDict):
    """What was said, or more of it."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class OllamaToken(TypedDict):
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int]


class OllamaLogprob(OllamaToken):
    """A token of the answer."""

    top_logprobs: list[OllamaToken]


class ReplyPart(TypedDict):
    """A line of a reply, or all of it. The last line has `done`, why it ended, and what it has cost.

    One that only keeps the connection says how far the prompt is read, or where in the queue the request waits.
    """

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    logprobs: NotRequired[list[OllamaLogprob]]
    prompt_progress: NotRequired[PrefillObject]
    queue_position: NotRequired[int]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class ChatPart(ReplyPart):
    """A line of a reply to a conversation, or all of it."""

    message: OllamaMessage


class GeneratePart(ReplyPart):
    """A line of a reply to a prompt, or all of it."""

    response: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class ModelDetails(TypedDict):
    """What a model is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class TaggedModel(TypedDict):
    """A model that can be served, under one of its names."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class TagList(TypedDict):
    """The models that can be served."""

    models: list[TaggedModel]


class RunningModel(TypedDict):
    """A model in memory, and when it will be unloaded."""

    name: str
    model: str
    size: int
    digest: str
    details: ModelDetails
    expires_at: str
    size_vram: int
    context_length: int


class RunningList(TypedDict):
    """The models in memory."""

    models: list[RunningModel]


class ShownModel(TypedDict):
    """What a model is and can do."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(TypedDict):
    """Whose API this is."""

    version: str


class PullStatus(TypedDict):
    """How far a download is."""

    status: str


class OllamaEmbeddings(TypedDict):
    """The vectors of texts."""

    model: str
    embeddings: list[list[float]]
    prompt_eval_count: int
    total_duration: int
    load_duration: int


class OllamaEmbedding(TypedDict):
    """The vector of one text."""

    embedding: list[float]

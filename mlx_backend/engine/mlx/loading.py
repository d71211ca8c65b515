"""Loading a model, its adapters and a draft model into memory, or refusing them with an error that says what to do.

Must run on the thread that will use the model. Knows nothing of requests.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import mlx_lm

from mlx_backend.device.mlx import keep_compiled_kernels, load_weights, set_precision, weight_bytes
from mlx_backend.engine.mlx.kv_cache import fresh_caches
from mlx_backend.engine.mlx.mlx_lm_patches.sliding_windows import patch_for_windows
from mlx_backend.engine.mlx.mtp import FoundHead, attach, head_in, head_of, own_head
from mlx_backend.engine.mlx.sharding import shard
from mlx_backend.engine.mlx.tokenizer import MLXTokenizer
from mlx_backend.engine.mlx.vision.whole import read_network
from mlx_backend.errors import EngineError, EngineRefused, first_line
from mlx_backend.models import files as model_files
from mlx_backend.models import templates
from mlx_backend.models.download import find_folder
from mlx_backend.models.engine_options import EngineOptions
from mlx_backend.models.folders import check_adapter, explain_load_errors, read_config, read_model
from mlx_backend.models.tasks import is_drafter
from mlx_backend.models.templates import TemplateOverrun

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from mlx_backend.byte_cache import CacheBudget
    from mlx_backend.engine.mlx.kv_cache import LayerCaches

log = logging.getLogger(__name__)

# Gets a network's name and the bytes of its weights; raises EngineError.
type CheckSize = Callable[[str, int], None]


class ReadNetwork(Protocol):
    """Makes a network of a folder; returns it and its configuration."""

    def __call__(self, folder: Path, *, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
        """With `trust_remote_code`, Python code in the folder may run."""
        ...


ASSUMED_CONTEXT = 4096
"""Tokens of the context of a model that does not state its length."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class LoadedNetwork:
    """A network in memory with its weights evaluated, and what belongs to it.

    `drafts` says for people what the model's MTP head does, or why there is none; it may be empty.
    """

    name: str
    folder: Path
    network: Any
    tokenizer: MLXTokenizer
    context_length: int
    states_context_length: bool  # if not, the length is a guess
    sampling_defaults: Mapping[str, float]
    drafts: str = ""


@dataclass(frozen=True, slots=True)
class DraftNetwork:
    """A smaller network for speculative decoding. It knows the token ids below `num_tokens`."""

    network: Any
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Networks:
    """A model's networks: `by_adapter`, where "" is the model without one, and what drafts for all of them."""

    model: LoadedNetwork
    by_adapter: dict[str, Any]
    draft: DraftNetwork | None
    options: EngineOptions

    @property
    def every(self) -> list[Any]:
        """All networks, that of the draft model too."""
        return [*self.by_adapter.values(), *([self.draft.network] if self.draft is not None else [])]

    def fresh_layers(self, adapter: str = "") -> LayerCaches:
        """Return empty caches for a prompt of which nothing is cached. Raises EngineError for impossible options."""
        return fresh_caches(self.by_adapter[adapter], self.options)

    def weight_bytes(self) -> int:
        """Return how many bytes the weights take here: of this process's part, with adapters and draft model."""
        weights = sum(
            weight_bytes(network, adapter_only=adapter != "") for adapter, network in self.by_adapter.items()
        )
        return weights + (weight_bytes(self.draft.network) if self.draft is not None else 0)


def load_networks(
    source: str | Path,
    options: EngineOptions,
    *,
    on_progress: Callable[[float], None],
    group: mx.distributed.Group | None,
    check_size: CheckSize,
    caches: CacheBudget,
) -> Networks:
    """Load a model with its adapters and its draft model. The parameters are those of `load_model`."""
    if options.draft_model is not None and options.draft_from_text:
        raise EngineError("Drafts come from a draft model or from the text itself, not from both: name one.")
    model = load_model(source, options, on_progress, group, check_size, caches)
    _check_context_length(options, model)
    by_adapter = {"": model.network}
    for adapter in options.adapters:
        by_adapter[adapter] = load_adapter(model, options, adapter, check_size)
    if options.adapter is not None and options.adapter not in options.adapters:
        raise EngineError(f"There is no adapter {options.adapter!r}.")
    draft = None
    if options.draft_model is not None and options.draft_tokens and head_of(model.network) is None:
        draft = load_draft(options.draft_model, options, model, check_size)
    return Networks(model, by_adapter, draft, options)


def load_model(
    model: str | Path,
    options: EngineOptions = EngineOptions(),  # noqa: B008 - frozen
    on_progress: Callable[[float], None] = lambda _share: None,
    group: mx.distributed.Group | None = None,
    check_size: CheckSize = lambda _name, _nbytes: None,
    caches: CacheBudget | None = None,
    read: ReadNetwork = read_network,
) -> LoadedNetwork:
    """Load a folder or a Hugging Face repository; with a group, this process's part of it. Raises EngineError.

    `check_size` is called before the weights are read, and raises for those that are too large. `caches` bounds what
    the tokenizer remembers. `read` makes the network of the folder, whose weights need not be read yet.
    """
    keep_compiled_kernels()
    folder, name = find_folder(str(model), allow_download=options.allow_download)
    config = read_model(folder, name)
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise EngineError(f"{name!r} has no tokenizer: there is no tokenizer.json in {folder}.")
    with explain_load_errors(name):
        network, config = read(folder, trust_remote_code=options.trust_remote_code)
        patch_for_windows(network)
        wrapper = _load_wrapper(folder, config, options)
    tokenizer = _tokenizer(name, config, wrapper, caches)
    if options.chat_template is not None:
        try:
            tokenizer.render([{"role": "user", "content": "hello"}], None)
        except EngineRefused as error:
            raise EngineError(f"The given chat template does not work. {error}") from error
    found = _find_head(network, folder, options)
    if group is not None:
        shard(network, config, group, name)
        if found.head is not None:
            found = FoundHead(
                reason="The model's MTP head is not used while several processes share the model."
            )
    if found.head is not None:
        attach(network, found.head)
    with explain_load_errors(name):
        set_precision(network, name)
    check_size(name, weight_bytes(network))
    with explain_load_errors(name):
        load_weights(network, on_progress, 1 if group is None else group.size())
    context_length, is_stated = _context_length(config, network)
    return LoadedNetwork(
        name=name,
        folder=folder,
        network=network,
        tokenizer=tokenizer,
        context_length=context_length,
        states_context_length=is_stated,
        sampling_defaults=model_files.sampling_advice(folder),
        drafts=found.reason,
    )


def _find_head(network: Any, folder: Path, options: EngineOptions) -> FoundHead:
    """Return the MTP head that drafts for a model: its own, or one in a folder that is named. Raises EngineError."""
    if options.engine == "plain" or not options.draft_tokens:
        return FoundHead()
    if options.draft_model is not None:
        named, _ = find_folder(options.draft_model, allow_download=options.allow_download)
        if is_drafter(model_files.read_json_or_empty(named / "config.json")):
            return FoundHead(head_in(named, network))
    found = own_head(network, folder)
    others = {"--draft-model": options.draft_model, "--draft-from-text": options.draft_from_text}
    if (other := next((name for name, value in others.items() if value), None)) is None:
        return found
    return FoundHead(
        reason=f"The model's MTP head is not used with {other}." if found.head is not None else ""
    )


def load_tokenizer(model: str | Path) -> tuple[MLXTokenizer, int]:
    """Load the tokenizer of a folder, or of a repository that has been downloaded; no weights.

    Return it and the context length. Raises EngineError.
    """
    folder, name = find_folder(str(model), allow_download=False)
    config = read_config(folder, name)
    with explain_load_errors(name):
        wrapper = _load_wrapper(folder, mlx_lm.utils.load_config(folder), EngineOptions())
    return _tokenizer(name, config, wrapper), _context_length(config, None)[0]


def _load_wrapper(folder: Path, config: Mapping[str, Any], options: EngineOptions) -> TokenizerWrapper:
    """Load a tokenizer with the chat template that is given, else the one that the model's files have."""
    settings: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    template = options.chat_template or model_files.own_chat_template(folder)
    if template is not None:
        settings["chat_template"] = template
    wrapper = mlx_lm.utils.load_tokenizer(folder, settings, eos_token_ids=config.get("eos_token_id"))
    if template is not None:
        wrapper.chat_template = template
    return wrapper


def _tokenizer(
    name: str, config: Mapping[str, Any], wrapper: TokenizerWrapper, caches: CacheBudget | None = None
) -> MLXTokenizer:
    """Make a model's tokenizer. Raises EngineError for one whose template can do harm, before anything renders it."""
    tokenizer = MLXTokenizer(wrapper, _vocabulary_size(config, wrapper), caches)
    try:
        templates.check(tokenizer.chat_template)
    except TemplateOverrun as overrun:
        raise EngineError(
            f"The chat template of {name!r} cannot be used: {overrun}. Choose another with --chat-template."
        ) from overrun
    return tokenizer


def load_adapter(model: LoadedNetwork, options: EngineOptions, adapter: str, check_size: CheckSize) -> Any:
    """Return a second network that shares the model's weights and has a LoRA adapter on top.

    The first network stays as it is, so no adapter ever has to be removed: mlx-lm's own removal leaves the experts
    of a mixture adapted.
    """
    folder = options.adapters[adapter].expanduser()
    check_adapter(folder)
    try:
        network, _ = read_network(model.folder, trust_remote_code=options.trust_remote_code)
        patch_for_windows(network)
        if (head := head_of(model.network)) is not None:
            attach(network, head)
        network.update(model.network.parameters())
        network = mlx_lm.utils.load_adapters(network, str(folder))
        network.eval()
        set_precision(network, adapter)
        check_size(adapter, weight_bytes(network, adapter_only=True))
        mx.eval(network.parameters())
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(
            f"The adapter {adapter!r} does not fit {model.name!r}: {first_line(error)}."
        ) from error
    return network


def load_draft(
    draft: str, options: EngineOptions, model: LoadedNetwork, check_size: CheckSize
) -> DraftNetwork:
    """Load a smaller model that drafts for `model`: one with the same vocabulary."""
    folder, name = find_folder(draft, allow_download=options.allow_download)
    read_model(folder, name)
    with explain_load_errors(name):
        network, config = read_network(folder, trust_remote_code=options.trust_remote_code)
        patch_for_windows(network)
        wrapper = _load_wrapper(folder, config, replace(options, chat_template=None))
        set_precision(network, name)
    check_size(name, weight_bytes(network))
    with explain_load_errors(name):
        mx.eval(network.parameters())
    sample = " the quick brown fox 12345 { } \n 日本語"
    encoded = wrapper.encode(sample, add_special_tokens=False)
    if encoded != model.tokenizer.encode(sample, control_tokens=False):
        raise EngineError(
            f"{draft} cannot draft for this model: its tokens are not the same. Name a smaller model of the same "
            "family, or leave --draft-model out."
        )
    # Embedding tables are padded to different sizes: the draft network must not see an id beyond the end of its own.
    own_size = network(mx.array([[0]])).shape[-1]
    return DraftNetwork(network, min(own_size, model.tokenizer.vocabulary_size))


def _check_context_length(options: EngineOptions, model: LoadedNetwork) -> None:
    limit = options.context_length
    if limit is None or 0 < limit <= model.context_length:
        return
    if limit < 1 or model.states_context_length:
        raise EngineError(
            f"A context of {limit} tokens is not possible: this model's is {model.context_length}."
        )
    log.info("The context is %d tokens, as given: the model states none.", limit)


def _vocabulary_size(config: Mapping[str, Any], wrapper: Any) -> int:
    return model_files.vocabulary_size(config) or len(wrapper)


def _context_length(config: Mapping[str, Any], network: Any) -> tuple[int, bool]:
    """Return how many positions a model was made for, and whether its config.json says so.

    Where it does not, as Google's of Gemma 3, mlx-lm's default for the architecture is taken, or a low guess.
    """
    if (stated := model_files.context_length(config)) is not None:
        return stated, True
    length = _default_context_length(network) or ASSUMED_CONTEXT
    log.warning(
        "The model does not state its context length; assuming %d tokens. --context-length says otherwise.",
        length,
    )
    return length, False


def _default_context_length(network: Any) -> int | None:
    """Return the context length among the arguments that a network, or its language model, was made with.

    A network that does not keep them has the defaults of its architecture's `ModelArgs`.
    """
    if network is None:
        return None
    kept = (each for module in network.modules() for each in filter(is_dataclass, vars(module).values()))
    defaults = getattr(sys.modules[type(network).__module__], "ModelArgs", None)
    for arguments in (*kept, defaults):
        described = {key: getattr(arguments, key, None) for key in model_files.CONTEXT_KEYS}
        if (length := model_files.context_length(described)) is not None:
            return length
    return None

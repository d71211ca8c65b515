"""mlx-vlm's network of a model, and mlx-lm's network of the part of it that reads and writes text.

mlx-vlm's families have a tower that sees and a language network, most of which mlx-lm has too. Some are families of
mlx-lm's own; of the others mlx-lm's network of the text's `model_type` is given the weights by mlx-vlm's names, which
are the same ones. What does not fit is a family that only mlx-vlm runs. Either way the two share their weights.
"""

from __future__ import annotations

import re
import warnings
import weakref
from contextlib import suppress
from dataclasses import asdict, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from mlx_backend.device.mlx import weight_bytes
from mlx_backend.engine.mlx.vision.families import WholeError, has_text_of_mlx_lm, may_run_on_mlx_vlm
from mlx_backend.layers.architecture import WeightGlob, load_network, network_classes, readable
from mlx_backend.models.files import of_text, read_json_or_empty
from mlx_backend.models.tasks import sees, text_family

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path


_NESTING = re.compile(r"^(?:(?:language_)?model\.)+")
"""What the names of a network's weights may begin with."""
_EMBEDDING, _HEAD = "embed_tokens.", "lm_head."
MAX_APART = 0.1
"""Share of the weights that mlx-vlm's network may have in another form, which it then has for itself."""


def read_whole(folder: Path, *, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """Return mlx-vlm's network of a folder, with weights that are not read yet, and its configuration."""
    import mlx_vlm.utils

    mlx_vlm.utils.glob = WeightGlob
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = mlx_vlm.utils.load_model(folder, lazy=True, trust_remote_code=trust_remote_code)
    return whole, mlx_vlm.utils.load_config(folder)


def read_network(folder: Path, *, trust_remote_code: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return mlx-lm's network of a folder, or of the text part of a model of mlx-vlm's, and its configuration.

    Some families of mlx-lm's do not load what mlx-vlm has converted.
    """
    config = read_json_or_empty(folder / "config.json")
    try:
        if not has_text_of_mlx_lm(config):
            return load_network(folder, trust_remote_code=trust_remote_code)
    except Exception:
        if not (sees(config) and may_run_on_mlx_vlm(config) and text_family(config) is not None):
            raise
        with suppress(Exception):  # what mlx-lm says of its own family tells more
            return _read_text_network(folder, trust_remote_code=trust_remote_code)
        raise
    return _read_text_network(folder, trust_remote_code=trust_remote_code)


def _read_text_network(folder: Path, *, trust_remote_code: bool) -> tuple[Any, dict[str, Any]]:
    """Return mlx-lm's network of the text part of a model that mlx-vlm reads, and the model's configuration.

    Raises WholeError if its weights do not fit.
    """
    whole, config = read_whole(folder, trust_remote_code=trust_remote_code)
    family, theirs = text_family(config), whole.language_model
    settings = {**of_text(config), **asdict(whole.config.text_config), "model_type": family}
    settings.setdefault("head_dim", settings["hidden_size"] // settings["num_attention_heads"])
    network_class, arguments_class = network_classes(folder, settings, trust_remote_code=False)
    settings = readable(settings, network_class)
    network = network_class(arguments_class.from_dict({**settings, "text_config": settings}))
    quantised = {_bare(name): module for name, module in theirs.named_modules() if hasattr(module, "bits")}

    def quantisation(name: str, _module: Any) -> Any:
        found = quantised.get(_bare(name))
        if found is None:
            return False
        return {"group_size": found.group_size, "bits": found.bits, "mode": getattr(found, "mode", "affine")}

    nn.quantize(network, class_predicate=quantisation)
    weights = dict(tree_flatten(theirs.parameters()))
    try:
        _give_weights(weights, network)
    except WholeError:  # mlx-vlm keeps them as they are published
        _give_weights(network.sanitize(weights), network)
    network.eval()
    return network, config


def share_weights(whole: Any, network: Any) -> None:
    """Give mlx-vlm's language network the weights of mlx-lm's. Raises WholeError if they are not the same ones."""
    weights = dict(tree_flatten(whole.language_model.parameters()))
    shared = _shared(whole, network)
    apart = sum(value.nbytes for name, value in weights.items() if name not in shared)
    if apart > MAX_APART * sum(value.nbytes for value in weights.values()):
        raise WholeError("mlx-lm's network has other weights than mlx-vlm's")
    if any(shared[name].shape != weights[name].shape for name in shared):
        raise WholeError("mlx-lm's network has weights of other shapes than mlx-vlm's")
    whole.language_model.load_weights(list(shared.items()), strict=False)


def own_bytes(whole: Any, network: Any) -> int:
    """Return the bytes of the weights that mlx-vlm's network does not share with mlx-lm's."""
    return weight_bytes(whole) - sum(value.nbytes for value in _shared(whole, network).values())


def _shared(whole: Any, network: Any) -> dict[str, mx.array]:
    """Return the weights of mlx-lm's network that mlx-vlm's language network has too, by their names there."""
    own = _by_bare_name(dict(tree_flatten(network.parameters())))
    names = dict(tree_flatten(whole.language_model.parameters()))
    return {name: own[_bare(name)] for name in names if _bare(name) in own}


def _give_weights(weights: Mapping[str, mx.array], network: Any) -> None:
    """Give a network all of these weights. Raises WholeError if they are others than it has."""
    known, given = _by_bare_name(weights), list[tuple[str, mx.array]]()
    own = dict(known)
    for name, value in tree_flatten(network.parameters()):
        found = own.pop(_bare(name), None)
        if found is None or found.shape != value.shape:
            raise WholeError(f"mlx-lm's network has {name}, and mlx-vlm's has not")
        given.append((name, found))
    if rest := [name for name in own if not (name.startswith(_HEAD) and _is_tied(name, known))]:
        raise WholeError(f"mlx-vlm's network has {rest[0]}, and mlx-lm's has not")
    network.load_weights(given)


def _by_bare_name(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return weights by their names without what they are nested in; those of tied embeddings also as the head's."""
    found = {_bare(name): value for name, value in weights.items()}
    tied = {
        _HEAD + name.removeprefix(_EMBEDDING): found[name] for name in found if name.startswith(_EMBEDDING)
    }
    return tied | found


def _is_tied(head: str, weights: Mapping[str, mx.array]) -> bool:
    """Whether a head's weights are those of the embeddings."""
    embedding = weights.get(_EMBEDDING + head.removeprefix(_HEAD))
    return embedding is not None and bool(mx.array_equal(weights[head], embedding))


def _bare(name: str) -> str:
    return _NESTING.sub("", name)


def to_mlx(value: Any) -> Any:
    """Return an input of a prompt's images (vlm_processor.py) as a network takes it."""
    if isinstance(value, list):
        return [to_mlx(each) for each in value]
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: to_mlx(each) for name, each in vars(value).items()})
    return mx.array(value) if isinstance(value, np.ndarray) else value


def embed(network: Any, tokens: mx.array, inputs: Mapping[str, Any]) -> Any:
    """Return what mlx-vlm's network makes of tokens ([1, tokens]) and the inputs of the images among them."""
    more = {name: value for name, value in inputs.items() if name != "pixel_values"}
    return network.get_input_embeddings(tokens, inputs.get("pixel_values"), mask=mx.ones_like(tokens), **more)


def make_caches(language: Any) -> list[Any]:
    """Return empty caches of mlx-vlm's language network."""
    from mlx_vlm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(language)
    return caches


class VLMRun:
    """A prompt that is run through mlx-vlm's network, as mlx-vlm's own generation does it, and the reply to it.

    `embeddings` are those of the prompt's tokens that have not been run, None after the last.
    """

    def __init__(self, whole: Any, prompt: Sequence[int], inputs: Mapping[str, Any]) -> None:
        self._language = whole.language_model
        for name in ("_position_ids", "_rope_deltas", "_image_cache"):  # of the request before
            if hasattr(self._language, name):
                setattr(self._language, name, None)
        self.tokens = mx.array([list(prompt)])
        given = {name: to_mlx(value) for name, value in inputs.items()}
        found = embed(whole, self.tokens, given)
        given.pop("pixel_values", None)
        self.embeddings: mx.array | None = found.inputs_embeds
        more = {name: value for name, value in found.to_dict().items() if value is not None}
        del more["inputs_embeds"]
        self.given: dict[str, Any] = {**given, **more}
        mx.eval(self.embeddings)

    def all_logits(self) -> mx.array:
        """Run a prompt at once; return the logits of all its tokens ([tokens, vocabulary])."""
        caches = make_caches(self._language)
        found = self._language(self.tokens, inputs_embeds=self.embeddings, cache=caches, **self.given)
        logits: mx.array = found.logits[0]
        return logits

    def __call__(self, tokens: mx.array, caches: Sequence[Any]) -> mx.array:
        """Run the prompt's next tokens, or one of the reply ([1, tokens]); return logits ([1, 1, vocabulary]).

        They are those after the last token, once the prompt ends. That one takes all embeddings that are left:
        LLaVA-NeXT's network makes more than there are tokens (0.7.10).
        """
        count, own, given = tokens.shape[1], self.embeddings, self.given
        if own is not None:
            tokens, self.tokens = self.tokens[:, :count], self.tokens[:, count:]
            self.embeddings = None
            if self.tokens.size:
                own, self.embeddings = own[:, :count], own[:, count:]
                given = {**given, "n_to_process": count}
        found = self._language(tokens, inputs_embeds=own, cache=caches, **given, logits_to_keep=1)
        if self.embeddings is None:
            names = ("cross_attention_states", "encoder_outputs")
            states = ((name, getattr(found, name)) for name in names)
            self.given = dict([each for each in states if each[1] is not None][:1])
        logits: mx.array = found.logits[:, -1:]
        return logits


class WholeNetwork(nn.Module):  # type: ignore[misc]  # mlx has no types
    """mlx-vlm's network as the engine runs one: `begin` a prompt, then call it with its tokens and the reply's."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole = whole
        self._run: Callable[[], VLMRun | None] = lambda: None
        self.cuts_prompts = True

    @property
    def run(self) -> VLMRun | None:
        """The prompt that was begun last, as long as whoever began it holds it."""
        return self._run()

    def begin(self, prompt: Sequence[int], inputs: Mapping[str, Any]) -> VLMRun:
        """Embed a prompt and its images, whose `inputs` these are. The network then holds its positions."""
        run = VLMRun(self.whole, prompt, inputs)
        self._run = weakref.ref(run)
        return run

    def make_cache(self) -> list[Any]:
        """Return empty caches."""
        return make_caches(self.whole.language_model)

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Run tokens ([1, tokens]); return the last one's logits ([1, 1, vocabulary])."""
        run = self.run
        assert run is not None
        return run(tokens, cache)

    def may_cut(self, run: VLMRun, caches: Sequence[Any]) -> bool:
        """Whether mlx-vlm takes a prompt that was begun in chunks, as its network's parts say."""
        return all(self._is_cut_by(part, run, caches) for part in (self.whole, self.whole.language_model))

    def _is_cut_by(self, part: Any, run: VLMRun, caches: Sequence[Any]) -> bool:
        if (policy := getattr(part, "chunked_prefill_policy", None)) is None:
            return not getattr(part, "no_chunked_prefill", False)
        allowed = policy(
            input_ids=run.tokens,
            inputs_embeds=run.embeddings,
            prompt_cache=caches,
            draft_model=None,
            draft_kind=None,
            prefill_kwargs=run.given,
        )
        return bool(getattr(allowed, "enabled", allowed))

"""MTP heads: read from checkpoints, right by mlx-vlm's own, and drafting replies that stay what they are without."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
import pytest
from architectures import write
from constraint_replies import TOOLS
from drafting import alone, drafting_engine, first_position, generate, loaded_batch, tokens
from engine_models import write_adapter
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mtp_heads import (
    add_head,
    apart,
    embedding_of,
    extra_layer,
    learnt_head,
    mimo,
    nemotron,
    original,
    random_head,
    text_of,
    weights_of,
)
from scripted_server import client_of
from seeing import LAYOUTS, Seeing
from vision_models import needs_mlx_vlm, write_qwen3_5
from vision_reference import reference

from mlx_backend.cli import main
from mlx_backend.constraints import Grammars
from mlx_backend.constraints.reasoning_budget import ReasoningBudgets
from mlx_backend.conversation.dialects import DIALECTS
from mlx_backend.conversation.events import Channel
from mlx_backend.device import Device
from mlx_backend.engine.base import GenerationRequest, Sampling
from mlx_backend.engine.mlx import load_engine
from mlx_backend.engine.mlx.arrays import as_ints
from mlx_backend.engine.mlx.batch import MLXBatch
from mlx_backend.engine.mlx.loading import load_model
from mlx_backend.engine.mlx.mtp import DRAFTING, Head, head_of, own_head
from mlx_backend.engine.mlx.speculative import DraftTask, HeadDrafter, propose
from mlx_backend.engine.mlx.vision.vlm_batch import VLMBatch
from mlx_backend.errors import EngineError
from mlx_backend.layers.architecture import load_network
from mlx_backend.models.engine_options import EngineOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from drafting import FoundReply

    from mlx_backend.constraints import Spec
    from mlx_backend.engine.base import Finished

REPLY = 18  # tokens
NEMOTRONS = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
"""What Nemotron-H's configuration says of its head."""
DRAFTS = 3  # at once


def requests(count: int, **fields: Any) -> list[GenerationRequest]:
    """Return requests, every other one sampled."""
    asked = []
    for at in range(count):
        prompt = as_ints(mx.random.randint(10, 250, (15 + 3 * (at % 4),), key=mx.random.key(at)))
        sampling = Sampling(temperature=0.3, seed=at) if at % 2 else Sampling()
        asked.append(
            GenerationRequest(prompt=prompt, **{"max_tokens": REPLY, "sampling": sampling, **fields})
        )
    return asked


def drafted(replies: Sequence[FoundReply]) -> tuple[int, int]:
    """Return how many tokens were drafted, and how many of them accepted."""
    ended = [reply.ended for reply in replies if reply.ended is not None]
    return sum(each.drafted_tokens for each in ended), sum(each.accepted_tokens for each in ended)


def pairs_of(layer: Any) -> list[mx.array]:
    """Return the keys and values that a head's cache holds."""
    return [each[..., : layer.offset, :] for each in (layer.keys, layer.values)]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("mtp") / "bare", "qwen3_5")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, bare: Path) -> Path:
    """A model whose head has learnt what it says, as in an original checkpoint."""
    folder = shutil.copytree(bare, tmp_path_factory.mktemp("mtp") / "model")
    head = learnt_head(folder, [each.prompt for each in requests(4)[::2]], tokens=REPLY)
    return add_head(folder, original(weights_of(head)), form="pt")


@pytest.fixture(scope="module")
def expected(bare: Path) -> list[list[int]]:
    """What eight requests are answered without any head."""
    with loaded_batch(bare) as plain:
        return tokens(alone(plain, requests(8)))


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_5_moe"])
def test_a_heads_logits_and_drafts_are_those_of_mlx_vlms_own(tmp_path: Path, architecture: str) -> None:
    drafters = pytest.importorskip("mlx_vlm.speculative.drafters.qwen3_5_mtp")
    folder = write(tmp_path / "model", architecture)
    weights = weights_of(random_head(folder))
    config = json.loads((folder / "config.json").read_text())["text_config"]
    config["rope_parameters"] |= {"mrope_section": [2, 1, 1]}
    theirs = drafters.Model(
        drafters.ModelConfig.from_dict({"text_config": config | {"model_type": architecture}})
    )
    theirs.load_weights(list(weights.items()))
    network = load_model(add_head(folder, weights)).network
    text, caches = mx.array([[5, 9, 200, 31, 7, 64]]), network.make_cache()
    token = mx.argmax(network(text, cache=caches)[:, -1], axis=-1)
    hidden = text_of(network).model(text, text_of(network).make_cache())
    theirs.reset(network)
    theirs.prefill_from_target_hidden(text, hidden, token, None, greedy=True)
    at = first_position(config["vocab_size"])
    task = DraftTask(HeadDrafter(network), [*as_ints(text[0]), *as_ints(token)], 4, at, caches)
    unknown = replace(
        task, drafter=HeadDrafter(network), layers=network.make_cache()
    )  # no vector, as after a failure
    nothing, drafts = propose([unknown, task])
    assert nothing is None
    assert drafts == as_ints(theirs.draft_block(token, hidden, None, 5, None, greedy=True)[0])
    pairs, [keys] = caches[-2], theirs.reset(network)
    assert pairs.offset == text.size, "what was drafted is taken back"
    theirs._next_position = 1
    theirs._forward_tokens(text[:, 1:], hidden[:, :-1], mx.int32)
    for own, other in zip(pairs_of(pairs), pairs_of(keys), strict=True):
        assert mx.allclose(own[..., 1:, :], other, atol=1e-4).item()


def test_nemotrons_head_drafts_as_mlx_vlms_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafters = pytest.importorskip("mlx_vlm.speculative.drafters.nemotron_h_mtp")
    splitters = pytest.importorskip("mlx_vlm.speculative.drafters.mtp_split")
    folder = write(tmp_path / "model", "nemotron_h")
    weights = {name: value * 1.5 for name, value in weights_of(random_head(folder)).items()}
    add_head(folder, nemotron(weights), form="pt", settings=NEMOTRONS)
    network = load_model(folder).network
    theirs = splitters.detect_mtp_splitter(folder).load(folder)
    monkeypatch.setattr(
        drafters.NemotronHMTPDraftModel, "bind", lambda self, _: self
    )  # takes mlx-vlm's alone
    theirs._input_embed, theirs._lm_head_fn = network.backbone.embeddings, network.lm_head
    text, caches = mx.array([[5, 9, 200, 31, 7, 64]]), network.make_cache()
    token = mx.argmax(network(text, cache=caches)[:, -1], axis=-1)
    hidden = network.backbone(text, network.make_cache()[:-2])
    theirs.reset(network)
    theirs.prefill_from_target_hidden(text, hidden, token, None, greedy=True)
    at = first_position(network.args.vocab_size)
    task = DraftTask(HeadDrafter(network), [*as_ints(text[0]), *as_ints(token)], 4, at, caches)
    [drafts] = propose([task])
    assert drafts == as_ints(theirs.draft_block(token, hidden, None, 5, None, greedy=True)[0])


CHECKPOINTS: dict[str, tuple[str, int | None, Any, str, str]] = {
    "in two layers": ("nemotron_h", None, nemotron, "pt", "mtp."),
    "the hidden vector first": ("mimo", None, mimo, "pt", "model.mtp_layers.0."),
    "original": ("qwen3_5", None, original, "pt", "mtp."),
    "a mixture": ("qwen3_5_moe", None, original, "pt", "mtp."),
    "experts apart": ("qwen3_5_moe", None, lambda weights: apart(original(weights)), "pt", "mtp."),
    "4 bits": ("qwen3_5", 4, dict, "mlx", "language_model.mtp."),
    "MLX's form, of which mlx-lm leaves out nothing": ("qwen3_next", 4, dict, "mlx", "mtp."),
    "MLX's form, but for the norms": ("qwen3_next", 4, original, "mlx", "mtp."),
    "a layer after the last": ("glm4_moe", None, extra_layer, "pt", "model.layers.{}."),
    "latent attention": ("glm4_moe_lite", None, extra_layer, "pt", "model.layers.{}."),
    "DeepSeek's": ("deepseek_v3", None, extra_layer, "pt", "model.layers.{}."),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_head_is_read_from_every_form_of_checkpoint(tmp_path: Path, name: str) -> None:
    architecture, bits, form, writer, prefix = CHECKPOINTS[name]
    sizes = {"num_hidden_layers": 61} if architecture == "deepseek_v3" else {}  # mlx-lm knows no other number
    folder = write(tmp_path / "model", architecture, bits=bits, sizes=sizes)
    head = random_head(folder)
    if bits is not None:
        nn.quantize(head, 32, bits)
    count = len(load_network(folder)[0].layers)
    add_head(folder, form(weights_of(head)), form=writer, prefix=prefix.format(count))
    found = head_of(load_model(folder).network)
    assert found is not None
    for path, value in weights_of(found).items():
        assert mx.allclose(value, weights_of(head)[path], atol=1e-5).item(), path


@pytest.mark.parametrize(
    ("file", "prefix", "is_indexed"),
    [
        ("mtp.safetensors", "mtp.", True),
        ("mtp.safetensors", "", False),
        ("model-mtp.safetensors", "", False),
        ("mtp/weights.safetensors", "language_model.mtp.", False),
    ],
)
def test_a_head_is_read_from_a_file_that_others_put_next_to_a_model(
    bare: Path, tmp_path: Path, file: str, prefix: str, is_indexed: bool
) -> None:
    folder = shutil.copytree(bare, tmp_path / "model")
    head = weights_of(random_head(folder))
    add_head(folder, head, prefix=prefix, file=file, is_indexed=is_indexed)
    found = head_of(load_model(folder).network)
    assert found is not None
    assert all(mx.allclose(value, head[name]).item() for name, value in weights_of(found).items())


def test_replies_are_those_without_a_head_alone_and_in_a_crowd(
    model: Path, expected: list[list[int]]
) -> None:
    with loaded_batch(model, draft_tokens=DRAFTS) as drafting:
        assert drafting.runtime.abilities.drafts == DRAFTING
        found = alone(drafting, requests(8))
        few = generate(drafting, requests(4), arrivals={1: 2, 2: 3, 3: 7})
        crowd = generate(drafting, requests(8))
        late = generate(drafting, requests(8), arrivals={at: 2 + 3 * at for at in range(1, 8)})
    assert tokens(found) == tokens(crowd) == tokens(late) == expected
    assert tokens(few) == expected[:4]
    for learnt in (found[:4:2], few[::2]):
        proposed, accepted = drafted(learnt)
        assert proposed > accepted > proposed / 3, "the head has learnt these"


FAMILIES: dict[str, tuple[Any, str]] = {
    "glm4_moe": (extra_layer, "model.layers.{}."),
    "glm4_moe_lite": (extra_layer, "model.layers.{}."),
    "mimo": (mimo, "model.mtp_layers.0."),
    "nemotron_h": (nemotron, "mtp."),
    "qwen3_5_moe": (original, "mtp."),
    "qwen3_next": (original, "mtp."),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_several_replies_at_once_have_drafts(tmp_path: Path, architecture: str) -> None:
    form, prefix = FAMILIES[architecture]
    folder = write(tmp_path / "model", architecture)
    asked = requests(5, checkpoints=(8,))  # one more than have drafts together
    with loaded_batch(folder) as plain:
        said = tokens(alone(plain, asked))
    weights = weights_of(learnt_head(folder, [asked[0].prompt], tokens=REPLY))
    add_head(folder, form(weights), form="pt", prefix=prefix.format(len(load_network(folder)[0].layers)))
    with loaded_batch(folder, draft_tokens=DRAFTS, cache_bytes=None) as drafting:
        assert drafting.runtime.abilities.can_pack
        few = generate(drafting, asked[:3], arrivals={1: 2, 2: 5})
        crowd = generate(drafting, asked, arrivals={at: 2 * at for at in range(1, 5)})
        held = drafting.runtime.networks.model.network.make_cache()
    assert tokens(few) == said[:3]
    assert tokens(crowd) == said
    proposed, accepted = drafted(few)
    assert proposed > accepted > 0
    assert len(held) == len(make_prompt_cache(load_network(folder)[0])) + 2


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("architecture", ["glm4_moe_lite", "nemotron_h", "qwen3_5_moe", "qwen3_next"])
def test_a_head_is_read_from_the_folder_that_mlx_vlm_writes(
    tmp_path: Path, architecture: str, bits: int | None
) -> None:
    splitters = pytest.importorskip("mlx_vlm.speculative.drafters.mtp_split")
    folder, (form, prefix) = (
        write(tmp_path / "model", architecture),
        FAMILIES[architecture],
    )
    wanted = random_head(folder)
    named = form(weights_of(wanted))
    add_head(
        folder,
        apart(named) if architecture == "qwen3_next" else named,
        form="pt",
        prefix=prefix.format(len(load_network(folder)[0].layers)),
        settings=NEMOTRONS,
    )
    splitter = splitters.detect_mtp_splitter(folder)
    splitter.split(str(folder), str(tmp_path / "head"), q_bits=bits, q_group_size=32)
    (folder / "model-head.safetensors").unlink()
    head = head_of(load_model(folder, EngineOptions(draft_model=str(tmp_path / "head"))).network)
    assert head is not None
    for path, value in weights_of(wanted).items():
        stem, _, kind = path.rpartition(".")
        found = head
        for part in stem.split("."):
            found = found[int(part)] if part.isdigit() else found[part]
        value_found = found[kind]
        if "scales" in found and kind == "weight":
            value_found = mx.dequantize(value_found, found.scales, found.biases, 32, bits)
        assert mx.allclose(value_found, value, atol=0.05).item(), path


def test_a_head_in_a_folder_of_its_own_drafts_as_if_it_were_the_models(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", "qwen3_next")
    asked = requests(2)
    head = tmp_path / "head"
    head.mkdir()
    weights = weights_of(learnt_head(folder, [asked[0].prompt], tokens=REPLY))
    mx.save_safetensors(str(head / "model.safetensors"), weights, {"format": "mlx"})
    (head / "config.json").write_text(json.dumps({"model_type": "qwen3_5_mtp"}))
    with pytest.raises(EngineError, match=r"a part of another model .*--draft-model"):
        load_model(head)
    with loaded_batch(folder) as plain:
        expected = tokens(alone(plain, asked))
    with loaded_batch(folder, draft_model=str(head)) as drafting:
        found = alone(drafting, asked)
    assert tokens(found) == expected
    assert drafted(found)[1] > 0
    other = write(tmp_path / "other", "qwen3_5", sizes={"hidden_size": 96})
    with pytest.raises(EngineError, match=r"cannot draft for this model: .*Name an MTP head"):
        MLXBatch(other, EngineOptions(draft_model=str(head)), device=Device(8 << 30)).load(lambda _: None)


def test_prefixes_on_a_disk_are_those_of_their_own_head(tmp_path: Path, bare: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps({"model_type": "qwen3_5_mtp"}))
    asked = replace(requests(1)[0], checkpoints=(8,))
    cached = list[int]()
    for seed in (5, 5, 6):
        if not cached or seed != 5:
            weights = weights_of(random_head(bare, seed=seed))
            mx.save_safetensors(str(head / "model.safetensors"), weights, {"format": "mlx"})
        with load_engine(bare, draft_model=str(head), cache_folder=tmp_path / "disk") as engine:
            cached.append(cast("Finished", list(engine.generate(asked))[-1]).cached_tokens)
    assert cached[0] == cached[2] == 0 < cached[1]


@pytest.mark.parametrize("kind", ["eagle3", "gemma4_assistant", "qwen3_dflash", "glm5_next_mtp"])
def test_what_drafts_otherwise_is_refused_by_its_name(tmp_path: Path, kind: str) -> None:
    folder = write(tmp_path / "model", "qwen3_next")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(
        EngineError, match=rf"cannot draft for this model: what is called '{kind}' is not read here"
    ):
        load_model(folder, EngineOptions(draft_model=str(tmp_path)))


def test_what_a_heads_caches_hold_after_drafts_is_what_the_text_makes(model: Path) -> None:
    asked = [replace(each, max_tokens=count) for count in range(9, 14) for each in requests(2)]
    held: list[tuple[list[int], list[mx.array]]] = []
    with loaded_batch(model, draft_tokens=DRAFTS, cache_bytes=None) as drafting:
        network, store = drafting.runtime.networks.model.network, drafting.runtime.prefix_store.store

        def noted(sequence: Any, length: int, layers: Any, **named: Any) -> None:
            if sequence.num_emitted:
                held.append((sequence.tokens[:length], [*pairs_of(layers[-2]), layers[-1][0]]))
            store(sequence, length, layers, **named)

        drafting.runtime.prefix_store.store = noted  # type: ignore[method-assign]  # noted, and stored as always
        proposed, accepted = drafted(alone(drafting, asked))
        assert 0 < accepted < proposed
        assert len(held) == len(asked)
        for text, found in held:
            caches = network.make_cache()
            network(mx.array([text]), cache=caches)
            for own, other in zip(found, [*pairs_of(caches[-2]), caches[-1][0]], strict=True):
                assert mx.allclose(own, other, atol=1e-4).item()


def test_turns_after_edits_and_a_restart_are_those_without_a_head(
    model: Path, bare: Path, tmp_path: Path
) -> None:
    first = requests(2, checkpoints=(8,))
    with loaded_batch(bare) as plain:
        said = tokens(alone(plain, first))
        turns = [
            replace(each, prompt=[*each.prompt, *reply[:cut], 30 + cut])
            for cut in (REPLY, 9)
            for each, reply in zip(first, said, strict=True)
        ]
        expected = tokens(alone(plain, turns))
    options: dict[str, Any] = {"draft_tokens": DRAFTS, "cache_bytes": None, "cache_folder": tmp_path / "disk"}
    for _ in range(2):
        with loaded_batch(model, **options) as drafting:
            assert tokens(alone(drafting, first)) == said
            found = alone(drafting, turns)
            assert tokens(found) == expected
            assert drafted(found)[0] > 0
    assert any((tmp_path / "disk").rglob("*"))


def test_a_budget_of_reasoning_and_adapters_have_drafts_too(model: Path, bare: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", bare)

    def asked(batch: MLXBatch) -> list[GenerationRequest]:
        words = batch.runtime.networks.model.tokenizer
        found = []
        for name in (None, "one"):
            for each in requests(2, adapter=name):
                budget = ReasoningBudgets(words, DIALECTS["harmony"]).start(
                    each.prompt, Channel.ANALYSIS, room=REPLY, tokens=9
                )
                found += [each, replace(each, constraint=budget)]
        return found

    with loaded_batch(bare, adapters={"one": adapter}) as plain:
        expected = tokens(alone(plain, asked(plain)))
    with loaded_batch(model, adapters={"one": adapter}, draft_tokens=DRAFTS) as drafting:
        found, crowd = alone(drafting, asked(drafting)), generate(drafting, asked(drafting))
    assert tokens(found) == tokens(crowd) == expected
    assert all(each.ended is not None and each.ended.drafted_tokens for each in found)


GRAMMARS: dict[str, tuple[Callable[[Grammars], Spec], Channel | None]] = {
    "a schema": (
        lambda grammars: grammars.json_schema({"type": "object", "required": ["a"]}, strict=False),
        Channel.FINAL,
    ),
    "a required call": (lambda grammars: grammars.tool_calls(TOOLS, required=True), None),
    "calls, or an answer": (lambda grammars: grammars.tool_calls(TOOLS, required=False), None),
    "an expression": (lambda grammars: grammars.regex("[^a]*"), Channel.FINAL),
}


def test_replies_that_follow_grammars_are_those_without_a_head(model: Path, bare: Path) -> None:
    def asked(batch: MLXBatch) -> list[GenerationRequest]:
        words = batch.runtime.networks.model.tokenizer
        grammars = Grammars(words, DIALECTS["harmony"])
        found = []
        for make, opens_in in GRAMMARS.values():
            found += [replace(each, constraint=make(grammars).start(opens_in)) for each in requests(2)]
        return found

    with loaded_batch(bare) as plain:
        expected = tokens(alone(plain, asked(plain)))
    with loaded_batch(model, draft_tokens=DRAFTS) as drafting:
        found = alone(drafting, asked(drafting))
        crowd = generate(drafting, asked(drafting))
        late = generate(drafting, asked(drafting), arrivals={at: 2 + 3 * at for at in range(1, 8)})
    assert tokens(found) == tokens(crowd) == tokens(late) == expected
    assert all(drafted([each])[0] for each in found)


@needs_mlx_vlm
def test_replies_about_pictures_have_drafts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[mx.array] = []
    write_pairs = Head.write

    def noted(self: Head, embeddings: mx.array, hidden: mx.array, cache: Any) -> None:
        written.append(embeddings)
        write_pairs(self, embeddings, hidden, cache)

    monkeypatch.setattr(Head, "write", noted)
    seen = write_qwen3_5(tmp_path)
    weights = weights_of(random_head(seen.folder))
    add_head(seen.folder, {name: value * 1.5 if value.ndim > 1 else value for name, value in weights.items()})
    embed = embedding_of(load_network(seen.folder)[0])
    with drafting_engine(seen.folder) as engine:
        seeing = Seeing(seen, engine)
        for layout in ("two images", "an image after a long text"):
            request = seeing.request(*LAYOUTS[layout])
            written.clear()
            assert seeing.reply(request) == reference(seen, request)
            [(pad, _)] = Counter(request.prompt).most_common(1)
            is_pad = mx.all(mx.concatenate(written, axis=1)[0] == embed(mx.array(pad)), axis=-1)
            assert not mx.any(is_pad).item(), "the head is given the images' embeddings"
            assert list(engine.generate(request))[-1].drafted_tokens > 0  # type: ignore[union-attr]  # the last item


@needs_mlx_vlm
def test_mlx_vlms_own_network_is_given_no_head(tmp_path: Path) -> None:
    seen = write_qwen3_5(tmp_path)
    add_head(seen.folder, weights_of(random_head(seen.folder)))
    batch = VLMBatch(seen.folder, EngineOptions(), device=Device(8 << 30))
    batch.load(lambda _: None)
    assert head_of(batch.runtime.networks.model.network.whole) is None
    batch.unload()


def broken(model: Path, kind: str) -> None:
    """Spoil a model's head."""
    weights = weights_of(random_head(model))
    match kind:
        case "absent":
            add_head(model, {})
            return
        case "of another shape":
            weights["fc.weight"] = weights["fc.weight"][:, :32]
        case "incomplete":
            del weights["layers.0.self_attn.q_proj.weight"]
        case "of 8 bits as others have them":
            weights["fc.weight_scale_inv"] = mx.ones((1, 1))
        case "no numbers":
            weights["norm.weight"] = weights["norm.weight"] * mx.nan
    add_head(model, weights)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("absent", "No MTP head drafts for this model: it was trained with one"),
        ("of another shape", "The model's MTP head is not used: .*fc.weight"),
        ("incomplete", "The model's MTP head is not used: .*q_proj.weight"),
        ("of 8 bits as others have them", "The model's MTP head is not used: .*fc.weight_scale_inv"),
        ("no numbers", "The model's MTP head is not used: its logits are not all numbers"),
    ],
)
def test_a_model_whose_head_is_of_no_use_serves_without_it_and_says_so(
    bare: Path, tmp_path: Path, kind: str, reason: str, expected: list[list[int]], caplog: Any, capsys: Any
) -> None:
    folder = shutil.copytree(bare, tmp_path / "model")
    broken(folder, kind)
    caplog.set_level("INFO")
    with load_engine(folder, cache_bytes=0) as engine:
        status, [health] = engine.status(), client_of(cast("Any", engine)).get("/health").get_json()["models"]
        [asked] = requests(1)
        said = [item.token for item in engine.generate(asked) if hasattr(item, "token")]
    assert said == expected[0]
    assert re.match(reason, status.drafts)
    assert health["drafts"] == status.drafts
    assert status.drafts in caplog.text
    if kind != "no numbers":  # which takes a run to find out
        assert main(["show", str(folder)]) == 0
        assert status.drafts in capsys.readouterr().out


UNKNOWN = {
    "deepseek_v32": "model.layers.4.eh_proj.weight",
    "deepseek_v41": "mtp.0.enorm.weight",
    "ernie4_5_moe": "model.mtp_linear_proj.0.weight",
    "exaone_moe": "mtp.fc.weight",
    "longcat_flash": "model.mtp.layers.0.eh_proj.weight",
    "mimo_v2_flash": "model.mtp.layers.0.eh_proj.weight",
    "step3p5": "model.layers.4.eh_proj.weight",
}


@pytest.mark.parametrize("architecture", UNKNOWN)
def test_a_head_that_is_not_known_is_left_out_and_named(tmp_path: Path, architecture: str) -> None:
    network, _ = load_network(write(tmp_path / "model", architecture))
    weights = {UNKNOWN[architecture]: mx.zeros((4, 8))}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "pt"})
    found = own_head(network, tmp_path)
    assert found.head is None
    assert found.reason == (
        f"The model's MTP head is not used: those of {architecture!r} models are not read here."
    )


def test_weights_that_cannot_be_read_are_no_head(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    assert own_head(nn.Module(), tmp_path).reason.startswith("The model's MTP head is not used: ")


def test_no_head_is_loaded_where_no_drafts_are_wanted_or_something_else_drafts(
    model: Path, bare: Path
) -> None:
    loaded = load_model(model, EngineOptions(draft_tokens=0))
    assert (head_of(loaded.network), loaded.drafts) == (None, "")
    network, _ = load_network(model)
    assert len(network.make_cache()) == len(network.layers)
    for options in ({"draft_model": str(bare)}, {"draft_from_text": True}):
        loaded = load_model(model, EngineOptions(**options))
        assert head_of(loaded.network) is None
        option = next(iter(options)).replace("_", "-")
        assert loaded.drafts == f"The model's MTP head is not used with --{option}."
    with loaded_batch(bare, draft_model=str(bare)) as batch:
        assert batch.runtime.abilities.drafts == ""
    shared = load_model(model, group=mx.distributed.init())
    assert head_of(shared.network) is None
    assert "several processes share the model" in shared.drafts

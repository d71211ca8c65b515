"""`mlx-backend show MODEL`: what a model is and can do, how it reasons and calls, and the memory it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.commands.list import efforts
from mlx_backend.commands.local_models import LocalModel, LocalModels, add_folder_options
from mlx_backend.commands.terminal import add_json_option, print_fields, print_json
from mlx_backend.device.memory import format_bytes, leaves_room_for_caches
from mlx_backend.errors import EngineError, first_line
from mlx_backend.models import files
from mlx_backend.models.folders import format_size
from mlx_backend.models.tasks import is_of_mlx_lm

if TYPE_CHECKING:
    import argparse

CONTEXTS = (8 << 10, 32 << 10, 128 << 10)
"""Tokens of prompt and reply for which memory is shown."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("model", metavar="MODEL", help="a model's name, or its folder")
    add_folder_options(parser)
    add_json_option(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what is known of the model."""
    models = LocalModels(arguments)
    model = models.find(arguments.model)
    described = model.description
    memory, drafts, unknown = _memory(model) if described.kind == "llm" else ([], "", "")
    if arguments.json:
        details = {
            "dialect": described.dialect,
            "recognised_by": described.recognised_by,
            "template": _template(model),
            "sampling": dict(described.sampling),
            "memory": {str(tokens): needed[None] for tokens, needed in memory},
            "memory_by_kv_bits": {
                str(bits): {str(tokens): needed[bits] for tokens, needed in memory}
                for bits in (memory[0][1] if memory else ())
                if bits is not None
            },
            "memory_unknown": unknown,
            "drafts": drafts,
        }
        print_json(model.as_json(models.room) | details)
        return 0
    room = models.room
    size = model.files.weight_bytes
    here = "fits" if leaves_room_for_caches(size, room) else "does not fit"
    fields = [
        ("name", model.name),
        ("folder", str(model.folder)),
        ("size", ", ".join(filter(None, [f"{format_size(size)} on disk", model.files.quantization]))),
        ("family", model.files.architecture),
        ("type", described.kind),
        ("context", f"{described.context_length:,} tokens" if described.context_length else "not stated"),
        ("can", ", ".join(described.capabilities)),
    ]
    if described.unbatched:
        fields.append(("at once", f"one reply: {described.unbatched}"))
    if described.kind == "llm":
        fields += [
            ("effort", efforts(described) + ("   (* by default)" if described.default_effort else "")),
            ("dialect", ": ".join(filter(None, [described.dialect, described.recognised_by]))),
            ("template", _template(model)),
            ("sampling", ", ".join(f"{name} {value}" for name, value in described.sampling.items())),
        ]
    if drafts:
        fields.append(("drafts", drafts))
    fields.append(
        ("here", f"{here}: {format_bytes(size)} of the {format_bytes(room)} of memory that weights may take")
    )
    if unknown:
        fields.append(("with caches", f"not known: {unknown}"))
    for tokens, needed in memory:
        within = "" if needed[None] <= room else "   more than there is"
        if described.context_length and tokens > described.context_length:
            within = "   beyond its context"
        text = format_bytes(needed[None]) + within
        for bits, nbytes in needed.items():
            text += f"; {format_bytes(nbytes)} with --kv-bits {bits}" if bits is not None else ""
        fields.append((f"at {tokens >> 10}k tokens", text))
    print_fields(fields)
    return 0


def _template(model: LocalModel) -> str:
    try:
        own = files.own_chat_template(model.folder)
        template = files.chat_template(model.folder)
    except (OSError, ValueError) as error:
        return f"cannot be read: {first_line(error)}"
    if template is None:
        return "none: messages are written one after the other"
    return f"its own, {len(template):,} characters" if own else "mlx-lm's own for this family"


def _memory(model: LocalModel) -> tuple[list[tuple[int, dict[int | None, int]]], str, str]:
    """Return tokens, each with the bytes of weights and one sequence's caches, and a sentence on its MTP head.

    The bytes are by the bits of --kv-bits, and None without. If they cannot be told, the last says why.
    """
    from mlx_backend.engine.mlx import memory_by_tokens

    try:
        needed, drafts = memory_by_tokens(model.folder)
    except EngineError as error:
        if is_of_mlx_lm(files.read_json_or_empty(model.folder / "config.json")):
            return [], "", str(error)
        return [], "", "mlx-lm has no network for this family."
    return [(tokens, {bits: own(tokens) for bits, own in needed.items()}) for tokens in CONTEXTS], drafts, ""

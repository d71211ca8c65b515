"""The network for training, in PyTorch: it computes what mlx-vlm's qwen3_vl does, on many rows of one shape at once.

Pictures are padded to `MAX_PATCHES` and attend to their own patches only. What depends on a picture's size alone (the
weights of the position table, the rotation angles) is computed once for every size.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from training.vision import shape
from training.vision.encode import GRIDS, RowClass

VISION: Final = shape.VISION
TEXT: Final = shape.TEXT
HEAD: Final[int] = TEXT["head_dim"]
_TABLE: Final = int(VISION["num_position_embeddings"] ** 0.5)  # positions a side
_MERGED: Final[int] = VISION["hidden_size"] * shape.MERGE**2


def _grid_tables() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for every size of a picture: position weights, rotation angles, and which patches are there."""
    patches, half = shape.MAX_PATCHES, VISION["hidden_size"] // VISION["num_heads"] // 2
    weights = np.zeros((len(GRIDS), patches, _TABLE**2), np.float32)
    angles = np.zeros((len(GRIDS), patches, 2 * half), np.float32)
    present = np.zeros((len(GRIDS), patches), bool)
    frequencies = 1.0 / 10_000.0 ** (np.arange(0, half, 2, dtype=np.float32) / half)
    for index, (rows, columns) in enumerate(GRIDS):
        height, width = rows * shape.MERGE, columns * shape.MERGE
        row, column = np.divmod(np.arange(height * width), width)
        order = (
            np.arange(height * width)
            .reshape(rows, shape.MERGE, columns, shape.MERGE)
            .transpose(0, 2, 1, 3)
            .reshape(-1)
        )
        row, column = row[order], column[order]
        count = len(order)
        present[index, :count] = True
        turn = np.concatenate([np.outer(row, frequencies), np.outer(column, frequencies)], axis=1)
        angles[index, :count] = np.tile(turn, 2)
        at_row, at_column = (
            np.linspace(0, _TABLE - 1, side, dtype=np.float32)[at]
            for side, at in ((height, row), (width, column))
        )
        for up in (0, 1):
            for right in (0, 1):
                near_row = np.minimum(at_row.astype(int) + up, _TABLE - 1)
                near_column = np.minimum(at_column.astype(int) + right, _TABLE - 1)
                share_row = at_row % 1 if up else 1 - at_row % 1
                share_column = at_column % 1 if right else 1 - at_column % 1
                np.add.at(
                    weights[index],
                    (np.arange(count), near_row * _TABLE + near_column),
                    share_row * share_column,
                )
    return weights, angles, present


def _axes() -> Tensor:
    """Return which position (time, row, column) each frequency of a head is turned by, as mlx-vlm interleaves them."""
    sections = TEXT["rope_scaling"]["mrope_section"]
    axes = torch.zeros(HEAD // 2, dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def turned(values: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return values ([..., head]) rotated, the first half against the second."""
    first, second = values.chunk(2, dim=-1)
    return (values * cosine + torch.cat([-second, first], dim=-1) * sine).to(values.dtype)


class VisionBlock(nn.Module):
    """A layer of the tower."""

    def __init__(self) -> None:
        super().__init__()
        width = VISION["hidden_size"]
        self.heads: int = VISION["num_heads"]
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.linear_fc1 = nn.Linear(width, VISION["intermediate_size"])
        self.linear_fc2 = nn.Linear(VISION["intermediate_size"], width)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor) -> Tensor:
        """Return the next hidden states of pictures ([pictures, patches, width])."""
        count, patches, width = hidden.shape
        made = self.qkv(self.norm1(hidden)).view(count, patches, 3, self.heads, width // self.heads)
        queries, keys, values = made.permute(2, 0, 3, 1, 4).unbind(0)
        queries, keys = turned(queries, cosine, sine), turned(keys, cosine, sine)
        seen = functional.scaled_dot_product_attention(queries, keys, values.contiguous(), attn_mask=mask)
        hidden = hidden + self.proj(seen.transpose(1, 2).reshape(count, patches, width))
        inner = functional.gelu(self.linear_fc1(self.norm2(hidden)), approximate="tanh")
        return hidden + self.linear_fc2(inner)


class Merger(nn.Module):
    """Makes one place of four patches; `norm_after`: they are normed together, as DeepStack has it."""

    def __init__(self, *, norm_after: bool) -> None:
        super().__init__()
        self.norm_after = norm_after
        self.norm = nn.LayerNorm(_MERGED if norm_after else VISION["hidden_size"], eps=1e-6)
        self.linear_fc1 = nn.Linear(_MERGED, _MERGED)
        self.linear_fc2 = nn.Linear(_MERGED, VISION["out_hidden_size"])

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what places get ([pictures, places, width of the text])."""
        count, patches, _ = hidden.shape
        merged = count, patches // shape.MERGE**2, _MERGED
        hidden = self.norm(hidden.reshape(merged)) if self.norm_after else self.norm(hidden).reshape(merged)
        return self.linear_fc2(functional.gelu(self.linear_fc1(hidden)))


class Tower(nn.Module):
    """From patches ([pictures, patches, bytes], uint8) to what their places get, and what layers add to them."""

    angles: Tensor
    present: Tensor
    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        width = VISION["hidden_size"]
        self.patch_embed = nn.Linear(shape.PATCH_BYTES, width)
        self.pos_embed = nn.Parameter(torch.zeros(_TABLE**2, width))
        self.blocks = nn.ModuleList(VisionBlock() for _ in range(VISION["depth"]))
        self.merger = Merger(norm_after=False)
        self.deep_at: list[int] = VISION["deepstack_visual_indexes"]
        self.deep = nn.ModuleList(Merger(norm_after=True) for _ in self.deep_at)
        for name, table in zip(("weights", "angles", "present"), _grid_tables(), strict=True):
            self.register_buffer(name, torch.from_numpy(table), persistent=False)

    def forward(self, patches: Tensor, grids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return both for all pictures, with their index in `GRIDS`."""
        pixels = patches.float() * (2 / 255) - 1
        hidden = (self.patch_embed(pixels) + self.weights[grids] @ self.pos_embed).float()
        angles = self.angles[grids][:, None]
        cosine, sine = angles.cos(), angles.sin()
        mask = self.present[grids][:, None, None, :]
        added: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, cosine, sine, mask)
            if index in self.deep_at:
                added.append(self.deep[len(added)](hidden))
        return self.merger(hidden), added


class TextBlock(nn.Module):
    """A layer of the language model."""

    def __init__(self) -> None:
        super().__init__()
        width, inner, eps = TEXT["hidden_size"], TEXT["intermediate_size"], TEXT["rms_norm_eps"]
        self.heads: int = TEXT["num_attention_heads"]
        self.kv_heads: int = TEXT["num_key_value_heads"]
        self.input_layernorm = nn.RMSNorm(width, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps=eps)
        self.q_norm, self.k_norm = nn.RMSNorm(HEAD, eps=eps), nn.RMSNorm(HEAD, eps=eps)
        self.q_proj = nn.Linear(width, self.heads * HEAD, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * HEAD, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * HEAD, bias=False)
        self.o_proj = nn.Linear(self.heads * HEAD, width, bias=False)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Return the next hidden states of rows ([rows, length, width])."""
        rows, length, _ = hidden.shape
        normed = self.input_layernorm(hidden)
        queries = self.q_proj(normed).view(rows, length, self.heads, HEAD).float()
        keys = self.k_proj(normed).view(rows, length, self.kv_heads, HEAD).float()
        queries, keys = self.q_norm(queries).transpose(1, 2), self.k_norm(keys).transpose(1, 2)
        values = self.v_proj(normed).view(rows, length, self.kv_heads, HEAD).transpose(1, 2)
        queries, keys = (turned(each, cosine, sine).to(values.dtype) for each in (queries, keys))
        shared = self.heads // self.kv_heads
        keys, values = (each.repeat_interleave(shared, dim=1) for each in (keys, values))
        read = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.o_proj(read.transpose(1, 2).reshape(rows, length, self.heads * HEAD))
        normed = self.post_attention_layernorm(hidden)
        return hidden + self.down_proj(functional.silu(self.gate_proj(normed)) * self.up_proj(normed))


class Network(nn.Module):
    """The whole network. Rows end with padding, which nothing before it can see."""

    axes: Tensor
    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()
        self.embed_tokens = nn.Embedding(TEXT["vocab_size"], TEXT["hidden_size"])
        self.layers = nn.ModuleList(TextBlock() for _ in range(TEXT["num_hidden_layers"]))
        self.norm = nn.RMSNorm(TEXT["hidden_size"], eps=TEXT["rms_norm_eps"])
        self.register_buffer("axes", _axes(), persistent=False)
        frequencies = 1.0 / TEXT["rope_theta"] ** (torch.arange(0, HEAD, 2).float() / HEAD)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def hidden(self, patches: Tensor, numbers: Tensor, row_class: RowClass) -> Tensor:
        """Return the last hidden states ([rows, length, width]); `patches` is [rows, images, patches, bytes]."""
        parts = {name: numbers[:, part].long() for name, part in row_class.parts.items()}
        seen, added = self.tower(patches.flatten(0, 1), parts["grid"].flatten())
        rows, length = parts["ids"].shape
        places = shape.MAX_PLACES * row_class.images
        is_place = parts["places"] >= 0
        spread = (
            torch.arange(length, device=numbers.device) % places
        )  # one place for all would be slow to add up
        index = torch.where(is_place, parts["places"], spread)
        index = index + torch.arange(rows, device=numbers.device)[:, None] * places

        def placed(features: Tensor) -> Tensor:
            found = features.flatten(0, 1).float().index_select(0, index.flatten())
            return found.view(rows, length, -1) * is_place[..., None]

        hidden = self.embed_tokens(parts["ids"]).float() * ~is_place[..., None] + placed(seen)
        positions = torch.stack([parts["time"], parts["row"], parts["column"]], dim=-1).float()
        angles = positions[..., self.axes] * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        cosine, sine = angles.cos(), angles.sin()
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, cosine, sine)
            if number < len(added):
                hidden = hidden + placed(added[number])
        return self.norm(hidden)

    def logits(self, patches: Tensor, numbers: Tensor, row_class: RowClass) -> tuple[Tensor, Tensor]:
        """Return logits where something is learned ([rows, learned, vocabulary]), and the tokens wanted there."""
        hidden = self.hidden(patches, numbers, row_class)
        at = numbers[:, row_class.parts["at"]].long()
        hidden = hidden.gather(1, at[..., None].expand(-1, -1, hidden.shape[-1]))
        return functional.linear(hidden, self.embed_tokens.weight), numbers[
            :, row_class.parts["target"]
        ].long()


def initialise(network: Network, seed: int) -> None:
    """Set the first weights: variance kept from layer to layer, what is added to the stream small, and waves as the
    position table, from which places are told apart before anything is learned.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        is_norm = "norm" in name
        if is_norm or name.endswith("bias"):
            nn.init.constant_(parameter, float(is_norm and name.endswith("weight")))
            continue
        deviation = 0.05 if "embed_tokens" in name else parameter.shape[-1] ** -0.5 * 0.8
        if name.split(".")[-2] in ("proj", "linear_fc2", "o_proj", "down_proj") and (
            "blocks" in name or "layers" in name
        ):
            deviation *= (2 * VISION["depth"]) ** -0.5
        nn.init.trunc_normal_(parameter, 0.0, deviation, generator=generator)
    with torch.no_grad():
        network.tower.pos_embed.copy_(_waves())


def _waves() -> Tensor:
    """Return sines and cosines of rows and of columns ([positions, width])."""
    width = VISION["hidden_size"]
    rates = 2 * np.pi / _TABLE * np.geomspace(0.5, _TABLE / 3, width // 4)
    row, column = np.divmod(np.arange(_TABLE**2), _TABLE)
    parts = [wave(np.outer(at, rates)) for at in (row, column) for wave in (np.sin, np.cos)]
    return torch.from_numpy(0.5 * np.concatenate(parts, axis=1)).float()


def exported(network: Network) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the weights by their names in mlx-vlm, in float32."""
    inner = {
        "qkv": "attn.qkv",
        "proj": "attn.proj",
        "linear_fc1": "mlp.linear_fc1",
        "linear_fc2": "mlp.linear_fc2",
    }
    of_text = {
        name: f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }
    of_text |= {name: f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    for name, parameter in network.named_parameters():
        value = parameter.detach().float().cpu().numpy()
        part, *rest = name.split(".")
        if part == "tower":
            if rest[0] == "patch_embed":
                if rest[1] == "weight":  # one kernel for both of the equal frames
                    kernel = value.reshape(-1, 3, shape.PATCH, shape.PATCH).transpose(0, 2, 3, 1)
                    value = np.stack([kernel / shape.FRAMES] * shape.FRAMES, axis=1)
                rest = ["patch_embed", "proj", rest[1]]
            elif rest[0] == "pos_embed":
                rest = ["pos_embed", "weight"]
            elif rest[0] == "blocks":
                rest[2] = inner.get(rest[2], rest[2])
            elif rest[0] == "deep":
                rest[0] = "deepstack_merger_list"
            yield ".".join(["vision_tower", *rest]), value
            continue
        if part == "layers":
            rest[1] = of_text.get(rest[1], rest[1])
        yield ".".join(["language_model.model", part, *rest]), value


def restore(network: Network, weights: dict[str, Any]) -> None:
    """Set the weights from those of a saved model."""
    with torch.no_grad():
        for (name, old), parameter in zip(exported(network), network.parameters(), strict=True):
            value = weights[name]
            assert value.shape == old.shape, name
            if name.endswith("patch_embed.proj.weight"):
                value = value.sum(axis=1).transpose(0, 3, 1, 2)
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)).reshape(parameter.shape))

"""The training forward pass and the wired initial weights, on an untrained model."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.gpt_oss import Model, ModelArgs

from training.chat import forward, wiring
from training.chat.train import CONFIG


@pytest.fixture(scope="module")
def model() -> Any:
    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(CONFIG))
    wiring.wire(model, CONFIG["rope_theta"])
    mx.eval(model.parameters())
    return model


def test_the_training_forward_pass_equals_mlx_lms(model: Any) -> None:
    assert forward.check(model, mx.random.randint(0, CONFIG["vocab_size"], (2, 192))) < 1e-3


def test_a_long_sequence_is_computed_in_parts_with_equal_results(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = mx.random.randint(0, CONFIG["vocab_size"], (1, 256))

    def gradients() -> dict[str, mx.array]:
        def total(model: Any) -> mx.array:
            return forward.hidden_states(model, ids).sum()

        return dict(tree_flatten(nn.value_and_grad(model, total)(model)[1]))

    whole = gradients()
    monkeypatch.setattr(forward, "PART", 96)
    assert forward.check(model, ids) < 1e-3
    for name, gradient in gradients().items():
        scale = max(1e-3, float(mx.abs(whole[name]).max()))
        assert float(mx.abs(gradient - whole[name]).max()) < 0.01 * scale, name


def test_its_gradients_equal_those_of_mlx_lms(model: Any) -> None:
    ids = mx.random.randint(0, CONFIG["vocab_size"], (8, 128))  # enough labels for a loss that is the mean
    positions = mx.concatenate([row * 128 + mx.arange(127) for row in range(8)])
    labels = ids[:, 1:].reshape(-1)
    assert labels.size >= forward.ENOUGH_LABELS

    def theirs(model: Any) -> mx.array:
        logits = model(ids)[:, :127].reshape(labels.size, -1)
        loss: mx.array = nn.losses.cross_entropy(logits, labels, reduction="mean")
        return loss

    def ours(model: Any) -> mx.array:
        return forward.loss(model, ids, positions, labels)[0]

    expected = dict(tree_flatten(nn.value_and_grad(model, theirs)(model)[1]))
    actual = dict(tree_flatten(nn.value_and_grad(model, ours)(model)[1]))
    for name, gradient in expected.items():
        scale = max(1e-3, float(mx.abs(gradient).max()))
        assert float(mx.abs(actual[name] - gradient).max()) < 0.02 * scale, name


def test_labels_that_fill_the_list_up_change_neither_loss_nor_accuracy(model: Any) -> None:
    ids = mx.random.randint(0, CONFIG["vocab_size"], (2, 64))
    positions, labels = mx.arange(100), ids.reshape(-1)[1:101]
    filled = (mx.concatenate([positions, mx.zeros(28, mx.int32)]), mx.concatenate([labels, mx.full(28, -1)]))
    for plain, more in zip(
        forward.loss(model, ids, positions, labels), forward.loss(model, ids, *filled), strict=True
    ):
        assert float(mx.abs(plain - more)) < 1e-5


def test_a_barred_token_has_no_part_in_the_loss(model: Any) -> None:
    ids = mx.random.randint(0, CONFIG["vocab_size"], (1, 128))
    positions, labels = mx.arange(100), ids[0, 1:101]
    barred = mx.where(mx.arange(100) < 40, (labels + 1) % CONFIG["vocab_size"], -1)
    logits = model.lm_head(forward.hidden_states(model, ids))[0, :100]
    without = mx.where(mx.arange(CONFIG["vocab_size"]) == barred[:, None], -mx.inf, logits)
    expected = (
        nn.losses.cross_entropy(without, labels, reduction="mean") * (100 / forward.ENOUGH_LABELS) ** 0.5
    )
    assert float(mx.abs(forward.loss(model, ids, positions, labels, barred)[0] - expected)) < 1e-4
    assert float(forward.loss(model, ids, positions, labels)[0] - expected) > 1e-6


def test_the_wired_weights_copy_before_any_training(model: Any) -> None:
    period = mx.random.permutation(800)[:40].tolist()
    ids = mx.array([period * 3])
    guesses = mx.argmax(model(ids), axis=-1)[0, 40:-1]
    assert float((guesses == ids[0, 41:]).mean()) > 0.9

"""One dial, and each model's own levels underneath: which level an effort comes to."""

import itertools
from typing import Any

import pytest

from mlx_backend.conversation.effort import DIAL, GPT_OSS_SCALE, NO_SCALE, Effort, EffortScale, Level
from mlx_backend.conversation.effort_sources import resolve

QUESTION = {"role": "user", "content": "?"}


def scale_of(*words: str, **settings: Any) -> EffortScale:
    levels = tuple(Level(effort=Effort(word), template_kwargs={"effort": word}) for word in words)
    return EffortScale(levels=levels, **settings)


@pytest.mark.parametrize(
    ("levels", "come_to"),
    [
        ("none low medium high", "none low low medium high high high"),
        ("none low medium xhigh", "none low low medium medium xhigh xhigh"),  # Qwen3.8
        ("none low high max", "none low low low high high max"),  # GLM-5.3, Kimi K3
        ("none high", "none high high high high high high"),  # Mistral Small 4
        ("none low high", "none low low low high high high"),  # Hunyuan
        ("none minimal max", "none minimal minimal minimal max max max"),
    ],
)
def test_an_effort_comes_to_the_nearest_level_and_of_two_to_the_lower(levels: str, come_to: str) -> None:
    scale = scale_of(*levels.split())
    found = [scale.level_of(effort) for effort in DIAL]
    assert [level.effort for level in found if level] == come_to.split()


def test_only_none_switches_reasoning_off() -> None:
    for size in range(1, 4):
        for words in itertools.combinations(DIAL[1:], size):
            scale = scale_of("none", *words)
            for effort in DIAL[1:]:
                level = scale.level_of(effort)
                assert level is not None
                assert level.effort is not Effort.NONE


def test_a_word_that_the_template_takes_for_a_level_is_that_level() -> None:
    xhigh = Level(effort=Effort.XHIGH, accepts=frozenset({Effort.HIGH}))
    scale = EffortScale(levels=(Level(effort=Effort.LOW), Level(effort=Effort.MEDIUM), xhigh))
    assert scale.level_of(Effort.HIGH) is xhigh


def test_a_model_that_does_not_reason_is_told_nothing() -> None:
    found = resolve({"reasoning_effort": "high"}, [QUESTION], scale=NO_SCALE)
    assert (found.effort, found.level, found.template_kwargs, found.budget) == (Effort.HIGH, None, {}, None)


def test_an_effort_that_nobody_states_is_the_templates_own_default() -> None:
    off_by_default = scale_of("none", "high", default=Effort.NONE, on=Effort.HIGH)
    assert resolve({}, [QUESTION], scale=off_by_default).effort is Effort.NONE
    assert resolve({}, [QUESTION], scale=GPT_OSS_SCALE).template_kwargs == {"reasoning_effort": "medium"}


def test_a_mere_on_is_what_the_template_takes_for_on() -> None:
    scale = scale_of("none", "low", "high", "max", default=Effort.NONE, on=Effort.HIGH)
    assert resolve({"think": True}, [QUESTION], scale=scale).effort is Effort.HIGH
    kwargs = {"chat_template_kwargs": {"thinking_mode": "enabled"}}
    assert resolve(kwargs, [QUESTION], scale=scale).effort is Effort.HIGH
    assert resolve({"enable_thinking": False}, [QUESTION], scale=scale).effort is Effort.NONE


def test_a_default_that_no_level_is_equal_to_is_not_told() -> None:
    scale = EffortScale(
        levels=scale_of("low", "medium", "high").levels, default=Effort.MEDIUM, tells_default=False
    )
    assert resolve({}, [QUESTION], scale=scale).template_kwargs == {}
    assert resolve({"reasoning_effort": "medium"}, [QUESTION], scale=scale).template_kwargs == {
        "effort": "medium"
    }

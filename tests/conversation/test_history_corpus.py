"""Whatever a client posts back becomes a prompt that a template renders, with every text in it once."""

from functools import cache

import pytest
from harmony_data import needs_gpt_oss_template
from history_corpus import HistoryCase, Prompt, demo, gpt_oss, history_cases

from mlx_backend.conversation.history import sanitise

CASES = history_cases()
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
real_template, demo_template = cache(gpt_oss), cache(demo)


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    assert len(CASES) >= 200
    assert len({case.name for case in CASES}) == len(CASES)


@needs_gpt_oss_template
@each_case
def test_the_real_template_shows_every_text_once_and_nothing_else(case: HistoryCase) -> None:
    assert real_template().shown(case.request) == case.shown


@each_case
def test_the_demonstration_template_shows_the_same(case: HistoryCase) -> None:
    assert demo_template().shown(case.request) == case.shown


@each_case
def test_a_sanitised_history_is_its_own_canonical_form(case: HistoryCase) -> None:
    once = sanitise(case.request["messages"], tools=case.request.get("tools"))
    assert sanitise(once, tools=case.request.get("tools")) == once


@needs_gpt_oss_template
def test_the_traits_of_both_templates_are_alike() -> None:
    assert isinstance(real_template(), Prompt)
    assert real_template().traits.reasoning_key == demo_template().traits.reasoning_key == "thinking"
    assert real_template().traits.refused == demo_template().traits.refused

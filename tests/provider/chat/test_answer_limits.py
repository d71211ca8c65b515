"""The limit of an answer, and what is kept of it: from settings, extra body, server and defaults."""

from __future__ import annotations

from typing import Any

import pytest

from dify_mlx_provider.chat.answer_limits import limit_tokens
from dify_mlx_provider.servers.base import MAX_UNREAD_TOKENS, ServedModel
from dify_mlx_provider.servers.discovery import PROFILES
from dify_mlx_provider.upstream.credentials import ServerKind


def limits(
    settings: dict[str, Any], *, of_server: int | None = None, default: int | None = 32_768, **more: bool
) -> tuple[int | None, int | None]:
    """Return what is sent as (max_tokens, answer_reserve)."""
    model = ServedModel(name="m", default_max_tokens=of_server)
    sent = limit_tokens(settings, model, default, **more)
    return sent.get("max_tokens"), sent.get("answer_reserve")


@pytest.mark.parametrize(
    ("settings", "sent"),
    [
        ({"max_tokens": 8192}, (8192, 1024)),
        ({"max_tokens": 2048}, (2048, 1024)),
        ({"max_tokens": 500}, (500, 250)),
        ({"max_tokens": 1}, (1, 0)),
        ({"max_tokens": 8192, "answer_reserve": 3000}, (8192, 3000)),
        ({"max_tokens": 500, "answer_reserve": 3000}, (500, 250)),
        ({"max_tokens": 500, "answer_reserve": 0}, (500, 0)),
        ({}, (32_768, 1024)),
        ({"answer_reserve": 20_000}, (32_768, 16_384)),
    ],
)
def test_the_setting_is_kept_or_1024_but_at_most_half(
    settings: dict[str, Any], sent: tuple[int, int]
) -> None:
    assert limits(settings) == sent


def test_a_background_request_keeps_most_of_its_tokens_whatever_the_setting() -> None:
    assert limits({"max_tokens": 500, "answer_reserve": 10}, is_background=True) == (500, 300)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_a_limit_in_the_extra_body_is_the_users_own(field: str) -> None:
    extra = {"extra_body": f'{{"{field}": 300}}'}
    assert limits(extra) == (None, 150)
    assert limits({**extra, "max_tokens": 9000}) == (9000, 150)
    assert limits({"extra_body": f'{{"{field}": -1}}'}) == (None, None)


def test_the_servers_own_default_is_left_to_it() -> None:
    assert limits({}, of_server=2000) == (None, 1000)
    assert limits({"max_tokens": 100}, of_server=2000) == (100, 50)


def test_where_the_server_is_to_decide_nothing_is_added() -> None:
    assert limits({}, default=None) == (None, None)
    assert limits({"answer_reserve": 9}, default=None) == (None, None)


def test_every_kind_of_server_gets_a_limit_unless_it_refuses_one_that_does_not_fit() -> None:
    without = {kind for kind in PROFILES if PROFILES[kind].answer_limit() is None}
    assert without == {ServerKind.VLLM, ServerKind.OTHER}
    assert PROFILES[ServerKind.MLX_BACKEND].answer_limit() == MAX_UNREAD_TOKENS
    assert PROFILES[ServerKind.MLX_LM].answer_limit() == 8192
    for kind in PROFILES.keys() - without:
        assert PROFILES[kind].answer_limit(500) == 500
        assert PROFILES[kind].answer_limit(10**6) == MAX_UNREAD_TOKENS

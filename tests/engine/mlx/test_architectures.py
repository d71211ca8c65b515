"""The most used kinds of caches: whatever else runs, a reply is the one that mlx-lm gives to the prompt alone.

`make matrix` checks every architecture in the same way.
"""

from collections.abc import Iterator

import pytest
from architecture_checks import CHECKS, Model
from architectures import write
from tolerances import check_replies

MOST_USED = (
    *("gpt_oss", "qwen3", "qwen3_5", "gemma3_text", "gemma4_text"),
    *("deepseek_v3", "lfm2", "nemotron_h", "mamba2"),
)


@pytest.fixture(scope="module", params=MOST_USED)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("model") / request.param
    with Model(write(folder, request.param)) as model:
        yield model


@pytest.mark.parametrize("check", CHECKS)
def test_a_reply_is_the_one_that_mlx_lm_gives_to_the_prompt_alone(model: Model, check: str) -> None:
    replies = CHECKS[check](model)
    check_replies(
        model.engine,
        [each.request for each in replies],
        [each.found for each in replies],
        [each.expected for each in replies],
    )

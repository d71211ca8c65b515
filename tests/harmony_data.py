"""Where the optional Harmony data lies: the real gpt-oss template and the o200k vocabulary.

They are not shipped with the project. `HARMONY_DATA` names the folder; by default it is looked for next to the
checkout. Tests that want it are skipped, with the reason, where it is absent.
"""

import os
from pathlib import Path

import pytest

HARMONY_DATA = Path(os.environ.get("HARMONY_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
GPT_OSS_TEMPLATE = HARMONY_DATA / "gpt-oss.chat_template.jinja"

needs_gpt_oss_template = pytest.mark.skipif(
    not GPT_OSS_TEMPLATE.exists(),
    reason="the gpt-oss chat template is not here; set HARMONY_DATA to its folder",
)
needs_o200k_vocabulary = pytest.mark.skipif(
    not (HARMONY_DATA / "o200k_base.tiktoken").exists(),
    reason="the o200k vocabulary is not here; set HARMONY_DATA to the folder of o200k_base.tiktoken",
)

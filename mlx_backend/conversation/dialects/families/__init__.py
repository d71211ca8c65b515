"""The families that write blocks: a row each, in the modules of this folder.

What a row says is read from the families' own chat templates and from what their models write. How calls are written is
`calls/`; what reads by these tables is `block_reader`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlx_backend.conversation.dialects.families.control_tokens import (
    APERTUS,
    COHERE,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GIGACHAT,
    INTERNLM,
    KIMI_K2,
    KIMI_K3,
    MISTRAL,
    MISTRAL_IDS,
    MISTRAL_LIST,
)
from mlx_backend.conversation.dialects.families.function_tags import (
    GRANITE,
    GRANITE_42,
    MIMO,
    MINICPM,
    NEMOTRON,
    QWEN_XML,
    SEED_OSS,
    STEP,
)
from mlx_backend.conversation.dialects.families.invoke_tags import (
    DSML,
    DSML_V4,
    DSML_V41,
    MINIMAX_M2,
    MINIMAX_M3,
)
from mlx_backend.conversation.dialects.families.key_value_tags import (
    GLM,
    HUNYUAN,
    HUNYUAN_A13B,
    HUNYUAN_OPEN_SOURCE,
    JAMBA,
    K2_HORIZON,
    LAGUNA,
    LING,
    LONGCAT,
)
from mlx_backend.conversation.dialects.families.python_and_gemma import (
    FUNCTION_GEMMA,
    GEMMA_3,
    GEMMA_4,
    LFM2,
    LLAMA_3,
    LLAMA_PYTHONIC,
    OLMO,
)

if TYPE_CHECKING:
    from mlx_backend.conversation.dialects.base import Dialect

FAMILIES: tuple[Dialect, ...] = (
    *(
        KIMI_K3,
        GEMMA_4,
        FUNCTION_GEMMA,
        MINIMAX_M3,
        MINIMAX_M2,
        DSML_V41,
        DSML_V4,
        DSML,
        DEEPSEEK_V3,
        DEEPSEEK_V31,
        KIMI_K2,
    ),
    *(MISTRAL_LIST, MISTRAL_IDS, MISTRAL, SEED_OSS, LONGCAT, K2_HORIZON),
    *(HUNYUAN_OPEN_SOURCE, HUNYUAN, HUNYUAN_A13B, APERTUS, COHERE, LFM2),
    *(LAGUNA, LING, GLM),
    *(GRANITE_42, NEMOTRON, STEP, MIMO, QWEN_XML, MINICPM, OLMO, GRANITE),
    *(LLAMA_PYTHONIC, LLAMA_3, GEMMA_3, JAMBA, INTERNLM, GIGACHAT),
)

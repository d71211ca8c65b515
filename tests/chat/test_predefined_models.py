"""What the plugin declares of its predefined models is what the server finds in their real templates."""

from pathlib import Path

import pytest
from harmony_data import GPT_OSS_TEMPLATE, HARMONY_DATA

from dify_mlx_provider.packaging.predefined import MODELS, declaration
from mlx_backend.chat.capabilities import describe
from mlx_backend.models.spec import ModelDefaults

TEMPLATES = {
    "mlx-community/gpt-oss-20b-MXFP4-Q8": GPT_OSS_TEMPLATE,
    "mlx-community/gpt-oss-120b-MXFP4-Q8": GPT_OSS_TEMPLATE,
    "mlx-community/Qwen3.5-9B-4bit": HARMONY_DATA / "templates/Qwen3.5-4B.jinja",
    "mlx-community/GLM-4.7-Flash-4bit": HARMONY_DATA / "templates/GLM-4.7-Flash.jinja",
}


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items(), ids=TEMPLATES)
def test_a_declaration_says_what_the_server_finds(name: str, template: Path) -> None:
    if not template.exists():
        pytest.skip("the real chat templates are not here; set HARMONY_DATA to their folder")
    [model] = [model for model in MODELS if model.model == name]
    found = describe(
        template=template.read_text(encoding="utf-8"),
        control_tokens=["<|im_end|>"],
        vocabulary_size=200_000,
        context_length=None,
        advice={},
        defaults=ModelDefaults(),
    )
    # A declaration holds for every server; that mlx-backend can switch any reasoning off, it says itself.
    assert [effort for effort in found.efforts if effort in (*model.efforts, "low", "medium", "high")] == [
        *model.efforts
    ]
    assert found.default_effort == model.default_effort
    features = declaration(model)["features"]
    assert ("tool-call" in features) == ("tools" in found.capabilities)
    assert ("agent-thought" in features) == ("thinking" in found.capabilities)

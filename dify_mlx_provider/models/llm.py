"""The language model as Dify's SDK loads it. The SDK runs this file more than once: it holds no state and no logic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dify_plugin import LargeLanguageModel

from dify_mlx_provider.credentials import Credentials
from dify_mlx_provider.errors import KINDS, for_dify
from dify_mlx_provider.invocation import estimated_tokens, fold, invoke
from dify_mlx_provider.model_schema import customizable_model
from dify_mlx_provider.validation import validate

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from dify_plugin.entities.model import AIModelEntity
    from dify_plugin.entities.model.llm import LLMResult, LLMResultChunk
    from dify_plugin.entities.model.message import PromptMessage, PromptMessageTool
    from dify_plugin.errors.model import InvokeError


class MLXLargeLanguageModel(LargeLanguageModel):
    """Chat models behind an MLX server, or another OpenAI-compatible one."""

    def _invoke(
        self,
        model: str,
        credentials: dict[str, Any],
        prompt_messages: list[PromptMessage],
        model_parameters: dict[str, Any],
        tools: list[PromptMessageTool] | None = None,
        stop: list[str] | None = None,
        stream: bool = True,
        user: str | None = None,
    ) -> LLMResult | Generator[LLMResultChunk, None, None]:
        """Answer one call of Dify."""
        chunks = invoke(
            model,
            credentials,
            prompt_messages,
            model_parameters,
            tools=tools,
            stop=stop,
            stream=stream,
            usage_of=lambda prompt, completion: self._calc_response_usage(
                model, credentials, prompt, completion
            ),
        )
        return chunks if stream else fold(model, chunks)

    def get_num_tokens(
        self,
        model: str,
        credentials: dict[str, Any],
        prompt_messages: list[PromptMessage],
        tools: list[PromptMessageTool] | None = None,
    ) -> int:
        """Estimate a prompt's tokens; nothing is downloaded for it."""
        texts = [message.get_text_content() for message in prompt_messages]
        texts += [tool.model_dump_json() for tool in tools or ()]
        return sum(map(estimated_tokens, texts))

    def validate_credentials(self, model: str, credentials: Mapping[str, Any]) -> None:
        """Check that the server answers and serves the model."""
        validate(credentials, model)

    def get_customizable_model_schema(self, model: str, credentials: Mapping[str, Any]) -> AIModelEntity:
        """Describe a model from its form and from what its server says."""
        return customizable_model(model, Credentials.read(credentials))

    @property
    def _invoke_error_mapping(self) -> dict[type[InvokeError], list[type[Exception]]]:
        return KINDS

    def _transform_invoke_error(self, error: Exception) -> InvokeError:
        return for_dify(error)

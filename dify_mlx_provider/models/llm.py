"""The language model as Dify's SDK loads it. The SDK runs this file more than once: it holds no state and no logic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dify_plugin import LargeLanguageModel

from dify_mlx_provider.chat.invocation import count_prompt_tokens, fold, invoke
from dify_mlx_provider.chat.messages import ChatInvocation
from dify_mlx_provider.dify_errors import DifyErrorMapping
from dify_mlx_provider.settings.coercion import coerce
from dify_mlx_provider.settings.model_schema import ServerSchemas
from dify_mlx_provider.settings.validation import validate

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from dify_plugin.entities.model.llm import LLMResult, LLMResultChunk
    from dify_plugin.entities.model.message import PromptMessage, PromptMessageTool


class MLXLargeLanguageModel(ServerSchemas, DifyErrorMapping, LargeLanguageModel):
    """Chat models of an MLX server, or of another OpenAI-compatible one."""

    _chosen: frozenset[str] = frozenset()

    def _validate_and_filter_model_parameters(
        self, model: str, model_parameters: dict[str, Any], credentials: dict[str, Any]
    ) -> dict[str, Any]:
        """Note what Dify sent before the SDK fills in defaults. The SDK makes a new object for every call."""
        self._chosen = frozenset(name for name, value in model_parameters.items() if value not in (None, ""))
        coerced = coerce(model_parameters, self.get_parameter_rules(model, credentials))
        try:
            filled: dict[str, Any] = super()._validate_and_filter_model_parameters(
                model, coerced, credentials
            )
        except ValueError as error:  # the SDK does not map errors raised here
            raise self._transform_invoke_error(error) from error
        return filled

    def _efforts(self, model: str, credentials: dict[str, Any]) -> list[str]:
        rules = self.get_parameter_rules(model, credentials)
        return next((list(rule.options) for rule in rules if rule.name == "reasoning_effort"), [])

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
        call = ChatInvocation(
            model=model.strip(),
            form=credentials,
            messages=prompt_messages,
            parameters=model_parameters,
            tools=tools or (),
            stop=stop or (),
            stream=stream,
            user=user,
            chosen=self._chosen,
            efforts=self._efforts(model, credentials),
        )
        chunks = invoke(
            call, lambda prompt, answer: self._calc_response_usage(model, credentials, prompt, answer)
        )
        return chunks if stream else fold(model, chunks)

    def get_num_tokens(
        self,
        model: str,
        credentials: dict[str, Any],
        prompt_messages: list[PromptMessage],
        tools: list[PromptMessageTool] | None = None,
    ) -> int:
        """Count a prompt's tokens."""
        call = ChatInvocation(
            model=model.strip(), form=credentials, messages=prompt_messages, tools=tools or ()
        )
        return count_prompt_tokens(call)

    def validate_credentials(self, model: str, credentials: Mapping[str, Any]) -> None:
        """Check that the server answers and serves the model."""
        validate(credentials, model)

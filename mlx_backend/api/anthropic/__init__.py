"""Anthropic's Messages API: POST /v1/messages, its token count, and its list of models."""

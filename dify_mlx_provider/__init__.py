"""The Dify model-provider plugin for MLX servers, and for others that speak OpenAI's protocol.

What Dify's SDK loads, and where a call of Dify goes from there:

    provider.py, models/   the classes the SDK loads; they only delegate
    settings/              what a person sets: validation (are the credentials good?), model_schema (what can a model
                           do?), parameters (the panel), coercion (values written for another model)
    chat/                  invocation (one call), messages, content_parts, dify_requests (those Dify makes by itself),
                           long_chats (leaves out old turns), answer_limits; back: stream_reader (chunks to events),
                           leaked_markup, tool_calls, react_agent, think_block, abandoned_answers
    knowledge.py           vectors and rankings
    servers/               which server answers: discovery, probe, base; the kinds: mlx_backend, and in kinds all
                           others; requests and token_count to any of them; efforts
    upstream/              any OpenAI-compatible server: client, sse, errors, cache, credentials
    dify_errors.py         errors, as Dify's kinds
    packaging/             makes the package, and is not in it: package, sdk_check, predefined
"""

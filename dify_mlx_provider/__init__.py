"""The Dify model-provider plugin for MLX servers, and for others that speak OpenAI's protocol.

What Dify's SDK loads, and where a call of Dify goes from there:

    provider.py, models/   the classes the SDK wants; they only delegate
    settings/              what a person sets: validation (is a form good?), model_schema (what can a model do?),
                           parameters (the panel), coercion (values that were meant differently than they came)
    chat/                  invocation (one call), messages, content_parts, background_requests (Dify's own questions);
                           back: stream_reader (chunks as events), leaked_markup, tool_calls, think_block
    knowledge/             embeddings, rerank
    upstream/              the server: client (HTTP), sse, requests (in its own words), server_kinds, discovery, probe,
                           cache, credentials, token_count, versions, effort_levels, surrogates, errors
    dify_errors.py         what goes wrong, in Dify's kinds
    packaging/             makes the package, and is not in it: package, declaration, declaration_fields, predefined
"""

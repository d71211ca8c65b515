"""The Dify model-provider plugin for MLX servers, and for others that speak OpenAI's protocol.

What Dify's SDK loads, and where a call of Dify goes from there:

    provider.py, models/   the classes the SDK wants; they only lead on
    validation             is a form good?          credentials, versions
    model_schema           what can a model do?     parameters (the panel), effort_levels, leniency
    invocation             a chat                   errands (Dify's own questions), messages, parts
    vectors, ranking       a knowledge base
    tokens                 how long is a prompt?

Between Dify and a server:

    servers                the kinds there are, and how each wants to be asked
    discovery              which kind this one is, and what its models can do     asking (soon or never), kept
    sending                a request in the server's own words                    client (HTTP), bodies (JSON, SSE)
    server_errors          what goes wrong, in sentences                          dify_errors: in Dify's kinds

What comes back:

    chunks                 a server's chunks as events     leaks (a model's own markers), tool_calls, surrogates
    thinking               events as Dify's thinking block

What makes the package, and is not in it: package, declaration and declaration_fields (what Dify takes), predefined (the
models' files).
"""

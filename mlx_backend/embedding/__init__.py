"""Texts to vectors, and documents in the order of their worth: what a knowledge base needs beside a chat model.

    texts ─service─▶ rows of tokens ─worker─▶ pieces, in turn with the chat ─mlx─▶ vectors, or scores

`recognising` tells from a model's files which kind it is, `recipe` how its vectors are to be made; `service` and
`worker` know no MLX, `mlx/` knows nothing of requests, and nothing here knows HTTP.

The networks are our own, a few hundred lines on MLX. The library for this, mlx-embeddings, is under the GPL, which
this project's licence is not, and brings a vision stack (mlx-vlm, OpenCV) with it. What mlx-lm has it does have
right: causal models (Qwen3-Embedding, Qwen3-Reranker) are loaded with it.
"""

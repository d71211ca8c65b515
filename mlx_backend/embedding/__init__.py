"""Embeddings and reranking: texts to vectors, documents to relevance scores, for a knowledge base next to a chat model.

    texts ─service─▶ tokens ─worker─▶ batches, interleaved with the chat model ─mlx─▶ vectors or scores

`embedding_config` says how a model's vectors are made. `service` and `worker` know no MLX, `mlx/` knows nothing of
requests, and nothing here knows HTTP.

The networks are our own, a few hundred lines on MLX. The existing library, mlx-embeddings, is under the GPL, which does
not fit this project's licence, and depends on a vision stack (mlx-vlm, OpenCV). Causal models (Qwen3-Embedding,
Qwen3-Reranker) are loaded with mlx-lm, which supports them well.
"""

"""A knowledge base's models: embeddings and rerank. Knows no HTTP."""

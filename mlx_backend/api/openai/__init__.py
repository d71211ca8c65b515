"""OpenAI's API, and what belongs beside it: chat, completions, embeddings, rerank, models, tokenize."""

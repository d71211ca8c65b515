"""OpenAI's API and what other servers have added to it: chat, completions, embeddings, rerank, models, tokenize."""

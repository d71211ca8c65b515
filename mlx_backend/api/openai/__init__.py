"""OpenAI's API and what other servers have added beside it: chat, completions, embeddings, rerank, models, tokenize."""

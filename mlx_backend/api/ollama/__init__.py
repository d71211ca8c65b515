"""Ollama's API: replies as one JSON object a line, and the models as its clients look for them."""

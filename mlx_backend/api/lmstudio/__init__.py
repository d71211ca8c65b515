"""LM Studio's own list of models, where clients look for the length of a context."""

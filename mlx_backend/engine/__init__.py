"""Tokens: engines, generations and the one thread that runs them. Knows no HTTP and no channels."""

"""Talking to a server: HTTP, its kind, its models, its errors. Knows nothing of chats."""

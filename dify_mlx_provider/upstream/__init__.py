"""The server behind the plugin: HTTP, what kind of server it is, its models, its errors. Knows nothing of chats."""

"""A chat: Dify's messages to a request, and a server's stream to Dify's chunks. Knows no HTTP."""

"""A chat with Dify: its messages out, a server's stream back as Dify's chunks. Knows no HTTP."""

"""HTTP: addresses, status codes, headers and sockets. The bodies are api/'s."""

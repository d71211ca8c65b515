"""Which server answers, what it says of itself, and how a request is fitted to it: a file a kind, and discovery."""

"""Which server answers, what it says of itself, and how a request is fitted to it, by its kind."""

"""Which models there are, and which of them are in memory."""

"""Wire protocols: how requests are written and replies are answered. One folder each. Knows no HTTP."""

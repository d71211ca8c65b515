"""The page at /: static files for browsers, which use the same addresses as every other client.

`vendor/` holds libraries of others as they were published.
"""

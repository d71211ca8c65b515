"""Wire protocols, one folder each: the bodies of requests and responses (base.py). Knows no sockets and no headers."""

#!/usr/bin/env python3
"""Stands in for Dify's plugin runner (SLIM_BINARY_PATH): forwards a graphon request to the running plugin.

`slim.py -id PLUGIN -action ACTION` reads `{"data": …}` and prints one JSON event a line. The plugin runs already, as it
does under Dify's daemon; bridge.py listens at PLUGIN_BRIDGE (host:port) on its behalf. Standard library only.
"""

import json
import os
import socket
import sys

host, _, port = os.environ["PLUGIN_BRIDGE"].rpartition(":")
request = {"action": sys.argv[sys.argv.index("-action") + 1], **json.load(sys.stdin)}
with socket.create_connection((host, int(port))) as connection:
    connection.sendall(json.dumps(request).encode() + b"\n")
    with connection.makefile(encoding="utf-8") as events:
        for event in events:
            sys.stdout.write(event)
            sys.stdout.flush()

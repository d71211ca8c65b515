#!/usr/bin/env python3
"""What graphon takes for Dify's own runner of plugins (SLIM_BINARY_PATH): hands a request on to the running plugin.

`slim.py -id PLUGIN -action ACTION` reads `{"data": …}` and prints one JSON event a line. The plugin runs already, as it
does under Dify's daemon; bridge.py listens at PLUGIN_BRIDGE (host:port) and speaks for it. Standard library only.
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

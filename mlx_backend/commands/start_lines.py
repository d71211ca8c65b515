"""What `mlx-backend serve` prints for people: which models there are, and how to reach them.

The address is one that other machines can use, found by asking the system which it would send from; nothing is sent.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from mlx_backend.clients import LOOPBACK
from mlx_backend.declaration import variable_of
from mlx_backend.demo import EMBEDDING_MODEL_NAME, MODEL_NAME, VISION_MODEL_NAME
from mlx_backend.engine.mlx.vision.families import is_installed
from mlx_backend.installation import vision_command

if TYPE_CHECKING:
    from mlx_backend.models.files import ModelType
    from mlx_backend.registry.registry import MultiModelRegistry
    from mlx_backend.settings import Settings


_EVERY_ADDRESS = ("0.0.0.0", "::", "")
# Documentation's addresses (RFC 5737, 3849): no machine has them, so the way there is the default route.
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_LOOPBACK = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}


def reachable_url(url: str, host: str) -> tuple[str, str]:
    """Return the address to show for a server at `url` whose `host` setting is this, and a remark to follow it."""
    if host not in _EVERY_ADDRESS:
        return url, ""
    port = url.rpartition(":")[2]
    families = [socket.AF_INET6, socket.AF_INET] if host == "::" else [socket.AF_INET]
    for family in families:
        if address := own_address(family):
            shown = f"[{address}]" if family is socket.AF_INET6 else address
            return f"http://{shown}:{port}", " (and every other address of this machine)"
    loopback = f"[{_LOOPBACK[families[0]]}]" if host == "::" else _LOOPBACK[families[0]]
    return (
        f"http://{loopback}:{port}",
        " (no other address was found: this machine seems to be on no network)",
    )


def own_address(family: socket.AddressFamily) -> str | None:
    """Return this machine's address on its network; None if it has none that others can use."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((_ELSEWHERE[family], 9))  # a datagram's socket: nothing is sent
        if _is_usable(address := probe.getsockname()[0]):
            return str(address)
    with suppress(OSError):  # on a network without a way out of it
        for *_, found in socket.getaddrinfo(socket.gethostname(), None, family, socket.SOCK_DGRAM):
            if _is_usable(str(found[0])):
                return str(found[0])
    return None


def _is_usable(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # one with a zone, which is of a single link
        return False
    return not (parsed.is_loopback or parsed.is_unspecified or parsed.is_link_local)


RECOMMENDED_MODEL = "mlx-community/gpt-oss-20b-MXFP4-Q8"
# On a Mac, Docker's virtual machine connects from the Mac itself, so loopback can be reached. On Linux it cannot.
HINT_ON_A_MAC = " (if the container cannot reach it, start with --host 0.0.0.0 --api-key KEY)"
HINT_ELSEWHERE = " (start with --host 0.0.0.0 --api-key KEY so that containers can reach it)"

_QUESTION = "What is the capital of France?"
_EXAMPLES: dict[ModelType, tuple[str, str]] = {
    "llm": ("/v1/chat/completions", f'{{"messages": [{{"role": "user", "content": "{_QUESTION}"}}]}}'),
    "embedding": ("/v1/embeddings", f'{{"input": "{_QUESTION}"}}'),
    "rerank": ("/v1/rerank", f'{{"query": "{_QUESTION}", "documents": ["Paris.", "Rome."]}}'),
}
# 40 x 20 pixels: a red circle next to a blue square.
_PICTURE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACgAAAAUAgMAAACCKJcoAAAACVBMVEX/////AAAAAP+3l+0cAAAANklEQVR42mNgIAgY"
    "Qx0YmFatWtXAwMAaGgBjioaGwJihoaFQJiOQ6UARE8kwZCuQLEZyDgEAAI5XMHvFHwjTAAAAAElFTkSuQmCC"
)
_ABOUT_A_PICTURE = (
    f'{{"messages": [{{"role": "user", "content": [{{"type": "image_url", "image_url": {{"url": "{_PICTURE}"}}}}, '
    '{"type": "text", "text": "What is in this picture?"}]}]}'
)
_SKILLS = {
    MODEL_NAME: "it knows a few toy skills and nothing else",
    VISION_MODEL_NAME: "it sees simple shapes and numbers and nothing else",
    EMBEDDING_MODEL_NAME: "it finds passages by meaning, less well than a real one",
}


def start_lines(
    url: str, models: MultiModelRegistry, settings: Settings, *, demo: str | None, is_mac: bool
) -> list[str]:
    """Return the lines for a server at `url`. `demo`: its first model is the demonstration model of this name."""
    first, *others = models.statuses()
    port = url.rpartition(":")[2]
    lines = [f"Model {first.name}"]
    described = models.describe(first.name)
    address, body = _EXAMPLES[described.kind]
    if effort := described.default_effort:
        lines = [f"{lines[0]}, reasoning effort {effort} (default)"]
    if others:
        lines.append(f"  Also served: {', '.join(status.name for status in others[:20])}")
    if demo:
        lines.append(f"  This is a demonstration model, not an assistant: {_SKILLS[demo]}.")
    if demo == VISION_MODEL_NAME:
        if is_installed():
            body = _ABOUT_A_PICTURE
        else:
            body = body.replace(_QUESTION, "What can you do?")
            lines.append(
                f"  It cannot see here yet. Install what that needs and start again: {vision_command()}."
            )
    if demo:
        lines += [
            f"  Start a real one with: mlx-backend serve {RECOMMENDED_MODEL}",
            "  Talk here: mlx-backend chat · models for this machine: mlx-backend recommend · more: mlx-backend help",
        ]
    hint = ""
    has_key = settings.api_key or settings.api_keys or settings.api_key_file
    if settings.host in LOOPBACK:
        hint = HINT_ON_A_MAC if is_mac else HINT_ELSEWHERE
        if has_key:
            hint = hint.replace(" --api-key KEY", "")
    elif not has_key:
        lines.append(
            f"  Everyone who can reach this address can use it: set --api-key or ${variable_of('--api-key')}."
        )
    key = ' -H "Authorization: Bearer $KEY"' if has_key else ""
    if settings.page:
        lines.append(f"  In a browser: {url}/")
    return [
        *lines,
        f"  Dify in Docker: http://host.docker.internal:{port}/v1{hint}",
        f"  Try: curl {url}{address}{key} -H 'Content-Type: application/json' -d '{body}'",
    ]

"""The fields `routed_experts` and `routed_servers` of answers, for return_routed_experts."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.core.request import TokenRoute
from moesaic.server.responses import ChatChoice, ChatChunkChoice, CompletionChoice


def set_routes(choice: ChatChoice | ChatChunkChoice | CompletionChoice, routes: Sequence[TokenRoute]) -> None:
    """Write the routes of a choice's tokens, one entry per token."""
    choice.routed_experts = [route.experts for route in routes]
    choice.routed_servers = [route.servers for route in routes]

"""Clients of any OpenAI-compatible server. They need no token counts of it."""

from __future__ import annotations

import http.client
import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 3600.0
"""Seconds without any data after which a request fails."""


@dataclass(frozen=True)
class Answer:
    """What a client saw of one request. Times are in seconds."""

    first: float
    """Until the first token."""
    last: float
    """Until the last one."""
    tokens: int


def ask(url: str, model: str, prompt: str, tokens: int) -> Answer:
    """Stream one greedy completion of at most so many tokens.

    An answer that ends because of its length has all of them. Of others the parts of the stream are counted.
    Raises OSError or http.client.HTTPException for a request that fails.
    """
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE)
    began = time.monotonic()
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"status {response.status}: {response.read(200).decode(errors='replace')}")
        times, reason = [], None
        for line in response:
            choices = _choices(line)
            if choices:
                times.append(time.monotonic() - began)
                reason = choices[0].get("finish_reason") or reason
    finally:
        connection.close()
    if not times or reason is None:
        raise OSError("the stream ended before the answer did")
    return Answer(times[0], times[-1], tokens if reason == "length" else len(times))


def _choices(line: bytes) -> list[dict[str, Any]]:
    text = line.decode().strip()
    if not text.startswith("data: {"):
        return []
    said = json.loads(text.removeprefix("data: "))
    if "error" in said:
        raise OSError(str(said["error"]))
    found: list[dict[str, Any]] = said["choices"]
    return found


def load(url: str, model: str, prompts: Sequence[str], tokens: int, clients: int) -> dict[str, Any]:
    """Ask all prompts with so many clients at once, after one request that is not measured.

    Returns generated tokens/s, and medians in ms: until the first token, and until the last one. A server may
    send several tokens in one part, so times between parts say little.
    """
    ask(url, model, f"warm {prompts[0]}", min(tokens, 2))
    began = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(lambda prompt: ask(url, model, prompt, tokens), prompts))
    generated, seconds = sum(one.tokens for one in answers), time.monotonic() - began
    return {
        "tokens": generated,
        "throughput": generated / seconds,
        "ttft": 1000 * statistics.median(one.first for one in answers),
        "answer": 1000 * statistics.median(one.last for one in answers),
    }

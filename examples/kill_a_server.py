"""Kill an expert server while an answer streams: the answer stays the same."""

import json
import os
import signal
import subprocess
import sys

import httpx

# The answer goes on after its end, so that there is time to kill.
BODY = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 256, "ignore_eos": True, "stream": True}
BODY |= {"seed": 1}


def stream(client):
    """The pieces of the answer, as they come."""
    with client.stream("POST", "/v1/completions", json=BODY) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


command = [sys.executable, "-m", "moesaic", "serve", "demo", "--port", "0", "--json", "--disable-log-stats"]
command += ["--expert-servers", "2", "--min-replicas", "2"]  # every expert is on both servers
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    try:
        url = json.loads(server.stdout.readline())["url"]
        client = httpx.Client(base_url=url, timeout=60, trust_env=False)
        undisturbed = "".join(stream(client))

        status = client.get("/v1/fault_tolerance/status").raise_for_status().json()
        victim = next(one for one in status["processes"] if one["role"] == "expert server")
        disturbed = ""
        for count, piece in enumerate(stream(client)):
            if count == 8:
                os.kill(victim["pid"], signal.SIGKILL)
                print(f"[killed {victim['name']}]", end="", flush=True)
            disturbed += piece
            print(piece, end="", flush=True)
        print(f"\nthe same answer as without the kill: {disturbed == undisturbed}")
    finally:
        server.terminate()

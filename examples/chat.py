"""Chat with a model: a line is a question, and the answer appears piece by piece. Ctrl-D ends the chat."""

import json
import subprocess
import sys

import httpx

command = [sys.executable, "-m", "moesaic", "serve", "demo", "--port", "0", "--json", "--disable-log-stats"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    try:
        url = json.loads(server.stdout.readline())["url"]
        client = httpx.Client(base_url=url, timeout=60, trust_env=False)
        messages = []
        for question in sys.stdin:
            messages.append({"role": "user", "content": question.strip()})
            body = {"model": "demo", "messages": messages, "max_tokens": 64, "temperature": 0, "stream": True}
            answer = ""
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        piece = json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content")
                        answer += piece or ""
                        print(piece or "", end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": answer})
    finally:
        server.terminate()

"""Record which experts tokens choose, place the experts by it, and serve with that placement."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx

moesaic = [sys.executable, "-m", "moesaic"]
folder = Path(tempfile.mkdtemp())
maths, code = folder / "maths.jsonl", folder / "code.jsonl"
with maths.open("w") as file:
    for count in range(2, 14):
        print(json.dumps({"prompt": f"Tom has {count} apples and buys {count + 3} more."}), file=file)
with code.open("w") as file:
    for name in ("add", "largest", "reverse", "count", "read", "write", "split", "join"):
        print(json.dumps({"prompt": f"def {name}(values):\n    result = []\n"}), file=file)

profile, placement = folder / "profile.npz", folder / "placement.json"
prompts = ["--prompts", maths, "--prompts", code]
subprocess.run([*moesaic, "profile", "demo", *prompts, "--output-file", profile], check=True)
place = ["place", profile, "--ranks", "2", "--solver", "sem-moe", "--output-file", placement]
subprocess.run([*moesaic, *place], check=True)

serve = ["serve", "demo", "--port", "0", "--json", "--data-parallel-size", "2", "--enable-expert-parallel"]
serve += ["--placement", placement]
with subprocess.Popen([*moesaic, *serve], stdout=subprocess.PIPE, text=True) as server:
    try:
        url = json.loads(server.stdout.readline())["url"]
        client = httpx.Client(base_url=url, timeout=60, trust_env=False)
        asked = [
            {"role": "user", "content": "Tom has 5 apples and buys 4 more. How many apples does he have?"}
        ]
        body = {"model": "demo", "messages": asked, "max_tokens": 48, "temperature": 0}
        answer = client.post("/v1/chat/completions", json=body).raise_for_status().json()
        print(f"answer: {answer['choices'][0]['message']['content']!r}")
        status = client.get("/v1/fault_tolerance/status").raise_for_status().json()
        for process in status["processes"]:
            if process["role"] == "expert server":
                print(f"{process['name']} holds, of layer 0, experts {process['held']['0']}")
    finally:
        server.terminate()

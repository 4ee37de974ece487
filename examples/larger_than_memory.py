"""Answer with a model that is larger than the memory it may take. The text is that of the model in memory."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
questions = folder / "questions.jsonl"
with questions.open("w") as file:
    for number in range(3, 7):
        asked = f"Tom has {number} apples and buys 4 more. How many apples does he have?"
        body = {"model": "demo", "messages": [{"role": "user", "content": asked}]}
        body |= {"max_tokens": 48, "temperature": 0}
        line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        print(json.dumps(line), file=file)


def answered(name, *flags):
    """The answers by custom_id, as `moesaic run-batch` gives them with these flags."""
    output = folder / name
    command = [sys.executable, "-m", "moesaic", "run-batch", "--model", "demo", "-i", questions, "-o", output]
    subprocess.run([*command, *flags], check=True)
    lines = [json.loads(text) for text in output.read_text().splitlines()]
    return {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in lines}


# The demo has 13 MiB of weights. Experts that do not fit into 8 MiB are read from the disk, again and again.
small = answered("small.jsonl", "--fast-memory", "8MiB", "--max-model-len", "96")
whole = answered("whole.jsonl", "--max-model-len", "96")
for number, text in sorted(small.items()):
    print(number, repr(text))
print(f"the same answers as with the model in memory: {small == whole}")

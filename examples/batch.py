"""Answer a file of questions. A batch that is killed goes on where it stopped when it is started again."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
questions, answers = folder / "questions.jsonl", folder / "answers.jsonl"

with questions.open("w") as file:
    for number in range(8):
        body = {"model": "demo", "prompt": f"{number} + {number} =", "max_tokens": 8, "temperature": 0}
        line = {"custom_id": f"sum-{number}", "method": "POST", "url": "/v1/completions", "body": body}
        print(json.dumps(line), file=file)

command = [sys.executable, "-m", "moesaic", "run-batch", "--model", "demo", "-i", questions, "-o", answers]
subprocess.run(command, check=True)

for text in answers.read_text().splitlines():
    line = json.loads(text)
    print(line["custom_id"], repr(line["response"]["body"]["choices"][0]["text"]))
print(f"questions and answers: {folder}")

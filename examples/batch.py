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
        messages = [{"role": "user", "content": f"What is {number} + {number}?"}]
        body = {"model": "demo", "messages": messages, "max_tokens": 24, "temperature": 0}
        line = {"custom_id": f"sum-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        print(json.dumps(line), file=file)

command = [sys.executable, "-m", "moesaic", "run-batch", "--model", "demo", "-i", questions, "-o", answers]
subprocess.run(command, check=True)

for text in answers.read_text().splitlines():
    line = json.loads(text)
    print(line["custom_id"], repr(line["response"]["body"]["choices"][0]["message"]["content"]))
print(f"questions and answers: {folder}")

"""The pages show what the demo answers, and scripts/demo_texts.py finds and replaces these answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scripts import demo_texts
from scripts.demo_texts import ADDRESS, MARK, Question

PAGE = f"""Text.

```python
print(1 + 1)
```

{MARK}
```text
3
```

```python
print("nobody looks at this")
```

```console
echo {ADDRESS} | tr a-z A-Z
```

{MARK}
```text
OLD

LINES
```
"""


def test_questions_are_blocks_with_an_answer_below() -> None:
    assert demo_texts.list_questions(PAGE) == [
        Question("python", "print(1 + 1)\n", "3\n"),
        Question("console", f"echo {ADDRESS} | tr a-z A-Z\n", "OLD\n\nLINES\n"),
    ]
    with pytest.raises(SystemExit, match="got 3 marks; allowed: 2"):
        demo_texts.list_questions(f"{PAGE}Words between.\n\n{MARK}\n```text\n3\n```\n")


def test_answers_are_replaced_and_nothing_else() -> None:
    text = demo_texts.replace_answers(PAGE, "http://x:1")
    assert text == PAGE.replace("\n3\n", "\n2\n").replace("OLD\n\nLINES", "HTTP://X:1")
    with pytest.raises(SystemExit, match="ended with 3"):
        demo_texts.ask(Question("console", "exit 3\n", ""), "")


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        ({"choices": [{"text": " 2"}]}, [" 2"]),
        ({"choices": [{"message": {"content": "Hi", "tool_calls": None}}]}, ["Hi"]),
        (
            {
                "choices": [
                    {
                        "message": {
                            "content": None,
                            "tool_calls": [{"function": {"name": "f", "arguments": '{"a": "é"}'}}],
                        }
                    }
                ]
            },
            ['a call of f with {"a": "é"}'],
        ),
        (
            {"content": [{"type": "text", "text": "I look."}, {"name": "f", "input": {"a": 1}}]},
            ["I look.", 'a call of f with {"a": 1}'],
        ),
        (
            {"output": [{"name": "f", "arguments": '{"a": 1}'}, {"content": [{"text": "Done."}]}]},
            ['a call of f with {"a": 1}', "Done."],
        ),
    ],
)
def test_answers_of_every_api_are_told(answer: object, parts: list[str]) -> None:
    assert list(demo_texts.list_parts(answer)) == parts


@pytest.mark.slow
def test_the_pages_show_what_the_demo_answers() -> None:
    command = [sys.executable, "-m", "scripts.demo_texts", "--check"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

"""What structured output costs, and which JSON Schemas it takes.

    python benchmarks/make_checkpoint.py qwen3-moe-0.96b-150k /tmp/qwen150k
    python benchmarks/structured.py speed /tmp/qwen150k --vocabulary 151643
    python benchmarks/structured.py schemas demo schemas/
    python benchmarks/structured.py suite JSON-Schema-Test-Suite/tests/draft4

`speed` runs the same requests in turn without and with a schema whose answers do not end early. It prints the
median of the rounds' ratios. --vocabulary first trains a tokenizer of so many tokens on the installed Python
packages, for a copy of the checkpoint whose weights are links. Masks of a real vocabulary take longer than
those of single bytes.

`schemas` compiles every schema of a folder and lets the model answer each one. Refused schemas are counted by
reason. Answers that ended by themselves are checked by jsonschema-rs, another library than the one that made
the grammar.

`suite` compiles the schemas of JSON Schema's own test suite. It counts instances that the standard accepts
and the grammar does not (missed), and the reverse (wrong).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from constrained import schemas, speed, suite


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    questions = parser.add_subparsers(dest="question", required=True)
    one = questions.add_parser("speed")
    one.add_argument("model")
    one.add_argument("--vocabulary", type=int, help="tokens of a tokenizer that is trained first")
    one.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    one.add_argument("--new", type=int, default=64, help="tokens of an answer")
    one.add_argument("--rounds", type=int, default=5)
    two = questions.add_parser("schemas")
    two.add_argument("model")
    two.add_argument("folder", type=Path)
    two.add_argument("--budget", type=int, default=1024, help="tokens of an answer")
    two.add_argument("--most", type=int, help="schemas")
    two.add_argument("--closed", action="store_true", help="objects have no properties beside those named")
    two.add_argument("--strings", type=int, help="characters of a string that its schema does not bound")
    three = questions.add_parser("suite")
    three.add_argument("folder", type=Path)
    options = parser.parse_args()
    match options.question:
        case "speed":
            report = speed.run(
                options.model, options.requests, options.new, options.rounds, options.vocabulary
            )
        case "schemas":
            report = schemas.run(
                options.model, options.folder, options.budget, options.most, options.closed, options.strings
            )
        case _:
            report = suite.run(options.folder)
    if options.json:
        print(json.dumps(report.asdict()))
    else:
        report.show()


if __name__ == "__main__":
    main()

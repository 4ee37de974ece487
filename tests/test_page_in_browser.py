"""The page in a real browser, in front of a real cluster: typed in, stopped, killed, and looked at."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import httpx
import pytest

from tests.support import browser, endless_demo
from tests.support.browser import Page
from tests.test_serve import Server, start

pytestmark = pytest.mark.skipif(browser.program() is None, reason="there is no Chromium on this machine")
KEY = "s3cret"
SHAPE = ("--attention-workers", "1", "--expert-servers", "2", "--min-replicas", "2")
READY = "document.querySelector('.model').textContent == 'demo'"
RUNNING = "document.querySelector('[aria-busy=true]')"
PROMPT = "def main(argv):"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It has the demo under its name, whose answers do not end by themselves."""
    model = endless_demo.write(tmp_path_factory.mktemp("endless"))
    running = start(*SHAPE, "--admin-key", KEY, "--served-model-name", "demo", model=str(model))
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 0
    assert running.process.stdout is not None
    running.process.stdout.close()


@pytest.fixture
def page(server: Server) -> Iterator[Page]:
    """A new browser with the admin's link open."""
    with browser.browser() as opened:
        opened.size(1280, 800)
        opened.open(f"{server.url}/#key={KEY}")
        opened.until("document.readyState == 'complete' && document.querySelector('.model')")
        opened.until(READY)
        yield opened
        assert opened.errors == []


def ask(page: Page, text: str) -> None:
    page.run("document.getElementById('message').focus()")
    page.type(text)
    page.press("Enter")


def settings(page: Page, **values: str) -> None:
    """Types these settings. Each in one go: between two scripts the page may draw the field again."""
    for name, value in values.items():
        page.run(
            f"(() => {{ const field = document.getElementById('{name}'); field.value = '{value}';"
            " field.dispatchEvent(new Event('input', { bubbles: true })); })()"
        )


def answers(page: Page) -> list[str]:
    found: list[str] = page.run(
        "[...document.querySelectorAll('.assistant .text')].map((one) => one.innerText)"
    )
    return found


@pytest.mark.slow
def test_an_answer_goes_on_when_its_server_is_killed(page: Page, server: Server) -> None:
    """Greedy: the answer equals the API's own, and its tokens have the routes that the API tells."""
    settings(page, temperature="0", max_tokens="200")
    page.run("document.querySelector('.tab:last-child').click()")
    page.click(".colours button:last-child")
    page.until("document.querySelectorAll('.kill').length == 3")
    ask(page, PROMPT)
    page.until("document.querySelectorAll('.token').length > 5")
    assert page.run("Boolean(" + RUNNING + ")")
    for _ in range(2):  # the second press is the confirmation
        page.click(".kill[aria-label$='expert server 1']")
        page.until("document.querySelector('.kill.armed, .card:last-child .kill:disabled')")
    page.until("document.querySelector('.card:last-child dl').innerText.includes('deaths\\n1')")
    page.until(f"!{RUNNING}")
    page.until("document.querySelector('.log').innerText.includes('killed by signal 9')")
    page.until(
        "document.querySelectorAll('.card .stage').length == 3 && "
        "[...document.querySelectorAll('.stage')].every((one) => one.innerText == 'serving')"
    )
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 200}
    reply = httpx.post(
        f"{server.url}/v1/chat/completions", json={**body, "return_routed_experts": True}, timeout=100
    ).json()["choices"][0]
    shown = page.run("[...document.querySelectorAll('.token')].map((one) => one.textContent).join('')")
    assert shown == reply["message"]["content"]
    assert page.run("location.hash") == "" and KEY not in page.run("JSON.stringify(localStorage)")


@pytest.mark.full
def test_keys_alone_are_enough(page: Page) -> None:
    """From the skip link to a second answer, and Escape stops it: greedy, it has all 400 tokens."""
    settings(page, max_tokens="400", temperature="0")
    page.press("Tab")
    assert page.run("document.activeElement.className") == "skip"
    for _ in range(40):
        page.press("Tab")
        if page.run("document.activeElement.id") == "message":
            break
    page.type("Tell me")
    page.press("Enter", shift=True)
    page.type("all.")
    assert page.run("document.getElementById('message').value") == "Tell me\nall."
    page.press("Enter")
    page.until(f"{RUNNING} && document.querySelector('.assistant .text').innerText.length > 3")
    page.press("Escape")
    page.until(f"!{RUNNING}")
    assert "stopped" in page.run("document.querySelector('.assistant footer').innerText")
    for _ in range(60):
        page.press("Tab")
        if page.run("document.activeElement.innerText") == "Another answer":
            break
    page.press("Enter")
    page.until(RUNNING)
    page.until(f"!{RUNNING}")
    assert len(answers(page)) == 1


@pytest.mark.full
def test_an_answer_without_colours_says_why(page: Page) -> None:
    settings(page, max_tokens="20", temperature="0")
    ask(page, PROMPT)
    page.until(f"!{RUNNING} && document.querySelector('.markdown')?.innerText.length > 3")
    assert page.run("document.querySelector('.text .hint')") is None
    page.click(".colours button:nth-child(2)")
    page.until("document.querySelector('.text .hint')?.innerText.startsWith('Colours were off while')")
    page.click(".assistant .link:last-child")  # another answer
    page.until(f"!{RUNNING} && document.querySelector('.token')")
    assert page.run("document.querySelector('.text .hint')") is None


@pytest.mark.full
def test_a_token_is_chosen_by_keys_and_told(page: Page) -> None:
    page.click(".colours button:nth-child(2)")
    settings(page, max_tokens="20", temperature="0")
    ask(page, PROMPT)
    page.until(f"!{RUNNING} && document.querySelector('.tokens')")
    page.run("document.querySelector('.tokens').focus()")
    page.press("ArrowRight")
    page.press("ArrowRight")
    page.until(
        "/layer 0: expert \\d+ on server \\d+, expert/.test(document.querySelector('.route').innerText)"
    )
    assert page.run("document.querySelector('.token.current').dataset.at") == "1"


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280, 1920])
def test_nothing_is_cut_or_too_pale(scheme: str, width: int, page: Page) -> None:
    page.size(width, 800)
    page.scheme(scheme)
    settings(page, max_tokens="60", temperature="0")
    page.click(".colours button:last-child")
    ask(page, "Natalia has 48 clips and sells half of them. How many are left?")
    page.until(f"!{RUNNING} && document.querySelector('.tokens')")
    for tab in range(page.run("document.querySelectorAll('.tab').length")):
        page.run(f"document.querySelectorAll('.tab')[{tab}].click()")
        page.until("document.querySelector('.talk, .cards')")
        assert page.run("document.documentElement.scrollWidth") <= width
        assert page.run(CUT) == []
        assert page.run(PALE) == []
        back = page.run("getComputedStyle(document.documentElement).backgroundColor")
        assert (sum(map(int, back[4:-1].split(", "))) < 200) == (scheme == "dark")


CUT = """[...document.querySelectorAll('header *, .panel *, .figure *, .card *, .composer *, .colours *')]
  .filter((one) => one.offsetParent && getComputedStyle(one).textOverflow != 'ellipsis')
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1
    || one.scrollWidth > one.clientWidth + 2)
  .filter((one) => one.clientWidth && !one.closest('.hidden, .skip'))
  .map((one) => one.outerHTML.slice(0, 120))"""
"""Elements that reach over the window or whose text does not fit."""
PALE = """(() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const paint = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (text) => {
    paint.clearRect(0, 0, 1, 1); paint.fillStyle = text; paint.fillRect(0, 0, 1, 1);
    return [...paint.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((x) => x / 255)
    .map((x) => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
    .reduce((sum, x, at) => sum + x * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (one) => {
    const layers = [];
    for (; one; one = one.parentElement) layers.push(rgb(getComputedStyle(one).backgroundColor));
    return layers.reverse().reduce((back, [r, g, b, a]) =>
      [r, g, b].map((x, at) => x * a / 255 + back[at] * (1 - a / 255)), [255, 255, 255]);
  };
  const found = [];
  for (const one of document.querySelectorAll('#app *')) {
    const text = [...one.childNodes].some((node) => node.nodeType == 3 && node.textContent.trim());
    const left = ':disabled, .skip, .hidden, dialog:not([open]), option';
    if (!text || !one.offsetParent || one.closest(left)) continue;
    const [a, b] = [light(rgb(getComputedStyle(one).color)), light(behind(one))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.push(contrast.toFixed(2) + ' ' + one.outerHTML.slice(0, 90));
  }
  return found;
})()"""
"""Texts whose contrast is below 4.5 (WCAG AA)."""


@pytest.mark.full
def test_everything_has_a_name_for_a_screen_reader(page: Page) -> None:
    page.run("document.querySelector('.tab:last-child').click()")
    page.until("document.querySelector('.cards')")
    nameless = [
        (role, name)
        for role, name in page.names()
        if role in ("button", "textbox", "combobox", "meter", "image", "navigation", "region") and not name
    ]
    assert nameless == []
    names = page.names()
    assert ("button", "Send") in names and ("button", "Kill expert server 0") in names
    assert ("log", "Messages") in names and ("meter", "Busy") in names
    page.run("document.querySelector('[aria-label=Settings]').click()")
    page.until("document.querySelector('dialog[open]')")
    names = page.names()
    assert ("dialog", "Settings") in names and ("spinbutton", "Temperature") in names


@pytest.mark.full
def test_no_markup_of_a_model_runs(page: Page) -> None:
    """The text is planted as an earlier answer."""
    text = "<img src=x onerror=window.hit=1><script>window.hit=1</script> [a](javascript:window.hit=1) **b**"
    kept = {
        "chat": "a",
        "chats": [{"id": "a", "title": "t", "messages": [{"role": "assistant", "content": text}]}],
    }
    page.run(f"localStorage.setItem('moesaic', {json.dumps(json.dumps(kept))})")
    page.run("location.search = '?again'")
    page.until("document.querySelector('.markdown strong')")
    assert page.run("window.hit") is None
    assert page.run("document.querySelectorAll('.markdown img, .markdown script, .markdown a').length") == 0


@pytest.mark.full
def test_settings_and_chats_outlive_the_page_and_a_wrong_schema_is_told(page: Page) -> None:
    settings(page, max_tokens="7", schema="{oops")
    page.until("document.getElementById('schema-hint').innerText.startsWith('This is not JSON')")
    ask(page, "Hello")
    told = "document.querySelector('.assistant .error')"
    page.until(f"{told}?.innerText.startsWith('The JSON schema in the settings: This is not JSON')")
    settings(page, schema='{"type": "object", "properties": {}, "additionalProperties": false}')
    page.click(".assistant .link")  # try again
    page.until(f"document.querySelector('.assistant') && !{told} && !{RUNNING}")
    assert answers(page)[0].strip().startswith("{")
    page.run("location.search = '?again'")
    page.until("location.search && document.readyState == 'complete' && document.querySelector('.assistant')")
    assert page.run("document.getElementById('max_tokens').value") == "7"
    page.run("document.querySelectorAll('.tab')[1].click()")
    page.until("document.querySelector('.kill')")


@pytest.mark.full
def test_scaling_adds_a_process_and_takes_it_away(page: Page) -> None:
    page.run("document.querySelectorAll('.tab')[1].click()")
    page.click("[aria-label='One more of the expert servers']")
    page.until("document.querySelectorAll('.card').length == 4")
    page.until("!document.querySelector(\"[aria-label='One less of the expert servers']\").disabled")
    page.click("[aria-label='One less of the expert servers']")
    page.until("document.querySelectorAll('.card').length == 3")
    page.until("document.querySelector('.log').innerText.includes('left')")

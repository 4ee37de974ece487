"""Templates that try to stop the process that renders them, and what becomes of that process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import gone

import moesaic
from moesaic.core.errors import RendererError, RequestError, TemplateError
from moesaic.text.templates.pool import MAX_RENDERINGS, Renderers
from moesaic.text.templates.renderer import Limits

pytestmark = pytest.mark.slow

LIMITS = Limits(seconds=60.0, memory=48 * 2**20, characters=2**20)
QUICK = Limits(seconds=0.1)
PATIENT = Limits(seconds=100.0)
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PLAIN = "{{ messages[0].content }}"


def said(text: str = "hi") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@pytest.fixture
def start() -> Iterator[Callable[..., Renderers]]:
    """Starts renderers that end with the test."""
    started: list[Renderers] = []

    def starting(source: str, limits: Limits = PATIENT) -> Renderers:
        started.append(Renderers(source, limits))
        return started[-1]

    yield starting
    for one in started:
        one.close()


HOSTILE = {
    "loops": (ENDLESS, "ran for more than 0.1 seconds and was stopped"),
    "a power": ("{{ (messages|length + 8) ** (9 ** 9) }}", "ran for more than 0.1 seconds"),
    "a long text": ("{{ 'a' * 20000000000 }}", "needed more than 48 MiB of memory"),
    "a long list": ("{{ messages * 1000000000 }}", "needed more than 48 MiB of memory"),
    "indentation": ("{{ messages|tojson(indent=2000000000) }}", "needed more than 48 MiB of memory"),
    "a wide number": ("{{ '%2000000000d' % messages|length }}", "needed more than 48 MiB of memory"),
    "doubling": (
        "{% set n = namespace(t='aaaaaaaa') %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}",
        "needed more than 48 MiB of memory",
    ),
    "pieces": (
        ENDLESS.replace("{% endfor %}", "xxxxxxxxxxxx{% endfor %}", 1),
        "more than 1048576 characters",
    ),
    "one piece": ("{{ 'a' * 2000000 }}", "made more than 1048576 characters of text"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it is nested too deeply"),
    "an endless error": ("{{ raise_exception('a\\n' * 1000000) }}", "^(a ){249}a$"),
}


TRIED = ("loops", "a long text", "pieces", "one piece", "recursion")
"""One of each limit, and an error; the others are slow."""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        pytest.param(*each, id=name, marks=() if name in TRIED else pytest.mark.slow)
        for name, each in HOSTILE.items()
    ],
)
def test_a_hostile_template_fails_with_one_line(
    start: Callable[..., Renderers], source: str, says: str
) -> None:
    with pytest.raises(TemplateError, match=says) as caught:
        start(source, QUICK if "seconds" in says else LIMITS).render(said())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("depth", [3_000, 100_000])
def test_a_hostile_template_is_refused_before_it_is_rendered(depth: int) -> None:
    with pytest.raises(TemplateError, match="^it is nested too deeply$"):
        Renderers("{{ " + "(" * depth + "1" + ")" * depth + " }}", PATIENT)


def test_compiling_has_the_limits_too() -> None:
    with pytest.raises(TemplateError, match="ran for more than 0.01 seconds"):
        Renderers("{% if messages %}x{{ messages }}{% endif %}" * 20_000, Limits(seconds=0.01))
    with pytest.raises(TemplateError, match="needed more than 1 MiB"):
        Renderers("{{ messages }}" * 2_000, Limits(memory=2**20))


@pytest.mark.slow
def test_a_failure_does_not_touch_the_next_conversation(start: Callable[..., Renderers]) -> None:
    """Another process is ready when one is ended, since it was started with the first conversation."""
    pool = start(
        "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}" + PLAIN, Limits(seconds=1.0)
    )
    assert pool.render(said()) == "hi"
    until(lambda: len(pool._warm) == 2)
    before = {renderer.pid for renderer in pool._warm}
    for _ in range(3):
        until(lambda: len(pool._warm) == 2)
        with pytest.raises(TemplateError, match="ran for more"):
            pool.render(said("loop"))
        assert pool._warm, "one is ready at once"
        assert pool.render(said("again")) == "again"
    until(lambda: len(pool._warm) == 2)
    assert any(gone(pid) for pid in before)


def test_a_large_request_may_take_more_memory(start: Callable[..., Renderers]) -> None:
    text = "é\U0001f600" * 500_000
    assert start(PLAIN + "{{ messages[0].content|trim }}", LIMITS).render(said(text), 2**22) == text + text


def test_texts_arrive_as_they_are(start: Callable[..., Renderers]) -> None:
    pool = start("{{ messages[0].content }}{{ messages[0].n }}")
    variables = {"messages": [{"content": "\ud800\0\U0010ffff", "n": (1, 2.5, None, True)}]}
    assert pool.render(variables) == "\ud800\0\U0010ffff[1, 2.5, None, True]"


def test_a_variable_that_is_not_json_is_named(start: Callable[..., Renderers]) -> None:
    pool = start(PLAIN)
    with pytest.raises(RequestError, match="^messages: .*type set .*; allowed: text, numbers") as caught:
        pool.render({"messages": [{"content": {1, 2}}]})
    assert caught.value.field == "messages"


@pytest.mark.slow
def test_several_conversations_are_rendered_at_once(start: Callable[..., Renderers]) -> None:
    pool = start(PLAIN)
    with ThreadPoolExecutor(16) as threads:
        texts = list(threads.map(lambda number: pool.render(said(str(number))), range(300)))
    assert texts == list(map(str, range(300)))
    until(lambda: not pool._starting)
    assert 2 <= len(pool._warm) <= MAX_RENDERINGS + 1


def test_conversations_that_come_together_get_a_process_each(start: Callable[..., Renderers]) -> None:
    """None of them is given back, so each needs a process of its own."""
    pool = start("x")
    with ThreadPoolExecutor(MAX_RENDERINGS) as threads:
        taken = [each.result(60) for each in [threads.submit(pool._take) for _ in range(MAX_RENDERINGS)]]
    assert len(set(map(id, taken))) == MAX_RENDERINGS


def busy(pool: Renderers) -> list[int]:
    """Ids of the processes that render."""
    return [renderer.pid for renderer in pool._alive - set(pool._warm) if _running(renderer.pid)]


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "R"
    except (FileNotFoundError, ProcessLookupError):
        return False  # it has ended


def rendering(pool: Renderers, others: Iterable[int] = ()) -> int:
    """Id of the process that renders, besides `others`, once there is one."""
    deadline = time.monotonic() + 60.0
    while not (found := set(busy(pool)).difference(others)):
        assert time.monotonic() < deadline, "none renders"
        time.sleep(0.005)
    [pid] = found
    return pid


@pytest.mark.slow
def test_a_conversation_whose_process_is_killed_is_rendered_by_another(
    start: Callable[..., Renderers],
) -> None:
    slow = "{% for i in range(99999) %}{% for j in range(40) %}{% endfor %}{% endfor %}" + PLAIN
    pool, texts = start(slow), list[str]()
    thread = threading.Thread(target=lambda: texts.append(pool.render(said())))
    thread.start()
    killed = rendering(pool)
    os.kill(killed, signal.SIGKILL)
    thread.join(60)
    assert texts == ["hi"] and gone(killed)


def test_a_conversation_whose_process_died_before_is_rendered_by_another(
    start: Callable[..., Renderers],
) -> None:
    pool = start(PLAIN)
    os.kill(pool._warm[0].pid, signal.SIGKILL)
    assert pool.render(said()) == "hi"


@pytest.mark.slow
def test_a_conversation_that_loses_two_processes_is_refused(start: Callable[..., Renderers]) -> None:
    pool, errors = start(ENDLESS), list[TemplateError]()

    def render() -> None:
        with pytest.raises(TemplateError) as caught:
            pool.render(said())
        errors.append(caught.value)

    thread = threading.Thread(target=render)
    thread.start()
    killed: set[int] = set()
    while len(killed) < 2:
        pid = rendering(pool, killed)
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    thread.join(60)
    assert "ended 2 processes; the last one: process" in str(errors[0])
    assert "was killed by signal 9" in str(errors[0])


def test_signals_for_the_whole_service_do_not_end_a_process(start: Callable[..., Renderers]) -> None:
    pool = start(PLAIN)
    pid = pool._warm[0].pid
    for signum in (signal.SIGTERM, signal.SIGINT):
        os.kill(pid, signum)
    assert pool.render(said()) == "hi"
    assert pid in {renderer.pid for renderer in pool._warm}


def test_a_process_inherits_neither_sockets_nor_secrets(
    start: Callable[..., Renderers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESAIC_API_KEY", "secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "w"):
        os.set_inheritable(reading, True)
        pid = start(PLAIN)._warm[0].pid
        # The process may just now read the size of its memory from a file.
        until(lambda: sorted(os.listdir(f"/proc/{pid}/fd")) == ["0", "1", "2"])  # noqa: PTH208, numbers
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"TZ=Asia/Tokyo" in environment and b"secret" not in environment and b"HOME" not in environment


def test_a_process_is_small(start: Callable[..., Renderers]) -> None:
    pool = start(PLAIN)
    pool.render(said())
    pages = [Path(f"/proc/{renderer.pid}/statm").read_text().split()[1] for renderer in pool._warm]
    assert max(map(int, pages)) * os.sysconf("SC_PAGESIZE") < 40 * 2**20


PARENT = """
import sys, threading
from moesaic.text.templates.pool import Renderers
from moesaic.text.templates.renderer import Limits
pool = Renderers(sys.argv[1], Limits(seconds=1000))
pool.render({}) if sys.argv[2] == "idle" else threading.Thread(target=pool.render, args=({},)).start()
while not (pool._alive - set(pool._warm) if sys.argv[2] == "busy" else len(pool._warm) > 1): pass
print(*(one.pid for one in pool._alive), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("doing", ["idle", "busy"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_processes_end_with_their_parent(doing: str, signum: signal.Signals) -> None:
    source = ENDLESS if doing == "busy" else "x"
    command = [sys.executable, "-c", PARENT, source, doing]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert pids
        if doing == "busy":
            until(lambda: any(_running(pid) for pid in pids))
        parent.send_signal(signum)
        parent.wait(60)
    until(lambda: all(gone(pid) for pid in pids))


def test_a_process_in_one_long_operation_ends_with_its_parent() -> None:
    """Python handles no signal in the middle of one."""
    command = [sys.executable, "-c", PARENT, "{{ (messages|length + 9) ** (9 ** 9) }}", "busy"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        until(lambda: any(_running(pid) for pid in pids))
        parent.kill()
        parent.wait(60)
    until(lambda: all(gone(pid) for pid in pids))


def test_modules_are_found_where_the_parent_finds_them() -> None:
    """Also in the folder that it was started in, although the process leaves it."""
    root = Path(moesaic.__file__).parents[1]
    code = f"import sys; sys.path[:] = ['', *(p for p in sys.path if p not in ('', {str(root)!r}))]\n"
    code += "from moesaic.text.templates.pool import Renderers; print(Renderers('x').render({}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("x\n", "")


def test_processes_end_with_the_object() -> None:
    pool = Renderers(PLAIN)
    pids = [renderer.pid for renderer in pool._alive]
    del pool
    assert all(gone(pid) for pid in pids)


def test_a_program_that_does_not_start_is_an_error_of_its_own(
    start: Callable[..., Renderers], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = start(PLAIN)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(RendererError, match="cannot start the process that renders chat templates"):
        Renderers(PLAIN)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RendererError, match="ended with code 1 before it was ready"):
        Renderers(PLAIN)
    os.kill(pool._warm[0].pid, signal.SIGKILL)
    with pytest.raises(RendererError, match="no process can render chat templates: process"):
        pool.render(said())
    monkeypatch.undo()
    assert pool.render(said()) == "hi", "it is tried anew for each conversation"


def test_a_conversation_that_is_interrupted_does_not_answer_the_next(
    start: Callable[..., Renderers], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = start(PLAIN)
    assert pool.render(said()) == "hi"
    until(lambda: len(pool._warm) == 2)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pool._warm[-1], "_receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.render(said("first"))
    assert pool.render(said("second")) == "second"


def test_rendering_after_the_end_is_refused() -> None:
    with closing(Renderers(PLAIN)) as pool:
        pool.render(said())
    with pytest.raises(RendererError, match="have been ended"):
        pool.render(said())

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import moesaic
from moesaic.commands import cli, doctor, flag_groups, machine, suggestions, usage
from moesaic.commands.announce import capacity_line, requests_of_maximum_length, schedule_lines
from moesaic.commands.machine import Machine
from moesaic.commands.units import in_bytes, in_words
from moesaic.core.errors import ConfigError
from moesaic.core.worker_info import WorkerInfo
from moesaic.policy.scheduling.minimum_batch import MAX_THRESHOLD
from tests.support import pairs
from tests.support.processes import children

FLAGS = (
    *("--revision", "--device", "--dtype", "--max-model-len", "--threads", "--kv-cache-memory"),
    *("--kv-cache-dtype", "--block-size", "--enable-prefix-caching", "--no-enable-prefix-caching"),
    *("--max-num-seqs", "--max-num-batched-tokens", "--host", "--port", "--api-key", "--served-model-name"),
    *("--chat-template", "--max-queue", "--json", "--debug"),
)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == moesaic.__version__


INTERRUPTED = """
import sys
from moesaic.__main__ import main

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "cyclopts":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
sys.exit(main())
"""


def test_ctrl_c_while_modules_load_is_quiet() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    named = ("serve", "scale", "join", "cluster", "run-batch", "bench", "doctor")
    assert [command for command in named if f" {command} " not in shown] == []


def test_flags_come_from_the_configs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help-all"]) == 0
    shown = capsys.readouterr().out
    assert [flag for flag in FLAGS if flag not in shown] == []
    assert "--no-json" not in shown
    assert "Tokens in one KV block." in shown, "docstrings under fields are the help"


@pytest.mark.slow
def test_help_explains_the_essential_flags_and_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    assert [flag for flag in FLAGS if flag not in shown and not flag.startswith("--no-")] == []
    assert "requests computed in one step" in " ".join(shown.replace("│", "").split()), (
        "--max-num-seqs is essential"
    )
    assert "Tokens in one KV block." not in shown, "--block-size is not"
    for command in (["place"], ["bench", "serve"]):
        assert cli.main([*command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert "Essential" not in shown and "--seed" in shown, "flags without a subject stand in one list"


@pytest.mark.parametrize("command", ["serve", "run-batch", "bench throughput"])
def test_every_flag_has_one_subject(command: str) -> None:
    words = command.split()
    arguments = cli.app[words[0]][words[1]] if len(words) > 1 else cli.app[words[0]]
    found = arguments.assemble_argument_collection()
    names = {name for one in found for name in one.names[:1] if name.startswith("--")}
    subjects = [flag for flags in flag_groups.GROUPS.values() for flag in flags]
    assert (
        len(names) >= flag_groups.GROUPED_FROM
        and names <= set(subjects)
        and len(set(subjects)) == len(subjects)
    )
    assert set(flag_groups.ESSENTIAL) <= set(subjects)


QUEUE_FLAGS = ("--queue-urgency", "--queue-history", "--expert-batch-pairs", "--expert-batch-wait")


@pytest.mark.slow
def test_flags_of_queues_are_where_there_are_some(capsys: pytest.CaptureFixture[str]) -> None:
    for command, named in (("serve", True), ("run-batch", True), ("bench throughput", False)):
        assert cli.main([*command.split(), "--help-all"]) == 0
        shown = capsys.readouterr().out
        assert [flag for flag in QUEUE_FLAGS if (flag in shown) != named] == [], command


def test_batches_of_expert_servers_need_expert_servers(capsys: pytest.CaptureFixture[str]) -> None:
    line = "serve demo --port 0 --expert-batch-pairs 8 --expert-batch-wait 2"
    assert cli.main(line.split()) == 2
    said = capsys.readouterr().err
    assert "--expert-servers: got 0; allowed: at least 1 with --expert-batch-pairs" in said


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("place", ["--output-file -o"]),
        ("profile", ["--output-file -o"]),
        ("run-batch", ["--input-file -i", "--output-file -o"]),
    ],
)
def test_the_help_shows_short_flags(
    command: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert [flag for flag in flags if f"{flag} PATH" not in shown] == []
    assert "--debug -" not in shown


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve", "--model: got nothing; allowed: a value, see --help"),
        ("serve demo --block-size x", "--block-size: got 'x'; allowed: an integer"),
        ("serve demo --kv-cache-dtype fp8", "got 'fp8'; allowed: auto, float32, bfloat16, float16, int8"),
        ("serve demo --max-model-len", "--max-model-len: got nothing; allowed: an integer"),
        ("serve demo --port 99999", "--port: got 99999; allowed: 0 to 65535"),
        ("serve demo --kv-cache-memory 3x", "--kv-cache-memory: got '3x'; allowed: a positive size"),
        ("serve demo --threads 99999", "--threads: got 99999; allowed: an integer of at least 1 and at most"),
        ("serve demo --max-num-seqs 0", "--max-num-seqs: got 0; allowed: an integer of at least 1"),
        ("serve demo --api-key=", "--api-key: "),
        ("serve demo --portt 3", "--portt. Did you mean --port?"),
        ("serve demo --max-in-flight 2", "--max-in-flight. --max-in-flight is a flag of run-batch."),
        ("serve demo --log-level loud", "--log-level: got 'loud'; allowed: debug, info, warning, error"),
        ("serve demo --log-levl debug", "--log-levl. Did you mean --log-level?"),
        ("serve demo --verbose", "--verbose. Did you mean --log-level?"),
        ("serve demo --tp=2", "--tp. Did you mean --tensor-parallel-size?"),
        ("serve demo --ctx-size 5", "--ctx-size. Did you mean --max-model-len?"),
        ("bench serve --hots x", "--hots. --host is a flag of serve."),
        ("doctor --log-level x", "--log-level. --log-level is a flag of serve, join, run-batch."),
        ("run-batch -i pyproject.toml -o y other", "got 'other', which is not an argument of this command"),
        ("serve demo a=/no/where", "model: got '/no/where'; allowed: "),
        ("serve demo --port 1 --port 2", "--port specified multiple times"),
        ("serv demo", 'Did you mean "serve"?'),
        ("serve no/such/model/here", "model: got 'no/such/model/here'; allowed: "),
        ("serve demo --chat-template nowhere.jinja", "--chat-template: got 'nowhere.jinja'; allowed: a file"),
        (
            "serve demo --tool-call-parser llama",
            "--tool-call-parser: got 'llama'; allowed: auto, none, hermes",
        ),
        (
            "serve demo --reasoning-parser no",
            "--reasoning-parser: got 'no'; allowed: auto, none, deepseek_r1",
        ),
        (
            "run-batch -i x -o y --model demo --tool-call-parser l",
            "--tool-call-parser: got 'l'; allowed: auto",
        ),
        ("run-batch -o x --model demo", "--input-file: got nothing"),
        ("run-batch -i nowhere -o x --model demo", "--input-file: got 'nowhere'; allowed: an existing"),
        ("serve demo --autoscale 1:2", "--expert-servers: got 0; allowed: at least 1 with --autoscale"),
        ("serve demo --expert-servers 1 --autoscale 3", "--autoscale: got '3'; allowed: MIN:MAX"),
        ("serve demo --rebalance-interval -1", "--rebalance-interval: got -1.0; allowed: seconds, 0 or more"),
        ("serve demo --expert-servers 1 --cluster-address x", "give both or none"),
        ("scale", "--expert-servers, --attention-workers, --prefill-workers or --cancel: give at least one"),
        ("scale --cancel --expert-servers 2", "--expert-servers: got 2; allowed: no number with --cancel"),
        ("serve demo --expert-servers 99", "--expert-servers: got 99; allowed: at most 24: a layer has 24"),
        ("serve demo --attention-workers 9999", "--attention-workers: got 9999; allowed: at most "),
        (
            "serve demo --expert-servers 2 --autoscale 2:99",
            "--autoscale: got '2:99'; allowed: for expert-servers a MAX of at most 24: a layer has 24",
        ),
        (
            "serve demo --data-parallel-size 99 --enable-expert-parallel",
            "--data-parallel-size: got 99; allowed: at most 24: a layer has 24 copies of experts",
        ),
        (
            "run-batch -i pyproject.toml -o x --model demo --expert-servers 99",
            "--expert-servers: got 99; allowed: at most 24: a layer has 24 copies of experts",
        ),
        ("scale --prefill-workers -1", "--prefill-workers: got -1; allowed: an integer of at least 0"),
        ("scale --attention-workers 0", "--attention-workers: got 0; allowed: an integer of at least 1"),
        ("join 127.0.0.1:1", "--secret-file: got nothing"),
        ("join 127.0.0.1:1 --secret-file x --threads 1025", "--threads: got 1025; allowed: an integer"),
        ("join 127.0.0.1:1 --secret-file nowhere", "--secret-file: nowhere: No such file"),
        ("join 127.0.0.1:1 --role chef --secret-file x", "--role: got 'chef'; allowed: expert-server"),
        ("bench serve --goodput ttft:5 tpot:x", "--goodput: got 'tpot:x'"),
        ("bench serve --request-rate fast", "--request-rate: got 'fast'; allowed: a number"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("moesaic: ")
    assert err.count("\n") == 1
    assert message in err


def test_flags_of_other_programs_mean_flags_of_this_one() -> None:
    known = frozenset[str]().union(*(names for _, names in suggestions._flags(cli.app, ())))
    assert known.issuperset(suggestions.FOREIGN_FLAGS.values())
    assert all(flag.startswith("--") for flag in suggestions.FOREIGN_FLAGS.keys() - known)
    assert suggestions.suggest("--n-cpu-moe", ("run-batch",), cli.app) == "Did you mean --fast-memory?"


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "demo", "--port", "99999", "--debug"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_failure_that_is_no_setting_has_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "serve", "--base-url", "http://127.0.0.1:1", "--num-prompts", "1"]) == 1
    assert capsys.readouterr().err.startswith("moesaic: http://127.0.0.1:1: ")


def test_allowed_values_in_words() -> None:
    assert usage.describe_values(int | None) == "an integer"
    assert usage.describe_values(str | None) == "a value, see --help"


@contextmanager
def server(*flags: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """`moesaic serve demo` on a free port, in a process group of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moesaic", "serve", "demo", "--port", "0", "--threads", "1", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def get(url: str, key: str | None = None) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


@pytest.mark.slow
def test_serve_says_what_it_chose_and_ends_on_sigterm() -> None:
    with server("--max-model-len", "100", "--max-num-seqs", "3") as process:
        shown = []
        while not (shown and shown[-1].startswith("Serving ")):
            line = process.stdout.readline()
            assert line, process.stderr.read_bytes()
            shown.append(line)
        url = shown[-1].split()[-1]
        assert get(f"{url}/health") == 200
        assert shown[-2].startswith("Page with a chat and a live view: http://")
        assert shown[-3] == "KV cache holds 336 tokens, 3 requests of the maximum length of 336.0 KiB each\n"
        table = "".join(shown)
        assert all(word in table for word in ("qwen3_moe", "parameters", "kernels", "float32", "100 tokens"))
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=120) == ("", "")
        assert process.returncode == 0


@pytest.mark.slow
def test_serve_as_json_with_a_key_and_the_death_of_its_worker() -> None:
    with server("--json", MOESAIC_API_KEY="secret") as process:
        served = json.loads(process.stdout.readline())
        assert served["event"] == "serving"
        assert served["kv_tokens"] == served["num_blocks"] * served["block_size"]
        url = served["url"]
        assert [get(f"{url}/v1/models"), get(f"{url}/v1/models", "secret")] == [401, 200]
        os.kill(worker_of(process.pid), signal.SIGKILL)
        out, err = process.communicate(timeout=120)
        assert out == ""
        settings, line = err.splitlines()
        assert settings == "moesaic: from the environment: MOESAIC_API_KEY (not shown)"
        assert "killed by signal 9" in line
        assert process.returncode == 1


@pytest.mark.parametrize("stdout", pairs.some([">/dev/full", "| true", ">&-"], [">/dev/full"]))
def test_serve_serves_when_nobody_can_read_what_it_says(stdout: str) -> None:
    host = "127.0.0.9"  # nobody else binds here, so the port stays free
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    flags = f"--host {host} --port {port} --threads 1 --max-model-len 64 --max-num-seqs 1"
    script = f"{sys.executable} -m moesaic serve demo {flags} {stdout}"
    process = subprocess.Popen(["bash", "-c", script], stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        url = f"http://{host}:{port}/v1/completions"
        assert post_when_up(url, {"prompt": "a", "max_tokens": 1})["usage"]["completion_tokens"] == 1
        os.killpg(process.pid, signal.SIGTERM)
        assert "Traceback" not in process.communicate(timeout=120)[1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def post_when_up(url: str, body: dict[str, object]) -> dict[str, Any]:
    """The answer, once there is a server."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except urllib.error.URLError:
            time.sleep(0.1)
    raise AssertionError("no server")


FULL = (">/dev/full", "moesaic: cannot write: No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stdout", "says", "flag"),
    [
        (*FULL, ""),
        pytest.param(*FULL, "--json", marks=pytest.mark.full),
        pytest.param(">&-", "", "", marks=pytest.mark.full),
        pytest.param(">&-", "", "--json", marks=pytest.mark.full),
    ],
)
def test_an_answer_that_cannot_be_written_is_no_traceback(stdout: str, says: str, flag: str) -> None:
    script = f"{sys.executable} -m moesaic doctor {flag} {stdout}"
    process = subprocess.run(["bash", "-c", script], stderr=subprocess.PIPE, text=True, check=False)
    assert process.stderr == says
    assert process.returncode == (1 if says else 0)


@pytest.mark.slow
def test_a_pipe_that_nobody_reads_is_no_traceback() -> None:
    command = [sys.executable, "-m", "moesaic", "doctor", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == "moesaic: cannot write: Broken pipe\n"
    assert process.wait(30) == 1
    process.stderr.close()


def worker_of(pid: int) -> int:
    """The one worker of a server, which also has a process that renders chat templates."""
    [child] = children(pid, "moesaic.runtime")
    return child


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--kv-cache-memory", "1KiB"), "--kv-cache-memory: got '1KiB'; allowed: at least "),
        (("--max-model-len", "123456789"), "--max-model-len: got 123456789; allowed: at most"),
    ],
)
def test_what_the_worker_refuses_is_one_line(flags: tuple[str, ...], message: str) -> None:
    with server(*flags) as process:
        out, err = process.communicate(timeout=120)
        assert (out, process.returncode) == ("", 2)
        assert err.startswith(f"moesaic: {message}")
        assert err.count("\n") == 1


def test_a_taken_port_costs_no_loading(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", "demo", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["memory_total"] > report["machine"]["memory_available"] > 0
    assert report["choice"]["device"] in ("cpu", "cuda")
    assert report["schedule"]["attention_ms"]["1"] > 0


def test_doctor_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("CPU", "memory", "torch", "moesaic will use", "kernels", "threads"))


def a_machine(**changes: object) -> Machine:
    plain = Machine(
        system="Linux",
        python="3.11",
        cpu="x",
        cores=8,
        cores_online=8,
        numa_nodes=1,
        cpu_quota=None,
        threads=8,
        instruction_sets=["avx2"],
        memory_total=2**36,
        memory_available=2**35,
        memory_limit=None,
        gpus=[],
        nvidia_driver=False,
        torch="2",
        torch_build="CPU",
        torch_cpu_capability="AVX2",
        hub_cache="/c",
        hub_cache_free=2**40,
    )
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"instruction_sets": []}, "AVX2"),
        ({"memory_available": 2**30}, "1.0 GiB of memory"),
        ({"hub_cache_free": 2**30}, "HF_HOME"),
        ({"nvidia_driver": True}, "install a CUDA build of torch"),
        ({"gpus": [machine.Gpu("a", 1, 1, "9.0")] * 2}, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_doctor_gives_advice(
    changes: dict[str, object], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.table, "instruction_sets", lambda: ["portable"])
    assert doctor.warnings(a_machine(), doctor.choose(a_machine())) == []
    sick = a_machine(**changes)
    (note,) = doctor.warnings(sick, doctor.choose(sick))
    assert advice in note


def test_reading_the_machine(tmp_path: Path) -> None:
    cpuinfo = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma amx_tile\n\nprocessor\t: 1\n"
    assert machine.cpu_name(cpuinfo) == "Some CPU"
    assert machine.instruction_sets(cpuinfo) == ["avx2", "fma"]
    integers = "flags\t: avx2 avx_vnni avx512_vnni amx_tile amx_int8\n"
    assert machine.instruction_sets(integers) == ["avx2", "avx_vnni", "avx512_vnni", "amx_int8"]
    assert machine.instruction_sets("Features\t: fp asimd bf16\n") == ["neon", "bf16"]


def test_numbers_for_people() -> None:
    assert [in_bytes(n) for n in (7, 1536, 3 * 2**30, 2**41)] == ["7 B", "1.5 KiB", "3.0 GiB", "2.0 TiB"]
    assert [in_words(n) for n in (12, 6_715_200, 30.5e9)] == ["12", "6.7 million", "30.5 billion"]


def test_capacity_counts_whole_blocks() -> None:
    names = dict.fromkeys(("model_type", "device", "kernels", "dtype", "kv_dtype"), "x")
    numbers = dict.fromkeys(WorkerInfo.__annotations__.keys() - names.keys(), 1)
    info = WorkerInfo(**names | numbers | {"max_model_len": 20, "block_size": 16, "num_blocks": 5})
    info = replace(info, state_seats=0, kv_bytes=80 * 1024)
    assert requests_of_maximum_length(info) == 2
    assert requests_of_maximum_length(replace(info, state_seats=1)) == 1
    assert (
        capacity_line(info) == "KV cache holds 80 tokens, 2 requests of the maximum length of 32.0 KiB each"
    )


def test_a_schedule_without_effect_is_told() -> None:
    names = dict.fromkeys(("model_type", "device", "kernels", "dtype", "kv_dtype"), "x")
    numbers = dict.fromkeys(WorkerInfo.__annotations__.keys() - names.keys(), 1)
    info = replace(WorkerInfo(**names | numbers), max_num_seqs=16, least_rows=0)
    for least in (0, 2, 16):
        assert schedule_lines(replace(info, least_rows=least)) == []
    [line] = schedule_lines(replace(info, least_rows=17))
    assert "of the 16 rows of --max-num-seqs ever runs alone" in line and "at least 17 rows" in line
    [line] = schedule_lines(replace(info, least_rows=MAX_THRESHOLD))
    assert "no number of rows is enough" in line


@pytest.mark.parametrize("flags", [(), ("--allow-special-tokens-in-content",)])
@pytest.mark.parametrize("command", ["serve", "run-batch"])
def test_the_flag_about_special_tokens_arrives(
    command: str, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def launch(*_: object, **settings: object) -> None:
        seen.append(settings["special_tokens_in_content"])
        raise ConfigError("enough")

    for module in ("moesaic.commands.serve", "moesaic.jobs.batch.local"):
        monkeypatch.setattr(f"{module}.launch", launch)
    (tmp_path / "in").write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'
    )
    batch = ("--model", "demo", "-i", str(tmp_path / "in"), "-o", str(tmp_path / "out"))
    rest = ("demo", "--port", "0") if command == "serve" else batch
    assert cli.main([command, *rest, *flags]) == 2
    assert seen == [bool(flags)]


def test_a_model_behind_the_served_names_is_missed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--served-model-name", "a", "demo"]) == 2
    assert "write MODEL before it" in capsys.readouterr().err

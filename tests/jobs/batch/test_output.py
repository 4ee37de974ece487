from __future__ import annotations

import errno
import os

import pytest
from tests.support.fake_batch_server import results

from moesaic.core.errors import ConfigError
from moesaic.jobs.batch.lines import BadLine, Job, encode, make_bad_line_result, make_result
from moesaic.jobs.batch.output import Output, OutputError
from moesaic.server.client import Reply

GOOD = encode(
    make_result(Job(1, "a", "/v1/completions", {}), Reply(200, {"model": "m"}, "r", None), "batch_req_1")
)
BAD = encode(make_bad_line_result(BadLine(2, "invalid_json", "not JSON"), "batch_req_2"))


def opened(path, **settings):
    return Output(path, lambda: 0.0, **settings)


def test_what_an_earlier_run_left_is_known(tmp_path):
    file = tmp_path / "out"
    file.write_bytes(GOOD + BAD)
    with opened(file) as output:
        done = output.recover()
    assert (done.keys, done.num_failed, done.models) == ({"a", 2}, 1, {"m"})


def test_a_file_torn_at_any_byte_is_cut_to_its_whole_lines(tmp_path):
    file = tmp_path / "out"
    whole = GOOD + BAD
    for size in range(len(whole) + 1):
        file.write_bytes(whole[:size])
        with opened(file) as output:
            done = output.recover()
            output.append(encode({"id": "batch_req_3", "custom_id": "z"}))
        kept = whole[: len(GOOD)] if len(GOOD) <= size < len(whole) else whole if size == len(whole) else b""
        assert len(done.keys) == kept.count(b"\n")
        assert file.read_bytes() == kept + b'{"id": "batch_req_3", "custom_id": "z"}\n'


def test_zeros_that_a_power_cut_left_are_cut_off(tmp_path):
    file = tmp_path / "out"
    file.write_bytes(GOOD + b"\0" * 100)
    with opened(file) as output:
        output.recover()
    assert file.read_bytes() == GOOD


@pytest.mark.parametrize(
    "content",
    [b"precious", b"precious\n", b'{"id": "x"}\n', GOOD + b"precious", b"[]\n", b'{"id": "batch_req_1"}\n'],
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path, content):
    file = tmp_path / "out"
    file.write_bytes(content)
    with opened(file) as output, pytest.raises(ConfigError, match=r"--output-file: .* line \d is no result"):
        output.recover()
    assert file.read_bytes() == content


def test_two_results_of_one_line_are_refused(tmp_path):
    file = tmp_path / "out"
    file.write_bytes(GOOD + GOOD)
    with opened(file) as output, pytest.raises(ConfigError, match="line 2 is a second result of 'a'"):
        output.recover()


def test_two_cannot_write_one_file(tmp_path):
    with opened(tmp_path / "out"), pytest.raises(ConfigError, match="another run-batch is writing it"):
        opened(tmp_path / "out")
    with opened(tmp_path / "out"):
        pass


@pytest.mark.parametrize("path", ["/dev/null", "/dev/full"])
def test_a_device_is_refused(path, tmp_path):
    link = tmp_path / "out"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="allowed: a regular file"):
        opened(link)


def test_a_directory_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        opened(tmp_path / "none" / "out")


def test_a_write_that_fails_half_way_leaves_no_trace(tmp_path, monkeypatch):
    calls = []

    def full_after_ten(fd, data):
        calls.append(len(data))
        if len(calls) == 1:
            return write(fd, bytes(data[:10]))
        raise OSError(errno.ENOSPC, "No space left on device")

    write = os.write
    file = tmp_path / "out"
    file.write_bytes(GOOD)
    with opened(file) as output:
        output.recover()
        monkeypatch.setattr(os, "write", full_after_ten)
        with pytest.raises(OutputError, match="No space left on device"):
            output.append(BAD)
        monkeypatch.undo()
        assert file.read_bytes() == GOOD
        output.append(BAD)
    assert len(results(file)) == 2


def test_a_disk_that_refuses_to_sync_is_an_error(tmp_path, monkeypatch):
    def broken(fd):
        raise OSError(errno.EIO, "Input/output error")

    output = opened(tmp_path / "out", sync_seconds=0.0)
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OutputError, match="Input/output error"), output:
        output.append(GOOD)
    assert len(results(tmp_path / "out")) == 1


def test_syncs_are_spaced_and_one_comes_at_the_end(tmp_path, monkeypatch):
    now, synced = [0.0], []
    with Output(tmp_path / "out", lambda: now[0], sync_seconds=5.0) as output:
        monkeypatch.setattr(os, "fsync", synced.append)
        for second in (1.0, 4.0, 5.0, 6.0, 9.9, 10.0):
            now[0] = second
            output.append(GOOD)
        assert len(synced) == 2
    assert len(synced) == 3

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_batch_server import line

from moesaic.core.errors import ConfigError
from moesaic.jobs.batch import lines
from moesaic.jobs.batch.lines import BadLine, Job, make_bad_line_result, make_result, parse, read
from moesaic.server.client import Reply


def with_changes(**changes):
    value = json.loads(line("a")) | changes
    return json.dumps({name: part for name, part in value.items() if part is not ...}).encode()


def test_a_good_line():
    assert parse(3, line("a").encode()) == Job(3, "a", "/v1/completions", {"model": "fake", "prompt": "p-a"})


@pytest.mark.parametrize(
    ("raw", "code", "custom_id", "said"),
    [
        (b"{", "invalid_json", None, "not JSON"),
        (b"\xff\xfe", "invalid_json", None, "not JSON"),
        (b"[" * 100_000, "invalid_json", None, "not JSON"),
        (b"[1]", "invalid_line", None, "a JSON object"),
        (None, "line_too_long", None, "longer than"),
        (with_changes(custom_id=...), "invalid_custom_id", None, "custom_id: got nothing"),
        (with_changes(custom_id=7), "invalid_custom_id", None, "custom_id: got 7"),
        (with_changes(custom_id=""), "invalid_custom_id", None, "custom_id: got ''"),
        (with_changes(custom_id="\ud800"), "invalid_custom_id", None, "custom_id: got"),
        (with_changes(method="GET"), "invalid_method", "a", "method: got 'GET'; allowed: 'POST'"),
        (with_changes(method=...), "invalid_method", "a", "method: got nothing"),
        (with_changes(url="/v1/embeddings"), "invalid_url", "a", "url: got '/v1/embeddings'"),
        (with_changes(url=["x"]), "invalid_url", "a", "url: got ['x']"),
        (with_changes(body=...), "invalid_body", "a", "body: got nothing"),
        (with_changes(body="x"), "invalid_body", "a", "body: got 'x'"),
        (with_changes(body={"stream": True}), "invalid_body", "a", "body.stream: got True"),
    ],
)
def test_a_bad_line_says_what_is_wrong(raw, code, custom_id, said):
    bad = parse(9, raw)
    assert isinstance(bad, BadLine)
    assert (bad.line, bad.code, bad.custom_id) == (9, code, custom_id)
    assert said in bad.reason
    assert bad.key == (custom_id or 9)


@pytest.mark.slow
@given(st.binary(max_size=200) | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(repr))
def test_no_line_breaks_the_parser(raw):
    data = raw.encode(errors="replace") if isinstance(raw, str) else raw
    assert parse(1, data).line == 1


@pytest.mark.slow
@given(st.text())
def test_every_line_gets_a_result_that_is_one_line_of_json(custom_id):
    item = parse(1, with_changes(custom_id=custom_id))
    if isinstance(item, BadLine):
        raw = lines.encode(make_bad_line_result(item, "batch_req_1"))
    else:
        raw = lines.encode(make_result(item, Reply(200, {"text": custom_id}, None, None), "batch_req_1"))
    assert raw.count(b"\n") == 1
    assert json.loads(raw)["id"] == "batch_req_1"


def test_reading_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 300)
    file = tmp_path / "in.jsonl"
    texts = ["\ufeff" + line("a"), "", "  ", line("b"), line("a"), "x" * 1000, line("c")]
    file.write_text("\n".join(texts), encoding="utf-8")
    items = list(read(file))
    assert [item.line for item in items] == [1, 4, 5, 6, 7]
    assert [item.custom_id for item in items] == ["a", "b", None, None, "c"]
    assert [item.code for item in items if isinstance(item, BadLine)] == [
        "duplicate_custom_id",
        "line_too_long",
    ]
    assert "line 1 has it already" in items[2].reason


def test_an_input_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"--input-file: .*No such file"):
        list(read(tmp_path / "none"))


def test_a_result_of_a_refused_request_keeps_the_answer_and_names_the_line():
    reply = Reply(400, {"error": {"message": "temperature: got -1", "code": None}}, "r", None)
    result = make_result(Job(7, "a", "/v1/completions", {}), reply, "batch_req_1")
    assert result["response"] == {"status_code": 400, "request_id": "r", "body": reply.body}
    assert result["error"] == {"code": "http_400", "message": "line 7: temperature: got -1", "line": 7}


@pytest.mark.parametrize("body", ["<html>", None, [], {"error": "text"}, {"error": {"code": 3}}])
def test_an_answer_of_another_shape_is_no_surprise(body):
    result = make_result(Job(7, "a", "/v1/completions", {}), Reply(502, body, None, None), "batch_req_1")
    assert result["error"]["code"] == "http_502"

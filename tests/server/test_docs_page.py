"""GET /docs and GET /tokenizer_info."""

from __future__ import annotations

from html.parser import HTMLParser

from moesaic.server.docs_page import page

from .conftest import Launch, Live


class Page(HTMLParser):
    """The texts, links and targets of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.links: set[str] = set()
        self.targets: set[str] = set()
        self.loaded: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loaded += [value for name, value in attrs if name == "src" and value]
        if tag in ("script", "link", "iframe", "img"):
            self.loaded.append(tag)
        self.links |= {given["href"]} if tag == "a" and given.get("href") else set()
        self.targets |= {f"#{given['id']}"} if given.get("id") else set()
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_docs_show_the_whole_schema_and_load_nothing(launch: Launch) -> None:
    live = launch(api_key="s3cret")
    with live.http as client:
        answer = client.get("/docs", headers={"Authorization": ""})
        schema = client.get("/openapi.json").json()
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert len(answer.content) < 200_000
    shown = Page(answer.text)
    assert shown.loaded == [] and shown.open == []
    assert shown.links <= shown.targets | {"openapi.json"}
    texts = set(shown.texts)
    assert {f"POST {path}" for path, methods in schema["paths"].items() if "post" in methods} <= texts
    for name, body in schema["components"]["schemas"].items():
        assert {name, *body.get("properties", {})} <= texts
    assert "Keep this many tokens of the prompt. -1 keeps as many as the context has room for." in texts
    assert "integer (at least 1, at most 128) or null" in "".join(shown.texts)


def test_nothing_in_a_schema_becomes_markup() -> None:
    evil = "<script>x</script>"
    operation = {"description": evil, "responses": {"200": {"description": evil}}}
    body = {"description": evil, "properties": {evil: {"enum": [evil], "description": evil}}}
    schema = {
        "info": {"title": evil, "version": "1"},
        "paths": {f"/{evil}": {"get": operation}},
        "components": {
            "schemas": {"A": body, "B": {"properties": {"x": {"type": "string", "pattern": evil}}}}
        },
    }
    text = page(schema)
    assert "<script" not in text and text.count("&lt;script&gt;") >= 8


def test_tokenizer_info_is_there_only_with_its_flag(launch: Launch, live: Live) -> None:
    assert live.get("/tokenizer_info").status_code == 404
    found = launch(tokenizer_info=True).get("/tokenizer_info")
    assert found.status_code == 200
    info = found.json()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (info["bos_token"], info["eos_token"]) == ("<s>", "</s>")
    assert "raise_exception" in info["chat_template"]


def test_tokenizer_info_needs_the_key_and_names_no_files(launch: Launch) -> None:
    locked = launch(api_key="s3cret", tokenizer_info=True)
    with locked.http as client:
        assert client.get("/tokenizer_info", headers={"Authorization": ""}).status_code == 401
    tokenizer = locked.front.engine.tokenizer
    before = dict(tokenizer.settings)
    tokenizer.settings |= {"vocab_file": "/home/me/vocab.json", "merges_file": "x", "tokenizer_class": "T"}
    try:
        info = locked.get("/tokenizer_info").json()
    finally:
        tokenizer.settings = before
    assert not {"vocab_file", "merges_file"} & set(info) and info["tokenizer_class"] == "T"

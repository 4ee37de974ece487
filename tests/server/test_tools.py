"""Tools and reasoning in /v1/chat/completions, through the openai client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from moesaic.server.requests import Message, Tool
from moesaic.server.tools import dump_tools, further_fields
from moesaic.testing import byte_tokenizer
from moesaic.text.parsers.table import detect_formats
from moesaic.text.templates.jinja_template import compile_template, render_template
from moesaic.text.tokenizer import Tokenizer
from tests.text.parsers.answers import BERN, CALL, COMPLETE, TOOLS

from .conftest import MODEL, Live, launched

ASK: list[Any] = [{"role": "user", "content": "hi"}]
MARKS = ("<s>", "</s>", "<tool_call>", "</tool_call>", "<|channel|>", "<|message|>", "<|end|>", "<|other|>")
"""Special tokens. An answer has no others in its text."""
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.id }}{{ c.function.arguments | items | list }}{% endfor %}"
    "{{ m.tool_call_id }}{% endfor %}{{ reasoning_effort }}{{ enable_thinking }}{{ thinking_mode }}"
    "{% if add_generation_prompt %}"
    "say:{{ replies[messages | selectattr('role', 'eq', 'tool') | list | length] }}{% endif %}"
    "{# <tool_call> <think> #}"
)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Live]]:
    """A function that starts a server whose model writes special tokens; one for each template and flags."""
    path, started = tmp_path_factory.mktemp("tools"), dict[tuple[str, ...], Live]()
    byte_tokenizer(path, MARKS, chat_template=TEMPLATE, eos_token="</s>")
    with launched(Tokenizer(path)) as launch:

        def serve(**flags: str) -> Live:
            key = tuple(sorted(flags.items()))
            if key not in started:
                started[key] = launch(max_model_len=4096, vocab_size=256 + len(MARKS), **flags)
            return started[key]

        yield serve


@pytest.fixture
def live(serving: Callable[..., Live]) -> Live:
    return serving()


def replying(*texts: str) -> dict[str, Any]:
    """The answer to a conversation without results of tools, with one, with two ..."""
    return {"extra_body": {"chat_template_kwargs": {"replies": texts}}}


def create(live: Live, *replies: str, messages: list[Any] = ASK, **options: Any) -> Any:
    options = {"tools": TOOLS, **options}
    body = replying(*replies)["extra_body"] | options.pop("extra_body", {})
    return live.openai.chat.completions.create(model=MODEL, messages=messages, extra_body=body, **options)


HERMES = COMPLETE["hermes"].text
NOW = COMPLETE["hermes after content"].text
ARGUMENTS = COMPLETE["hermes"].calls[0][1]


def test_a_call_has_openais_shape(live: Live) -> None:
    body = {"messages": ASK, "tools": TOOLS, "chat_template_kwargs": {"replies": [NOW]}}
    choice = live.post("/v1/chat/completions", **body).json()["choices"][0]
    assert choice["message"]["tool_calls"][0].pop("id").startswith("call_")
    assert choice["message"] == {
        "role": "assistant",
        "content": "I look.",
        "refusal": None,
        "reasoning": None,
        "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": "{}"}}],
    }
    assert choice["finish_reason"] == "tool_calls"


def test_the_content_of_a_message_that_only_calls_is_null(live: Live) -> None:
    message = create(live, HERMES).choices[0].message
    assert message.content is None
    assert message.tool_calls[0].function.arguments == ARGUMENTS


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_stream_has_openais_shape(live: Live, choice: Any) -> None:
    chunks = list(create(live, f"{NOW}\n{HERMES}", stream=True, tool_choice=choice))
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""} and deltas[-1] == {}
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert all(len(delta) == 1 for delta in deltas[1:-1])
    firsts = [call for call in calls if "id" in call]
    assert [call.pop("id")[:5] for call in firsts] == ["call_", "call_"]
    assert firsts == [
        {"index": 0, "type": "function", "function": {"name": "now", "arguments": ""}},
        {"index": 1, "type": "function", "function": {"name": "get_weather", "arguments": ""}},
    ]
    rest = [call for call in calls if "type" not in call]
    assert {tuple(sorted(call)) for call in rest} == {("function", "index")}
    assert {tuple(call["function"]) for call in rest} == {("arguments",)}
    assert "".join(call["function"]["arguments"] for call in rest if call["index"] == 1) == ARGUMENTS
    num_pieces = sum(call["index"] == 1 for call in rest)
    assert num_pieces == 1 if choice == "auto" else num_pieces > 20, (
        "without a grammar they are checked first"
    )
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "tool_calls"]


def test_n_answers_have_calls_of_their_own(live: Live) -> None:
    answer = create(live, HERMES, n=3)
    ids = {choice.message.tool_calls[0].id for choice in answer.choices}
    assert len(ids) == 3
    found = dict[int, str]()
    for chunk in create(live, HERMES, n=3, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            index = chunk.choices[0].index
            found[index] = found.get(index, "") + (call.function.arguments or "")
    assert found == dict.fromkeys(range(3), ARGUMENTS)


def test_only_the_first_call_without_parallel_calls(live: Live) -> None:
    text = f"{HERMES}{HERMES}"
    assert len(create(live, text).choices[0].message.tool_calls) == 2
    assert len(create(live, text, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    indices = {
        call.index
        for chunk in create(live, text, parallel_tool_calls=False, stream=True)
        for call in chunk.choices[0].delta.tool_calls or []
    }
    assert indices == {0}


def test_without_tools_calls_are_content(live: Live) -> None:
    for options in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
        choice = create(live, "a<tool_call>{}b<|other|>", **options).choices[0]
        assert choice.message.content == "a{}b", "special tokens are left out"
        assert choice.message.tool_calls is None and choice.finish_reason == "stop"


def test_special_tokens_of_other_meaning_are_left_out(live: Live) -> None:
    message = create(live, f"a<|other|>b{HERMES}c<|other|>d").choices[0].message
    assert message.content == "abcd" and message.tool_calls[0].function.name == "get_weather"


def test_what_is_no_call_is_content(live: Live) -> None:
    for text in ("The <tool_call> tag", NOW.replace("{}", "{'a': 1}")):
        choice = create(live, text).choices[0]
        assert choice.message.content == text and choice.finish_reason == "stop"
        assert choice.message.tool_calls is None


def test_a_call_that_is_cut_off_ends_for_its_length(live: Live) -> None:
    choice = create(live, HERMES, max_tokens=60).choices[0]
    assert choice.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice.message.tool_calls[0].function.arguments)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "length", "begun"),
    [
        ("required", 3, None),
        ("required", 18, None),
        ("required", 36, ("get_weather", "")),
        ("required", 60, ("get_weather", ARGUMENTS[:15])),
        ({"type": "function", "function": {"name": "get_weather"}}, 3, ("get_weather", "")),
        ({"type": "function", "function": {"name": "get_weather"}}, 60, ("get_weather", ARGUMENTS[:15])),
    ],
)
def test_a_forced_call_that_is_cut_has_begun(
    live: Live, choice: Any, length: int, begun: tuple[str, str] | None, stream: bool
) -> None:
    answer = create(live, HERMES, tool_choice=choice, max_tokens=length, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        calls = [call.function for chunk in chunks for call in chunk.delta.tool_calls or []]
        assert chunks[-1].finish_reason == "length" and not any(chunk.delta.content for chunk in chunks)
    else:
        message = answer.choices[0].message
        calls = [call.function for call in message.tool_calls or []]
        assert answer.choices[0].finish_reason == "length" and not message.content
    name = "".join(call.name or "" for call in calls)
    found = (name, "".join(call.arguments for call in calls)) if calls else None
    assert found == begun or (begun and found and found[0] == begun[0] and ARGUMENTS.startswith(found[1]))


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_all_tokens(live: Live, stream: bool) -> None:
    options = {"logprobs": True, "top_logprobs": 1, "stream": stream}
    with_calls, without = (create(live, HERMES, **options, tools=t) for t in (TOOLS, openai.NOT_GIVEN))
    if stream:
        with_calls, without = ([c.choices[0] for c in chunks] for chunks in (with_calls, without))
    else:
        with_calls, without = with_calls.choices, without.choices
    found = [[e for c in cs if c.logprobs for e in c.logprobs.content] for cs in (with_calls, without)]
    assert found[0] == found[1] and len(found[0]) > 50


def test_an_agent_calls_two_tools_in_turn(live: Live) -> None:
    tools = {"now": lambda: "noon", "get_weather": lambda city, days: f"{days} days of sun in {city}"}
    call = f'<tool_call>\n{{"name": "get_weather", "arguments": {BERN}}}\n</tool_call>'
    replies = (NOW, f"<think>\nWhere?\n</think>\n\n{call}", "<think>\nGood.\n</think>\n\nSunny.")
    messages, answers = list(ASK), list[Any]()
    while not answers or answers[-1].tool_calls:
        answers.append(create(live, *replies, messages=messages).choices[0].message)
        messages.append(answers[-1].model_dump())
        for one in answers[-1].tool_calls or []:
            result = tools[one.function.name](**json.loads(one.function.arguments))
            messages.append({"role": "tool", "tool_call_id": one.id, "content": result})
    assert [message["content"] for message in messages] == [
        *("hi", "I look.", "noon", None, "2 days of sun in Bern", "Sunny.")
    ]
    assert [getattr(answer, "reasoning", None) for answer in answers] == [None, "Where?", "Good."]
    prompt = live.worker.tokenizer.decode(live.worker.seen[-1].prompt_token_ids)
    assert f"[assistant]Where?{answers[1].tool_calls[0].id}[('city', 'Bern'), ('days', 2)]" in prompt
    assert f"[tool]2 days of sun in Bern{answers[1].tool_calls[0].id}" in prompt


def test_a_call_can_be_forced(live: Live) -> None:
    for choice, names in (
        ("required", {"get_weather", "now"}),
        ({"type": "function", "function": {"name": "now"}}, {"now"}),
        ("auto", set()),
    ):
        answer = create(live, NOW, tool_choice=choice).choices[0]
        *_, last = create(live, NOW, tool_choice=choice, stream=True)
        assert answer.message.tool_calls[0].function.name == "now"
        ended = "tool_calls" if isinstance(choice, str) else "stop"
        assert answer.finish_reason == last.choices[0].finish_reason == ended
        grammar = live.worker.seen[-1].grammar
        assert {name for name in ("get_weather", "now") if name in grammar} == names
    create(live, NOW, tool_choice="required")
    several = live.worker.seen[-1].grammar
    create(live, NOW, tool_choice="required", parallel_tool_calls=False)
    alone = live.worker.seen[-1].grammar
    assert several.count("*") == alone.count("*") + 1
    create(live, NOW, tool_choice={"type": "function", "function": {"name": "now"}})
    assert live.worker.seen[-1].grammar.count("*") == alone.count("*"), "a named function is called once"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_the_only_ones(live: Live, mode: str) -> None:
    named = [{"type": "function", "function": {"name": "now"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    assert create(live, NOW, tool_choice=choice).choices[0].message.tool_calls[0].function.name == "now"
    request = live.worker.seen[-1]
    assert "get_weather" not in live.worker.tokenizer.decode(request.prompt_token_ids)
    assert bool(request.grammar) == (mode == "required")
    named[0]["function"]["name"] = "later"  # type: ignore[index]
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]: got 'later'; allowed: 'get_weather'"):
        create(live, NOW, tool_choice=choice)


@pytest.mark.parametrize("name", ["srv:do/it", "a.b-c_d", "x" * 64])
def test_names_that_other_servers_take(live: Live, name: str) -> None:
    tools = [{"type": "function", "function": {"name": name}}]
    reply = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
    for choice in ("auto", "required"):
        message = create(live, reply, tools=tools, tool_choice=choice).choices[0].message
        assert message.tool_calls[0].function.name == name


def test_a_name_that_is_too_long_is_refused_with_the_limit(live: Live) -> None:
    tools = [{"type": "function", "function": {"name": "x" * 65}}]
    with pytest.raises(
        openai.BadRequestError, match=r"tools\[0\].function.name: got 'x+.*allowed: 1 to 64 char"
    ):
        create(live, NOW, tools=tools)


def test_messages_of_other_shapes(live: Live) -> None:
    messages = [
        {"role": "critic", "content": "harsh"},
        {"role": "user", "content": ["How", "is it?"], "tool_calls": []},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "tool_calls": []},
        {"role": "assistant", "content": None, "refusal": "Never."},
        {"role": "user", "content": "hi"},
    ]
    create(live, "ok", messages=messages)
    prompt = live.worker.tokenizer.decode(live.worker.seen[-1].prompt_token_ids)
    assert "[critic]harsh[user]How\nis it?[assistant]No.[assistant]Never.[user]hi" in prompt


def test_an_unknown_format_of_a_schema_is_a_remark(live: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "format": "int32"}}}
    tools = [{"type": "function", "function": {"name": "now", "parameters": schema}}]
    assert create(live, NOW, tools=tools, tool_choice="required").choices[0].message.tool_calls
    assert "int32" not in live.worker.seen[-1].grammar


def test_a_form_comes_after_the_reasoning(live: Live, serving: Callable[..., Live]) -> None:
    form = {"type": "json_object"}
    message = create(live, "<think>So.</think>{}", response_format=form).choices[0].message
    assert (message.content, message.reasoning) == ("{}", "So.")
    assert "@form" in live.worker.seen[-1].grammar
    assert "get_weather" in live.worker.seen[-1].grammar, "a call may come in place of the form"
    odd = [{"type": "function", "function": {"name": "f", "parameters": {"unevaluatedProperties": False}}}]
    create(live, "{}", response_format=form, tools=odd)
    create(live, NOW, response_format=form, tool_choice="required")
    forced = live.worker.seen[-1].grammar
    assert "@form" not in forced and "get_weather" in forced, "a forced call has no content"
    other = serving(tool_call_parser="none", reasoning_parser="none")
    create(other, "{}", response_format=form, tools=openai.NOT_GIVEN)
    assert "@form" not in other.worker.seen[-1].grammar


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "'get_weather', 'now'",
        ),
        (
            {"tool_choice": "required", "extra_body": {"guided_json": {"type": "object"}}},
            "tool_choice",
            "allowed with",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"properties": {"a": {"contains": {}}}}},
                    }
                ],
            },
            "tools",
            r"^.*tools\[0\].function.parameters of 'f': at properties.a.contains: an answer cannot",
        ),
    ],
)
def test_what_cannot_be_forced_is_named(live: Live, options: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        create(live, NOW, **options)
    assert caught.value.param == param


@pytest.mark.parametrize("depth", [90, 120, 900])
def test_what_is_nested_deeply_is_named(live: Live, depth: int) -> None:
    deep: Any = json.loads('{"a":' * depth + "1" + "}" * depth)
    calls = [{"id": "c", "type": "function", "function": {"name": "now", "arguments": json.dumps(deep)}}]
    messages = [*ASK, {"role": "assistant", "tool_calls": calls}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": deep}}]
    for options, field in (
        ({"tools": tools}, "tools"),
        ({"tools": tools, "tool_choice": "required"}, "tools"),
        ({"messages": messages}, "messages"),
    ):
        body = {"messages": ASK, "chat_template_kwargs": {"replies": ["ok"]}, **options}
        answer = live.post("/v1/chat/completions", **body)
        if depth == 90:
            assert answer.status_code in (200, 400)
        else:
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, field)
            assert "nested more than 100 levels deep" in error["message"]


def test_results_may_be_text_parts(live: Live) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [{"id": "c", "type": "function", "function": {"name": "now", "arguments": ""}}]
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c", "content": parts},
    ]
    create(live, "", "ok", messages=messages)
    prompt = live.worker.tokenizer.decode(live.worker.seen[-1].prompt_token_ids)
    assert "[assistant]c[][tool]a\nbc" in prompt


def test_reasoning_has_a_field_of_its_own(live: Live) -> None:
    answer = create(live, "<think>\nSo.\n</think>\n\nYes.", tools=openai.NOT_GIVEN)
    message = answer.choices[0].message
    assert (message.content, message.reasoning, message.reasoning_content) == ("Yes.", "So.", "So.")
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("<think>\nSo.\n</think>")
    assert answer.usage.completion_tokens == len("<think>\nSo.\n</think>\n\nYes.") + 1


def test_reasoning_streams(live: Live) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}, "tools": openai.NOT_GIVEN}
    *chunks, last = create(live, "<think>So.</think>Yes.", **options)
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        *({"reasoning": one, "reasoning_content": one} for one in "So."),
        *({"content": one} for one in "Yes."),
        {},
    ]
    assert last.usage.completion_tokens_details.reasoning_tokens == len("<think>So.</think>")


def test_a_prompt_may_open_the_reasoning(live: Live) -> None:
    message = create(live, "So.</think>Yes.<think>\n", tools=openai.NOT_GIVEN).choices[0].message
    assert (message.content, message.reasoning) == ("Yes.<think>\n", "So.")


def test_a_continued_message_may_be_inside_of_its_reasoning(live: Live) -> None:
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    for before, reasoning in (("<think>say:So", "So"), ("<think></think>say:So", None)):
        messages = [*ASK, {"role": "assistant", "content": before}]
        message = create(live, "", messages=messages, extra_body=flags).choices[0].message
        assert getattr(message, "reasoning", None) == reasoning


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_can_be_left_out(live: Live, stream: bool) -> None:
    flags = {"include_reasoning": False}
    answer = create(live, "<think>So.</think>Yes.", stream=stream, extra_body=flags)
    parts = [c.choices[0].delta for c in answer] if stream else [answer.choices[0].message]
    assert "".join(part.content or "" for part in parts) == "Yes."
    assert not any(part.model_dump().get("reasoning") for part in parts)


def test_the_effort_reaches_the_template(live: Live) -> None:
    for effort, seen in (("high", "high"), ("none", "noneFalsedisabled")):
        create(live, "ok", reasoning_effort=effort)
        prompt = live.worker.tokenizer.decode(live.worker.seen[-1].prompt_token_ids)
        assert f"hi{seen}say:" in prompt
    kept = {"chat_template_kwargs": {"enable_thinking": True, "replies": ["ok"]}}
    create(live, extra_body=kept, reasoning_effort="none")
    assert "noneTruedisabledsay:" in live.worker.tokenizer.decode(live.worker.seen[-1].prompt_token_ids)


def test_tokenize_counts_the_tools(live: Live) -> None:
    body = {"messages": ASK, "chat_template_kwargs": {"replies": [""]}}
    without, with_tools = (live.post("/tokenize", **body, **more).json() for more in ({}, {"tools": TOOLS}))
    listed = [{**tool, "function": {**tool["function"]}} for tool in TOOLS]
    for tool in listed:  # a function without parameters has an empty list of them
        tool["function"].setdefault("parameters", {"type": "object", "properties": {}})
    assert with_tools["count"] == without["count"] + sum(len(json.dumps(tool)) for tool in listed)


def test_another_parser_by_its_name(serving: Callable[..., Live]) -> None:
    live = serving(tool_call_parser="openai", reasoning_parser="openai_gptoss")
    choice = create(live, COMPLETE["harmony stopped"].text.replace("<|start|>assistant", "<s>")).choices[0]
    assert choice.message.reasoning == "Think." and choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.arguments == BERN
    content = create(live, f"<s>{CALL.format(BERN)}", tools=openai.NOT_GIVEN).choices[0].message.content
    assert BERN in content


def test_ids_that_the_model_wrote_are_kept(serving: Callable[..., Live]) -> None:
    live = serving(tool_call_parser="kimi_k2")
    calls = create(live, COMPLETE["kimi_k2"].text).choices[0].message.tool_calls
    assert [call.id for call in calls] == ["functions.get_weather:0", "functions.get_weather:1"]
    short = create(serving(tool_call_parser="mistral"), COMPLETE["mistral bare"].text).choices[0].message
    assert len(short.tool_calls[0].id) == 9 and short.tool_calls[0].id.isalnum()


def test_parsers_can_be_switched_off(serving: Callable[..., Live]) -> None:
    live = serving(tool_call_parser="none", reasoning_parser="none")
    message = create(live, "<think>So.</think>Yes.", tools=openai.NOT_GIVEN).choices[0].message
    assert message.content == "<think>So.</think>Yes."
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser NAME, or tool_choice 'none'"):
        create(live, "")
    assert create(live, "ok", tool_choice="none").choices[0].message.content == "ok"


def test_a_template_gets_arguments_that_are_no_json_as_they_are(live: Live, tmp_path: Path) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "now", "arguments": '{"a'}}]
    messages = [*ASK, {"role": "assistant", "tool_calls": calls}]
    with pytest.raises(openai.BadRequestError, match="the chat template refuses them"):
        create(live, "ok", messages=messages)  # this one needs an object


def test_a_budget_of_the_reasoning(serving: Callable[..., Live]) -> None:
    live = serving()
    for budget, tools in ((0, TOOLS), (7, None)):
        create(live, "ok", tools=tools or openai.omit, extra_body={"thinking_token_budget": budget})
        found = live.worker.seen[-1].params.reasoning
        assert found is not None and found.tokens == budget and bytes(found.end_ids) == b"</think>"
        assert (found.opening, found.starts_inside, found.can_start_later) == ("<think>", False, False)
    create(live, "ok", extra_body={"thinking_token_budget": -1})
    assert live.worker.seen[-1].params.reasoning is None
    channels = serving(reasoning_parser="openai_gptoss")
    create(channels, "ok", tools=openai.omit, extra_body={"thinking_token_budget": 5})
    found = channels.worker.seen[-1].params.reasoning
    assert found is not None and found.can_start_later and found.end_ids == (256 + MARKS.index("<|end|>"),)


@pytest.mark.parametrize(
    ("flags", "body", "message"),
    [
        ({}, {"thinking_token_budget": -2}, "thinking_token_budget: .*greater than or equal to -1"),
        ({}, {"thinking_token_budget": 1.5}, "thinking_token_budget: .*integer"),
        (
            {"reasoning_parser": "none"},
            {"thinking_token_budget": 5},
            "thinking_token_budget: got 5, but reasoning is not told apart .*--reasoning-parser NAME, or -1",
        ),
        (
            {},
            {"thinking_token_budget": 5, "allowed_token_ids": [1, 60]},
            r"allowed_token_ids: with thinking_token_budget they need the tokens \[60, .*end the reason",
        ),
    ],
)
def test_a_budget_that_cannot_be(
    serving: Callable[..., Live], flags: dict[str, str], body: dict[str, Any], message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        create(serving(**flags), "ok", tools=openai.omit, extra_body=body)


BARE = [Tool.model_validate({"type": "function", "function": {"name": "now"}})]
"""A tool of which only the name is known."""


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ('{% for t in tools %}{{ "// " + t.function.description + ";" }}{% endfor %}', "// ;"),
        ('{% for t in tools %}{{ "// " + t["function"]["description"] + ";" }}{% endfor %}', "// ;"),
        ("{% for t in tools %}{{ t.function.description is defined }}{% endfor %}", "False"),
        ("{% for t in tools %}{{ t.function.parameters.properties | length }}{% endfor %}", "0"),
    ],
)
def test_a_template_gets_what_it_needs_of_a_tool(template: str, text: str) -> None:
    formats = detect_formats(template)
    variables = {"tools": dump_tools(BARE, formats.text_descriptions)}
    assert render_template(compile_template(template), variables, 100) == text


def test_a_call_that_was_damaged_can_be_sent_back() -> None:
    """Templates that write each argument by itself get an object. They would refuse a text."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": '}}
    message = Message.model_validate({"role": "assistant", "tool_calls": [call]})
    for template, expected in (
        ("tools <tool_call> <function=", {"INVALID_JSON": '{"city": '}),
        ("tools <tool_call> <arg_key>", {"INVALID_JSON": '{"city": '}),
        ("tools <minimax:tool_call>", {"INVALID_JSON": '{"city": '}),
        ("tools <tool_call>", '{"city": '),
        ("tools [TOOL_CALLS]", '{"city": '),
    ):
        [found] = further_fields(message, detect_formats(template))["tool_calls"]
        assert found["function"]["arguments"] == expected

"""Skills with tools: calls that need the schema, answers after a result, and requests without a tool."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from demo_chat import Message, write_call
from demo_skills import Example
from demo_words import CITIES, LANGUAGES, NAMES, WEEKDAYS, WORDS, pick_name
from skills_lists import draw_lists
from skills_numbers import draw_sums

Value = str | int


@dataclass(frozen=True)
class Parameter:
    """A parameter in the names that it can have in a schema."""

    names: tuple[str, ...]
    draw: Callable[[random.Random], Value]
    is_optional: bool = False


@dataclass(frozen=True)
class Intent:
    """One thing that a tool can do, in the words of schemas, of users and of results."""

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    requests: tuple[str, ...]
    """Requests with {0}, {1} for the parameters. An optional one only stands in `more`."""
    draw_result: Callable[[random.Random], dict[str, Value]]
    answer: str
    """What is said after a result, with {0} for parameters and {name} for fields of the result."""
    more: str = ""


def _number(rng: random.Random) -> Value:
    return rng.randint(2, 99)


def _city(rng: random.Random) -> Value:
    return pick_name(rng, CITIES)


def _person(rng: random.Random) -> Value:
    return pick_name(rng, NAMES)


def _word(rng: random.Random) -> Value:
    return rng.choice(WORDS)


def _pick(*choices: str) -> Callable[[random.Random], Value]:
    return lambda rng: rng.choice(choices)


def _done(rng: random.Random) -> dict[str, Value]:
    return {rng.choice(("status", "result")): rng.choice(("ok", "done"))}


def _weather(rng: random.Random) -> dict[str, Value]:
    sky = rng.choice(("sunny", "rainy", "cloudy", "windy", "snowy"))
    return {"temperature": rng.randint(1, 35), "sky": sky}


DAYS = (*WEEKDAYS, "today", "tomorrow")
INTENTS = (
    Intent(
        ("get_weather", "weather", "current_weather", "read_forecast", "weather_lookup"),
        ("Get the weather of a city.", "Tells the weather in a place.", "Weather forecast for a location."),
        (
            Parameter(("city", "place", "location", "town", "where"), _city),
            Parameter(("day", "date", "when"), _pick(*DAYS), is_optional=True),
        ),
        ("What is the weather in {0}{more}?", "How is the weather in {0}{more}?", "Weather in {0}{more}?"),
        _weather,
        "It is {temperature} degrees and {sky} in {0}.",
        " on {1}",
    ),
    Intent(
        ("add", "calculate_sum", "add_numbers", "sum_two", "plus"),
        ("Add two numbers.", "Returns the sum of two numbers.", "Calculates a sum."),
        (
            Parameter(("a", "x", "first", "left"), _number),
            Parameter(("b", "y", "second", "right"), _number),
        ),
        ("Use a tool to add {0} and {1}.", "Add {0} and {1} with a tool.", "Let a tool compute {0} + {1}."),
        lambda rng: {rng.choice(("sum", "result")): rng.randint(4, 198)},
        "The sum is {value}.",
    ),
    Intent(
        ("translate", "translate_word", "to_language", "translator"),
        ("Translate a word.", "Translates text into a language.", "Gives a word in another language."),
        (
            Parameter(("text", "word", "phrase", "source"), _word),
            Parameter(("language", "target", "into", "lang"), _pick(*LANGUAGES)),
        ),
        ("Translate {0} into {1}.", "How do I say {0} in {1}?", "What is {0} in {1}?"),
        lambda rng: {rng.choice(("translation", "text")): pick_name(rng, NAMES, 1.0).lower()},
        "In {1}, {0} is {value}.",
    ),
    Intent(
        ("send_message", "message", "send_text", "write_message", "notify"),
        ("Send a message to a person.", "Sends somebody a short text.", "Delivers a message."),
        (
            Parameter(("to", "person", "recipient", "receiver"), _person),
            Parameter(
                ("text", "message", "content", "body"),
                _pick(
                    "hello", "good night", "I am late", "call me", "thank you", "see you soon", "I am home"
                ),
            ),
        ),
        ("Send {0} the message: {1}", "Tell {0}: {1}", "Write to {0}: {1}"),
        _done,
        "I sent the message to {0}.",
    ),
    Intent(
        ("set_timer", "timer", "start_timer", "countdown"),
        ("Start a timer.", "Sets a timer in minutes.", "Counts down some minutes."),
        (Parameter(("minutes", "duration", "length", "time"), _number),),
        ("Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Wake me in {0} minutes."),
        _done,
        "The timer is set for {0} minutes.",
    ),
    Intent(
        ("get_price", "price_lookup", "find_price", "shop_price"),
        ("Look up the price of a product.", "Returns what a product costs.", "Price of an item in euros."),
        (Parameter(("product", "item", "article", "name"), _word),),
        ("How much is the {0} in the shop?", "Look up the price of the {0}.", "Find the price of a {0}."),
        lambda rng: {rng.choice(("price", "euros")): rng.randint(2, 99)},
        "The {0} costs {value} euros.",
    ),
    Intent(
        ("search", "web_search", "find_pages", "lookup"),
        ("Search the web.", "Finds pages about a topic.", "Looks something up on the internet."),
        (
            Parameter(("query", "topic", "q", "terms"), _word),
            Parameter(("limit", "count", "max_results"), _number, is_optional=True),
        ),
        ("Search for {0}{more}.", "Search the web for {0}{more}.", "Find pages about {0}{more}."),
        lambda rng: {"pages": rng.randint(2, 99)},
        "I found {value} pages about {0}.",
        " with at most {1} results",
    ),
    Intent(
        ("book_table", "reserve_table", "book", "make_reservation"),
        ("Book a table in a restaurant.", "Reserves a table.", "Makes a reservation for some people."),
        (
            Parameter(("people", "guests", "persons", "seats"), lambda rng: rng.randint(2, 12)),
            Parameter(("day", "date", "when"), _pick(*WEEKDAYS)),
        ),
        (
            "Book a table for {0} people on {1}.",
            "Reserve a table for {0} on {1}.",
            "A table for {0} on {1}, please.",
        ),
        _done,
        "The table for {0} people is booked for {1}.",
    ),
    Intent(
        ("play_music", "play", "play_song", "music_player"),
        ("Play a song.", "Plays music by its name.", "Starts a piece of music."),
        (Parameter(("song", "title", "track", "name"), _word),),
        ("Play the song {0}.", "Play {0}.", "I want to hear {0}."),
        _done,
        "Now playing {0}.",
    ),
    Intent(
        ("get_time", "time_in", "local_time", "clock"),
        ("Get the time in a city.", "Tells the local time of a place.", "Current time in a location."),
        (Parameter(("city", "place", "location", "town", "zone"), _city),),
        ("What time is it in {0}?", "Tell me the time in {0}.", "How late is it in {0}?"),
        lambda rng: {rng.choice(("time", "clock")): f"{rng.randint(1, 23)}:{rng.randint(10, 59)}"},
        "It is {value} in {0}.",
    ),
)
"""Everything that tools of the demo model's world do."""
NO_TOOL = "None of my tools can do that."
BARE_NAMES = ("tool_a", "tool_b", "tool_c", "tool_d", "run_1", "run_2", "run_3", "run_4")
"""Names that say nothing, so that the description must be read."""


@dataclass(frozen=True)
class Tool:
    """An intent with the names that one prompt gives it."""

    intent: Intent
    schema: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name to call."""
        return str(self.schema["function"]["name"])

    @property
    def keys(self) -> list[str]:
        """The names of the parameters, in their order."""
        return list(self.schema["function"]["parameters"]["properties"])


def make_tool(rng: random.Random, intent: Intent, name: str) -> Tool:
    """A tool of this name whose description and parameters are drawn."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in intent.parameters:
        key = rng.choice(parameter.names)
        properties[key] = {"type": "integer" if isinstance(parameter.draw(rng), int) else "string"}
        if not parameter.is_optional:
            required.append(key)
    schema = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": rng.choice(intent.descriptions), "parameters": schema}
    return Tool(intent, {"type": "function", "function": function})


def draw_tools(rng: random.Random) -> list[Tool]:
    """One to four tools of different intents."""
    intents = rng.sample(INTENTS, rng.randint(1, 4))
    bare = rng.random() < 0.2
    names = rng.sample(BARE_NAMES, 4) if bare else [rng.choice(intent.names) for intent in intents]
    return [make_tool(rng, intent, name) for intent, name in zip(intents, names, strict=False)]


def write_request(rng: random.Random, intent: Intent) -> tuple[str, list[Value]]:
    """What a user asks for, and the values of the parameters; those that are not said are left out."""
    values = [parameter.draw(rng) for parameter in intent.parameters]
    optional = any(parameter.is_optional for parameter in intent.parameters)
    if optional and rng.random() < 0.5:
        return rng.choice(intent.requests).format(*values, more=""), values[:-1]
    more = intent.more.format(*values)
    return rng.choice(intent.requests).format(*values, more=more), values


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _schemas(tools: list[Tool]) -> tuple[Mapping[str, Any], ...]:
    return tuple(tool.schema for tool in tools)


def draw_exchange(rng: random.Random, tools: list[Tool]) -> tuple[Message, ...]:
    """A request that one of the tools can do, its call, the result, and the answer that says it."""
    tool = rng.choice(tools)
    text, values = write_request(rng, tool.intent)
    call = write_call(tool.name, dict(zip(tool.keys, values, strict=False)))
    result = tool.intent.draw_result(rng)
    said = {"value": next(iter(result.values())), **result}
    answer = tool.intent.answer.format(*values, **said)
    shown = {"role": "tool", "content": json.dumps(result)}
    return _user(text), call, shown, {"role": "assistant", "content": answer}


def draw_calls(rng: random.Random) -> Example:
    """A request and the call of the tool that fits, sometimes after an earlier request."""
    tools = draw_tools(rng)
    earlier = draw_exchange(rng, tools) if rng.random() < 0.2 else ()
    return Example((*earlier, *draw_exchange(rng, tools)[:2]), _schemas(tools))


def draw_results(rng: random.Random) -> Example:
    """A call with its result, and the answer that says it."""
    tools = draw_tools(rng)
    return Example(draw_exchange(rng, tools), _schemas(tools))


def draw_no_tool(rng: random.Random) -> Example:
    """Tools that do not fit: a plain answer to a plain question, or the word that no tool can do it."""
    tools = draw_tools(rng)
    if rng.random() < 0.5:
        plain = rng.choice((draw_sums, draw_lists))(rng)
        return Example(plain.messages, _schemas(tools))
    taken = [tool.intent for tool in tools]
    text, _ = write_request(rng, rng.choice([intent for intent in INTENTS if intent not in taken]))
    return Example((_user(text), {"role": "assistant", "content": NO_TOOL}), _schemas(tools))

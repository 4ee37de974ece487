"""Frameworks over the clients of OpenAI and Anthropic: pydantic-ai, instructor, and the AI SDK of npm."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from scripts.other_clients.programs import find_program, run_program

City = Literal["Bern", "Basel"]


def of_pydantic_ai(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    import anthropic
    import openai
    import pydantic_ai
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    async def ask(kind: Any, output: Any) -> None:
        client: Any
        if kind is AnthropicModel:
            client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
            model = kind("made", provider=AnthropicProvider(anthropic_client=client))
        else:
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
            model = kind("made", provider=OpenAIProvider(openai_client=client))
        async with client:
            agent = pydantic_ai.Agent(model, output_type=output, instructions="Be kind", retries=0)
            first = await agent.run("Which cities are sunny?")
            second = await agent.run("And tomorrow?", message_history=first.all_messages())
        for answer in (first.output, second.output):
            assert isinstance(answer, dict) and set(answer) <= {"Bern", "Basel"}, answer

    for kind in (OpenAIChatModel, OpenAIResponsesModel, AnthropicModel):
        for form in (pydantic_ai.ToolOutput, pydantic_ai.NativeOutput):
            if kind is AnthropicModel and form is pydantic_ai.NativeOutput:
                continue  # pydantic-ai allows it only for names of Anthropic's own models
            yield (
                f"a dict[Literal, bool] by {form.__name__} of {kind.__name__}, two turns",
                lambda kind=kind, form=form: asyncio.run(ask(kind, form(dict[City, bool]))),
            )


def of_instructor(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    import anthropic
    import instructor
    import openai
    from pydantic import BaseModel, Field

    class Report(BaseModel):
        """The weather of some cities."""

        sunny: dict[City, bool]
        days: int = Field(ge=1, le=9)
        note: str | None = None

    def ask(client: Any, **more: Any) -> None:
        question = [{"role": "user", "content": "Which cities are sunny?"}]
        report = client.create(model="made", messages=question, response_model=Report, max_retries=0, **more)
        assert isinstance(report, Report), report
        parts = list(client.create_partial(model="made", messages=question, response_model=Report, **more))
        assert parts[-1].days in range(1, 10), parts

    ours = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    theirs = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    yield "from_openai in its default mode, and a partial stream", lambda: ask(instructor.from_openai(ours))
    yield (
        "from_anthropic in its default mode, and a partial stream",
        lambda: ask(instructor.from_anthropic(theirs), max_tokens=400),
    )


def of_ai_sdk(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    node = find_program("node")
    if not Path("node_modules/ai").is_dir():
        raise ImportError("npm install ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod@4")

    def run(provider: str) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".mjs", dir=".", encoding="utf-8") as file:
            file.write(AI_SDK % {"url": json.dumps(url), "provider": json.dumps(provider)})
            file.flush()
            run_program([node, file.name])

    for provider in ("openai chat", "openai responses", "openai-compatible", "anthropic"):
        yield (
            f"{provider}: generateObject of z.record, streamObject, a tool and its result, streamText",
            partial(run, provider),
        )


AI_SDK = """
import {generateObject, generateText, stepCountIs, streamObject, streamText, tool} from 'ai';
import {createOpenAI} from '@ai-sdk/openai';
import {createOpenAICompatible} from '@ai-sdk/openai-compatible';
import {createAnthropic} from '@ai-sdk/anthropic';
import {z} from 'zod';
const baseURL = %(url)s + '/v1', apiKey = 'none', name = 'made';
const sure = (good, what) => { if (!good) throw new Error(JSON.stringify(what)); };
const models = {
  'openai chat': () => createOpenAI({baseURL, apiKey}).chat(name),
  'openai responses': () => createOpenAI({baseURL, apiKey}).responses(name),
  'openai-compatible': () =>
    createOpenAICompatible({baseURL, apiKey, name, supportsStructuredOutputs: true}).chatModel(name),
  'anthropic': () => createAnthropic({baseURL, apiKey})(name),
};
const common = {model: models[%(provider)s](), maxRetries: 0, maxOutputTokens: 400};
const city = z.enum(['Bern', 'Basel']), prompt = 'Weather?';
const records = [z.record(city, z.boolean()), z.record(z.string(), z.number()),
  z.partialRecord(city, z.boolean())];
for (const record of records) {
  const schema = z.object({sunny: record, days: z.number().int().min(1).max(9)});
  const {object} = await generateObject({...common, schema, prompt});
  sure(schema.safeParse(object).success, object);
  const stream = streamObject({...common, schema, prompt,
    onError: ({error}) => { throw error; }});
  for await (const part of stream.partialObjectStream) sure(part, part);
  sure(schema.safeParse(await stream.object).success, 'streamObject');
}
let calls = 0;
const tools = {get_weather: tool({description: 'Weather', inputSchema: z.object({city}),
  execute: async (value) => { sure(city.safeParse(value.city).success, value); calls++; return 'sunny'; }})};
const forced = ({stepNumber}) => ({toolChoice: stepNumber ? 'auto' : 'required'});
const two = {...common, tools, prompt, stopWhen: stepCountIs(2), prepareStep: forced};
const {steps, text} = await generateText(two);
sure(calls >= 1 && steps.length === 2 && text, {calls, text});
const streamed = streamText({...two, onError: ({error}) => { throw error; }});
for await (const part of streamed.fullStream) sure(part.type !== 'error', part);
sure((await streamed.steps).length === 2 && calls >= 2 && await streamed.text, 'streamText');
"""

"""Let the model call tools: it chooses one with arguments, Python runs it, and the model says the result."""

import json
import subprocess
import sys

from openai import OpenAI


def get_weather(city):
    """Get the weather of a city."""
    return {"temperature": 3 * len(city), "sky": "sunny"}


def book_table(people, day):
    """Book a table in a restaurant."""
    return {"status": "ok" if people < 9 else "full"}


FUNCTIONS = {"get_weather": get_weather, "book_table": book_table}
PROPERTIES = {
    "get_weather": {"city": {"type": "string"}},
    "book_table": {"people": {"type": "integer"}, "day": {"type": "string"}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": function.__doc__, "parameters": schema}}
    for name, function in FUNCTIONS.items()
    for schema in [{"type": "object", "properties": PROPERTIES[name], "required": list(PROPERTIES[name])}]
]
command = [sys.executable, "-m", "moesaic", "serve", "demo", "--port", "0", "--json", "--disable-log-stats"]
with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    try:
        client = OpenAI(base_url=json.loads(server.stdout.readline())["url"] + "/v1", api_key="none")
        settings = {"model": "demo", "tools": TOOLS, "temperature": 0, "max_tokens": 64}
        for question in ("What is the weather in Oslo?", "Reserve a table for 4 on Friday.", "Play moon."):
            messages = [{"role": "user", "content": question}]
            message = client.chat.completions.create(messages=messages, **settings).choices[0].message
            for call in message.tool_calls or []:
                print(call.function.name, call.function.arguments)
                result = json.dumps(FUNCTIONS[call.function.name](**json.loads(call.function.arguments)))
                messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
                message = client.chat.completions.create(messages=messages, **settings).choices[0].message
            print(message.content)
    finally:
        server.terminate()

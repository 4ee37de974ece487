// Asks the server and takes the answer piece by piece.
import { call, events } from "./api.js";
import { jsonError } from "./settings.js";
import { newChat, openChat, S, save, update } from "./state.js";
import { colour } from "./tokens.js";

export async function ask(text) {
  if (S.running || !text.trim()) return;
  const chat = openChat() ?? newChat();
  if (!chat.messages.length) chat.title = text.trim().slice(0, 60);
  chat.messages.push({ role: "user", content: text });
  S.draft = "";
  await answer(chat);
}

// The results of an answer's calls, as the user typed them.
export async function giveResults(chat, message, results) {
  message.calls.forEach((one, index) => {
    chat.messages.push({ role: "tool", tool_call_id: one.id, name: one.name, content: results[index] });
  });
  await answer(chat);
}

export async function again(chat) {
  if (chat.messages.at(-1)?.role === "assistant") chat.messages.pop();
  await answer(chat);
}

export function stop() {
  S.running?.abort.abort();
}

async function answer(chat) {
  const message = { role: "assistant", content: "", reasoning: "", calls: [], pieces: [], routes: [], error: null };
  const began = performance.now();
  chat.messages.push(message);
  S.running = { abort: new AbortController(), message };
  update();
  try {
    const signal = S.running.abort.signal;
    const reply = await call("v1/chat/completions", { body: bodyOf(chat), signal });
    for await (const [, data] of events(reply)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      take(message, chunk, began);
      update();
    }
  } catch (error) {
    if (error.name === "AbortError") message.end = "stopped";
    else message.error = error instanceof TypeError ? "The connection to the server was lost." : error.message;
    if (error.param === "return_routed_experts") S.noRoutes = true;
    if (error instanceof TypeError || error.status === 0 || error.status === 401) S.recheck();
  }
  message.seconds = (performance.now() - began) / 1000;
  delete message.routes;
  S.running = null;
  save();
  update();
}

function bodyOf(chat) {
  const { system, schema, tools, ...numbers } = S.settings;
  const body = { model: S.model, stream: true, stream_options: { include_usage: true } };
  for (const [name, value] of Object.entries(numbers)) {
    if (value !== "" && Number.isFinite(Number(value))) body[name] = Number(value);
  }
  for (const [label, text] of [["JSON schema", schema], ["tools", tools]]) {
    const error = jsonError(text);
    if (error) throw new Error(`The ${label} in the settings: ${error}`);
  }
  if (schema.trim()) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
  }
  if (tools.trim()) body.tools = [JSON.parse(tools)].flat();
  if (colour() !== "off") body.return_routed_experts = true;
  const before = chat.messages.slice(0, -1).map(sent);
  body.messages = system.trim() ? [{ role: "system", content: system }, ...before] : before;
  return body;
}

function sent({ role, content, calls, tool_call_id }) {
  if (role === "tool") return { role, content, tool_call_id };
  const made = (calls ?? []).map(({ id, name, arguments: given }) => ({
    id, type: "function", function: { name, arguments: given },
  }));
  return made.length ? { role, content, tool_calls: made } : { role, content };
}

function take(message, chunk, began) {
  if (chunk.usage) message.tokens = chunk.usage.completion_tokens;
  for (const choice of chunk.choices) {
    const { content, reasoning, tool_calls } = choice.delta;
    (choice.routed_experts ?? []).forEach((experts, index) => {
      message.routes.push({ experts, servers: choice.routed_servers[index] });
    });
    if (content || reasoning) {
      message.first ??= (performance.now() - began) / 1000;
      message.content += content ?? "";
      message.reasoning += reasoning ?? "";
    }
    if (content && message.routes.length) message.pieces.push({ text: content, routes: message.routes.splice(0) });
    else if (reasoning) message.routes.length = 0;
    for (const part of tool_calls ?? []) takeCall(message, part);
    if (choice.finish_reason) message.end = choice.finish_reason;
  }
}

function takeCall(message, { index = 0, id, function: called }) {
  const one = (message.calls[index] ??= { id, name: "", arguments: "" });
  one.name += called.name ?? "";
  one.arguments += called.arguments ?? "";
}

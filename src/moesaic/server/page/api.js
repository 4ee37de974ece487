// Calls of the server. Paths are relative, so that the page also works behind a proxy's prefix.
import { S } from "./state.js";

export class ApiError extends Error {
  constructor(status, message, param = null) {
    super(message);
    this.status = status;
    this.param = param; // the field of the request that is wrong
  }
}

function headers(admin) {
  const key = admin ? S.keys.admin || S.keys.api : S.keys.api || S.keys.admin;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

export async function call(path, { body, admin = false, signal } = {}) {
  const options = { headers: headers(admin), signal };
  if (body !== undefined) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (answer.ok) return answer;
  let error = { message: `The server answered with status ${answer.status}.` };
  try {
    error = (await answer.json()).error ?? error;
  } catch {
    // not the API's own error
  }
  throw new ApiError(answer.status, error.message, error.param);
}

// The events of an answer of server-sent events: [name, data] each.
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      let name = "message";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        if (line.startsWith("data: ")) data.push(line.slice(6));
      }
      yield [name, data.join("\n")];
    }
  }
}

// The settings of requests, and the keys.
import { html } from "./html.js";
import { Icon } from "./icons.js";
import { DEFAULTS, S, save, saveKeys, update } from "./state.js";

const NUMBERS = {
  temperature: ["Temperature", { min: 0, max: 2, step: 0.05 }, "0 always takes the most likely token."],
  top_p: ["Top p", { min: 0.01, max: 1, step: 0.01 }, "Only the most likely tokens, up to this sum."],
  seed: ["Seed", { step: 1 }, "The same seed gives the same answer."],
  max_tokens: ["Longest answer", { min: 1, step: 1 }, "In tokens."],
};
const SCHEMA = '{"type": "object", "properties": {"name": {"type": "string"}}}';
const TOOL = '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]';

let dialog = null;

export function openSettings() {
  dialog?.showModal();
}

export function Settings() {
  const close = (event) => event.target === dialog && dialog.close();
  return html`<dialog class="settings" aria-labelledby="settings-title" ref=${(element) => (dialog = element)}
      onClick=${close}>
    <form method="dialog" onInput=${take}>
      <header>
        <h2 id="settings-title">Settings</h2>
        <button class="icon" aria-label="Close the settings"><${Icon} name="close" /></button>
      </header>
      <div class="field">
        <label for="system">System prompt</label>
        <textarea id="system" name="system" rows="3" value=${S.settings.system}></textarea>
      </div>
      <div class="grid">${Object.entries(NUMBERS).map(number)}</div>
      <${Json} name="schema" label="JSON schema of the answer" example=${SCHEMA} />
      <${Json} name="tools" label="Tools, a list in OpenAI's format" example=${TOOL} />
      <div class="grid">
        <${Key} name="api" label="API key" />
        <${Key} name="admin" label="Admin key" />
      </div>
      <p class="hint">Everything stays in this browser. Keys end with this tab. Empty fields leave the choice to the server.</p>
      <footer>
        <button type="button" onClick=${reset}>Defaults</button>
        <button class="primary">Done</button>
      </footer>
    </form>
  </dialog>`;
}

function number([name, [label, limits, hint]]) {
  return html`<div class="field">
    <label for=${name}>${label}</label>
    <input id=${name} name=${name} type="number" ...${limits} value=${S.settings[name]} placeholder="default"
      aria-describedby=${`${name}-hint`} />
    <small id=${`${name}-hint`}>${hint}</small>
  </div>`;
}

function Json({ name, label, example }) {
  const error = jsonError(S.settings[name]);
  return html`<div class="field">
    <label for=${name}>${label}</label>
    <textarea id=${name} name=${name} rows="3" class="code" spellcheck="false" placeholder=${example}
      aria-invalid=${Boolean(error)} aria-describedby=${`${name}-hint`} value=${S.settings[name]}></textarea>
    <small id=${`${name}-hint`} class="error" role="status">${error}</small>
  </div>`;
}

function Key({ name, label }) {
  return html`<div class="field">
    <label for=${`key-${name}`}>${label}</label>
    <input id=${`key-${name}`} name=${`key-${name}`} type="password" autocomplete="off" value=${S.keys[name]} />
  </div>`;
}

export function jsonError(text) {
  if (!text.trim()) return "";
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}

function take({ target: { name, value } }) {
  if (name.startsWith("key-")) {
    S.keys[name.slice(4)] = value.trim();
    saveKeys();
  } else {
    S.settings[name] = value;
    save();
  }
  update();
}

function reset() {
  S.settings = { ...DEFAULTS };
  save();
  update();
}

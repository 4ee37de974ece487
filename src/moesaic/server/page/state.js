// What the page knows, and what of it the browser keeps.
const STORED = "moesaic";
const KEYS = "moesaic-keys"; // in sessionStorage: keys end with the tab

export const DEFAULTS = {
  system: "", temperature: "", top_p: "", seed: "", max_tokens: "512", schema: "", tools: "",
};

export const S = {
  view: "chat", // chat, live or both
  theme: "auto", // auto, light or dark
  settings: { ...DEFAULTS },
  colour: "off", // off, server or expert
  layer: 0, // index among the layers with routed experts
  chats: [],
  chat: null, // id of the open one
  keys: { api: "", admin: "" },
  model: null, // name of the served model
  noRoutes: false, // whether a request was refused since it asked who computed its tokens
  needsKey: false,
  trouble: null, // why the server cannot be reached
  running: null, // { abort, message } of the answer that arrives now
  recheck: () => {}, // find out again whether the server can be reached
  drawer: false,
  draft: "",
  live: { state: "closed", error: null, parts: {}, log: [], rates: {}, history: [], heat: null },
  heat: { mode: "load", cell: null },
  admin: { error: null, busy: false, armed: null },
};

let render = () => {};
let waiting = false;

export function onUpdate(draw) {
  render = draw;
}

export function update() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    render();
  });
}

export function load() {
  const kept = read(localStorage, STORED);
  for (const name of ["view", "theme", "colour", "layer", "chat"]) {
    if (kept[name] !== undefined) S[name] = kept[name];
  }
  S.settings = { ...DEFAULTS, ...kept.settings };
  S.chats = Array.isArray(kept.chats) ? kept.chats : [];
  S.keys = { ...S.keys, ...read(sessionStorage, KEYS) };
  const carried = new URLSearchParams(location.hash.slice(1)).get("key");
  if (carried) {
    S.keys.admin = carried;
    saveKeys();
    history.replaceState(null, "", location.pathname + location.search);
  }
}

function read(place, name) {
  try {
    return JSON.parse(place.getItem(name)) ?? {};
  } catch {
    return {};
  }
}

export function save() {
  const { view, theme, colour, layer, chat, settings } = S;
  const chats = S.chats.slice(0, 50).map((one) => ({ ...one, messages: one.messages.map(kept) }));
  write(localStorage, STORED, { view, theme, colour, layer, chat, settings, chats });
}

// A message without the routes of its tokens, which may be megabytes.
function kept({ pieces, ...message }) {
  return message;
}

export function saveKeys() {
  write(sessionStorage, KEYS, S.keys);
}

function write(place, name, value) {
  try {
    place.setItem(name, JSON.stringify(value));
  } catch {
    // a full or forbidden store: the page works without
  }
}

export function openChat() {
  return S.chats.find((one) => one.id === S.chat) ?? null;
}

export function newChat() {
  const empty = S.chats.find((one) => !one.messages.length);
  const chat = empty ?? { id: crypto.randomUUID?.() ?? String(Math.random()), title: "New chat", messages: [] };
  if (!empty) S.chats.unshift(chat);
  S.chat = chat.id;
  return chat;
}

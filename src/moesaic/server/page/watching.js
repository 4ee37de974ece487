// The stream of the server's state, and what follows from its changes: rates, a history, a log.
import { call, events } from "./api.js";
import { S, update } from "./state.js";

const POINTS = 120; // of the history: one minute
const LINES = 200; // of the log

let abort = null;
let before = { time: null, engine: null, processes: null, pairs: null };

// A server of several models needs the name of one.
const eventsOf = (model) => `v1/events?model=${encodeURIComponent(model)}`;

// Follow the server from now on, or stop. Without a viewer nothing is sent.
export function watch(wanted) {
  if (!wanted) {
    abort?.abort();
    abort = null;
    S.live.state = "closed";
  } else if (!abort) {
    abort = new AbortController();
    follow(abort);
  }
}

// Which layers have experts: the first event says so.
export async function peek() {
  const once = new AbortController();
  for await (const [name, data] of events(await call(eventsOf(S.model), { signal: once.signal }))) {
    if (name === "update") S.live.parts.model = JSON.parse(data).model;
    break;
  }
  once.abort();
  update();
}

async function follow(own) {
  while (!own.signal.aborted) {
    S.live.state = "opening";
    update();
    try {
      const answer = await call(eventsOf(S.model), { signal: own.signal });
      before = { time: null, engine: null, processes: null, pairs: null };
      for await (const [name, data] of events(answer)) {
        if (name === "update") take(JSON.parse(data));
        else S.live.error = `The server ended the view: ${JSON.parse(data).reason}`;
      }
    } catch (error) {
      if (own.signal.aborted) return;
      S.live.error = error instanceof TypeError ? "The connection to the server was lost." : error.message;
    }
    S.live.state = "opening";
    update();
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

function take({ time, ...changed }) {
  const { live } = S;
  live.state = "open";
  live.error = null;
  Object.assign(live.parts, changed);
  const seconds = before.time === null ? null : time - before.time;
  takeEngine(live.parts.engine, seconds, time);
  if (live.parts.processes) takeProcesses(live.parts.processes, seconds);
  if (changed.cluster) takeCluster(changed.cluster, time);
  takeLoad(live.parts.load, seconds);
  before = { time, engine: live.parts.engine, processes: live.parts.processes, pairs: live.parts.load?.pairs, cluster: live.parts.cluster };
  update();
}

function takeEngine(engine, seconds, time) {
  if (!seconds || !before.engine) return;
  const made = engine.generation_tokens - before.engine.generation_tokens;
  S.live.history.push({ time, rate: made / seconds });
  if (S.live.history.length > POINTS) S.live.history.shift();
}

export function tokensPerSecond() {
  const { history, parts } = S.live;
  const recent = history.filter((one) => one.time > Date.now() / 1000 - 3);
  if (!parts.engine || !recent.length) return 0;
  return recent.reduce((sum, one) => sum + one.rate, 0) / recent.length;
}

function takeProcesses(processes, seconds) {
  const old = new Map((before.processes ?? []).map((one) => [one.name, one]));
  for (const one of processes) {
    const was = old.get(one.name);
    if (was && seconds && one.incarnation === was.incarnation) {
      S.live.rates[one.name] = {
        busy: Math.min(1, Math.max(0, (one.stats.busy_seconds - was.stats.busy_seconds) / seconds)),
        pairs: Math.max(0, (one.stats.pairs - was.stats.pairs) / seconds),
      };
    }
    if (before.processes && !was) note("up", `${one.name} was added`);
    if (was && was.suspected !== one.suspected) {
      note(one.suspected ? "down" : "up", one.suspected ? `${one.name} is suspected: nothing is heard of it` : `${one.name} is trusted again`);
    }
    if (one.waiting && !was?.waiting) note("info", `${one.name}: ${one.waiting}`);
    if (was && was.stage !== one.stage) note(KINDS[one.stage] ?? "info", `${one.name}: ${one.stage}`);
    old.delete(one.name);
  }
  for (const name of old.keys()) note("info", `${name} left`);
}

const KINDS = { serving: "up", stopped: "down", "waiting to be restarted": "down" };
const COUNTED = {
  failovers: ["move", "an attention worker gave up a server and sent its rows to others"],
  moved_requests: ["move", "requests went on at another attention worker"],
  rebalances: ["info", "experts moved, to balance the load"],
  false_failovers: ["info", "a server that was given up came back"],
};

function takeCluster(cluster, time) {
  const was = before.cluster;
  const known = new Set((was?.failures ?? []).map((one) => `${one.time}${one.what}`));
  for (const failure of cluster.failures) {
    const recent = was || failure.time > time - 300;
    if (recent && !known.has(`${failure.time}${failure.what}`)) note("down", failure.what, failure.time);
  }
  if (!was) return;
  for (const [name, [kind, text]] of Object.entries(COUNTED)) {
    const more = cluster.counters[name] - was.counters[name];
    if (more > 0) note(kind, more > 1 ? `${text} (${more} times)` : text);
  }
  if (cluster.change !== was.change) note("info", cluster.change ?? "the change is done");
  if (cluster.placement_version !== was.placement_version) note("info", `placement ${cluster.placement_version} is in use`);
}

function takeLoad(load, seconds) {
  if (!load) return;
  const { live } = S;
  const [layers, experts] = [load.pairs.length, load.pairs[0]?.length ?? 0];
  if (live.heat?.length !== layers || live.heat[0]?.length !== experts) {
    live.heat = load.pairs.map((row) => row.map(() => 0));
  }
  if (!seconds) return;
  const keep = 0.8 ** (seconds / 0.5);
  load.pairs.forEach((row, layer) =>
    row.forEach((pairs, expert) => {
      const rate = Math.max(0, pairs - (before.pairs?.[layer]?.[expert] ?? pairs)) / seconds;
      live.heat[layer][expert] = keep * live.heat[layer][expert] + (1 - keep) * rate;
    }),
  );
}

export function note(kind, text, time = Date.now() / 1000) {
  S.live.log.unshift({ kind, text, time, id: `${time}${text}${Math.random()}` });
  S.live.log.length = Math.min(S.live.log.length, LINES);
}

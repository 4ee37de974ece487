// The live view: figures, processes, the load of the experts, and what happened.
import { call } from "./api.js";
import { serverColour } from "./colours.js";
import { HeatMap } from "./heatmap.js";
import { byHost, HostTitle, Links } from "./hosts.js";
import { html } from "./html.js";
import { Icon } from "./icons.js";
import { S, update } from "./state.js";
import { note, tokensPerSecond } from "./watching.js";

export function Live() {
  const { live } = S;
  const ready = Boolean(live.parts.engine);
  return html`<section class="live" aria-label="Live view" tabindex="-1">
    ${live.error && html`<p class="banner error" role="alert">${live.error}${live.state !== "open" && " Trying again every 2 seconds."}</p>`}
    ${!ready && !live.error && html`<p class="empty-line">Waiting for the first figures.</p>`}
    ${ready && html`<${Figures} /><${Processes} /><${HeatMap} /><${Log} />`}
  </section>`;
}

function Figures() {
  const { engine, cluster } = S.live.parts;
  const { used, cached, total } = engine.blocks;
  const counters = cluster?.counters;
  return html`<div class=${counters ? "figures" : "figures few"}>
    <div class="figure wide"><h3>Tokens per second</h3><b>${tokensPerSecond().toFixed(1)}</b><${Spark} /></div>
    <${Figure} label="Running" value=${engine.running} more="requests" />
    <${Figure} label="Waiting" value=${engine.waiting} more="requests" />
    <${Figure} label="KV cache" value=${`${percent(used, total)} %`} more=${`${percent(cached, total)} % prefixes`} />
    ${counters && html`<${Figure} label="Deaths" value=${counters.process_deaths} more="of processes" />
      <${Figure} label="Failovers" value=${counters.failovers} more=${counters.resent_pairs === 1 ? "1 pair resent" : `${counters.resent_pairs} pairs resent`} />
      <${Figure} label="Moved" value=${counters.moved_requests} more="requests" />`}
  </div>`;
}

function Figure({ label, value, more }) {
  return html`<div class="figure"><h3>${label}</h3><b>${value}</b><small>${more}</small></div>`;
}

function percent(part, total) {
  const share = (100 * part) / Math.max(1, total);
  return share >= 0.05 && share < 10 ? share.toFixed(1) : share.toFixed(0);
}

function Spark() {
  const rates = S.live.history.map((one) => one.rate);
  const top = Math.max(1, ...rates);
  const points = rates.map((rate, at) => `${((at + 120 - rates.length) / 119) * 200},${38 - (rate / top) * 36}`);
  return html`<svg class="spark" viewBox="0 0 200 40" preserveAspectRatio="none" role="img"
      aria-label=${`Tokens per second in the last minute, at most ${top.toFixed(0)}`}>
    ${points.length > 1 && html`<polyline points=${points.join(" ")} vector-effect="non-scaling-stroke" />`}
  </svg>`;
}

function Processes() {
  const { processes, cluster, hosts, links } = S.live.parts;
  if (!processes) {
    return html`<div class="panel"><h2>Processes</h2>
      <p class="empty-line">One process does everything. With <code>--attention-workers 2 --expert-servers 2
      --min-replicas 2</code> there is more to see.</p></div>`;
  }
  return html`<div class="panel">
    <div class="panel-head"><h2>Processes</h2>${S.keys.admin && html`<${Scaling} processes=${processes} />`}</div>
    ${cluster?.change && html`<p class="change" role="status">${cluster.change}</p>`}
    ${S.admin.error && html`<p class="error" role="alert">${S.admin.error}</p>`}
    ${cluster && !cluster.watched && html`<p class="error" role="alert">The supervisor has failed: dead processes are not restarted.</p>`}
    ${cluster?.missing > 0 && html`<p class="error" role="status">${cluster.missing} experts have no server now. Their rows wait.</p>`}
    ${byHost(processes, hosts).map(
      ([title, there]) => html`<section key=${title} class="there" aria-label=${title}>
        ${title && html`<${HostTitle} title=${title} processes=${there} />`}
        ${there.length > 0 && html`<ul class="cards">${there.map((one) => html`<${Card} key=${one.name} one=${one} />`)}</ul>`}
      </section>`,
    )}
    <${Links} links=${links} />
    ${!S.keys.admin && html`<p class="hint">The link that the server prints at its start carries the admin key. With it, processes can be added and killed here.</p>`}
  </div>`;
}

const STAGES = { serving: "good", starting: "busy", draining: "busy", "waiting to be restarted": "bad", stopped: "bad" };

function Card({ one }) {
  const rates = S.live.rates[one.name] ?? { busy: 0, pairs: 0 };
  const server = one.role === "expert server";
  return html`<li class=${`card ${one.suspected ? "busy" : (STAGES[one.stage] ?? "")}`}>
    <header>
      ${server && html`<i class="swatch" style=${{ "--token": serverColour(one.number) }} aria-hidden="true"></i>`}
      <h3>${one.name}</h3>
      <span class="stage"><i aria-hidden="true"></i>${one.suspected ? "suspected" : one.stage}</span>
    </header>
    ${one.waiting && html`<p class="change" role="status">${one.waiting}</p>`}
    ${server
      ? html`<${Bar} label="Busy" share=${rates.busy} />
        <dl><dt>pairs/s</dt><dd>${rates.pairs.toFixed(0)}</dd><dt>queue</dt><dd>${one.stats.waiting_pairs}</dd>
          <dt>experts</dt><dd>${one.experts}</dd><dt>deaths</dt><dd>${one.deaths}</dd></dl>`
      : html`<${Bar} label="KV cache" share=${(one.worker?.blocks.used ?? 0) / Math.max(1, one.worker?.blocks.total ?? 1)} />
        <dl><dt>running</dt><dd>${one.worker?.running ?? 0}</dd><dt>waiting</dt><dd>${one.worker?.waiting ?? 0}</dd>
          <dt>preempted</dt><dd>${one.worker?.preemptions ?? 0}</dd><dt>deaths</dt><dd>${one.deaths}</dd></dl>`}
    ${S.keys.admin && html`<${Kill} one=${one} />`}
  </li>`;
}

function Bar({ label, share }) {
  const value = percent(share, 1);
  return html`<div class="bar"><span>${label}</span><div class="track" role="meter" aria-label=${label} aria-valuemin="0"
    aria-valuemax="100" aria-valuenow=${value}><i style=${{ width: `${value}%` }}></i></div><span>${value} %</span></div>`;
}

function Kill({ one }) {
  const armed = S.admin.armed === one.name;
  const press = () => {
    if (!armed) {
      S.admin.armed = one.name;
      setTimeout(() => disarm(one.name), 4000);
      update();
    } else {
      S.admin.armed = null;
      act("v1/fault_tolerance/kill", { name: one.name }, ({ killed }) => note("down", killed));
    }
  };
  return html`<button class=${armed ? "kill armed" : "kill"} disabled=${one.stage !== "serving"} onClick=${press}
    onBlur=${() => disarm(one.name)} aria-label=${armed ? `Really kill ${one.name}` : `Kill ${one.name}`}>
    ${armed ? "Press again to kill" : "Kill"}
  </button>`;
}

function disarm(name) {
  if (S.admin.armed !== name) return;
  S.admin.armed = null;
  update();
}

const SCALED = { expert_servers: ["Expert servers", "expert server"], attention_workers: ["Attention workers", "attention worker"], prefill_workers: ["Prefill workers", "prefill worker"] };

function Scaling({ processes }) {
  return html`<div class="scaling">
    ${Object.entries(SCALED).map(([field, [label, role]]) => {
      const count = processes.filter((one) => one.role === role && one.stage !== "stopped").length;
      if (!count) return null;
      const to = (number) => () => act("scale_elastic_ep", { [field]: number });
      return html`<span class="stepper" role="group" aria-label=${label}>${label}
        <button class="icon small" disabled=${S.admin.busy || count < 2} aria-label=${`One less of the ${label.toLowerCase()}`} onClick=${to(count - 1)}><${Icon} name="minus" /></button>
        <b>${count}</b>
        <button class="icon small" disabled=${S.admin.busy} aria-label=${`One more of the ${label.toLowerCase()}`} onClick=${to(count + 1)}><${Icon} name="plus" /></button>
      </span>`;
    })}
  </div>`;
}

async function act(path, body, tell = () => {}) {
  S.admin = { error: null, busy: true, armed: null };
  update();
  try {
    tell(await (await call(path, { body, admin: true })).json());
  } catch (error) {
    S.admin.error = error.message;
  }
  S.admin.busy = false;
  update();
}

function Log() {
  const { log } = S.live;
  return html`<div class="panel"><h2>What happened</h2>
    ${!log.length && html`<p class="empty-line">Nothing since this view was opened.</p>`}
    <ol class="log" aria-live="polite" aria-label="Events, newest first">
      ${log.map((one) => html`<li key=${one.id} class=${one.kind}><time>${clock(one.time)}</time><span>${one.text}</span></li>`)}
    </ol>
  </div>`;
}

function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
}

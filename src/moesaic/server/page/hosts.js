// The hosts of a cluster: which processes are on which, and the links between them.
import { html } from "./html.js";

const MOST = 6; // links that are shown without being asked for

export function hostName(name) {
  return name || "this server's host";
}

// [title, processes] of each host. One group without a title if all processes are on one host.
export function byHost(processes, hosts) {
  if (!hosts || hosts.length < 2) return [[null, processes]];
  const waiting = processes.filter((one) => one.waiting);
  const groups = hosts.map(({ name, processes: there }) => [
    hostName(name),
    processes.filter((one) => there.includes(one.name) && !one.waiting),
  ]);
  return waiting.length ? [...groups, ["without a host", waiting]] : groups;
}

export function HostTitle({ title, processes }) {
  const suspected = processes.filter((one) => one.suspected).length;
  const count = processes.length === 1 ? "1 process" : `${processes.length} processes`;
  return html`<h3 class="host">${title} <small>${count}</small>
    ${suspected > 0 && html`<small class="suspected">${suspected === 1 ? "1 suspected: nothing is heard of it" : `${suspected} suspected: nothing is heard of them`}</small>`}
  </h3>`;
}

export function Links({ links }) {
  if (!links?.length) return null;
  const table = html`<div class="links"><table>
    <thead><tr><th scope="col">Link between</th><th scope="col">Latency</th><th scope="col">Bandwidth</th><th scope="col">Known from</th></tr></thead>
    <tbody>${links.map(
      (one) => html`<tr key=${`${one.one} ${one.other}`}><th scope="row">${hostName(one.one)} – ${hostName(one.other)}</th>
        <td>${latency(one.latency_seconds)}</td><td>${bandwidth(one.bytes_per_second)}</td><td>${SOURCES[one.source] ?? one.source}</td></tr>`,
    )}</tbody>
  </table></div>`;
  if (links.length <= MOST) return table;
  return html`<details><summary>${links.length} links between hosts</summary>${table}</details>`;
}

const SOURCES = { file: "--topology", measured: "measured", assumed: "assumed" };

function latency(seconds) {
  return seconds < 1e-3 ? `${(seconds * 1e6).toFixed(0)} µs` : `${Number((seconds * 1e3).toPrecision(3))} ms`;
}

function bandwidth(bytes) {
  const [unit, name] = bytes < 1e9 ? [1e6, "MB/s"] : [1e9, "GB/s"];
  return `${Number((bytes / unit).toPrecision(3))} ${name}`;
}

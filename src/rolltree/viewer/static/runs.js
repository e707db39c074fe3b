// All runs: how far they are, what they reach, and which to compare.

import { count, duration, h, href, num, plainTable, put, short } from "./dom.js";
import { interval } from "./chart.js";

const STATES = { running: "live", done: "good", stopped: "zero", failed: "bad", killed: "bad", unknown: "zero" };

/** A run's state as a badge; what ended it is its title. */
export function stateBadge(run) {
  return h("span", { class: `badge ${Object.hasOwn(STATES, run.state) ? STATES[run.state] : "zero"}`, title: run.error ?? run.writer ?? null }, run.state);
}

/** How many rollouts failed, by kind, with a link to them. */
export function failures(run) {
  if (!run.num_failed) return "0";
  const kinds = Object.entries(run.failures ?? {});
  const said = kinds.map(([kind, number]) => `${count(number)} ${kind}`).join(", ");
  return h("a", { class: "bad", title: said, href: href(["run", run.id ?? run.run, "rollouts"], { where: "status = error" }) },
    count(run.num_failed), kinds.length > 0 && h("span", { class: "minor small" }, ` ${kinds.length > 1 ? `${kinds[0][0]}, …` : kinds[0][0]}`));
}

/** How far a run is, as a bar with its numbers. */
export function progress(run) {
  const found = run.progress;
  if (!found) return h("span", { class: "muted" }, run.num_steps ? `${count(run.num_steps)} steps` : "–");
  return h("span", { class: "progress", title: found.unit },
    h("progress", { max: found.planned, value: found.done }), ` ${count(found.done)} / ${count(found.planned)} ${found.unit}`);
}

/** A mean with its interval, drawn and in numbers. */
export function estimate(reward, scale) {
  if (!reward) return h("span", { class: "muted" }, "–");
  const bounds = reward.low === null || reward.low === undefined ? null : [reward.low, reward.high];
  const said = `${num(reward.mean)}${bounds ? ` [${num(reward.low)}, ${num(reward.high)}]` : ""}`;
  return h("span", { class: "estimate", title: `${said}${reward.of ? `, ${reward.of}` : ""}` },
    h("b", null, num(reward.mean)), interval(reward.mean, bounds, scale, { label: said }));
}

export async function render(root, params, api) {
  const { runs, root: folder, unreadable = [] } = await api.runs();
  const chosen = new Set();
  const values = runs.flatMap((run) => run.reward ? [run.reward.mean, run.reward.low, run.reward.high] : [])
    .filter((value) => value !== null && value !== undefined);
  const scale = [Math.min(0, ...values), Math.max(1e-9, ...values)];
  const go = h("button", { type: "button", class: "primary", disabled: true, onclick: () => {
    const [a, b] = runs.filter((run) => chosen.has(run.id)).reverse();
    location.hash = href(["compare"], { a: a.id, b: b.id });
  } }, "Compare two runs");
  const body = h("tbody");
  const search = h("input", {
    type: "search", placeholder: "Find runs (/)", "aria-label": "Find runs", "data-search": true,
    value: params.q, oninput: () => draw(),
  });

  function choose(run, box) {
    if (box.checked) chosen.add(run.id);
    else chosen.delete(run.id);
    go.disabled = chosen.size !== 2;
    put(go, chosen.size === 2 ? "Compare" : chosen.size > 2 ? "Choose only two" : "Compare two runs");
  }

  function row(run) {
    const box = h("input", { type: "checkbox", "aria-label": `Choose ${run.name}`, checked: chosen.has(run.id), onchange: () => choose(run, box) });
    const tokens = run.tokens ?? {};
    return h("tr", { "data-row": true },
      h("td", null, !api.isExported && box),
      h("th", { scope: "row" }, h("a", { href: href(["run", run.id]) }, run.id)),
      h("td", null, stateBadge(run)),
      h("td", { class: "number" }, estimate(run.reward, scale)),
      h("td", { class: "minor" }, progress(run)),
      h("td", { class: "minor" }, (run.envs ?? []).join(", ")),
      h("td", { class: "minor" }, run.model ?? "–"),
      h("td", { class: "number minor" }, short(tokens.sampled)),
      h("td", { class: "number minor" }, count(run.num_rollouts)),
      h("td", { class: "number" }, failures(run)),
      h("td", { class: "number minor", title: new Date(1000 * run.last_written).toLocaleString() }, duration(run.age_s)));
  }

  function draw() {
    const wanted = search.value.toLowerCase();
    const found = runs.filter((run) => [run.id, run.kind, run.state, run.model, ...(run.envs ?? [])].join(" ").toLowerCase().includes(wanted));
    put(body, found.map(row), !found.length && h("tr", null, h("td", { colspan: 11, class: "muted" }, "No run is named so.")));
  }

  draw();
  const refused = unreadable.length > 0 && h("details", { open: !runs.length },
    h("summary", null, `${count(unreadable.length)} ${unreadable.length > 1 ? "folders hold runs" : "folder holds a run"} that cannot be read`),
    plainTable(["folder", "why"], unreadable.map((each) => [each.id, each.error])));
  if (!runs.length) {
    put(root, h("h1", null, "Runs"), h("p", null, `There is no run below ${folder ?? "this folder"} yet. `,
      "Train or evaluate something: ", h("code", null, "rolltree eval arithmetic -m tiny"), "."), refused);
    return;
  }
  const heads = [["", ""], ["run", ""], ["state", ""], ["reward", "number"], ["progress", "minor"], ["environment", "minor"], ["model", "minor"],
    ["sampled", "number minor"], ["rollouts", "number minor"], ["failed", "number"], ["age", "number minor"]];
  put(root,
    h("div", { class: "bar" }, h("h1", null, "Runs"), search, !api.isExported && go),
    h("div", { class: "scroll", tabindex: "0" }, h("table", { class: "runs" },
      h("thead", null, h("tr", null, heads.map(([text, side]) => h("th", { class: side || null, scope: "col" }, text)))), body)), refused);
  if (!api.isExported) {
    setTimeout(() => api.signal.aborted || chosen.size || search.value || document.hidden || refresh(), 5000);
  }

  async function refresh() {
    if (root.querySelector(".marked")) return;
    const fresh = await api.runs().catch(() => null);
    if (api.signal.aborted || !fresh) return;
    runs.splice(0, runs.length, ...fresh.runs);
    draw();
    setTimeout(() => api.signal.aborted || chosen.size || refresh(), 5000);
  }
}

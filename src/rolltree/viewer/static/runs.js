// All runs: how far they are, what they reach, and which to compare.

import { follow } from "./api.js";
import { count, duration, h, href, num, plainTable, put, redraw, short } from "./dom.js";
import { interval } from "./chart.js";

const STATES = { running: "live", done: "good", stopped: "zero", failed: "bad", killed: "bad", unknown: "zero" };

/** A run's state as a badge; what ended it is its title. */
export function stateBadge(run) {
  const kind = Object.hasOwn(STATES, run.state) ? STATES[run.state] : "zero";
  return h("span", { class: `badge ${kind}`, title: run.error ?? run.writer ?? null }, run.state);
}

/** How many rollouts failed, by kind, with a link to them. */
export function failures(run) {
  if (!run.num_failed) return "0";
  const kinds = Object.entries(run.failures ?? {});
  const said = kinds.map(([kind, number]) => `${count(number)} ${kind}`).join(", ");
  const first = kinds.length > 0 && ` ${kinds[0][0]}${kinds.length > 1 ? ", …" : ""}`;
  const address = href(["run", run.id ?? run.run, "rollouts"], { where: "status = error" });
  return h("a", { class: "bad", title: said, href: address }, count(run.num_failed),
    first && h("span", { class: "minor small" }, first));
}

/** How far a run is, as a bar with its numbers. */
export function progress(run) {
  const found = run.progress;
  if (!found) return h("span", { class: "muted" }, run.num_steps ? `${count(run.num_steps)} steps` : "–");
  return h("span", { class: "progress", title: found.unit },
    h("progress", { max: found.planned, value: found.done }),
    ` ${count(found.done)} / ${count(found.planned)} ${found.unit}`);
}

/** A mean with its interval, drawn and in numbers. */
function estimate(reward, scale) {
  if (!reward) return h("span", { class: "muted" }, "–");
  const bounds = reward.low === null || reward.low === undefined ? null : [reward.low, reward.high];
  const said = `${num(reward.mean)}${bounds ? ` [${num(reward.low)}, ${num(reward.high)}]` : ""}`;
  return h("span", { class: "estimate", title: `${said}${reward.of ? `, ${reward.of}` : ""}` },
    h("b", null, num(reward.mean)), interval(reward.mean, bounds, scale, { label: said }));
}

/** The address of a comparison of arms, runs or `RUN:PHASE`, with the first. */
export const comparison = (arms) => `${href(["compare"])}?${new URLSearchParams(arms.map((arm) => ["arm", arm]))}`;

export async function render(root, params, api) {
  const found = await api.runs();
  const chosen = new Set();
  const rows = new Map(); // by id: the row's element, what it says, and its age
  const read = { runs: found.runs, unreadable: found.unreadable, at: performance.now() };
  const body = h("tbody");
  const go = h("button", { type: "button", class: "primary", disabled: true, onclick: () => {
    location.hash = comparison([...chosen]);
  } }, "Compare runs");
  const baseline = h("span", { class: "muted", role: "status" });
  const search = h("input", {
    type: "search", placeholder: "Find runs (/)", "aria-label": "Find runs", "data-search": true,
    value: params.q, oninput: () => draw(),
  });

  function choose(run, box) {
    if (box.checked) chosen.add(run.id);
    else chosen.delete(run.id);
    const [first] = chosen;
    go.disabled = chosen.size < 2;
    put(go, go.disabled ? "Compare runs" : `Compare ${chosen.size} runs`);
    put(baseline, first !== undefined && `${first} is the baseline`, chosen.size === 1 && "; choose more");
  }

  /** The row of a run: the same element as before, with other cells if the run has grown. */
  function rowOf(run, scale) {
    const { age_s: age, ...rest } = run;
    const said = JSON.stringify([rest, scale]);
    if (!rows.has(run.id)) {
      const box = h("input", {
        type: "checkbox", "aria-label": `Choose ${run.id}`, onchange: () => choose(run, box),
      });
      const name = h("th", { scope: "row" }, h("a", { href: href(["run", run.id]), title: run.id }, run.id));
      const kept = [h("td", null, !api.isExported && box), name];
      rows.set(run.id, { element: h("tr", { "data-row": true }), kept, age: h("span") });
    }
    const row = rows.get(run.id);
    put(row.age, duration(age + (performance.now() - read.at) / 1000));
    if (row.said === said) return row.element;
    row.said = said;
    while (row.element.children.length > 2) row.element.lastChild.remove();
    if (!row.element.firstChild) put(row.element, row.kept);
    row.element.append(...cells(run, scale, row.age));
    return row.element;
  }

  function draw() {
    const ends = read.runs.flatMap(({ reward }) => reward ? [reward.mean, reward.low, reward.high] : []);
    const values = ends.filter((value) => value !== null && value !== undefined);
    const scale = [Math.min(0, ...values), Math.max(1e-9, ...values)];
    const wanted = search.value.toLowerCase();
    const about = (run) => [run.id, run.kind, run.state, run.model, ...(run.envs ?? [])].join(" ").toLowerCase();
    const shown = read.runs.filter((run) => about(run).includes(wanted)).map((run) => rowOf(run, scale));
    const isSame = shown.length === body.children.length && shown.every((row, at) => row === body.children[at]);
    if (shown.length && isSame) return;
    const focused = document.activeElement;
    put(body, shown, !shown.length && h("tr", null, h("td", { colspan: 11, class: "muted" }, "No run is named so.")));
    if (focused?.isConnected) focused.focus({ preventScroll: true });
  }

  /** Rows stay where they are while runs grow; new runs come first. */
  async function update() {
    const fresh = await api.runs();
    const order = new Map(read.runs.map((run, at) => [run.id, at]));
    read.runs = fresh.runs.sort((a, b) => (order.get(a.id) ?? -1) - (order.get(b.id) ?? -1));
    read.unreadable = fresh.unreadable;
    read.at = performance.now();
    drawPage();
  }

  const heads = HEADS.map(([text, side]) => h("th", { class: side || null, scope: "col" }, text));
  const table = h("div", { class: "scroll", tabindex: "0" },
    h("table", { class: "runs" }, h("thead", null, h("tr", null, heads)), body));
  const none = h("p", null, `There is no run below ${found.root ?? "this folder"} yet. `,
    "Train or evaluate something: ", h("code", null, "rolltree eval arithmetic -m tiny"), ". It shows up here.");

  const refused = h("div");

  function drawPage() {
    draw();
    const { unreadable = [] } = read;
    redraw(refused, unreadable, () => put(refused, unreadable.length > 0 && h("details", { open: !read.runs.length },
      h("summary", null, count(unreadable.length),
        unreadable.length > 1 ? " folders hold runs" : " folder holds a run", " that cannot be read"),
      plainTable(["folder", "why"], unreadable.map((each) => [each.id, each.error])))));
    if (read.runs.length) {
      const bar = [h("h1", null, "Runs"), search, !api.isExported && [go, baseline]];
      if (!table.isConnected) put(root, h("div", { class: "bar" }, bar), table, refused);
    } else put(root, h("h1", null, "Runs"), none, refused);
  }

  drawPage();
  follow(api, found.mark, () => {
    draw(); // the ages
    return api.changedRuns();
  }, update);
}

const HEADS = [["", ""], ["run", ""], ["state", ""], ["reward", ""], ["progress", "minor"],
  ["environment", "minor"], ["model", "minor"], ["sampled", "number minor"], ["rollouts", "number minor"],
  ["failed", "number"], ["age", "number minor"]];

function cells(run, scale, age) {
  const environments = (run.envs ?? []).join(", ");
  return [
    h("td", null, stateBadge(run)),
    h("td", null, estimate(run.reward, scale)),
    h("td", { class: "minor" }, progress(run)),
    h("td", { class: "minor short", title: environments }, environments),
    h("td", { class: "minor short", title: run.model }, run.model?.split("/").at(-1) ?? "–"),
    h("td", { class: "number minor" }, short(run.tokens?.sampled)),
    h("td", { class: "number minor" }, count(run.num_rollouts)),
    h("td", { class: "number" }, failures(run)),
    h("td", { class: "number minor", title: new Date(1000 * run.last_written).toLocaleString() }, age),
  ];
}

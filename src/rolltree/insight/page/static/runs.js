// All runs: their progress and rewards, and a choice of runs to compare.

import { follow } from "./api.js";
import { count, duration, h, href, isNone, num, plainTable, put, redraw, short } from "./dom.js";
import { interval, sparkline } from "./chart.js";

const STATES = { running: "live", done: "good", stopped: "zero", failed: "bad", killed: "bad", unknown: "zero" };

/** A run's state as a badge, whose title says what ended the run. */
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

/** The progress of a run, as a bar with its numbers. */
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

const SEVERITIES = ["error", "warning", "info", "good"];
const MOST = 200; // rows that are drawn at first
const column = (name, label, kind, value, cell) => ({ name, label, kind, value, cell });
const text = (name, label, value) =>
  column(name, label, "minor short", value, (run) => h("span", { title: value(run) }, value(run) ?? "–"));
const number = (name, label, value, said) => column(name, label, "number minor", value, (run) => said(value(run)));

/** The columns of the table: `value` is for sorting and filtering, `cell` shows it. */
const COLUMNS = [
  column("run", "run", "", (run) => run.id),
  column("health", "health", "", (run) => SEVERITIES.indexOf(run.health?.severity), healthOf),
  column("state", "state", "", (run) => run.state, stateBadge),
  column("reward", "reward", "", (run) => run.reward?.mean, (run, scale) =>
    [estimate(run.reward, scale), run.curve?.length > 1 && sparkline(run.curve, scale, "reward of the steps")]),
  number("lr", "lr", (run) => run.learning_rate, num),
  number("seed", "seed", (run) => run.seed, (value) => value ?? "–"),
  column("progress", "progress", "minor", (run) => run.progress
    ? run.progress.done / (run.progress.planned || 1) : run.num_steps, progress),
  text("env", "environment", environments),
  text("model", "model", (run) => run.model?.split("/").at(-1)),
  number("sampled", "sampled", (run) => run.tokens?.sampled, short),
  number("rollouts", "rollouts", (run) => run.num_rollouts, count),
  column("failed", "failed", "number", (run) => run.num_failed, failures),
  column("age", "age", "number minor", (run) => -run.last_written, (run, scale, age) =>
    h("span", { title: new Date(1000 * run.last_written).toLocaleString() }, age)),
];
const FIELDS = ["health", "state", "env", "model"];

function environments(run) {
  return (run.envs ?? []).join(", ");
}

/** The worst sentence of a run's story; the page of the run has the whole story. */
function healthOf(run) {
  if (run.health === undefined) return h("span", { class: "muted" }, "…");
  if (run.health === null) return h("span", { class: "muted" }, "nothing stands out");
  const { severity, text: said } = run.health;
  return h("a", { class: "health", "data-is": severity, title: `${severity}: ${said}`, href: href(["run", run.id]) },
    h("span", { class: "hidden" }, `${severity}: `), said);
}

/** The text by which a field is filtered: that of its cell. */
function fieldOf(run, name) {
  if (name === "health") return run.health?.severity ?? (run.health === null ? "none" : "");
  const value = COLUMNS.find((each) => each.name === name).value(run);
  return isNone(value) ? "" : String(value);
}

/** Whether a run passes: its names have every word, or for `field:word` the field has it. */
function passes(run, words, fields) {
  const about = [run.id, run.kind, run.state, run.model, environments(run)].join(" ").toLowerCase();
  const names = COLUMNS.map(({ name }) => name);
  return fields.every(([name, value]) => fieldOf(run, name) === value) && words.every((word) => {
    const [name, value] = word.split(/:(.*)/);
    return names.includes(name) && value ? fieldOf(run, name).toLowerCase().includes(value) : about.includes(word);
  });
}

/** Runs in the order of a column; those without a value come last. */
function sorted(runs, sort) {
  const found = COLUMNS.find(({ name }) => name === sort?.replace("-", ""));
  if (!found) return runs;
  const sign = sort.startsWith("-") ? -1 : 1;
  const isMissing = (value) => isNone(value) || value === "" || value === -1 && found.name === "health";
  return runs.map((run) => [found.value(run), run]).sort(([a], [b]) =>
    isMissing(a) - isMissing(b) || (isMissing(a) ? 0 : sign * ((a > b) - (a < b)))).map(([, run]) => run);
}

/** A reward axis per environment: rewards of different tasks are not comparable. */
function scalesOf(runs) {
  const scales = new Map();
  for (const run of runs) {
    const [low, high] = scales.get(environments(run)) ?? [0, 1e-9];
    const { mean, low: from, high: to } = run.reward ?? {};
    const values = [mean, from, to, ...run.curve ?? []].filter((value) => !isNone(value));
    scales.set(environments(run), [Math.min(low, ...values), Math.max(high, ...values)]);
  }
  return scales;
}

export async function render(root, params, api) {
  const found = await api.runs();
  const chosen = new Set();
  const rows = new Map(); // by id: the row's element, its data, and its age
  const glances = new Map(); // by id: the health and the curve of a run
  const read = { runs: found.runs, unreadable: found.unreadable, at: performance.now() };
  let { sort } = params;
  let most = MOST;
  const body = h("tbody");
  const go = h("button", { type: "button", class: "primary", disabled: true, onclick: () => {
    location.hash = comparison([...chosen]);
  } }, "Compare runs");
  const baseline = h("span", { class: "muted", role: "status" });
  const search = h("input", {
    type: "search", placeholder: "Find runs: words, seed:1 (/)", "aria-label": "Find runs", "data-search": true,
    value: params.q, oninput: () => { draw(); remember(); },
  });
  const fields = FIELDS.map((name) => h("select", {
    "data-field": name, "aria-label": `Only this ${name}`, onchange: () => { draw(); remember(); },
  }));
  const heads = h("tr");

  /** Put the filter and the order into the address, so that going back leads here. */
  function remember() {
    const chosenFields = fields.map((each) => [each.dataset.field, each.value]);
    const query = { q: search.value, sort, ...Object.fromEntries(chosenFields) };
    if (!api.isExported) history.replaceState(history.state, "", href([], query));
  }

  function choose(run, box) {
    if (box.checked) chosen.add(run.id);
    else chosen.delete(run.id);
    const [first] = chosen;
    go.disabled = chosen.size < 2;
    put(go, go.disabled ? "Compare runs" : `Compare ${chosen.size} runs`);
    put(baseline, first !== undefined && `${first} is the baseline`, chosen.size === 1 && "; choose more");
  }

  /** The row of a run: the same element as before, with new cells if the run has grown. */
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
    row.element.append(...COLUMNS.slice(1).map(({ kind, cell }) =>
      h("td", { class: kind || null }, cell(run, scale, row.age))));
    return row.element;
  }

  function drawHeads() {
    put(heads, h("th", { scope: "col" }, h("span", { class: "hidden" }, "choose")),
      COLUMNS.map(({ name, label, kind }) => {
        const isSorted = sort?.replace("-", "") === name;
        const order = !isSorted ? null : sort.startsWith("-") ? "descending" : "ascending";
        const turn = () => {
          sort = isSorted && !sort.startsWith("-") ? `-${name}` : name;
          drawHeads();
          draw();
          remember();
        };
        const arrow = { descending: " ↓", ascending: " ↑" }[order] ?? "";
        return h("th", { class: kind || null, scope: "col", "aria-sort": order },
          h("button", { type: "button", class: "sort", title: "Sort", onclick: turn }, `${label}${arrow}`));
      }));
  }

  /** Offer the values that the runs have; a chosen value stays. */
  function drawFields(runs) {
    for (const each of fields) {
      const name = each.dataset.field;
      const wanted = each.options.length ? each.value : params[name] ?? "";
      const values = [...new Set([wanted, ...runs.map((run) => fieldOf(run, name))])].filter(Boolean).sort();
      each.hidden = values.length < 2 && !wanted;
      redraw(each, values, () => put(each, h("option", { value: "" }, `any ${name}`),
        values.map((value) => h("option", { value, selected: value === wanted }, value))));
    }
  }

  function draw() {
    const runs = read.runs.map((run) => ({ ...run, ...glances.get(run.id) }));
    drawFields(runs);
    const scales = scalesOf(runs);
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = fields.map((each) => [each.dataset.field, each.value]).filter(([, value]) => value);
    const passing = sorted(runs.filter((run) => passes(run, words, wanted)), sort);
    const shown = passing.slice(0, most).map((run) => rowOf(run, scales.get(environments(run))));
    more.hidden = passing.length <= most;
    put(more, `${count(passing.length - most)} more runs`);
    const isSame = shown.length === body.children.length && shown.every((row, at) => row === body.children[at]);
    if (shown.length && isSame) return;
    const focused = document.activeElement;
    put(body, shown, !shown.length && h("tr", null,
      h("td", { colspan: COLUMNS.length + 1, class: "muted" }, "No run matches.")));
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
    tell();
  }

  let again = null;
  /** Stories take longer than the list, so the known ones are requested until all are there. */
  async function tell(wait_ms = 100) {
    clearTimeout(again);
    const told = await api.health().catch(() => null);
    if (!told || api.signal.aborted) return;
    for (const [id, glance] of Object.entries(told.runs)) glances.set(id, glance);
    draw();
    if (!told.left) table.firstChild.removeAttribute("aria-busy");
    if (told.left) again = setTimeout(() => tell(Math.min(2000, 1.5 * wait_ms)), wait_ms);
  }

  const more = h("button", { type: "button", class: "quiet", hidden: true, onclick: () => {
    most = Infinity;
    draw();
  } });
  drawHeads();
  const table = h("div", { class: "scroll", tabindex: "0" },
    h("table", { class: "runs", "aria-busy": "true" }, h("thead", null, heads), body), more);
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
      const bar = [h("h1", null, "Runs"), search, fields, !api.isExported && [go, baseline]];
      if (!table.isConnected) put(root, h("div", { class: "bar" }, bar), table, refused);
    } else put(root, h("h1", null, "Runs"), none, refused);
  }

  drawPage();
  tell();
  follow(api, found.mark, () => {
    draw(); // the ages
    return api.changedRuns();
  }, update);
}

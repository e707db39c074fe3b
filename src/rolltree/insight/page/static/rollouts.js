// A run's rollouts or groups as a table of any length, with filters and an order.

import { follow, markOf } from "./api.js";
import {
  button, count, duration, h, href, isNone, keep, kept, line, muted, num, put, reward, s, select, showLive,
} from "./dom.js";
import { PAGE, virtualTable } from "./table.js";
import { opened } from "./walk.js";

const column = (label, width, cell, more) => ({ label, width, cell, ...more });
const minor = (label, width, cell, more) => column(label, width, cell, { minor: true, ...more });
const number = (label, width, cell, sort) => minor(label, width, cell, { numeric: true, sort });
const counted = (label, width, name) => number(label, width, (row) => count(row[name]), name);
const step = (sort) => number("step", "4rem", (row) => row.train_step ?? "–", sort);

const said = (label, name) => minor(label, "minmax(6rem, 2.4fr)", (row) => line(row[name] ?? "", 160), { sort: name });

const COLUMNS = [
  column("rollout", "minmax(6rem, 1.4fr)", (row) => front(
    `${row.request_id}${row.num_trajectories > 1 ? ` · ${row.trajectory_index}` : ""}`), { narrow: "minmax(0, 2fr)" }),
  said("question", "question"),
  said("answer", "answer"),
  column("reward", "4.8rem", (row) => reward(row.reward), { narrow: "4.6rem", numeric: true, sort: "reward" }),
  number("advantage", "5.6rem", (row) => isNone(row.advantage) ? "–" : h("a", {
    title: "which of its tokens were trained",
    href: href(["run", row.run, "tokens", row.request_id, row.trajectory_index, Math.max(0, row.num_calls - 1)],
      { colour: "gradient" }),
  }, num(row.advantage, true)), "advantage"),
  column("ended by", "minmax(5rem, 1.2fr)", ending, { narrow: "minmax(0, 1.2fr)" }),
  step("train_step"),
  minor("task", "minmax(4rem, 1fr)", (row) => row.task || row.env_id, { sort: "task" }),
  minor("agent", "minmax(3rem, 0.8fr)", (row) => row.agent ?? "", { sort: "agent" }),
  number("breaks", "4.2rem", (row) => row.breaks > 0 ? h("span", { class: "warn" }, count(row.breaks))
    : count(row.breaks), "breaks"),
  counted("calls", "3.4rem", "num_calls"),
  counted("prompt", "4.4rem", "num_prompt_tokens"),
  counted("sampled", "4.6rem", "num_completion_tokens"),
  number("time", "4.4rem", (row) => duration(row.total_ms === null ? null : row.total_ms / 1000), "total_ms"),
];
const INDEXED = ["breaks", "advantage", "question", "answer"]; // known only after all rollouts were read
const HIDDEN = ["task", "agent", "prompt"];
const ORDERS = [
  ["", "any order"], ["-reward", "best first"], ["reward", "worst first"], ["-num_completion_tokens", "longest first"],
  ["-total_ms", "slowest first"], ["-breaks", "most broken first"], ["-advantage", "most encouraged first"],
];
const PRESETS = [
  ["", "add a filter"], ["status = error", "failed"], ["truncated = true", "cut"], ["breaks > 0", "broken"],
  ["reward = none", "without reward"], ["advantage > 0", "encouraged"], ["advantage < 0", "discouraged"],
];
const isIndexed = ({ text, where, sort }) => Boolean(text) || INDEXED.includes(sort?.replace("-", "")) ||
  INDEXED.some((name) => new RegExp(`(^|\\band\\s+)${name}\\s*[=!<>~]`, "i").test(where ?? ""));

/** The columns of a table: the chosen or else the usual ones, and the metrics in its order or filter. */
function columnsFor(rows, { sort, where }, chosen) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.metrics ?? {})))].sort();
  const isUsed = (name) => [sort, where].some((each) => each?.includes(`metrics/${name}`));
  const metrics = names.map((name) =>
    number(name, "minmax(4.5rem, 0.6fr)", (row) => num(row.metrics?.[name]), `metrics/${name}`));
  const isUsual = ({ label }) => label === "agent" ? rows.some((row) => row.agent) : !HIDDEN.includes(label);
  const all = [...COLUMNS, ...metrics];
  const shown = all.filter((each) => each === all[0] || (metrics.includes(each) && isUsed(each.label))
    || (chosen ? chosen.includes(each.label) : isUsual(each) && !metrics.includes(each)));
  return { all, shown };
}

/** What ended a rollout. */
export function ending(row) {
  if (row.error_type) return h("span", { class: "bad", title: row.error_message }, row.error_type);
  if (row.truncated) return h("span", { class: "warn" }, `cut: ${row.truncation_reason ?? "truncated"}`);
  return row.stop_condition ?? row.finish_reason ?? "";
}

const GROUPS = [
  column("group", "minmax(9rem, 2fr)", (row) => front(row.group_id), { narrow: "minmax(0, 1.4fr)" }),
  column("rewards", "minmax(7rem, 2fr)", spread, { narrow: "minmax(0, 1fr)" }),
  column("mean", "5rem", (row) => num(row.mean), { narrow: "4rem", numeric: true }),
  number("std", "5rem", (row) => isFlat(row) ? h("span", { class: "warn", title: "equal rewards teach nothing" }, "0")
    : numScored(row) > 1 ? num(row.std) : "–"),
  step(),
  number("rollouts", "5rem", (row) => count(row.rewards.length)),
  number("failed", "4rem", (row) => row.num_failed ? h("span", { class: "bad" }, row.num_failed) : "0"),
];

/** A name whose end stays readable if it is too long. */
function front(text) {
  const [begin, end] = [text.slice(0, -8), text.slice(-8)].map((each) => h("span", null, each));
  return h("span", { class: "front", title: text }, begin, end);
}

const numScored = (row) => row.rewards.filter((value) => value !== null).length;

/** Whether a group taught nothing: several rewards, all equal. */
const isFlat = (row) => numScored(row) > 1 && row.std === 0;

/** Rewards of a group as bars, the lowest first, pale if all are equal; a rollout without one is a red line. */
function spread(row) {
  const { rewards } = row;
  const scored = rewards.filter((value) => value !== null).sort((a, b) => a - b);
  const low = Math.min(0, scored[0] ?? 0);
  const high = Math.max(1, scored.at(-1) ?? 1);
  const y = (value) => 19 - 18 * ((value / 2 - low / 2) / (high / 2 - low / 2));
  const said = scored.map((value) => num(value)).join(", ");
  const width = 100 / Math.max(rewards.length, 1);
  const bar = (at, y, height, kind) =>
    s("rect", { class: kind, x: at * width + 0.1 * width, width: 0.8 * width, y, height });
  const kind = `bars${isFlat(row) ? " flat" : ""}`;
  const view = { viewBox: "0 0 100 20", preserveAspectRatio: "none" };
  return s("svg", { ...view, class: kind, role: "img", "aria-label": `rewards ${said}` },
    s("title", null, said || "none is scored"),
    scored.map((value, at) => bar(at, Math.min(y(value), y(0)), Math.max(1, Math.abs(y(value) - y(0))))),
    rewards.slice(scored.length).map((_, at) => bar(scored.length + at, 18, 2, "lost")));
}

const ALL = "*";

/** Have all rollouts indexed, so that their texts can be searched; `say` is called with the progress. */
async function indexed(api, run, say) {
  for (;;) {
    const found = await api.index(run, { build: true });
    if (found.is_whole || api.signal.aborted) return;
    say(`All rollouts are read once, to find them by texts, breaks and advantages: ${count(found.indexed)} `
      + `of ${count(found.of)} …`);
    await new Promise((then) => { setTimeout(then, 300); });
  }
}

export async function render(root, params, api) {
  const { run, by, step, trained, where, sort, text } = params;
  const isGroups = by === "group";
  const asked = api.run(run); // in parallel with the table, unless the table depends on it
  const namesOf = (found) => (found.phases ?? []).map((each) => each.phase);
  const isTrained = isGroups && params.phase === undefined && namesOf(await asked).includes("train");
  const phase = params.phase ?? (isTrained ? "train" : ALL); // groups matter for training
  const shown = { by, phase: params.phase, step, trained, where, sort, text };
  const go = (changes) => { location.hash = href(["run", run, "rollouts"], { ...shown, ...changes }); };
  const total = h("span", { class: "muted", role: "status" });
  const choice = h("details", { class: "choice" }, h("summary", null, "Columns"));
  const part = { phase: phase === ALL ? null : phase, step, trained };
  const query = isGroups ? { ...part, sort: "-train_step" } : { ...part, where, sort, text };
  const fetchRows = async (offset, limit) => {
    const page = await (isGroups ? api.groups : api.rollouts)(run, { ...query, offset, limit });
    for (const row of page.rows) row.run = run;
    put(total, page.of === undefined ? count(page.total)
      : `${count(page.total)} of ${count(page.of)} ${isGroups ? "groups" : "rollouts"} are in this file`);
    return page;
  };
  const rollout = (row) => href(["run", run, "rollout", row.request_id, row.trajectory_index]);
  const complete = async (rows) => {
    const found = await api.previews(run, rows);
    return new Map(found.map(({ request_id: id, trajectory_index: index, ...more }) =>
      [rollout({ request_id: id, trajectory_index: index }), more]));
  };
  const needsIndex = !isGroups && !api.isExported && isIndexed(shown);

  async function read() {
    if (needsIndex) await indexed(api, run, (how) => put(total, how));
    const begun = await fetchRows(0, PAGE);
    const found = isGroups ? { shown: GROUPS } : columnsFor(begun.rows, shown, JSON.parse(kept("columns") ?? "null"));
    if (!isGroups) drawChoice(found);
    return virtualTable({
      columns: found.shown,
      fetchRows, begun, sort,
      onSort: isGroups ? null : (name) => go({ sort: name }),
      link: (row) => isGroups ? href(["run", run, "group", row.group_id]) : rollout(row),
      onOpen: (row, at) => opened(run, shown, row, at),
      complete: isGroups || api.isExported ? null : complete,
      empty: isGroups ? "No groups here." : text ? "No rollout contains that."
        : where || phase !== ALL || step || trained ? "No rollout matches the filter." : "The run has no rollouts yet.",
    });
  }

  function drawChoice({ all, shown: drawn }) {
    put(choice, h("summary", null, "Columns"), h("div", { class: "card" }, all.slice(1).map(({ label }) =>
      h("label", null, h("input", {
        type: "checkbox", checked: drawn.some((each) => each.label === label), onchange: async ({ target }) => {
          const labels = drawn.map((each) => each.label).filter((each) => each !== label);
          keep("columns", JSON.stringify(target.checked ? [...labels, label] : labels));
          put(box, await read());
        },
      }), ` ${label}`))));
  }

  const failed = (error) => {
    if (api.signal.aborted) throw error;
    return h("p", { class: "error", role: "alert" }, error.message);
  };
  const reading = read().catch(failed);
  const [summary, table] = await Promise.all([asked, needsIndex ? null : reading]);
  const choose = () => go({ phase: phases.value, step: null, trained: null });
  const phases = h("select", { "aria-label": "Phase", onchange: choose },
    h("option", { value: ALL }, "all phases"));
  const known = new Set();
  const addPhases = (found) => namesOf(found).filter((name) => !known.has(name)).forEach((name) => {
    known.add(name);
    phases.append(h("option", { value: name, selected: name === phase }, name));
  });
  // The step that rollouts were played for or, from a curve, the one that trained them.
  const [chosen, place] = trained === undefined ? ["step", step] : ["trained", trained];
  const at = h("input", {
    type: "number", min: 0, placeholder: "step", "aria-label": chosen === "step" ? "Step" : "Trained in step",
    title: chosen === "step" ? "the step they were played for" : "the step that trained them",
    value: place, class: "step", onchange: () => go({ [chosen]: at.value }),
  });
  const turn = (by, sign, name) => h("button", {
    type: "button", [name]: true, "aria-label": by < 0 ? "Earlier" : "Later",
    disabled: place === undefined ? by > 0 : Number(place) + by < 1 || Number(place) + by > summary.num_steps,
    onclick: () => go({ [chosen]: place === undefined ? summary.num_steps : Number(place) + by }),
  }, sign);
  const field = (name, label, placeholder, more) => h("input", {
    type: "search", value: params[name], "aria-label": label, placeholder, ...more,
    onkeydown: ({ key, target }) => { if (key === "Enter") go({ [name]: target.value }); },
    onsearch: ({ target }) => { if (!target.value && params[name]) go({ [name]: null }); },
  });
  const filters = api.isExported ? where && h("button", {
    type: "button", title: "Show all", onclick: () => go({ where: null }),
  }, `${where} ×`) : [
    field("text", "Find a text", "words that were said (f)", { "data-find": true }),
    field("where", "Filter", "reward < 0.5 and num_calls > 2  (/)", { "data-search": true, class: "filter" }),
    select("Add a filter", PRESETS, "", (value) => go({ where: where ? `${where} and ${value}` : value })),
    select("Order", ORDERS.some(([value]) => value === sort) || !sort ? ORDERS : [[sort, sort], ...ORDERS], sort ?? "",
      (value) => go({ sort: value })),
    choice,
  ];
  const other = href(["run", run, "rollouts"], { by: isGroups ? null : "group", phase: params.phase, step, trained });
  const box = h("div", null, table);
  const steps = summary.num_steps > 0 && [turn(-1, "←", "data-previous"), at, turn(1, "→", "data-next")];
  put(root, h("div", { class: "bar" },
    h("h1", null, isGroups ? "Groups" : "Rollouts"), phases,
    h("span", null, chosen === "trained" && muted("trained in step "), steps || at),
    !isGroups && filters, total, button(isGroups ? "Rollouts" : "Groups", other)), box);
  if (needsIndex) reading.then((element) => put(box, element), () => null);

  /** Show what the run has added, at the present place of the table. */
  async function update() {
    say(await api.run(run));
    if (needsIndex) await indexed(api, run, () => null);
    const event = new CustomEvent("refresh", { detail: {} });
    box.querySelector("[data-virtual]")?.dispatchEvent(event);
    if (event.detail.done) await event.detail.done;
    else put(box, await read());
  }

  const say = (found) => {
    showLive(found, api);
    addPhases(found);
  };
  say(summary);
  follow(api, markOf(summary), () => api.changed(run), update);
}

// A run's rollouts, or its groups, as a table of any length, with filters and an order.

import { follow, markOf } from "./api.js";
import { button, count, duration, h, href, num, put, reward, s, showLive } from "./dom.js";
import { virtualTable } from "./table.js";

const column = (label, width, cell, more) => ({ label, width, cell, ...more });
const minor = (label, width, cell, more) => column(label, width, cell, { minor: true, ...more });
const number = (label, width, cell, sort) => minor(label, width, cell, { numeric: true, sort });
const counted = (label, width, name) => number(label, width, (row) => count(row[name]), name);
const step = (sort) => number("step", "4rem", (row) => row.train_step ?? "–", sort);

const COLUMNS = [
  column("rollout", "minmax(9rem, 3fr)", (row) => front(
    `${row.request_id}${row.num_trajectories > 1 ? ` · ${row.trajectory_index}` : ""}`), { narrow: "minmax(0, 2fr)" }),
  column("reward", "5.5rem", (row) => reward(row.reward), { narrow: "4.6rem", numeric: true, sort: "reward" }),
  column("ended by", "minmax(6rem, 1.4fr)", ending, { narrow: "minmax(0, 1.2fr)" }),
  step("train_step"),
  minor("task", "minmax(4rem, 1fr)", (row) => row.task || row.env_id),
  minor("agent", "minmax(3rem, 0.8fr)", (row) => row.agent ?? ""),
  counted("calls", "4rem", "num_calls"),
  counted("prompt", "5rem", "num_prompt_tokens"),
  counted("sampled", "5rem", "num_completion_tokens"),
  number("time", "5rem", (row) => duration(row.total_ms === null ? null : row.total_ms / 1000), "total_ms"),
];

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

/** A name whose end stays readable when it is too long. */
function front(text) {
  const [begin, end] = [text.slice(0, -8), text.slice(-8)].map((each) => h("span", null, each));
  return h("span", { class: "front", title: text }, begin, end);
}

const numScored = (row) => row.rewards.filter((value) => value !== null).length;

/** Whether a group taught nothing: several rewards, all equal. */
const isFlat = (row) => numScored(row) > 1 && row.std === 0;

/** Rewards of a group as bars, the least first, pale if they are all equal; one without a reward is a red line. */
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

export async function render(root, params, api) {
  const { run, by, step, where, sort } = params;
  const isGroups = by === "group";
  const asked = api.run(run); // the table is read beside it, and behind it only where it depends on it
  const namesOf = (found) => (found.phases ?? []).map((each) => each.phase);
  const isTrained = isGroups && params.phase === undefined && namesOf(await asked).includes("train");
  const phase = params.phase ?? (isTrained ? "train" : ALL); // groups are there to train
  const shown = { by, phase: params.phase, step, where, sort };
  const go = (changes) => { location.hash = href(["run", run, "rollouts"], { ...shown, ...changes }); };
  const total = h("span", { class: "muted", role: "status" });
  const part = { phase: phase === ALL ? null : phase, step };
  const query = isGroups ? { ...part, sort: "-train_step" } : { ...part, where, sort };
  const fetchRows = async (offset, limit) => {
    const page = await (isGroups ? api.groups : api.rollouts)(run, { ...query, offset, limit });
    put(total, page.of === undefined ? count(page.total)
      : `${count(page.total)} of ${count(page.of)} ${isGroups ? "groups" : "rollouts"} are in this file`);
    return page;
  };
  const rollout = (row) => href(["run", run, "rollout", row.request_id, row.trajectory_index]);
  const read = () => virtualTable({
    columns: isGroups ? GROUPS : COLUMNS,
    fetchRows, sort,
    onSort: isGroups ? null : (name) => go({ sort: name }),
    link: (row) => isGroups ? href(["run", run, "group", row.group_id]) : rollout(row),
    empty: isGroups ? "No group is here."
      : where || phase !== ALL || step ? "No rollout passes the filter." : "The run has no rollouts yet.",
  });
  const reading = read().catch((error) => {
    if (api.signal.aborted) throw error;
    return h("p", { class: "error", role: "alert" }, error.message);
  });
  const [summary, table] = await Promise.all([asked, reading]);
  const phases = h("select", { "aria-label": "Phase", onchange: () => go({ phase: phases.value, step: null }) },
    h("option", { value: ALL }, "all phases"));
  const known = new Set();
  const addPhases = (found) => namesOf(found).filter((name) => !known.has(name)).forEach((name) => {
    known.add(name);
    phases.append(h("option", { value: name, selected: name === phase }, name));
  });
  const at = h("input", {
    type: "number", min: 0, placeholder: "step", "aria-label": "Step", value: step, class: "step",
    onchange: () => go({ step: at.value }),
  });
  const turn = (by, sign, name) => h("button", {
    type: "button", [name]: true, "aria-label": by < 0 ? "Earlier" : "Later",
    disabled: step === undefined ? by > 0 : Number(step) + by < 1 || Number(step) + by > summary.num_steps,
    onclick: () => go({ step: step === undefined ? summary.num_steps : Number(step) + by }),
  }, sign);
  const filter = api.isExported ? where && h("button", {
    type: "button", title: "Show all", onclick: () => go({ where: null }),
  }, `${where} ×`) : h("input", {
    type: "search", value: where, "data-search": true, "aria-label": "Filter", class: "filter",
    placeholder: "reward < 0.5 and num_calls > 2  (/)",
    onkeydown: (event) => { if (event.key === "Enter") go({ where: filter.value }); },
    onsearch: () => { if (!filter.value && where) go({ where: null }); },
  });
  const other = href(["run", run, "rollouts"], { by: isGroups ? null : "group", phase: params.phase, step });
  const box = h("div", null, table);
  const steps = summary.num_steps > 0 && [turn(-1, "←", "data-previous"), at, turn(1, "→", "data-next")];
  put(root, h("div", { class: "bar" },
    h("h1", null, isGroups ? "Groups" : "Rollouts"), phases, h("span", null, steps || at),
    !isGroups && filter, total, button(isGroups ? "Rollouts" : "Groups", other)), box);

  /** Take what the run has added, where the table stands. */
  async function update() {
    say(await api.run(run));
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

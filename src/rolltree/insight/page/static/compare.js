// Several evaluations, paired by example: each one's difference to the first, whether it is noise, what flipped.

import { folded, h, href, num, plainTable, put, select } from "./dom.js";
import { board, interval } from "./chart.js";
import { comparison } from "./runs.js";

export async function render(root, params, api) {
  const found = await api.compare(new URLSearchParams(location.hash.split("?")[1] ?? "").getAll("arm"));
  const curves = await overlaid(found.arms, api).catch(() => null);
  put(root, armsOf(found), curves, found.pairs.map((pair, at) => {
    const ends = [found.arms[0], found.arms[at + 1]];
    if (!at) return h("section", null, h("h2", null, titleOf(pair)), pairOf(pair, ends));
    return h("details", { "data-row": true }, h("summary", null, h("b", null, titleOf(pair))), pairOf(pair, ends));
  }));
}

/** The curves of several training runs, overlaid in one chart per metric. */
async function overlaid(arms, api) {
  const runs = [...new Map(arms.map((arm) => [arm.id, arm])).values()];
  if (runs.length < 2) return null;
  const found = await Promise.all(runs.map((arm) => api.curves(arm.id)));
  const steps = [...new Set(found.flatMap((each) => each.steps))].sort((a, b) => a - b);
  const along = (own, values) => {
    const known = new Map(own.map((step, at) => [step, values?.[at]]));
    return values && steps.map((step) => known.get(step) ?? null);
  };
  const every = found.flatMap(({ series }) => series);
  const names = new Set(every.filter((each) => each.is_compared).map(({ name }) => name));
  const panels = [...names].flatMap((name) => {
    const series = runs.flatMap((arm, at) => {
      const own = found[at].series.find((each) => each.name === name);
      return own ? [{ ...own, label: arm.name, values: along(found[at].steps, own.values),
        low: along(found[at].steps, own.low), high: along(found[at].steps, own.high) }] : [];
    });
    const first = every.find((each) => each.name === name);
    return series.length > 1 ? [{ title: first.label, unit: first.unit, group: "", series }] : [];
  });
  if (!panels.length) return null;
  const drawn = board(steps, panels, {});
  const bar = h("div", { class: "bar" }, h("h2", null, "Curves"), drawn.logs, drawn.reset);
  return h("section", null, bar, drawn.element);
}

/** The settings that differ between the two arms. */
function settingsOf(pair) {
  const rows = Object.entries(pair.settings ?? {});
  const said = (value) => value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value);
  return h("details", { "data-row": true, open: rows.length < 9 },
    h("summary", null, `${rows.length} settings differ`),
    rows.length > 0 && plainTable(["setting", pair.a, pair.b], rows.map(([name, [a, b]]) => [name, said(a), said(b)])));
}

const titleOf = (pair) => [pair.b, h("span", { class: "muted" }, " against "), pair.a];
const percentOf = (each) => `${Number((100 * each.confidence).toPrecision(4))} % interval`;
const bounds = ({ low, high }, sign) =>
  low === null || low === undefined ? "–" : `[${num(low, sign)}, ${num(high, sign)}]`;
const sizeOf = ({ mean, low, high }) => Math.max(Math.abs(mean), Math.abs(low ?? 0), Math.abs(high ?? 0)) || 1;

/** A row per arm, with its difference to the baseline; the baseline and the phases can be chosen here. */
function armsOf({ arms, pairs, confidence }) {
  const rewards = pairs.map((pair) => pair.measures.reward);
  const size = Math.max(...rewards.map((each) => sizeOf(each.difference)));
  const open = (chosen) => { location.hash = comparison(chosen.map(({ id, phase }) => `${id}:${phase}`)); };
  const phaseOf = (arm) => select(`Phase of ${arm.name}`, arm.phases.map((phase) => [phase, phase]), arm.phase,
    (phase) => open(arms.map((each) => each === arm ? { ...arm, phase } : each)));
  const first = select("Baseline", arms.map((arm, at) => [at, arm.name]), 0,
    (at) => open([arms[at], ...arms.filter((each) => each !== arms[at])]));
  const heads = ["", "reward", percentOf({ confidence }), "difference", percentOf(rewards[0]), "", "", "phase"];
  const bar = h("div", { class: "bar" }, h("h1", null, "Comparison"), h("label", null, "Baseline ", first));
  return [bar, plainTable(heads, arms.map((arm, at) => [
    h("a", { href: href(["run", arm.id]), title: arm.id }, arm.name),
    num(arm.rewards[0]?.mean), bounds(arm.rewards[0] ?? {}),
    ...(at ? gain("reward", rewards[at - 1], size) : ["baseline", "", "", ""]), phaseOf(arm),
  ]), [1, 2, 3, 4, 6])];
}

function pairOf(pair, ends) {
  return [
    h("div", { class: "story" }, pair.sentences.map((text) => h("p", null, text))),
    plainTable(["", pair.a, pair.b, "difference", percentOf(pair.measures.reward), "", ""],
      Object.entries(pair.measures).map(([name, each]) => [
        h("b", null, name.replaceAll("_", " ")), num(each.before.mean), num(each.after.mean), ...gain(name, each),
      ]), [1, 2, 3, 4, 6]),
    settingsOf(pair),
    h("h2", null, "Examples that changed"),
    h("p", null, `${pair.num_lost} pass with ${pair.a} and not with ${pair.b}, ${pair.num_won} the other way.`),
    pair.changes.slice(0, pair.shown.length).map((change, at) => changed(change, pair.shown[at], ends)),
    pair.changes.length > pair.shown.length && h("ul", { class: "members", "aria-label": "Other changes" },
      pair.changes.slice(pair.shown.length).map((change) => h("li", null, headOf(change), " ", ends.map((arm) =>
        [" ", h("a", { class: "small", href: exampleOf(arm, change) }, arm.name)])))),
  ];
}

/** A difference, its interval in numbers and drawn, and whether it is noise. */
function gain(name, { difference, verdict }, size = sizeOf(difference)) {
  const { mean, low, high } = difference;
  const said = bounds(difference, true);
  const about = { zero: 0, label: `${name} ${num(mean, true)}` };
  return [num(mean, true), said, interval(mean, said === "–" ? null : [low, high], [-size, size], about), verdict];
}

/** The name of an example, and the change of its reward. */
function headOf(change) {
  const kind = change.flip === "won" ? "good" : change.flip === "lost" ? "bad" : "zero";
  return [
    h("span", { class: `badge ${kind}` }, change.flip ?? "changed"), " ",
    h("b", null, [...new Set([change.example].flat())].join(" · ")), " ",
    h("span", { class: "muted" }, `${num(change.reward_a)} → ${num(change.reward_b)}`),
  ];
}

/** The rollouts of a changed example in an arm. */
function exampleOf(arm, { example }) {
  const id = [example].flat().at(-1);
  const where = `example_id = ${typeof id === "string" ? JSON.stringify(id) : id}`;
  return href(["run", arm.id, "rollouts"], { phase: arm.phase, where });
}

function changed(change, shown, ends) {
  const sides = shown.map((side, at) => h("div", { class: "card" },
    h("div", { class: "muted" }, ends[at].name, " · ",
      h("a", { href: href(["run", ends[at].id, "rollout", side.request_id, side.trajectory_index]) }, "rollout")),
    side.answers.map((text) => h("p", { class: "said" }, folded(text, 1500)))));
  return h("details", { "data-row": true, open: change.flip === "lost" || change.flip === "won" },
    h("summary", null, headOf(change)),
    h("p", { class: "said" }, folded(shown[0].question, 1500)), h("div", { class: "sides" }, sides));
}

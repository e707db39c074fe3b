// One run: its story in sentences, the curves, the phases, the settings.

import { follow, markOf } from "./api.js";
import { board } from "./chart.js";
import {
  button, count, details, duration, factList, h, href, isNone, json, line, muted, num, plainTable, put, redraw, short,
  showLive,
} from "./dom.js";
import { comparison, failures, progress, stateBadge } from "./runs.js";
import { file } from "./stored.js";

const MOST_DRAWN = 120;

export async function render(root, params, api) {
  const { run } = params;
  const story = h("section", { class: "story", "aria-label": "What happened", "aria-busy": "true" },
    h("p", { class: "muted" }, "Reading the rollouts …"));
  const head = h("div");
  const gain = h("div");
  const said = h("div");
  const rest = h("div");
  const curves = curvesOf(params);
  let again = null;
  put(root, file && h("p", { class: "muted small" }, `This file has ${count(file.num_rollouts)} of `,
    `${count(file.of)} rollouts, as of ${dateOf(file)}. The run itself opens with `,
    h("code", null, "rolltree view"), "."), head, story, gain, said, curves.element, rest);

  async function draw() {
    const [summary, found] = await Promise.all([api.run(run), api.curves(run)]);
    if (api.signal.aborted) return summary;
    const { age_s: age, ...stored } = summary;
    redraw(head, stored, () => drawHead(head, summary, params));
    tell();
    curves.update(found);
    redraw(said, stored.notices, () => drawNotices(said, stored.notices));
    redraw(rest, [stored.phases, stored.evaluations, stored.config], () => drawRest(rest, summary, run));
    showLive(summary, api);
    return summary;
  }

  /** The story reads all rollouts, so it is requested last, and nothing waits for it. */
  async function tell() {
    clearTimeout(again);
    const told = await api.story(run).catch((error) => ({ error }));
    if (api.signal.aborted) return;
    const sentences = told.error?.message ?? told.sentences;
    redraw(story, sentences, () => told.error ? put(story, h("p", { class: "error", role: "alert" }, sentences))
      : drawStory(story, sentences, run, curves.pair));
    const found = await api.gain(run).catch(() => null);
    if (api.signal.aborted) return;
    redraw(gain, found, () => put(gain, found && gained(found, run)));
    story.removeAttribute("aria-busy");
    if (told.again_s) again = setTimeout(tell, 1000 * told.again_s);
  }

  const summary = await draw();
  if (params.metric) root.addEventListener("shown", () => curves.element.scrollIntoView(), { once: true });
  follow(api, markOf(summary), () => api.changed(run), draw);
}

const bounds = ({ low, high }, sign) => isNone(low) ? "" : ` [${num(low, sign)}, ${num(high, sign)}]`;

/** The first and the last held-out evaluation, and their difference. */
function gained(found, run) {
  const { a, b, before, after, difference, phases, verdict, environments } = found;
  const part = (name, value, said) =>
    h("div", null, h("dt", null, name), h("dd", null, h("b", null, value), muted(said)));
  const of = (phase, name) => h("a", { href: href(["run", run, "evaluation", phase]) }, name);
  return h("dl", { class: "facts gain" },
    part(["held out, ", of(phases[0], a)], num(before.mean), bounds(before)),
    part(["held out, ", of(phases[1], b)], num(after.mean), bounds(after)),
    part("difference", num(difference.mean, true), [bounds(difference, true), ` ${verdict}`]),
    Object.entries(environments ?? {}).map(([name, own]) => part(name, num(own.difference.mean, true),
      [bounds(own.difference, true), ` ${own.verdict}, ${num(own.before.mean)} to ${num(own.after.mean)}`])),
    h("div", null, h("dt", null, `${count(difference.num_examples)} examples`), h("dd", null,
      h("a", { href: comparison(phases.map((phase) => `${run}:${phase}`)) }, "what changed"))));
}

/** The notices of the run, each once; all except the latest three are folded. */
function drawNotices(box, notices) {
  const lines = (notices ?? []).map((each) => h("p", { class: "sentence", "data-row": true }, each.text,
    muted(" ", isNone(each.step) ? "" : `step ${each.step}, `, dateOf(each),
      each.times > 1 && `, ${count(each.times)} times`)));
  const [latest, earlier] = [lines.slice(-3).reverse(), lines.slice(0, -3).reverse()];
  const title = "Notices of the run";
  put(box, lines.length > 0 && h("section", { "aria-label": title }, h("h2", null, title), latest,
    earlier.length > 0 && details(`${count(earlier.length)} earlier`, earlier)));
}

const dateOf = (record) => new Date(1000 * record.created_at).toLocaleString();

function drawHead(head, run, params) {
  const { reward } = run;
  const held = (run.phases ?? []).findLast(({ phase }) => phase !== "train");
  const rollouts = (query) => href(["run", params.run, "rollouts"], query);
  const facts = [
    ["reward", reward ? [h("b", null, num(reward.mean)),
      muted(reward.low !== null && ` [${num(reward.low)}, ${num(reward.high)}]`, ` ${reward.of}`)] : "–"],
    ["progress", progress(run)],
    ["rollouts", h("a", { href: rollouts() }, count(run.num_rollouts))],
    ["failed", failures({ ...run, run: params.run })],
    ["sampled tokens", short(run.tokens?.sampled)],
    ["environment", (run.envs ?? []).join(", ") || "–"],
    ["model", run.model ?? "–"],
    ["last written", run.state === "running" ? "now" : `${duration(run.age_s)} ago`],
  ];
  put(head,
    h("div", { class: "bar" }, h("h1", null, run.name), stateBadge(run),
      button("Rollouts", rollouts()), button("Groups", rollouts({ by: "group" })),
      held && button("Evaluation", href(["run", params.run, "evaluation", held.phase]))),
    run.error && h("p", { class: "error" }, line(run.error, 400)),
    run.state === "killed" && h("p", { class: "error" }, "The process that wrote this run is gone and did not say ",
      "why: it was killed, or the machine went down. What is stored is whole; the same command continues it."),
    factList(facts));
}

/** The curves behind a sentence: one, or two that are to be compared. */
const curvesIn = ({ series, beside }) => [series, beside].flat().filter(Boolean);

/** The address of the evidence for a sentence. */
function evidenceLink(run, view, evidence) {
  const { phase, where, step, request_id: id, trajectory_index: index, call, position: at } = evidence;
  const [from, to] = evidence.steps ?? [];
  const [parts, query] = {
    groups: [["rollouts"], { by: "group", phase, step }],
    rollouts: [["rollouts"], { phase, where }],
    group: [["group", evidence.group_id]],
    rollout: [["rollout", id, index]],
    tree: [["tree", id, index]],
    tokens: [["tokens", id, index, call], { at }],
    curves: [[], { metric: curvesIn(evidence)[0], beside: curvesIn(evidence)[1], from, to }],
  }[view];
  return href(["run", run, ...parts], query);
}

function drawStory(box, sentences, run, pair) {
  if (!sentences?.length) return put(box, h("p", { class: "muted" }, "Nothing stands out."));
  return put(box, sentences.map(({ evidence, severity, text }) => {
    const names = curvesIn(evidence);
    const views = [evidence.view, evidence.view !== "curves" && names.length && "curves"].filter(Boolean);
    const link = (view) => [" ", h("a", { href: evidenceLink(run, view, evidence) }, `see ${SEEN[view] ?? view}`)];
    return h("p", { class: `sentence ${severity}`, "data-row": true },
      h("span", { class: "hidden" }, `${severity}: `), text, views.map(link), names.length > 1 && pair(names));
  }));
}

const SEEN = { curves: "the curve", rollout: "the rollout" };

/** Whether all values of a curve are equal, so that its shape says nothing. */
const isConstant = ({ series }) => series.every(({ values }) => {
  const known = values.filter((value) => !isNone(value));
  return known.length > 1 && known.every((value) => value === known[0]);
});

/** Curves that belong together share a chart, in the place of the first; the others have their own. */
function panelsOf(series) {
  return series.flatMap((each) => {
    const members = each.chart ? series.filter(({ chart }) => chart === each.chart) : [each];
    const title = members.length > 1 ? each.chart : each.label;
    return members[0] === each ? [{ title, unit: each.unit, group: each.group, series: members }] : [];
  });
}

/** The curves with search and zoom; `update` adds new steps of a run without moving anything. */
function curvesOf(params) {
  const element = h("div");
  const readout = h("span", { class: "muted", role: "status" });
  const bar = h("div", { class: "bar" });
  const buttons = h("span");
  const place = h("div");
  const folded = h("div");
  const missing = h("p", { class: "muted small" });
  const search = h("input", {
    type: "search", placeholder: "Find a curve (/)", "aria-label": "Find a curve", "data-search": true,
    value: params.metric, oninput: () => draw(),
  });
  const more = h("button", { type: "button", class: "quiet", onclick: () => {
    isWhole = true;
    draw();
  } });
  const onStep = (step) => {
    location.hash = href(["run", params.run, "rollouts"], { phase: "train", trained: step });
  };
  let data = { steps: [], series: [] };
  let drawn = null;
  let names = "";
  let isWhole = false;

  /** The panels that match the search, or else the most important ones; the reward is the largest. */
  function chosen() {
    const wanted = search.value.toLowerCase();
    if (params.beside && search.value === params.metric) return alone([params.metric, params.beside]);
    const [top, ...others] = panelsOf(data.series);
    const isLarge = top?.group === "Reward" && !wanted;
    const all = top ? [{ ...top, isLarge }, ...others] : [];
    const about = (panel) => [panel.title, panel.group, ...panel.series.flatMap((each) => [each.name, each.label])];
    if (wanted) return all.filter((panel) => about(panel).join(" ").toLowerCase().includes(wanted));
    const first = all.filter((panel) => panel.series[0].is_first);
    return isWhole || !first.length ? all : first;
  }

  /** Curves each in its own chart, in this order. */
  const alone = (wanted) => wanted.map((name) => data.series.find((each) => each.name === name)).filter(Boolean)
    .map((each) => ({ title: each.label, unit: each.unit, group: "", series: [each] }));

  /** Two curves next to each other, for a sentence about both. */
  const pair = (wanted) => board(data.steps, alone(wanted), { onStep }).element;

  function draw() {
    const found = chosen();
    const isSought = search.value !== "";
    const varied = found.filter((panel) => isSought || panel.isLarge || !isConstant(panel));
    const flat = found.filter((panel) => !varied.includes(panel));
    const panels = varied.slice(0, MOST_DRAWN);
    redraw(folded, flat, () => put(folded, flat.length > 0 && details(
      `${count(flat.length)} curves do not change`, factList(flat.flatMap((panel) => panel.series.map((each) =>
        [each.label, num(each.values.findLast((value) => !isNone(value)))]))))));
    const said = JSON.stringify(panels.map((panel) => panel.series.map(({ name }) => name)));
    const others = data.series.length - found.flatMap((panel) => panel.series).length;
    if (drawn && said === names) drawn.update(data.steps, panels);
    else {
      const range = drawn?.range();
      drawn = board(data.steps, panels, { onStep, readout });
      if (range) drawn.zoom(range);
      names = said;
      put(place, drawn.element, varied.length > MOST_DRAWN && h("p", { class: "muted" },
        `${count(varied.length - MOST_DRAWN)} more are not drawn. Find them by their names above.`), more);
      const reset = bar.querySelector("[data-reset]");
      if (reset) put(buttons, drawn.logs, drawn.reset);
      else put(bar, h("h2", null, "Curves"), search, put(buttons, drawn.logs, drawn.reset), readout);
    }
    put(more, `${count(others)} more curves`);
    more.hidden = others <= 0 || search.value !== "";
  }

  function update(found) {
    data = found;
    if (!data.steps.length || !data.series.length) return;
    const isNew = !drawn;
    draw();
    put(missing, data.missing?.length && `Not recorded: ${data.missing.map(({ label }) => label).join(", ")}.`);
    if (!isNew) return;
    put(element, bar, h("p", { class: "muted small" }, "Drag to zoom; click a step for its rollouts, a title to ",
      "enlarge its curve. ", data.steps.length > 200 && "Bold: the mean around each step."), place, folded, missing);
    if (params.from !== undefined) drawn.zoom([Number(params.from) - 1, Number(params.to) + 1]);
  }

  return { element, update, pair };
}

function drawRest(rest, run, name) {
  const link = (phase) => h("a", { href: href(["run", name, "rollouts"], { phase }) }, phase);
  const report = (each) => each.phase !== "train" &&
    h("a", { href: href(["run", name, "evaluation", each.phase]) }, "evaluation");
  const counts = ["num_rollouts", "num_errors", "num_truncated", "num_prompt_tokens", "num_completion_tokens"];
  put(rest,
    h("h2", null, "Phases"),
    plainTable(["phase", "reward", "rollouts", "failed", "truncated", "prompt tokens", "sampled tokens", ""],
      (run.phases ?? []).map((each) => [link(each.phase), num(each.mean_reward),
        ...counts.map((column) => count(each[column])), report(each)]), [1, 2, 3, 4, 5, 6]),
    details("Settings", json(run.config ?? {})));
}

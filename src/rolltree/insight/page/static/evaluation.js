// One evaluation: reward, pass@k and metrics with their intervals, failures by kind, worst examples.

import {
  button, count, duration, factList, h, href, isNone, line, muted, num, plainTable, put, reward,
} from "./dom.js";
import { interval } from "./chart.js";
import { comparison } from "./runs.js";

const bounds = ({ low, high }) => isNone(low) ? "–" : `[${num(low)}, ${num(high)}]`;
const section = (title, ...parts) => h("section", null, h("h2", null, title), parts);

/** A table of estimates by name, with their intervals on one axis. */
function estimates(title, found) {
  const rows = Object.entries(found ?? {});
  if (!rows.length) return null;
  const ends = rows.flatMap(([, each]) => [each.mean, each.low, each.high]).filter((value) => !isNone(value));
  const scale = [Math.min(0, ...ends), Math.max(1, ...ends)];
  return section(title, plainTable(["", "mean", "95 % interval", "", "examples"], rows.map(([name, each]) => [
    name, num(each.mean), bounds(each), interval(each.mean, isNone(each.low) ? null : [each.low, each.high], scale,
      { label: `${name} ${num(each.mean)}` }), count(each.num_examples)]), [1, 2, 4]));
}

export async function render(root, { run, phase }, api) {
  const { report, phases, worst } = await api.evaluation(run, { phase });
  const rollouts = (query) => href(["run", run, "rollouts"], { phase, ...query });
  const { usage, failures, failure_messages: messages, stops, truncations } = report;
  const passes = Object.entries(report.pass_at ?? {}).map(([k, each]) => [`pass@${k}`, each]);
  const ends = [...Object.entries(stops ?? {}),
    ...Object.entries(truncations ?? {}).map(([why, number]) => [`cut: ${why}`, number])];
  const others = phases.filter((each) => each.phase !== phase && !isNone(each.step));
  const here = phases.find((each) => each.phase === phase);
  put(root,
    h("div", { class: "bar" }, h("h1", null, "Evaluation"),
      muted(phase, isNone(here?.step) ? "" : ` · after ${count(here.step)} steps`), button("Rollouts", rollouts()),
      others.map((each) => button(`compare with step ${each.step}`,
        comparison([`${run}:${each.phase}`, `${run}:${phase}`])))),
    factList([
      ["reward", report.reward ? [h("b", null, num(report.reward.mean)), muted(` ${bounds(report.reward)}`)] : "–"],
      ["examples", count(report.num_examples)],
      ["rollouts", h("a", { href: rollouts() }, count(report.num_rollouts))],
      ["failed", report.num_failed ? h("a", { class: "bad", href: rollouts({ where: "status = error" }) },
        count(report.num_failed)) : "0"],
      ["without reward", report.num_unscored ? count(report.num_unscored) : null],
      ["cut", count(report.num_truncated)],
      ["calls per rollout", num(usage?.mean_num_calls)],
      ["sampled per rollout", num(usage?.mean_num_completion_tokens)],
      ["time per rollout", isNone(usage?.mean_total_ms) ? null : duration(usage.mean_total_ms / 1000)],
      ["model", report.model || "–"],
    ]),
    estimates(`A pass is a reward of at least ${num(report.pass_threshold)}`, Object.fromEntries(passes)),
    estimates("Metrics", report.metrics),
    estimates("Environments", Object.fromEntries(Object.entries(report.env ?? {}).flatMap(([name, own]) =>
      [[name, own.reward], ...Object.entries(own.metrics).map(([metric, each]) => [`${name}, ${metric}`, each])])
      .filter(([, each]) => each))),
    Object.keys(report.tasks ?? {}).length > 1 && Object.keys(report.tasks).some((name) => !report.env?.[name]) &&
      estimates("Reward by task", report.tasks),
    Object.keys(failures ?? {}).length > 0 && section("Failures", plainTable(["kind", "rollouts", "first message"],
      Object.entries(failures).map(([kind, number]) => [
        h("a", { class: "bad", href: rollouts({ where: `error_type = "${kind}"` }) }, kind), count(number),
        line(messages?.[kind] ?? "", 300)]), [1])),
    section("How rollouts ended", plainTable(["ended by", "rollouts"],
      ends.map(([name, number]) => [name, count(number)]), [1])),
    worst.length > 0 && section("Worst examples", plainTable(
      ["example", "mean reward", "rollouts", "question", "answer"], worst.map((each) => [
        h("a", { href: href(["run", run, "rollout", each.request_id, each.trajectory_index]) },
          String(each.example.example_id ?? each.example.task)),
        reward(each.reward), count(each.num_rollouts), line(each.question ?? "", 160), line(each.answer ?? "", 160)]),
      [1, 2])));
}

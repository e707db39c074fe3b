// One rollout: the conversation, the reward, the times, and the breaks.

import {
  button, count, details, duration, factList, folded, h, href, isNone, json, muted, num, plainTable, put, reward,
} from "./dom.js";
import { markdown } from "./markdown.js";
import { ending } from "./rollouts.js";
import { neighbours } from "./walk.js";

export async function render(root, params, api) {
  const { run, id, index } = params;
  marked = 0;
  const found = await api.rollout(run, { id, index });
  const row = found.rollout;
  const near = await neighbours(api, run, row).catch(() => null);
  const tokens = (call, at) => href(["run", run, "tokens", id, index, call], { at });
  const relative = (each) => h("a", { href: href(["run", run, "rollout", each.request_id, each.trajectory_index]) },
    each.agent || `rollout ${each.trajectory_index}`);
  /** A button to the next rollout of the list that the reader came from, else of the same request. */
  const other = (by, sign, key) => {
    const listed = by < 0 ? near?.before : near?.after;
    const at = row.trajectory_index + by;
    const sibling = !near && found.others.some((each) => each.trajectory_index === at);
    if (!listed && !sibling) return null;
    const [name, number] = listed ? [listed.request_id, listed.trajectory_index] : [id, at];
    return button(sign, href(["run", run, "rollout", name, number]), { [key]: true,
      "aria-label": `${by < 0 ? "Previous" : "Next"} ${listed ? "of the list" : "rollout of this request"}` });
  };
  const broken = breaks(found.breaks, tokens);
  const leftOut = new Map(found.calls.filter((each) => !isNone(each.left_out))
    .map((each) => [each.call, each.left_out]));
  const said = (each) => message(each, tokens, leftOut.get(each.call));
  const { min_version: oldest, max_version: newest } = row;
  const expected = found.input.answer;
  const facts = [
    ["expected answer", isNone(expected) || expected === "" ? null : h("b", { class: "said" }, folded(
      typeof expected === "string" ? expected : JSON.stringify(expected), 400))],
    ["reward", reward(row.reward)],
    ["ended by", ending(row) || "–"],
    ["phase", `${row.phase ?? "–"}${isNone(row.train_step) ? "" : `, step ${row.train_step}`}`
      + (isNone(row.trained_step) || row.trained_step === row.train_step
        ? "" : `, trained in step ${row.trained_step}`)],
    ["environment", [row.env_id, row.task].filter(Boolean).join(" · ") || "–"],
    ["example", row.example_id],
    ["agent", row.agent || null],
    ["calls", count(row.num_calls)],
    ["tokens", `${count(row.num_prompt_tokens)} prompt, ${count(row.num_completion_tokens)} sampled`],
    ["breaks", found.breaks.length
      ? h("button", { type: "button", class: "sort", onclick: () => broken.scrollIntoView() },
        h("b", { class: "warn" }, count(found.breaks.length)))
      : row.num_calls > 1 ? "0" : null],
    ["not trained", row.num_calls > 0 && leftOut.size
      ? h("b", { class: "warn" }, `${count(leftOut.size)} of ${count(row.num_calls)} calls`) : null],
    ["program", found.program && found.program.how],
    ["versions", oldest === newest ? oldest : `${oldest} to ${newest}`],
  ];
  put(root,
    h("div", { class: "bar" }, h("h1", null, "Rollout"), button("Tokens", tokens(0)),
      button("Tree", href(["run", run, "tree", id, index])),
      row.group_id && button("Group", href(["run", run, "group", row.group_id])),
      other(-1, "←", "data-previous"), near && muted(`${count(near.at + 1)} of ${count(near.total)}`),
      other(1, "→", "data-next")),
    factList(facts),
    found.parent && h("p", null, "Asked by ", relative(found.parent), muted(" to do: "),
      h("span", { class: "said" }, folded(found.asked ?? "", 600))),
    found.children.length > 0 && section("Delegated", h("ul", { class: "members" }, found.children.map((each) =>
      h("li", null, relative(each), " ", reward(each.reward), " ",
        h("span", { class: "said" }, folded(each.asked ?? "", 200)))))),
    found.errors.map(failure),
    found.tool_errors.map(failure),
    h("div", { class: "reading" },
      h("div", null, section("Conversation", h("div", { class: "conversation" },
        found.messages.length ? found.messages.map(said)
          : h("p", { class: "muted" }, "No message was stored."))),
      found.left_out.length > 0 && section("Beside the conversation", found.left_out.map((each) =>
        h("div", { class: "conversation" },
          h("p", { class: "muted small" }, `Not trained: ${each.why}`), each.messages.map(said))))),
      h("aside", null, paid(found.rewards, row), program(found.program), timing(found, tokens))),
    broken,
    steps(found.calls, tokens),
    Object.keys(found.input).length > 0 && details("Dataset row", json(found.input)));
}

const section = (title, ...parts) => h("section", null, h("h2", null, title), parts);

/** The parts that add up to the reward, and the other metrics. */
function paid({ functions, rest, metrics, is_recorded: isRecorded }, row) {
  const others = Object.entries(metrics);
  const isSplit = functions.length > 0 || (isRecorded && row.reward !== null);
  const parts = functions.map((each) => [each.name, num(each.value), num(each.weight), num(each.contribution, true)]);
  if (rest) parts.push([h("i", null, "not by a function: the world, the form of answers"), "", "", num(rest, true)]);
  if (row.reward !== null) parts.push([h("b", null, "reward"), "", "", h("b", null, num(row.reward))]);
  return [
    isSplit && section("Reward by function",
      plainTable(["reward function", "value", "weight", "contribution"], parts, [1, 2, 3])),
    others.length > 0 && section("Metrics",
      !isRecorded && h("p", { class: "muted small" },
        "Weights not recorded: which of these were rewarded, this run does not say."),
      plainTable(["metric", "value"], others.map(([name, value]) => [name, num(value)]), [1])),
  ];
}

/** How the program of the rollout ended, what it used, and the end of what it printed. */
function program(found) {
  if (!found) return null;
  const { error, files } = found;
  const facts = [
    ["ended", found.how],
    ["time", isNone(found.wall_s) ? null : duration(found.wall_s)],
    ["CPU time", found.cpu_s ? duration(found.cpu_s) : null],
    ["memory", found.peak_memory_bytes ? `${count(found.peak_memory_bytes / 2 ** 20)} MiB` : null],
    ["files", files.length ? folded(files.join(", "), 400) : null],
    ["raised", error ? `${error.type}: ${error.message}` : null],
    ["returned", isNone(found.returned) ? null : folded(found.returned, 400)],
  ];
  const output = (name) => found[name]
    && [h("p", { class: "muted small" }, name), h("pre", null, folded(found[name], 2000))];
  return section("Program", factList(facts), output("stdout"), output("stderr"));
}

function failure(error) {
  const { message: text, phase, tool, traceback, type } = error;
  return h("section", { class: "failure", role: "alert" },
    h("p", null, h("b", null, type || "Error"),
      muted(tool ? ` raised by the tool ${tool}; the model was told` : phase && ` in ${phase}`)),
    h("p", { class: "said" }, folded(text, 2000)),
    traceback && h("details", { "data-row": true }, h("summary", null, "Traceback"),
      h("pre", null, folded(traceback, 8000))));
}

const ROLES = ["system", "user", "assistant", "tool"];

/** One message of the conversation, with its reasoning and its tool calls. */
function message(each, tokens, whyNot) {
  const role = ROLES.includes(each.role) ? each.role : "other"; // a class that the model chose could hide the message
  return h("article", { class: `message ${role}`, "data-row": true },
    h("header", null, h("b", null, each.role), each.name && muted(` ${each.name}`),
      each.is_prompt && each.role === "assistant" && h("span", { class: "badge zero",
        title: "a part of the prompt: an example, not an answer of the model" }, "given, not sampled"),
      whyNot && h("span", { class: "badge zero", title: whyNot }, "not trained"),
      each.call !== null && h("a", { class: "small", href: tokens(each.call) }, `call ${each.call}`)),
    each.reasoning && thinking(each.reasoning),
    content(each.content),
    each.tool_calls.map((call) => h("div", { class: "toolcall" },
      h("b", null, call.name || "tool"), h("pre", null, folded(pretty(call.arguments), 2000)))));
}

const thinking = (text) => h("details", { class: "reasoning" },
  h("summary", null, `reasoning, ${count(text.length)} characters`), folded(text));

const MAX_PRETTY = 8000;
const MAX_MARKED = 400_000;
let marked = 0; // characters of this view that were parsed as Markdown
const THINKING = /^\s*<think>([\s\S]*?)(?:<\/think>|$)/;

function content(value) {
  if (isNone(value) || value === "") return null;
  if (typeof value !== "string") {
    return [value].flat().map((part) => typeof part?.text === "string" ? content(part.text)
      : h("pre", null, folded(JSON.stringify(part, null, 2), 1000)));
  }
  const thought = THINKING.exec(value);
  const rest = thought ? value.slice(thought[0].length) : value;
  marked += rest.length;
  return [thought && thinking(thought[1]), (marked < MAX_MARKED ? markdown(rest) : null) ?? folded(rest)];
}

function pretty(value) {
  if (value.length > MAX_PRETTY) return value; // deep JSON grows with the square of its depth
  try {
    return JSON.stringify(JSON.parse(value), null, 2);
  } catch {
    return value;
  }
}

/** The calls as a table; a column without any value is left out. */
function steps(list, tokens) {
  if (!list.length) return null;
  const signed = (value) => num(value, true);
  const columns = [
    ["agent", "agent", String], ["turn", "turn", String], ["reward", "reward", num, true],
    ["advantage", "advantage", signed, true], ["prompt", "num_prompt_tokens", count, true],
    ["new", "num_new_tokens", count, true], ["sampled", "num_completion_tokens", count, true],
    ["mean logprob", "mean_logprob", num, true], ["finish", "finish_reason", String],
    ["not trained", "left_out", String],
  ].filter(([, name]) => list.some((each) => (each[name] ?? "") !== ""));
  return section("Steps", plainTable(["call", ...columns.map(([title]) => title)],
    list.map((each) => [h("a", { href: tokens(each.call) }, each.call),
      ...columns.map(([, name, said]) => (each[name] ?? "") === "" ? "–" : said(each[name]))]),
    columns.flatMap(([, , , isNumber], at) => isNumber ? at + 1 : [])));
}

/** When each call was sent, how long it waited in the queue, and how long the call itself took. */
function timing({ calls, timing: sums }, tokens) {
  const known = calls.filter((each) => each.time_ms !== null);
  if (!known.length) return null;
  const end = Math.max(...known.map((each) => (each.sent_ms ?? 0) + each.time_ms), 1);
  const seconds = (value) => value === null ? "–" : duration(value / 1000);
  const share = (value) => `${(100 * value) / end}%`;
  const part = (kind, from, size) => h("i", { class: kind, vars: { left: share(from), width: share(size) } });
  return section("Time",
    h("p", { class: "muted small" }, `${seconds(sums.generation_ms)} of playing: ${seconds(sums.server_ms)} waiting `,
      `for answers, ${seconds(sums.own_ms)} environment and tools; ${seconds(sums.scoring_ms)} of scoring. `,
      h("i", { class: "swatch wait" }), " queue and retries ", h("i", { class: "swatch own" }), " the call"),
    h("div", { class: "timeline" }, known.map(({ call, sent_ms: sent, time_ms: time, wait_ms: waited }) => {
      const wait = Math.min(waited ?? 0, time);
      const title = `call ${call}: ${seconds(time)}, ${seconds(wait)} of it waiting`;
      return h("a", { class: "span", href: tokens(call), title }, h("span", null, `call ${call}`),
        h("span", { class: "lane" }, part("wait", sent ?? 0, wait), part("own", (sent ?? 0) + wait, time - wait)),
        h("span", { class: "number" }, seconds(time)));
    })));
}

function breaks(list, tokens) {
  const none = h("p", { class: "muted" }, "None: every prompt continues the call before it.");
  return section("Breaks", list.length ? list.map((each) => breakCard(each, tokens(each.call, each.position))) : none);
}

/** A broken prefix: where and why, with the earlier and the new text side by side. */
export function breakCard(each, address) {
  const { call, previous_call: previous, num_common: common } = each;
  const isText = !isNone(each.common_text);
  const shared = isText ? each.common_text : each.previous_ids.slice(0, common).map((id) => `${id} `);
  const side = (title, text, ids, kind) => h("div", { class: `card ${kind}` },
    h("div", { class: "muted small" }, title),
    h("p", { class: "said" }, muted(shared), h("mark", null, (isText ? text : ids.slice(common).join(" ")) || "∅")));
  return h("section", { class: "break", "data-row": true },
    h("p", null, h("a", { href: address }, h("b", null, String(each.cause ?? "break").replaceAll("_", " "))),
      muted(` call ${call}${isNone(previous) ? "" : ` after call ${previous}`}, ${count(each.position)} tokens agree`)),
    h("div", { class: "sides" },
      side(`before, call ${previous ?? "–"}`, each.previous_after, each.previous_ids, "old"),
      side(`now, call ${call}`, each.current_after, each.current_ids, "new")));
}

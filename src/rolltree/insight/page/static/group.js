// One group as one tree: the shared tokens once, then the branches and the reward of each rollout.

import { button, count, folded, h, href, muted, num, put, reward } from "./dom.js";
import { forest, times } from "./tree.js";

const MAX_DRAWN = 300;
const ALL = "*";
const ROUNDING = 1e-6; // smaller advantages are rounding errors, since their mean in a group is 0

/** The requested group; by default only the first agent's rollouts, which have the same prompt. */
async function read({ run, id, agent }, api) {
  const found = await api.group(run, { id, agent: agent === ALL ? null : agent });
  if (agent !== undefined || found.agents.length < 2) return { found, agent: agent ?? ALL };
  const [first] = found.agents;
  return { found: await api.group(run, { id, agent: first }), agent: first };
}

/** A link for each agent, and one to the tree of all. */
function agentsOf(found, agent, { run, id }) {
  if (found.agents.length < 2) return null;
  return h("p", { class: "bar" }, muted("Several agents play here. The rollouts of"),
    [...found.agents, ALL].map((each) => button(each === ALL ? "all" : each || "no agent",
      href(["run", run, "group", id], { agent: each }), { "aria-current": each === agent ? "true" : null })));
}

export async function render(root, params, api) {
  const { run, id } = params;
  const { found, agent } = await read(params, api);
  const members = found.members ?? [];
  const segments = found.segments ?? [];
  const { children, tops } = forest(segments);
  const leaves = segments.map(() => []);
  members.forEach((member, at) => leaves[member.calls.findLast((call) => call.segment !== null)?.segment]?.push(at));
  const lost = members.filter((member) => !member.path.length);
  const scored = members.map((each) => each.reward).filter((value) => value !== null);
  const low = Math.min(...scored);
  const high = Math.max(...scored);
  // Equal but for rounding, as in training.
  const isFlat = high - low <= 1e-9 * Math.max(1, Math.abs(low), Math.abs(high));
  let drawn = 0;

  /** The class of a branch by its reward in the group: better, worse, between, or none. */
  function tone(segment) {
    if (segment.reward === null || isFlat || segment.members.length === members.length) return "";
    const share = (segment.reward - low) / (high - low);
    return share > 0.66 ? "better" : share < 0.34 ? "worse" : "between";
  }

  function branch(at) {
    drawn += 1;
    const segment = segments[at];
    const list = segment.members;
    const kids = children[at];
    const isAll = list.length === members.length;
    const name = list.length === 1 ? rolloutName(members[list[0]]) : `${isAll ? "all " : ""}${list.length} rollouts`;
    const more = h("div", { class: kids.length > 1 ? "fork" : null });
    const grow = () => put(more, kids.map(branch));
    if (drawn < MAX_DRAWN) grow();
    else if (kids.length) {
      put(more, h("button", { type: "button", class: "more", onclick: grow }, "… the rest of this branch"));
    }
    const isPiece = segment.parent >= 0 && children[segment.parent].length === 1;
    const head = !isPiece && h("div", { class: "branchhead" }, h("b", null, name),
      list.length > 1 && h("span", null, "mean reward ", num(segment.reward)),
      segment.advantage !== null && h("span", null, "advantage ", advantage(segment.advantage)),
      muted(`from token ${count(segment.start)}`));
    return h("div", { class: isPiece ? "piece" : `branch ${tone(segment)}` },
      head, said(segment), leaves[at].map((each) => ending(members[each])), more);
  }

  /** The text of a segment, with a background for the model's own part; ids if there is no tokenizer. */
  function said(segment) {
    let from = 0;
    const pieces = segment.pieces ?? segment.authors.map(([author, size]) =>
      ({ author, text: segment.ids.slice(from, from += size).join(" ") }));
    return h("div", { class: "said", tabindex: "0", title: `${count(segment.num_tokens)} tokens` },
      pieces.map(({ author, text }) =>
        [h("span", { class: `by ${author}` }, folded(text, 1200)), !segment.pieces && " "]));
  }

  const rolloutName = ({ index_in_group: number, trajectory_index: index, agent: its }) =>
    `rollout ${number}${index ? `.${index}` : ""}${its && agent === ALL ? ` · ${its}` : ""}`;
  const address = (view, member, ...more) =>
    href(["run", run, view, member.request_id, member.trajectory_index, ...more]);
  const named = (member) => [
    h("a", { href: address("rollout", member) }, rolloutName(member)), " ", reward(member.reward), " "];

  function ending(member) {
    return h("div", { class: "ending", "data-row": true },
      named(member), member.advantage !== null && [muted("advantage "), advantage(member.advantage)],
      member.error_type && h("span", { class: "bad" }, ` ${member.error_type}`),
      member.truncated && h("span", { class: "warn" }, " cut"), " ",
      h("a", { class: "small", href: address("tokens", member, member.calls.at(-1)?.call ?? 0) }, "tokens"));
  }

  const order = [...members].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
  const { example, train_step: step } = found;
  const about = [example.task, example.example_id, found.phase, step !== null && `step ${step}`];
  put(root, h("div", { class: "bar" }, h("h1", null, "Group"), muted(about.filter(Boolean).join(" · ")),
    button("Tree picture", href(["run", run, "tree", id]))),
    agentsOf(found, agent, params),
    scored.length > 1 && isFlat && h("p", { class: "sentence warning" },
      "All rewards are equal, so this group teaches nothing."),
    h("ol", { class: "members", "aria-label": "Rewards" }, order.map((member) =>
      h("li", null, named(member), member.advantage !== null && advantage(member.advantage)))),
    h("p", { class: "muted" },
      members.length > 1 ? `${count(found.shared_tokens)} tokens are shared by all` : "The group has one rollout",
      `; with the tree each token is computed once and used ${times(found.reuse_factor)}.`,
      !found.is_trained && " Advantages were not recorded."),
    h("div", null, tops.map(branch)), lost.map(ending));
  root.addEventListener("shown", () => {
    for (const each of root.querySelectorAll(".branch .said")) each.scrollTop = each.scrollHeight;
  }, { once: true });
}

function advantage(value) {
  const shown = Math.abs(value) < ROUNDING ? 0 : value;
  return h("span", { class: shown > 0 ? "good" : shown < 0 ? "bad" : "muted" }, num(shown, true));
}

// All tokens of a call's exact context, coloured by a chosen value; blocks are loaded when they come into view.

import { button, count, h, href, isNone, muted, num, put, visible } from "./dom.js";
import { breakCard } from "./rollout.js";

const BLOCK = 1000;

/** How a value becomes a colour: `scale` is the value of full colour; null: the largest value so far. */
const COLOURS = {
  author: { label: "who wrote it", kind: "author" },
  logprob: { label: "logprob", kind: "cold", scale: 6, says: ["certain", "surprising: −6 nats or less"] },
  advantage: { label: "advantage", kind: "signed", scale: null, says: ["paid less", "paid more"] },
  entropy: { label: "entropy", kind: "hot", scale: 4, says: ["certain", "open: 4 nats or more"] },
  difference: { label: "trainer minus engine", kind: "signed", scale: null, floor: 0.02,
    says: ["higher in the engine", "higher in the trainer"] },
  version: { label: "policy version", kind: "category" },
  gradient: { label: "advantage × loss weight", kind: "signed", scale: null, says: ["less likely", "more likely"] },
  loss_weight: { label: "loss weight", kind: "hot", scale: null, says: ["not trained", "full weight"] },
};
const AUTHORS = {
  sampled: ["sampled in this call", "the model, here"],
  earlier: ["by the model before", "the model, before"],
  environment: ["by the environment", "the environment"],
};
const signed = (value) => num(value, true);
const VALUES = [
  ["logprob", "logprob", num], ["trainer", "trainer_logprob", num], ["difference", "difference", signed],
  ["advantage", "advantage", signed], ["weight", "loss_weight", num], ["entropy", "entropy", num],
  ["version", "version", String], ["mask", "mask", num], ["KL", "kl", num], ["trained in step", "trained_step", String],
];
const blockOf = (position) => position - (position % BLOCK);

export async function render(root, params, api) {
  const { run, id, index } = params;
  const call = Number(params.call);
  const read = async (offset) => {
    const data = await api.tokens(run, { id, index, call, offset, limit: BLOCK });
    const { advantage, loss_weight: weight } = data; // a token's gradient is multiplied by their product
    const gradient = advantage && weight && advantage.map((value, at) => isNone(value) ? null : value * weight[at]);
    return { ...data, gradient };
  };
  const wanted = Math.floor(Number(params.at ?? 0));
  let at = Number.isSafeInteger(wanted) ? Math.max(0, wanted) : 0;
  let first = await read(blockOf(at));
  const total = first.num_tokens;
  if (at >= total && total) { // a link to a missing token leads to the last one
    at = total - 1;
    first = await read(blockOf(at));
  }
  const { breaks, calls } = first;
  const begun = blockOf(at);
  const place = calls.findIndex((each) => each.call === call);
  const agent = calls[place]?.agent;
  const blocks = new Map();
  const most = {};
  const known = Object.keys(COLOURS).filter((name) => name === "author" || first[name]);
  let colour = known.includes(params.colour) ? params.colour : "author";
  const address = (other, more) => href(["run", run, "tokens", id, index, other],
    { colour: colour === "author" ? null : colour, ...more });

  const choice = h("select", { "aria-label": "Colour by", onchange: () => {
    colour = choice.value;
    recolour();
    history.replaceState(null, "", address(call, { at: text.querySelector(".chosen")?.dataset.at }));
  } }, Object.entries(COLOURS).map(([name, { label }]) => {
    const disabled = !known.includes(name);
    const said = `${label}${disabled ? ": not recorded" : ""}`;
    return h("option", { value: name, selected: name === colour, disabled }, said);
  }));
  const legend = h("div", { class: "scale" });
  const facts = h("div", { class: "facts inspector", role: "status" },
    muted("Point at a token for its id, bytes and values."));
  const loose = h("button", {
    type: "button", class: "quiet", hidden: true, "data-reset": true, onclick: () => release(),
  }, "Unpin (Esc)");
  const text = h("div", { class: "tokens", tabindex: "0", "aria-label": "Tokens" });
  const jump = h("input", {
    type: "number", min: 0, max: total - 1, placeholder: "position (/)", "aria-label": "Go to position",
    "data-search": true, onchange: () => go(Number(jump.value)),
  });

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) load(Number(entry.target.dataset.from));
  }, { rootMargin: "1200px" });
  for (let from = 0; from < total; from += BLOCK) {
    const lines = Math.ceil((4.2 * Math.min(BLOCK, total - from)) / 110);
    const block = h("div", { class: "block", "data-from": from, vars: { "min-height": `${lines * 26}px` } });
    blocks.set(from, { element: block, data: null });
    text.append(block);
    seen.observe(block);
  }

  async function load(from) {
    const block = blocks.get(from);
    if (!block || block.data) return;
    block.data = "loading";
    try {
      fill(from, from === begun ? first : await read(from));
    } catch {
      block.data = null;
    }
  }

  /** Draw a block of tokens, with the breaks between them. */
  function fill(from, data) {
    const block = blocks.get(from);
    block.data = data;
    block.element.style.removeProperty("min-height");
    const broken = new Map(breaks.map((each) => [each.position, each]));
    const before = most[colour];
    put(block.element, data.ids.map((_, at) => {
      const span = h("span", { "data-at": from + at });
      span.textContent = shownText(data, at);
      const found = broken.get(from + at);
      const mark = { class: "mark", href: "#break", title: found?.cause, onclick: showBreak };
      return [found && h("a", mark, "break"), span];
    }));
    for (const [name, { scale }] of Object.entries(COLOURS)) {
      if (scale !== null || !data[name]) continue;
      most[name] = data[name].reduce((largest, value) => Math.max(largest, Math.abs(value)), most[name] ?? 0);
    }
    recolour(most[colour] === before ? [block] : undefined);
  }

  function showBreak(event) {
    event.preventDefault();
    root.querySelector(".break")?.scrollIntoView({ block: "center" });
  }

  /** Colour all blocks, or only new ones. */
  function recolour(only = blocks.values()) {
    const scheme = COLOURS[colour];
    const full = Math.max(scheme.scale ?? most[colour] ?? 0, scheme.floor ?? 0) || 1;
    for (const { element, data } of only) {
      if (!data?.ids) continue;
      element.querySelectorAll("span").forEach((span, at) => paint(span, data, at, scheme, full));
    }
    put(legend, legendOf(scheme, full));
  }

  function legendOf({ kind, says, scale }, full) {
    const key = (name, said) => h("span", { class: `tk ${name}` }, said);
    if (kind === "author") return Object.entries(AUTHORS).map(([name, [said]]) => key(name, said));
    if (kind === "category") {
      const versions = new Set([...blocks.values()].flatMap(({ data }) => data?.version ?? []));
      const found = [...versions].filter((value) => !isNone(value)).sort((a, b) => a - b);
      return found.slice(0, 12).map((value) => key(`v${value % 8}`, `version ${value}`));
    }
    return [h("span", null, says[0]), h("span", { class: `ramp ${kind}` }), h("span", null, says[1]),
      scale === null && muted(`full at ${num(full)}`)];
  }

  function paint(span, data, at, { kind }, full) {
    const value = data[colour]?.[at];
    const name = kind === "author" ? authorOf(data, at)
      : isNone(value) ? "unknown"
        : kind === "category" ? `v${value % 8}`
          : kind !== "signed" ? "hot" : value < 0 ? "minus" : "plus";
    span.style.setProperty("--v", `${Math.round(100 * Math.min(1, Math.abs(value) / full))}%`);
    span.className = `tk ${name}${span.classList.contains("chosen") ? " chosen" : ""}`;
  }

  function inspect(span) {
    const position = Number(span.dataset.at);
    const at = position % BLOCK;
    const { data } = blocks.get(position - at);
    const rows = [
      ["token", JSON.stringify(data.texts?.[at])], ["id", data.ids[at]],
      ["bytes", data.bytes?.[at].replace(/../g, "$& ").trim()], ["position", count(position)],
      ["by", AUTHORS[authorOf(data, at)][1]],
      ...VALUES.map(([name, key, said]) => [name, isNone(data[key]?.[at]) ? null : said(data[key][at])]),
    ];
    put(facts, rows.filter(([, value]) => !isNone(value)).map(([name, value]) =>
      h("span", null, muted(`${name} `), h("b", null, value))));
  }

  text.addEventListener("pointerover", ({ target }) =>
    target.dataset?.at !== undefined && !text.querySelector(".chosen") && inspect(target));
  text.addEventListener("click", ({ target }) => {
    if (target.dataset?.at === undefined) return;
    if (target.classList.contains("chosen")) release();
    else choose(target.dataset.at);
  });
  text.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const now = Number(text.querySelector(".chosen")?.dataset.at ?? -1);
    choose(Math.max(0, Math.min(total - 1, now + by)));
  });

  function choose(position) {
    text.querySelector(".chosen")?.classList.remove("chosen");
    const span = text.querySelector(`[data-at="${position}"]`);
    if (!span) return;
    span.classList.add("chosen");
    span.scrollIntoView({ block: "nearest" });
    inspect(span);
    loose.hidden = false;
    history.replaceState(history.state, "", address(call, { at: position }));
  }

  /** Unpin the token, so that the values follow the pointer again. */
  function release() {
    text.querySelector(".chosen")?.classList.remove("chosen");
    loose.hidden = true;
    history.replaceState(history.state, "", address(call));
  }

  async function go(position) {
    const at = Math.min(position, total - 1);
    await load(blockOf(at));
    blocks.get(blockOf(at))?.element.scrollIntoView();
    choose(at);
  }

  const step = (other, sign, key) => other &&
    button(sign, address(other.call), { [key]: true, "aria-label": `Call ${other.call}` });
  const sampled = count(total - first.num_prompt_tokens);
  put(root,
    h("div", { class: "bar" }, h("h1", null, "Tokens"), step(calls[place - 1], "←", "data-previous"),
      h("span", null, `call ${call}`,
        muted(` of ${calls.length} · ${agent ? `${agent} · ` : ""}${count(total)} tokens, ${sampled} sampled`)),
      step(calls[place + 1], "→", "data-next"),
      button("Rollout", href(["run", run, "rollout", id, index])),
      button("Tree", href(["run", run, "tree", id, index]))),
    breaks.map((each) => breakCard(each, address(call, { at: each.position }))),
    h("div", { class: "sticky" },
      h("div", { class: "bar" }, h("label", null, "Colour by ", choice), legend, jump, loose), facts),
    !first.texts && h("p", { class: "muted" }, first.why_raw), text);
  if (total) fill(begun, first);
  root.addEventListener("shown", () => { if (params.at !== undefined) go(at); }, { once: true });
}

function authorOf(data, at) {
  if (data.is_sampled?.[at]) return "sampled";
  return data.author?.[at] === "model" ? "earlier" : "environment";
}

/** A token as it is shown: its text, a mark if that is invisible, or its id. */
function shownText(data, at) {
  const text = data.texts?.[at];
  if (isNone(text)) return `${data.ids[at]} `;
  if (text === "" || text === "\ufffd") return `⟨${data.bytes?.[at] || data.ids[at]}⟩`;
  return visible(text).replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
}

// Every token of a call's exact context, coloured by what one asks; blocks are read when they are seen.

import { count, h, href, num, put, visible } from "./dom.js";
import { breakCard } from "./rollout.js";

const BLOCK = 1000;

/** How a value becomes a colour: `scale` is where it is full, null takes the largest value seen. */
const COLOURS = {
  author: { label: "who wrote it", kind: "author" },
  logprob: { label: "logprob", kind: "cold", scale: 6, says: ["certain", "surprising: −6 nats or less"] },
  advantage: { label: "advantage", kind: "signed", scale: null, says: ["paid less", "paid more"] },
  entropy: { label: "entropy", kind: "hot", scale: 4, says: ["certain", "open: 4 nats or more"] },
  difference: { label: "trainer minus engine", kind: "signed", scale: null, floor: 0.02, says: ["engine likes it more", "trainer likes it more"] },
  version: { label: "policy version", kind: "category" },
  weight: { label: "loss weight", kind: "hot", scale: null, says: ["not trained", "full weight"] },
};

export async function render(root, params, api) {
  const { run, id, index } = params;
  const call = Number(params.call);
  const query = (offset) => ({ id, index, call, offset, limit: BLOCK });
  const wanted = Math.floor(Number(params.at ?? 0));
  let at = Number.isSafeInteger(wanted) ? Math.max(0, wanted) : 0;
  let begun = at - (at % BLOCK);
  let first = await api.tokens(run, query(begun));
  const total = first.num_tokens;
  if (at >= total && total) { // a link to a token that is not there leads to the last one
    at = total - 1;
    begun = at - (at % BLOCK);
    first = await api.tokens(run, query(begun));
  }
  const place = first.calls.findIndex((each) => each.call === call);
  const agent = first.calls[place]?.agent;
  const breaks = first.breaks;
  const blocks = new Map();
  const most = {};
  const known = Object.keys(COLOURS).filter((name) => name === "author" || first[name]);
  let colour = known.includes(params.colour) ? params.colour : "author";
  const address = (other, more = {}) => href(["run", run, "tokens", id, index, other], { colour: colour === "author" ? null : colour, ...more });

  const choice = h("select", { "aria-label": "Colour by", onchange: () => { colour = choice.value; recolour(); history.replaceState(null, "", address(call)); } },
    Object.entries(COLOURS).map(([name, each]) => h("option", { value: name, selected: name === colour, disabled: !known.includes(name) },
      known.includes(name) ? each.label : `${each.label}: not recorded`)));
  const legend = h("div", { class: "scale" });
  const facts = h("div", { class: "facts inspector", role: "status" }, h("span", { class: "muted" }, "Point at a token for its id, bytes and values."));
  const text = h("div", { class: "tokens", tabindex: "0", "aria-label": "Tokens" });
  const jump = h("input", { type: "number", min: 0, max: total - 1, placeholder: "position (/)", "aria-label": "Go to position", "data-search": true,
    onchange: () => go(Number(jump.value)) });

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
      fill(from, from === begun ? first : await api.tokens(run, query(from)));
    } catch {
      block.data = null;
    }
  }

  /** Draw a block of tokens, with the breaks where they are. */
  function fill(from, data) {
    const block = blocks.get(from);
    const before = most[colour];
    block.data = data;
    block.element.style.minHeight = "";
    const broken = new Map(breaks.map((each) => [each.position, each]));
    const parts = data.ids.map((_, at) => {
      const span = document.createElement("span");
      span.dataset.at = from + at;
      span.textContent = shownText(data, at);
      return broken.has(from + at) ? [h("a", { class: "mark", href: "#break", title: broken.get(from + at).cause, onclick: showBreak }, "break"), span] : span;
    });
    put(block.element, parts);
    for (const [name, each] of Object.entries(COLOURS)) {
      if (each.kind === "category" || each.scale !== null && each.scale !== undefined || !data[name]) continue;
      for (const value of data[name]) if (Math.abs(value ?? 0) > (most[name] ?? 0)) most[name] = Math.abs(value);
    }
    const isScaled = most[colour] !== before;
    recolour(isScaled ? null : block);
  }

  function showBreak(event) {
    event.preventDefault();
    root.querySelector(".break")?.scrollIntoView({ block: "center" });
  }

  /** Colour all blocks, or only a new one. */
  function recolour(only = null) {
    const scheme = COLOURS[colour];
    const full = Math.max(scheme.scale ?? most[colour] ?? 0, scheme.floor ?? 0) || 1;
    for (const { element, data } of only ? [only] : blocks.values()) {
      if (!data?.ids) continue;
      for (const span of element.querySelectorAll("span[data-at]")) paint(span, data, Number(span.dataset.at) - Number(element.dataset.from), scheme, full);
    }
    const says = scheme.says;
    if (scheme.kind === "author") put(legend, [["sampled", "sampled in this call"], ["earlier", "by the model before"], ["environment", "by the environment"]].map(([name, said]) => h("span", { class: `tk ${name}` }, said)));
    else if (scheme.kind === "category") put(legend, [...new Set([...blocks.values()].flatMap(({ data }) => data?.version ?? []))].filter((value) => value !== null && value !== undefined).sort((a, b) => a - b).slice(0, 12).map((value) => h("span", { class: `tk v${value % 8}` }, `version ${value}`)));
    else put(legend, h("span", null, says[0]), h("span", { class: `ramp ${scheme.kind}` }), h("span", null, says[1]), scheme.scale === null && h("span", { class: "muted" }, `full at ${num(full)}`));
  }

  function paint(span, data, at, scheme, full) {
    const name = span.classList.contains("chosen") ? ["tk", "chosen"] : ["tk"];
    if (scheme.kind === "author") name.push(authorOf(data, at));
    else {
      const value = data[colour]?.[at];
      if (value === null || value === undefined) name.push("unknown");
      else if (scheme.kind === "category") name.push(`v${value % 8}`);
      else {
        span.style.setProperty("--v", `${Math.round(100 * Math.min(1, Math.abs(value) / full))}%`);
        name.push(scheme.kind === "signed" ? (value < 0 ? "minus" : "plus") : "hot");
      }
    }
    span.className = name.join(" ");
  }

  function inspect(span) {
    const position = Number(span.dataset.at);
    const from = Math.floor(position / BLOCK) * BLOCK;
    const data = blocks.get(from).data;
    const at = position - from;
    const rows = [
      ["token", JSON.stringify(data.texts?.[at] ?? null)], ["id", data.ids[at]], ["bytes", data.bytes?.[at].replace(/../g, "$& ").trim()],
      ["position", count(position)], ["by", authorOf(data, at) === "sampled" ? "the model, here" : authorOf(data, at) === "earlier" ? "the model, before" : "the environment"],
      ["logprob", num(data.logprob?.[at])], ["trainer", data.trainer_logprob && num(data.trainer_logprob[at])], ["difference", data.difference && num(data.difference[at], true)],
      ["advantage", data.advantage && num(data.advantage[at], true)], ["weight", data.weight && num(data.weight[at])], ["entropy", data.entropy && num(data.entropy[at])],
      ["version", data.version?.[at]], ["mask", data.mask && num(data.mask[at])], ["KL", data.kl && num(data.kl[at])], ["trained in step", data.trained_step?.[at]],
    ];
    put(facts, rows.filter(([, value]) => value !== null && value !== undefined && value !== "–").map(([name, value]) => h("span", null, h("span", { class: "muted" }, `${name} `), h("b", null, value))));
  }

  text.addEventListener("pointerover", (event) => event.target.dataset?.at !== undefined && inspect(event.target));
  text.addEventListener("click", (event) => {
    if (event.target.dataset?.at === undefined) return;
    text.querySelector(".chosen")?.classList.remove("chosen");
    event.target.classList.add("chosen");
    inspect(event.target);
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
  }

  async function go(position) {
    const from = Math.floor(Math.min(position, total - 1) / BLOCK) * BLOCK;
    await load(from);
    blocks.get(from)?.element.scrollIntoView();
    choose(Math.min(position, total - 1));
  }

  const step = (other, sign, name) => other && h("a", { class: "button", [name]: true, href: address(other.call), "aria-label": `Call ${other.call}` }, sign);
  put(root,
    h("div", { class: "bar" }, h("h1", null, "Tokens"), step(first.calls[place - 1], "←", "data-previous"),
      h("span", null, `call ${call}`, h("span", { class: "muted" }, ` of ${first.calls.length} · ${agent ? `${agent} · ` : ""}${count(total)} tokens, ${count(total - first.num_prompt_tokens)} sampled`)), step(first.calls[place + 1], "→", "data-next"),
      h("a", { class: "button", href: href(["run", run, "rollout", id, index]) }, "Rollout"), h("a", { class: "button", href: href(["run", run, "tree", id, index]) }, "Tree")),
    breaks.map((each) => breakCard(each, address(call, { at: each.position }))),
    h("div", { class: "sticky" }, h("div", { class: "bar" }, h("label", null, "Colour by ", choice), legend, jump), facts),
    !first.texts && h("p", { class: "muted" }, "No tokenizer was found, so tokens are shown by their ids."), text);
  if (total) fill(begun, first);
  root.addEventListener("shown", () => { if (params.at !== undefined) go(at); }, { once: true });
}

function authorOf(data, at) {
  if (data.is_sampled?.[at]) return "sampled";
  return data.author?.[at] === "model" ? "earlier" : "environment";
}

/** What a token is shown as: its text, a mark for what cannot be seen, or its id. */
function shownText(data, at) {
  const text = data.texts?.[at];
  if (text === null || text === undefined) return `${data.ids[at]} `;
  if (text === "" || text === "\ufffd") {
    return `⟨${data.bytes?.[at] || data.ids[at]}⟩`;
  }
  return visible(text).replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
}

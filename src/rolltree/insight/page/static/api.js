// Requests to the server; an exported page has the answers inside.

import { keep, kept, withQuery } from "./dom.js";
import { file, storedApi } from "./stored.js";

/** The link has the token after its `#`, and says whether it was printed or in a file, which is then removed. The token
 * is removed from the address and kept in this origin's storage, which other ports do not share, unlike a cookie. A
 * link with a wrong token, which any page can open, does not replace a valid one. */
async function takeToken() {
  if (file) return null;
  const given = /^#(token|file)=([\w-]+)/.exec(location.hash);
  if (given) {
    history.replaceState(null, "", `${location.pathname}#/`);
    const headers = { Authorization: `Bearer ${given[2]}` };
    const answer = await fetch(`api/token?from=${given[1]}`, { headers }).catch(() => null);
    await answer?.text(); // else the connection stays busy
    if (answer?.ok) return keep("token", given[2]);
  }
  return kept("token");
}

const taken = takeToken();

/** Tell the shell whether the server answers: "ok", "gone", or "token" if it rejects the token. */
const reached = (state) => document.dispatchEvent(new CustomEvent("reached", { detail: state }));

addEventListener("hashchange", () => { // a new link was opened in this tab
  if (/^#(token|file)=/.test(location.hash)) location.reload();
});

async function get(path, query, signal) {
  const url = withQuery(`api/${path}`, query);
  const first = await taken;
  const headers = { Authorization: `Bearer ${kept("token") ?? first}` }; // another tab may have stored a newer one
  const answer = await fetch(url, { signal, headers }).catch((error) => {
    if (signal?.aborted) throw error;
    reached("gone");
    throw new Error("The server does not answer. Start `rolltree view` again and open the link that it prints.");
  });
  reached(answer.status === 401 ? "token" : "ok");
  if (answer.ok) return answer.json();
  const said = await answer.json().catch(() => ({}));
  throw new Error(said.error ?? `The server answers ${answer.status} to ${url.slice(0, 200)}.`);
}

/** The endpoints for one view, whose pending requests end with `signal`. */
export function apiFor(signal) {
  if (file) return { signal, isExported: true, ...storedApi };
  const ask = (path, query = {}) => get(path, query, signal);
  const of = (part) => (run, query) => ask(`runs/${encodeURIComponent(run)}${part}`, query);
  return {
    signal,
    isExported: false,
    runs: () => ask("runs"),
    health: () => ask("health"),
    run: of(""),
    changed: async (run) => markOf(await of("/changed")(run)),
    changedRuns: async () => (await ask("changed")).mark,
    curves: of("/curves"),
    story: of("/story"),
    gain: of("/gain"),
    evaluation: of("/evaluation"),
    rollouts: of("/rollouts"),
    index: of("/index"),
    previews: (run, rows) => ask(`runs/${encodeURIComponent(run)}/previews?${new URLSearchParams(
      rows.map((row) => ["of", `${row.trajectory_index}:${row.request_id}`]))}`),
    groups: of("/groups"),
    group: of("/group"),
    rollout: of("/rollout"),
    tokens: of("/tokens"),
    tree: of("/tree"),
    compare: (arms) => ask(`compare?${new URLSearchParams(arms.map((arm) => ["arm", arm]))}`),
  };
}

/** A text that changes when a run grows or ends, from its summary or its `changed` endpoint. */
export const markOf = ({ commits, num_commits: number, is_running: running, state }) =>
  `${commits ?? number} ${running ?? state === "running"}`;

const later = (wait_ms) => new Promise((resolve) => { setTimeout(resolve, wait_ms); });

const seen = () => new Promise((resolve) => {
  if (!document.hidden) resolve();
  else document.addEventListener("visibilitychange", resolve, { once: true });
});

/** Request a mark every `period_ms` while the page is visible; if it has changed, call `update`. */
export async function follow(api, mark, ask, update, period_ms = 2000) {
  let known = mark;
  while (!api.isExported && !api.signal.aborted) {
    await later(period_ms);
    await seen();
    if (api.signal.aborted) return;
    try {
      const now = await ask();
      if (now !== known && !api.signal.aborted) await update();
      known = now;
    } catch {
      // The shell shows that the server is gone; the next request tries again.
    }
  }
}

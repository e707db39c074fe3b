// The server's answers; those of a page that was exported are inside it.

import { file, storedApi } from "./stored.js";

/** The token comes behind the link's `#`, or a code for it that works once; it leaves the address and stays in
 * this origin's storage, which no other port shares, as a cookie would. A link with a wrong one, which any page can
 * open, takes nothing away. */
async function takeToken() {
  if (file) return null;
  const given = /^#(token|code)=([\w-]+)/.exec(location.hash);
  if (given) {
    history.replaceState(null, "", `${location.pathname}#/`);
    const headers = given[1] === "token" ? { Authorization: `Bearer ${given[2]}` } : { "X-Code": given[2] };
    const answer = await fetch("api/token", { headers }).catch(() => null);
    if (answer?.ok) return keep((await answer.json()).token);
  }
  return storedToken();
}

function storedToken() {
  try {
    return localStorage.getItem("token");
  } catch {
    return null;
  }
}

/** A browser that stores nothing keeps the token until the page is left. */
function keep(found) {
  try {
    localStorage.setItem("token", found);
  } catch {
    // The link opens it again.
  }
  return found;
}

const taken = takeToken();

/** Tell the shell whether the server answers: "ok", "gone", or "token" if it wants another token. */
const reached = (state) => document.dispatchEvent(new CustomEvent("reached", { detail: state }));

addEventListener("hashchange", () => { // a new link in a tab that is open
  if (/^#(token|code)=/.test(location.hash)) location.reload();
});

async function get(path, query = {}, signal = undefined) {
  const kept = Object.entries(query).filter(([, v]) => v !== null && v !== undefined && v !== "");
  const text = new URLSearchParams(kept).toString();
  const url = `api/${path}${text ? `?${text}` : ""}`;
  const first = await taken;
  const headers = { Authorization: `Bearer ${storedToken() ?? first}` }; // another tab may have taken a newer one
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

const of = (run, part) => `runs/${encodeURIComponent(run)}${part ? `/${part}` : ""}`;

/** The endpoints, for one view: what it still waits for ends with `signal`. */
export function apiFor(signal) {
  if (file) return { signal, isExported: true, ...storedApi };
  return {
    signal,
    isExported: false,
    runs: () => get("runs", {}, signal),
    run: (run) => get(of(run), {}, signal),
    changed: async (run) => markOf(await get(of(run, "changed"), {}, signal)),
    changedRuns: async () => (await get("changed", {}, signal)).mark,
    curves: (run) => get(of(run, "curves"), {}, signal),
    story: (run) => get(of(run, "story"), {}, signal),
    rollouts: (run, query) => get(of(run, "rollouts"), query, signal),
    groups: (run, query) => get(of(run, "groups"), query, signal),
    group: (run, id, agent) => get(of(run, "group"), { id, agent }, signal),
    rollout: (run, id, index) => get(of(run, "rollout"), { id, index }, signal),
    tokens: (run, query) => get(of(run, "tokens"), query, signal),
    tree: (run, query) => get(of(run, "tree"), query, signal),
    compare: (arms) => get(`compare?${new URLSearchParams(arms.map((arm) => ["arm", arm]))}`, {}, signal),
  };
}

/** What tells whether a run has grown or ended; its summary has it, too. */
export const markOf = ({ commits, num_commits: number, is_running: running, state }) =>
  `${commits ?? number} ${running ?? state === "running"}`;

function later(wait_ms, signal) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, wait_ms);
    signal.addEventListener("abort", end);
  });
}

const seen = () => new Promise((resolve) => {
  if (!document.hidden) resolve();
  else document.addEventListener("visibilitychange", resolve, { once: true });
});

/** Ask for a mark every `period_ms` while the page is seen; another one than `mark` calls `update`. */
export async function follow(api, mark, ask, update, period_ms = 2000) {
  let known = mark;
  while (!api.isExported && !api.signal.aborted) {
    await later(period_ms, api.signal);
    await seen();
    if (api.signal.aborted) return;
    try {
      const now = await ask();
      if (now !== known && !api.signal.aborted) await update();
      known = now;
    } catch {
      // The shell says that the server is gone; it is asked again.
    }
  }
}

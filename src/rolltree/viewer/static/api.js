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

const token = takeToken();
addEventListener("hashchange", () => { // a new link in a tab that is open
  if (/^#(token|code)=/.test(location.hash)) location.reload();
});

async function get(path, query = {}, signal = undefined) {
  const kept = Object.entries(query).filter(([, v]) => v !== null && v !== undefined && v !== "");
  const text = new URLSearchParams(kept).toString();
  const url = `api/${path}${text ? `?${text}` : ""}`;
  const answer = await fetch(url, { signal, headers: { Authorization: `Bearer ${await token}` } }).catch((error) => {
    if (signal?.aborted) throw error;
    throw new Error("The server does not answer. Start `rolltree view` again and open the link that it prints.");
  });
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
    changed: (run, since) => get(of(run, "changed"), { since }, signal),
    curves: (run) => get(of(run, "curves"), {}, signal),
    story: (run) => get(of(run, "story"), {}, signal),
    rollouts: (run, query) => get(of(run, "rollouts"), query, signal),
    groups: (run, query) => get(of(run, "groups"), query, signal),
    group: (run, id) => get(of(run, "group"), { id }, signal),
    rollout: (run, id, index) => get(of(run, "rollout"), { id, index }, signal),
    tokens: (run, query) => get(of(run, "tokens"), query, signal),
    tree: (run, query) => get(of(run, "tree"), query, signal),
    compare: (query) => get("compare", query, signal),
  };
}

/** Call `update` when the run has grown, at most every `period_ms` while the page is seen. */
export function whenChanged(api, run, update, period_ms = 2000) {
  if (api.isExported) return;
  let since = null;
  const ask = async () => {
    if (api.signal.aborted) return;
    if (!document.hidden) {
      try {
        const { commits } = await api.changed(run, since ?? -1);
        if (since !== null && commits !== since) await update();
        since = commits;
      } catch {
        if (api.signal.aborted) return;
      }
    }
    setTimeout(ask, period_ms);
  };
  setTimeout(ask, 0);
}

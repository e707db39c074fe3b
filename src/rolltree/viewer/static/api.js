// Requests to the server. The link's `#token=...` is kept in this origin's storage (which no other
// port shares, as a cookie would) and sent as a header; the address bar loses it at once.

const KEY = "rolltree-token";
const given = /^#token=([\w-]+)/.exec(location.hash);
if (given) {
  localStorage.setItem(KEY, given[1]);
  history.replaceState(null, "", `${location.pathname}#/`);
}

async function get(path, params = {}, signal) {
  const known = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(known).toString();
  const headers = { Authorization: `Bearer ${localStorage.getItem(KEY) ?? ""}` };
  const answer = await fetch(query ? `${path}?${query}` : path, { headers, signal });
  const body = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(body.error), { status: answer.status });
  return body;
}

// api.run("sub/demo", "rollouts", {phase: "train"}) -> /api/runs/sub%2Fdemo/rollouts?phase=train
const run = (id, what = "", params = {}, signal) =>
  get(`/api/runs/${encodeURIComponent(id)}${what && `/${what}`}`, params, signal);

export const api = { get, run };

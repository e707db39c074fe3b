/* What a page of another origin tries on the page: returns what it got. */
async (base) => {
  const got = [];
  const tries = ["/", "/api/runs", "/api/token", "/static/main.js"];
  for (const path of tries) {
    for (const options of [{}, { mode: "no-cors" }, { credentials: "include" }, { headers: { Authorization: "Bearer a" } }]) {
      try {
        const answer = await fetch(base + path, options);
        if (answer.type !== "opaque") got.push(`fetch ${path} ${answer.status}`);
        else if ((await answer.text()) !== "") got.push(`opaque ${path}`);
      } catch { /* refused */ }
    }
  }
  const loaded = (element, source) => new Promise((done) => {
    element.addEventListener("load", () => done(true));
    element.addEventListener("error", () => done(false));
    setTimeout(() => done(false), 3000);
    Object.assign(element, source);
    document.body.append(element);
  });
  if (await loaded(document.createElement("script"), { src: `${base}/static/api.js`, type: "module" })) got.push("module");
  if (await loaded(document.createElement("script"), { src: `${base}/static/chart.js` })) got.push("script");
  if (await loaded(document.createElement("img"), { src: `${base}/static/icon.svg` })) got.push("img");
  if (await loaded(document.createElement("link"), { rel: "stylesheet", href: `${base}/static/style.css` })) got.push("css");
  const frame = document.createElement("iframe");
  await loaded(frame, { src: base });
  try { if (frame.contentDocument?.getElementById("view")) got.push("frame"); } catch { /* foreign */ }
  if (frame.contentWindow?.length) got.push("frames");
  const opened = open(`${base}/#token=stolen`);
  addEventListener("message", (event) => got.push(`message ${event.data}`));
  await new Promise((done) => setTimeout(done, 1500));
  try { if (opened && !opened.closed) { got.push("opener"); void opened.localStorage; got.push("storage"); } } catch { /* foreign */ }
  opened?.postMessage("hello", "*");
  await new Promise((done) => setTimeout(done, 300));
  return got;
}

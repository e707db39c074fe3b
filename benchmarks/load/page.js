/* What the benchmark asks of the browser; all times are of its own performance API, in ms. */
(() => {
  const seen = { tasks: [], paints: {}, ready: null };
  new PerformanceObserver((list) => {
    for (const each of list.getEntries()) seen.tasks.push([each.startTime, each.duration]);
  }).observe({ type: "longtask", buffered: true });
  new PerformanceObserver((list) => {
    for (const each of list.getEntries()) seen.paints[each.name] = each.startTime;
  }).observe({ type: "paint", buffered: true });

  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))));

  /** When `holds` is true for the first time after a change of the document. */
  const when = (holds) => new Promise((done) => {
    const look = () => {
      if (!holds()) return;
      watch.disconnect();
      done(performance.now());
    };
    const watch = new MutationObserver(look);
    watch.observe(document, { subtree: true, childList: true, attributes: true });
    look();
  });

  const asked = (since) => performance.getEntriesByType("resource")
    .filter((each) => each.startTime >= since && each.name.includes("/api/"))
    .map((each) => ({ path: each.name.split("/api/")[1].slice(0, 80), ms: each.duration, kb: each.decodedBodySize / 1024 }));

  const longest = (since) => Math.max(0, ...seen.tasks.filter(([at]) => at >= since - 1).map(([, ms]) => ms));

  /** What it took from `begun` until the view of `address` stood and a frame with it was drawn. */
  async function stood(begun, address) {
    await when(() => document.body?.dataset.ready === address);
    const view = performance.getEntriesByName("view").at(-1);
    const drawn_ms = (await frame()) - begun;
    await frame();
    return { view_ms: view.duration, drawn_ms, longest_ms: longest(begun), asked: asked(begun), error: document.querySelector("[role=alert]")?.textContent ?? null };
  }

  window.load = {
    /** Go to an address within the page. */
    async open(address) {
      const begun = performance.now();
      location.hash = address;
      return stood(begun, address);
    },
    /** The page was opened at this address: times count from the click on the link. */
    async opened(address) {
      const found = await stood(0, address);
      return { ...found, first_paint_ms: seen.paints["first-contentful-paint"] ?? null };
    },
    /** Do something and wait until `selector` is there and drawn. */
    async until(act, selector) {
      const begun = performance.now();
      act();
      await when(() => document.querySelector(selector));
      const drawn_ms = (await frame()) - begun;
      await frame();
      return { drawn_ms, longest_ms: longest(begun), asked: asked(begun) };
    },
    /** Watch every frame until `stop`: its length, and how many rows in sight have no data. */
    watch(selector) {
      const box = document.querySelector(selector);
      const found = { frames: [], blank: [], tops: [], begun: performance.now(), on: true };
      let last = null;
      const look = (now) => {
        if (!found.on) return;
        if (last !== null) {
          found.frames.push(now - last);
          setTimeout(() => { // behind the frame, when nothing is left to lay out
            found.blank.push(window.load.blanks(box));
            found.tops.push(box.scrollTop);
          });
        }
        last = now;
        requestAnimationFrame(look);
      };
      requestAnimationFrame(look);
      window.load.watched = found;
    },
    /** Share of places down a box in which nothing is drawn yet. */
    blanks(box) {
      const sight = box === document.scrollingElement ? { left: 0, top: 0, height: innerHeight } : box.getBoundingClientRect();
      const places = [0.1, 0.3, 0.5, 0.7, 0.9].map((share) => document.elementFromPoint(sight.left + 60, sight.top + share * sight.height));
      const isBlank = (at) => !at || at.matches(".vbody, .block:empty") || at.closest(".vbody > .vrow:not([data-row])") !== null;
      return places.filter(isBlank).length / places.length;
    },
    stop() {
      const { watched } = window.load;
      watched.on = false;
      return { frames: watched.frames, blank: watched.blank, tops: watched.tops, longest_ms: longest(watched.begun), asked: asked(watched.begun) };
    },
  };
})();

/* What the tests ask of a page: texts that are too pale, and what sticks out of it. */
() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const brush = canvas.getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (text) => {
    if (!known.has(text)) {
      brush.clearRect(0, 0, 1, 1);
      brush.fillStyle = text;
      brush.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = brush.getImageData(0, 0, 1, 1).data;
      known.set(text, [r, g, b, a / 255]);
    }
    return known.get(text);
  };
  const over = (top, below) => [0, 1, 2].map((at) => top[at] * top[3] + below[at] * (1 - top[3]));
  const light = (colour) => {
    const [r, g, b] = colour.map((each) => {
      const share = each / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const above = [];
    for (let each = element; each; each = each.parentElement) above.push(rgba(getComputedStyle(each).backgroundColor));
    return above.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const pale = [];
  for (const element of document.body.querySelectorAll("*")) {
    const says = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!says || !element.checkVisibility() || element.closest(".hidden") || element.disabled) continue;
    const style = getComputedStyle(element);
    const isDrawn = element instanceof SVGElement;
    let below = ground(element);
    if (element.matches(".inside")) below = over(rgba(getComputedStyle(element.previousElementSibling).fill), below);
    const ink = over(rgba(isDrawn ? style.fill : style.color), below);
    const [high, low] = [light(ink), light(below)].sort((a, b) => b - a);
    const contrast = (high + 0.05) / (low + 0.05);
    const name = `${element.tagName}.${element.getAttribute("class")}`;
    if (contrast < 4.5) pale.push(`${name}: ${contrast.toFixed(2)} ${element.textContent.slice(0, 30)}`);
  }
  const page = document.documentElement;
  return { pale, overflow: Math.max(0, page.scrollWidth - page.clientWidth), hacked: window.hacked ?? null };
}

/* What the tests of hostile strings ask of a page: what could act, what is out of place, which strings are seen. */
() => {
  const bad = [];
  for (const element of document.querySelectorAll("body, body *")) {
    for (const { name, value } of element.attributes) {
      if (name.startsWith("on") || name === "src" || name === "srcdoc") bad.push(`${name}=${value}`);
      if (name.endsWith("href") && !value.startsWith("#")) bad.push(`${name}=${value}`);
      if (name === "style" && value.includes("url(")) bad.push(value);
    }
  }
  for (const row of document.querySelectorAll(".vbody .vrow")) {
    if (row.offsetHeight !== 32) bad.push(`a row of ${row.offsetHeight} pixels`);
  }
  for (const message of document.querySelectorAll(".message")) {
    if (message.offsetHeight < 20) bad.push(`a hidden message: ${message.className}`);
  }
  scrollTo(0, document.documentElement.scrollHeight);
  const top = document.getElementById("top").getBoundingClientRect();
  if (top.top !== 0 || top.height > 60) bad.push(`the header is at ${top.top}, ${top.height} high`);
  scrollTo(0, 0);
  if (document.title.length > 200 || /[\u0000-\u001f\u202a-\u202e\u2066-\u2069]/.test(document.title)) bad.push(document.title);
  return { bad, seen: [...document.body.innerText.matchAll(/window\.hacked=1(\d{4})/g)].map((each) => each[1]) };
}

// Sections that hold every word of the query, headings first; INDEX: [page#id, title, heading, text].
const query = document.getElementById("query");
const found = document.getElementById("found");
const count = document.getElementById("count");

function entry([page, title, heading, text], word) {
  const item = document.createElement("li");
  const link = document.createElement("a");
  link.href = page;
  link.textContent = heading === title ? title : `${title}: ${heading}`;
  const at = Math.max(0, text.toLowerCase().indexOf(word) - 60);
  item.append(link, document.createElement("br"), `${at ? "… " : ""}${text.slice(at, at + 180)} …`);
  return item;
}

query.addEventListener("input", () => {
  const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
  const has = (text) => words.every((word) => text.toLowerCase().includes(word));
  const hits = words.length ? INDEX.filter((e) => has(e.slice(1).join(" "))) : [];
  hits.sort((a, b) => has(b[2]) - has(a[2]));
  count.textContent = words.length ? `${hits.length} sections found` : "";
  found.replaceChildren(...hits.slice(0, 30).map((e) => entry(e, words[0])));
});

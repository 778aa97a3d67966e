// The page: its charts and their controls, the theme, and the table of runs.

const groups = { curves: new Group("step"), use: new Group("time") };
const charts = page.charts.map((spec) => {
  const group = spec.axes.length > 1 ? groups.curves : groups.use;
  return new Chart(document.getElementById(`chart-${spec.id}`), spec, group);
});
const heats = page.heats.map((spec) => new Heat(document.getElementById(`heat-${spec.id}`), spec));

/** Build the charts in the window at once, and the others one by one afterwards. */
function buildNext(waiting) {
  if (!waiting.length) {
    document.documentElement.dataset.complete = "";
    return;
  }
  const [next, ...rest] = waiting;
  if (!next.plot) next.build();
  setTimeout(() => buildNext(rest));
}
const [shown, below] = [[], []];
for (const chart of charts) (chart.place.getBoundingClientRect().top < innerHeight ? shown : below).push(chart);
shown.forEach((chart) => chart.build());

function redraw() {
  charts.forEach((chart) => chart.plot?.redraw());
  heats.forEach((heat) => heat.draw());
}

new ResizeObserver(() => {
  charts.forEach((chart) => chart.resize());
  heats.forEach((heat) => heat.place.clientWidth * devicePixelRatio !== heat.canvas.width && heat.draw());
}).observe(document.querySelector("main"));

function control(name, event, change) {
  document.querySelectorAll(`[name="${name}"]`).forEach((input) => input.addEventListener(event, () => change(input)));
}

control("axis", "change", (input) => groups.curves.set({ axis: input.value }));
control("log-x", "change", (input) => groups.curves.set({ logX: input.checked }));
control("log-y", "change", (input) => groups.curves.set({ logY: input.checked }));
control("smoothing", "input", (input) => {
  input.nextElementSibling.value = input.value;
  groups.curves.set({ smoothing: Number(input.value) });
});
control("reset", "click", () => Object.values(groups).forEach((group) => group.set({ zoom: null })));

const root = document.documentElement;
const dark = matchMedia("(prefers-color-scheme: dark)");
function setTheme(theme) {
  root.dataset.theme = theme;
  redraw();
}
control("theme", "click", () => {
  const shown = root.dataset.theme || (dark.matches ? "dark" : "light");
  setTheme(shown === "dark" ? "light" : "dark");
});
dark.addEventListener("change", redraw);
let before = "";
addEventListener("beforeprint", () => {
  below.forEach((chart) => chart.plot || chart.build());
  before = root.dataset.theme || "";
  setTheme("light");
});
addEventListener("afterprint", () => setTheme(before));

const runRows = [...document.querySelectorAll("tr[data-run]")];
function showRuns() {
  const hidden = runRows.filter((row) => row.hidden || !row.querySelector("[name=run]").checked);
  groups.curves.set({ hiddenRuns: new Set(hidden.map((row) => Number(row.dataset.run))) });
}
control("run", "change", showRuns);
control("filter", "input", (input) => {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of runRows) row.hidden = !words.every((word) => row.dataset.words.toLowerCase().includes(word));
  showRuns();
});
control("every-run", "change", (input) => {
  for (const row of runRows) row.querySelector("[name=run]").checked = input.checked;
  showRuns();
});

/** Sort a table by the column of a heading's button, numerically for numbers; a second click reverses the order. */
control("sort", "click", (button) => {
  const heading = button.closest("th");
  const body = heading.closest("table").tBodies[0];
  const index = [...heading.parentNode.children].indexOf(heading);
  const up = heading.getAttribute("aria-sort") !== "ascending";
  const text = (row) => row.children[index].textContent.trim();
  const number = (row) => parseFloat(text(row).replaceAll(",", ""));
  const order = (a, b) => {
    const [x, y] = [number(a), number(b)];
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || text(a).localeCompare(text(b));
    return up ? x - y : y - x;
  };
  for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", up ? "ascending" : "descending");
  body.append(...[...body.rows].sort(order));
});
requestAnimationFrame(() => {
  root.dataset.ready = "";
  setTimeout(() => buildNext(below));
});

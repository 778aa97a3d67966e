// A chart: uPlot draws it; this file controls zoom, legend, smoothing and the tip at the pointer.

const COLORS = 8;
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const HEIGHT = 250;
const MOST_AT_POINTER = 12;

/** Charts that share their x axis and zoom. */
class Group {
  constructor(axis) {
    Object.assign(this, { charts: [], axis, logX: false, logY: false, smoothing: 0, zoom: null, hiddenRuns: new Set() });
    this.key = `group-${Group.count++}`;
  }

  /** The x range that is shown: the zoom, or the range of all lines. */
  range() {
    this.whole ??= this.wholeRange();
    return this.zoom ?? this.whole;
  }

  wholeRange() {
    let [low, high] = [Infinity, -Infinity];
    for (const chart of this.charts) {
      for (const line of chart.lines) {
        const { x } = pointsOf(line, this.axis, this.logX, false);
        if (x.length) [low, high] = [Math.min(low, x[0]), Math.max(high, x[x.length - 1])];
      }
    }
    if (low > high) return [0, 1];
    return low < high ? [low, high] : [low * 0.9, high * 1.1 || 1];
  }

  set(changes) {
    Object.assign(this, changes);
    const rebuilds = "axis" in changes || "logX" in changes || "logY" in changes;
    if (rebuilds) [this.zoom, this.whole] = [null, null];
    for (const chart of this.charts) if (chart.plot) rebuilds ? chart.build() : chart.update();
  }
}
Group.count = 0;

class Chart {
  constructor(figure, spec, group) {
    Object.assign(this, { figure, spec, group, lines: spec.lines, hidden: new Set(), hovered: false });
    this.place = figure.querySelector(".plot");
    this.tip = element("div", { class: "tip", hidden: "" });
    this.legend();
    group.charts.push(this);
  }

  /** Add a button per line, unless the page has a list of runs instead. */
  legend() {
    const place = this.figure.querySelector(".legend");
    if (this.lines.length < 2 || this.lines.some((line) => line.run !== null)) return;
    this.lines.forEach((line, i) => {
      const button = element("button", { type: "button", "aria-pressed": "true" }, element("i", {}), line.label);
      button.firstChild.style.setProperty("--own", `var(--${this.colorName(i)})`);
      button.firstChild.dataset.kind = line.kind;
      button.addEventListener("click", () => {
        this.hidden.has(i) ? this.hidden.delete(i) : this.hidden.add(i);
        button.setAttribute("aria-pressed", String(!this.hidden.has(i)));
        this.update();
      });
      place.append(button);
    });
  }

  colorName(i) {
    const line = this.lines[i];
    if (line.kind === "limit") return "muted";
    if (line.kind === "low" || line.kind === "high") return "c0";
    return `c${(line.run ?? i) % COLORS}`;
  }

  shows(i) {
    return !this.hidden.has(i) && !this.group.hiddenRuns.has(this.lines[i].run);
  }

  series() {
    return this.lines.flatMap((line, i) => {
      const kind = line.kind;
      const base = {
        stroke: () => color(this.colorName(i)),
        dash: kind === "limit" ? [6, 4] : DASHES[Math.floor((line.run ?? i) / COLORS) % DASHES.length],
        spanGaps: true,
        points: { show: (plot, index) => this.sparse(index), size: 5 },
      };
      return [
        { ...base, width: kind === "faint" ? 1 : 1.6, alpha: this.alpha(i) },
        { ...base, width: 2, points: { show: false } },
      ];
    });
  }

  /** Make single steps pale in a chart that also has other lines. */
  alpha(i) {
    const kind = this.lines[i].kind;
    return (kind === "faint" && this.lines.length > 1) || kind === "low" || kind === "high" ? 0.45 : 1;
  }

  sparse(index) {
    const line = this.lines[(index - 1) >> 1];
    return line.kind !== "limit" && this.spec.axes.length > 1 && (this.counts?.[(index - 1) >> 1] ?? 0) <= 40;
  }

  build() {
    this.plot?.destroy();
    const { axis, logX, logY } = this.group;
    const axes = { stroke: () => color("ink2"), grid: { stroke: () => color("grid"), width: 1 }, ticks: { stroke: () => color("grid") } };
    const font = "12px system-ui, sans-serif";
    const low = this.lines.findIndex((line) => line.kind === "low");
    const high = this.lines.findIndex((line) => line.kind === "high");
    this.plot = new uPlot(
      {
        width: this.place.clientWidth || 400,
        height: HEIGHT,
        legend: { show: false },
        cursor: { drag: { x: true, y: false, setScale: false }, sync: { key: this.group.key }, points: { show: false }, bind: { dblclick: () => () => this.group.set({ zoom: null }) } },
        scales: {
          x: { time: false, distr: logX ? 3 : 1, range: () => this.group.range() },
          y: { distr: logY ? 3 : 1, range: (_, least, most) => this.yRange(least, most, logY) },
        },
        axes: [
          { ...axes, font, space: 64, values: (_, values) => values.map((value) => (value === null ? "" : AXES[axis].text(value))) },
          { ...axes, font, size: 58, values: (_, values) => values.map((value) => (value === null ? "" : digits(value))) },
        ],
        bands: high < 0 ? [] : [{ series: [2 * high + 1, 2 * low + 1], fill: () => color("band") }],
        series: [{}, ...this.series()],
        hooks: { setSelect: [(plot) => this.select(plot)], setCursor: [(plot) => this.point(plot)] },
      },
      null,
      this.place,
    );
    this.plot.over.addEventListener("mouseenter", () => (this.hovered = true));
    this.plot.over.addEventListener("mouseleave", () => this.leave());
    this.place.append(this.tip);
    this.update();
  }

  yRange(least, most, log) {
    if (least === null || most === null) return log ? [0.1, 1] : [0, 1];
    if (log) return uPlot.rangeLog(least, most, 10, false);
    return this.spec.from_zero ? [Math.min(0, least), most * 1.08 || 1] : uPlot.rangeNum(least, most, 0.08, false);
  }

  /** Redraw the lines for the group's range, smoothing and hidden runs. */
  update() {
    const { axis, logX, logY, smoothing } = this.group;
    const [from, to] = this.group.range();
    const count = Math.max(Math.round((this.plot.over.clientWidth || 300) * devicePixelRatio), 50);
    const nothing = new Array(2 * count).fill(null);
    const data = [cells(from, to, count, logX)];
    this.counts = this.lines.map((line) => {
      const { x } = pointsOf(line, axis, logX, logY);
      return lowerBound(x, to) - lowerBound(x, from) + 1;
    });
    this.lines.forEach((line, i) => {
      const { x, y } = pointsOf(line, axis, logX, logY);
      const smooths = smoothing > 0 && line.smooths;
      const shown = this.shows(i);
      this.plot.series[2 * i + 1].alpha = smooths ? 0.25 : this.alpha(i);
      data.push(shown ? resampled(x, y, from, to, count, logX) : nothing);
      data.push(shown && smooths ? resampled(x, smoothed(y, smoothing), from, to, count, logX) : nothing);
    });
    this.plot.setData(data, true);
  }

  resize() {
    if (!this.plot || this.place.clientWidth === this.plot.width) return;
    this.plot.setSize({ width: this.place.clientWidth, height: HEIGHT });
    this.update();
  }

  select(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.group.set({ zoom: [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")] });
  }

  leave() {
    this.hovered = false;
    this.tip.hidden = true;
  }

  /** Show the values of the lines nearest to the pointer. */
  point(plot) {
    const { left, top } = plot.cursor;
    if (!this.hovered || left === undefined || left < 0) {
      this.tip.hidden = true;
      return;
    }
    const { axis, logX, logY } = this.group;
    const at = plot.posToVal(left, "x");
    const found = this.lines.flatMap((line, i) => {
      const { x, y, rows } = pointsOf(line, axis, logX, logY);
      if (!this.shows(i) || !x.length) return [];
      const k = nearest(x, at);
      const off = Math.abs(plot.valToPos(y[k], "y") - top);
      return [{ i, line, row: rows[k], value: y[k], off, beside: Math.abs(x[k] - at) }];
    });
    const near = found.sort((a, b) => a.off - b.off).slice(0, MOST_AT_POINTER);
    if (!near.length) return;
    const { line: first, row } = near.reduce((a, b) => (b.beside < a.beside ? b : a));
    const head = this.spec.axes.filter((name) => name in page.tables[first.table]);
    const where = head.map((name) => `${AXES[name].title} ${AXES[name].text(column(first.table, name)[row])}`);
    const rows = near.sort((a, b) => b.value - a.value).map(({ i, line, value }) => {
      const mark = element("i", {});
      mark.style.setProperty("--own", `var(--${this.colorName(i)})`);
      return element("div", {}, mark, element("span", {}, line.label), element("b", {}, `${digits(value)} ${this.spec.unit}`));
    });
    const more = found.length - near.length;
    this.tip.replaceChildren(element("p", {}, where.join(" · ")), ...rows, more ? `${more} more` : "");
    showTip(this.tip, this.place, plot.over.offsetLeft + left, plot.over.offsetTop + 8);
  }
}

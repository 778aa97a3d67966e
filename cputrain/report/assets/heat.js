// A heat map: one row per rank or layer, one column per record.

const RAMP = ["#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725"].map((text) =>
  [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16)),
);
const ROW = { least: 2, most: 18, all: 420 };
const LABEL = { font: "11px system-ui, sans-serif", most: 170, part: 0.3 }; // of the width
const BOTTOM = 22;

class Heat {
  constructor(figure, spec) {
    Object.assign(this, { figure, spec, values: {}, measure: Object.keys(spec.measures)[0] });
    for (const [name, text] of Object.entries(spec.measures)) this.values[name] = unpack(text);
    this.place = figure.querySelector(".plot");
    this.canvas = element("canvas", { class: "heat" });
    this.tip = element("div", { class: "tip", hidden: "" });
    this.place.append(this.canvas, this.tip);
    this.buttons();
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => (this.tip.hidden = true));
    this.draw();
  }

  buttons() {
    const names = Object.keys(this.spec.measures);
    const buttons = names.map((name) => {
      const button = element("button", { type: "button", "aria-pressed": String(name === this.measure) }, name);
      button.addEventListener("click", () => {
        this.measure = name;
        buttons.forEach((each) => each.setAttribute("aria-pressed", String(each === button)));
        this.draw();
      });
      return button;
    });
    this.figure.querySelector(".legend").append(...buttons);
  }

  columnName(i) {
    const name = this.spec.at[i];
    return typeof name === "number" ? digits(name) : name;
  }

  get height() {
    const row = Math.min(Math.max(ROW.all / this.spec.rows.length, ROW.least), ROW.most);
    return Math.round(row * this.spec.rows.length);
  }

  /** Map the lowest value to 0 and the highest to 1; on a log scale if all are positive. */
  scale() {
    const known = this.values[this.measure].filter((value) => !Number.isNaN(value));
    const [low, high] = known.reduce(([a, b], value) => [Math.min(a, value), Math.max(b, value)], [Infinity, -Infinity]);
    const log = this.spec.log && low > 0;
    const place = log ? Math.log : (value) => value;
    const width = place(high) - place(low) || 1;
    return { low, high, of: (value) => (place(value) - place(low)) / width };
  }

  draw() {
    const [rows, count] = [this.spec.rows.length, this.spec.at.length];
    const image = new OffscreenCanvas(count, rows).getContext("2d");
    const pixels = image.createImageData(count, rows);
    const scale = this.scale();
    this.values[this.measure].forEach((value, i) => {
      if (Number.isNaN(value)) return;
      const at = scale.of(value) * (RAMP.length - 1);
      const [a, b] = [RAMP[Math.floor(at)], RAMP[Math.ceil(at)]];
      a.forEach((part, k) => (pixels.data[4 * i + k] = part + (b[k] - part) * (at % 1)));
      pixels.data[4 * i + 3] = 255;
    });
    image.putImageData(pixels, 0, 0);
    const [width, height] = [this.place.clientWidth, this.height];
    this.canvas.width = width * devicePixelRatio;
    this.canvas.height = (height + BOTTOM) * devicePixelRatio;
    this.canvas.style.height = `${height + BOTTOM}px`;
    const context = this.canvas.getContext("2d");
    context.font = LABEL.font;
    const longest = Math.max(...this.spec.rows.map((name) => context.measureText(name).width));
    this.left = Math.min(longest + 10, LABEL.most, width * LABEL.part);
    context.scale(devicePixelRatio, devicePixelRatio);
    context.imageSmoothingEnabled = false;
    context.drawImage(image.canvas, this.left, 0, width - this.left, height);
    this.labels(context, width, height);
    const unit = this.spec.unit;
    this.figure.querySelector(".scale").replaceChildren(
      `${digits(scale.low)} ${unit}`, element("i", {}), `${digits(scale.high)} ${unit}`,
    );
  }

  labels(context, width, height) {
    const { rows, at } = this.spec;
    context.fillStyle = color("ink2");
    context.font = LABEL.font;
    context.textBaseline = "middle";
    context.textAlign = "right";
    const every = Math.ceil((14 * rows.length) / height);
    for (let i = 0; i < rows.length; i += every) {
      context.fillText(shortened(context, rows[i], this.left - 8), this.left - 6, ((i + 0.5) * height) / rows.length);
    }
    context.textAlign = "center";
    const steps = Math.min(Math.max(Math.floor((width - this.left) / 90), 2), at.length);
    for (let i = 0; i < steps; i++) {
      const part = steps > 1 ? i / (steps - 1) : 0;
      const k = Math.round(part * (at.length - 1));
      const text = `${i ? "" : `${this.spec.across} `}${this.columnName(k)}`;
      const half = context.measureText(text).width / 2;
      const middle = this.left + ((k + 0.5) * (width - this.left)) / at.length;
      context.fillText(text, Math.min(Math.max(middle, this.left + half), width - half), height + 13);
    }
  }

  point(event) {
    const { rows, at } = this.spec;
    const column = Math.floor(((event.offsetX - this.left) / (this.place.clientWidth - this.left)) * at.length);
    const row = Math.floor((event.offsetY / this.height) * rows.length);
    this.tip.hidden = column < 0 || column >= at.length || row < 0 || row >= rows.length;
    if (this.tip.hidden) return;
    const lines = Object.keys(this.values).map((name) =>
      element("div", {}, element("span", {}, name), element("b", {}, `${digits(this.values[name][row * at.length + column])} ${this.spec.unit}`)),
    );
    this.tip.replaceChildren(element("p", {}, `${rows[row]} · ${this.spec.across} ${this.columnName(column)}`), ...lines);
    showTip(this.tip, this.place, event.offsetX, event.offsetY - 40);
  }
}

/** Shorten a name to its end that fits into `width` pixels, as layers' names differ at the end. */
function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let from = 1;
  while (from < text.length && context.measureText(`…${text.slice(from)}`).width > width) from++;
  return `…${text.slice(from)}`;
}

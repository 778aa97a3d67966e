// Columns of numbers, resampled for drawing to at most two values per pixel, the lowest and the highest.

const page = JSON.parse(document.getElementById("data").textContent);
const columns = new Map();

/** Return a column of a table; it is decoded from base64 at its first use. */
function column(table, name) {
  const key = `${table}\n${name}`;
  if (!columns.has(key)) columns.set(key, unpack(page.tables[table][name]));
  return columns.get(key);
}

function unpack(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Float32Array(bytes.buffer);
}

/** Return the points of a line that have a value, with their rows in the table; on a log axis only positive ones. */
function pointsOf(line, axis, logX, logY) {
  const key = [line.table, line.y, axis, logX, logY].join("\n");
  if (!columns.has(key)) {
    const [xs, ys] = [column(line.table, axis), column(line.table, line.y)];
    const rows = [];
    for (let i = 0; i < xs.length; i++) {
      if (!Number.isNaN(ys[i]) && !Number.isNaN(xs[i]) && (!logX || xs[i] > 0) && (!logY || ys[i] > 0)) rows.push(i);
    }
    columns.set(key, { rows, x: Float64Array.from(rows, (i) => xs[i]), y: Float64Array.from(rows, (i) => ys[i]) });
  }
  return columns.get(key);
}

/** Bias-corrected exponential moving average. */
function smoothed(y, weight) {
  let [sum, norm] = [0, 0];
  return y.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/** Return the first index whose x is at least `value`. */
function lowerBound(x, value) {
  let [low, high] = [0, x.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

function nearest(x, value) {
  const after = Math.min(lowerBound(x, value), x.length - 1);
  return after > 0 && value - x[after - 1] < x[after] - value ? after - 1 : after;
}

/** Return the x of the two cells of each of `count` pixels from `from` to `to`. */
function cells(from, to, count, log) {
  const [low, high] = log ? [Math.log(from), Math.log(to)] : [from, to];
  return Array.from({ length: 2 * count }, (_, i) => {
    const at = low + ((i + 0.5) / (2 * count)) * (high - low);
    return log ? Math.exp(at) : at;
  });
}

/** Return the lowest and the highest y of each pixel, in the order of their x; null for pixels without points. */
function resampled(x, y, from, to, count, log) {
  const place = log ? Math.log : (value) => value;
  const low = place(from);
  const scale = count / (place(to) - low || 1);
  const values = new Array(2 * count).fill(null);
  const first = lowerBound(x, from);
  let last = first;
  let pixel = -1;
  let [least, most] = [0, 0];
  const store = () => {
    if (pixel < 0) return;
    values[2 * pixel] = y[Math.min(least, most)];
    if (least !== most) values[2 * pixel + 1] = y[Math.max(least, most)];
  };
  for (; last < x.length && x[last] <= to; last++) {
    const at = Math.min(Math.max(Math.floor((place(x[last]) - low) * scale), 0), count - 1);
    if (at !== pixel) {
      store();
      [pixel, least, most] = [at, last, last];
    } else {
      if (y[last] < y[least]) least = last;
      if (y[last] > y[most]) most = last;
    }
  }
  store();
  if (first > 0 && first < x.length && values[0] === null) values[0] = between(x, y, first, from);
  if (last > 0 && last < x.length && values[2 * count - 1] === null) values[2 * count - 1] = between(x, y, last, to);
  return values;
}

function between(x, y, after, at) {
  const part = (at - x[after - 1]) / (x[after] - x[after - 1] || 1);
  return y[after - 1] + part * (y[after] - y[after - 1]);
}

/** Format a number with four significant digits and thousands separators. */
function digits(value) {
  if (value === null || Number.isNaN(value)) return "";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2);
  return value.toLocaleString("en-US", { maximumSignificantDigits: Math.max(4, Math.ceil(Math.log10(size || 1))) });
}

/** Format seconds as "52 s", "3:20" or "5:07:00". */
function clock(seconds) {
  if (seconds < 60) return `${digits(seconds)} s`;
  const whole = Math.round(seconds);
  const two = (value) => String(value).padStart(2, "0");
  const minutes = `${Math.floor((whole % 3600) / 60)}`;
  const rest = `:${two(whole % 60)}`;
  return whole < 3600 ? minutes + rest : `${Math.floor(whole / 3600)}:${two(minutes)}${rest}`;
}

const AXES = {
  step: { title: "step", text: digits },
  epoch: { title: "epoch", text: digits },
  time: { title: "running time", text: clock },
};

/** Create an element with attributes and children; strings become text, never markup. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Show a tip beside a point of `place`, inside the window. */
function showTip(tip, place, x, y) {
  tip.hidden = false;
  const [left, width] = [place.getBoundingClientRect().left, tip.offsetWidth];
  const beside = left + x + 14 + width <= document.documentElement.clientWidth ? x + 14 : x - 14 - width;
  tip.style.left = `${Math.max(beside, 4 - left)}px`;
  tip.style.top = `${Math.max(y, 0)}px`;
}

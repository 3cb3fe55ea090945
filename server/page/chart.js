// A small line chart of what was measured lately: one or two series over the same time.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 300;
const HEIGHT = 64;

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export class Chart {
  /**
   * `series` are names, `show` writes a value, `mark` one at the axis, `top` is the least height of the axis, and `span`
   * what its left end says.
   */
  constructor({ title, series, show, mark = show, top, size, span }) {
    Object.assign(this, { title, names: series, show, mark, top, size });
    this.values = series.map(() => []);
    this.now = series.map(() => element("b"));
    this.lines = series.map((_, index) => shape("path", { class: `line s${index}` }));
    this.highest = element("span");
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    for (const y of [0, HEIGHT / 2, HEIGHT]) this.svg.append(shape("path", { class: "grid", d: `M0 ${y}H${WIDTH}` }));
    this.svg.append(...this.lines);
    const legend = series.map((name, index) =>
      element("span", {}, element("span", { class: `key s${index}` }), `${name} `, this.now[index]));
    this.node = element("div", { class: "chart" }, element("h3", {}, title), element("div", { class: "now" }, ...legend),
      this.svg, element("div", { class: "axis" }, element("span", {}, span), this.highest, element("span", {}, "now")));
  }

  /** One value a series; null where there is none. */
  add(values) {
    values.forEach((value, index) => {
      this.values[index].push(value);
      if (this.values[index].length > this.size) this.values[index].shift();
      this.now[index].textContent = value === null ? "–" : this.show(value);
    });
    this.draw();
  }

  draw() {
    const top = Math.max(this.top, ...this.values.flat().map((value) => value ?? 0));
    this.lines.forEach((line, index) => line.setAttribute("d", this.path(this.values[index], top)));
    this.highest.textContent = `up to ${this.mark(top)}`;
    const said = this.names.map((name, index) => `${name} ${this.now[index].textContent}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${said}`);
  }

  path(values, top) {
    let path = "";
    let drawing = false;
    values.forEach((value, index) => {
      if (value !== null) {
        const x = WIDTH - ((values.length - 1 - index) * WIDTH) / (this.size - 1);
        const y = HEIGHT - (HEIGHT * value) / top;
        path += `${drawing ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      }
      drawing = value !== null;
    });
    return path;
  }
}

"use strict";
// Everything the page draws comes from the JSON in #data; the tables are in the page itself and only sorted here.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function el(name, attributes, parent, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

// -- sorting ----------------------------------------------------------------------------------------------------

for (const table of document.querySelectorAll("table.data")) {
  const body = table.tBodies[0], original = [...body.rows];
  const heads = [...[...table.tHead.rows].at(-1).cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const next = now === "ascending" ? "descending" : now === "descending" ? null : "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      const rows = [...original];
      if (next) {
        head.setAttribute("aria-sort", next);
        const sign = next === "ascending" ? 1 : -1;
        rows.sort((a, b) => sign * compare(a.cells[column].dataset.v, b.cells[column].dataset.v));
      }
      body.append(...rows);
    });
  });
}

// Numbers by value, text by alphabet, nothing always last.
function compare(a, b) {
  if (a === "" || b === "") return a === b ? 0 : a === "" ? Infinity : -Infinity;
  const difference = Number(a) - Number(b);
  return Number.isNaN(difference) ? a.localeCompare(b) : difference;
}

// -- charts -----------------------------------------------------------------------------------------------------

function frame(box, width, height) {
  box.replaceChildren();
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img" });
  const tip = document.createElement("div");
  tip.className = "tip";
  box.append(svg, tip);
  return { svg, tip, box };
}

function showTip({ svg, tip, box }, x, y, lines) {
  tip.replaceChildren();
  lines.forEach((line, i) => {
    const node = document.createElement(i ? "div" : "b");
    node.textContent = line;
    tip.append(node);
  });
  const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
  const left = Math.min(Math.max(x * scale - tip.offsetWidth / 2, 4), box.scrollWidth - tip.offsetWidth - 4);
  const above = y * scale - tip.offsetHeight - 12;
  tip.style.left = `${left}px`;
  tip.style.top = `${above < 0 ? y * scale + 14 : above}px`;
  tip.style.opacity = 1;
}

function niceTicks(low, high, count) {
  const raw = (high - low) / count, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((s) => s * size).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let value = Math.ceil(low / step) * step; value <= high + 1e-9; value += step) ticks.push(+value.toFixed(9));
  return ticks;
}

function logTicks(low, high) {
  const ticks = [];
  for (let e = -3; e < 6; e++) for (const b of [1, 2, 5]) ticks.push(b * 10 ** e);
  return ticks.filter((t) => t >= low && t <= high);
}

const W = 1120, H = 560, L = 58, R = 24, T = 16, B = 52;

function axes(svg, x, y, xTicks, yTicks, xLabel, yLabel) {
  for (const t of yTicks) {
    el("line", { class: "grid", x1: L, x2: W - R, y1: y(t), y2: y(t) }, svg);
    el("text", { x: L - 9, y: y(t) + 4, "text-anchor": "end" }, svg, +t.toFixed(3));
  }
  for (const t of xTicks) {
    el("line", { class: "grid", x1: x(t), x2: x(t), y1: T, y2: H - B }, svg);
    el("text", { x: x(t), y: H - B + 19, "text-anchor": "middle" }, svg, +t.toFixed(3));
  }
  el("text", { class: "axis", x: (L + W - R) / 2, y: H - 6, "text-anchor": "middle" }, svg, xLabel);
  el("text", { class: "axis", transform: `translate(14 ${(T + H - B) / 2}) rotate(-90)`, "text-anchor": "middle" }, svg, yLabel);
}

// -- the figure -------------------------------------------------------------------------------------------------

const figure = { box: document.getElementById("figure"), axis: "parameters", dataset: null };

function placesOf(point) {
  const found = [];
  if (point.paper !== null && point.paper_x[figure.axis] !== undefined)
    found.push({ kind: "paper", x: point.paper_x[figure.axis], y: point.paper });
  if (point.ours !== null && point.x[figure.axis] !== undefined)
    found.push({ kind: "ours", x: point.x[figure.axis], y: point.ours });
  return found;
}

function drawFigure() {
  const axis = DATA.axes.find((a) => a.name === figure.axis);
  const points = DATA.points[figure.dataset].filter((p) => placesOf(p).length);
  const chart = frame(figure.box, W, H), { svg } = chart;
  const all = points.flatMap(placesOf);
  if (!all.length) { figure.box.textContent = "Nothing is known here yet."; return; }
  const xs = all.map((p) => p.x), ys = all.map((p) => p.y);
  const x0 = Math.min(...xs) / 1.25, x1 = Math.max(...xs) * 1.35;
  const margin = Math.max((Math.max(...ys) - Math.min(...ys)) * 0.08, 0.4);
  const y0 = Math.min(...ys) - margin, y1 = Math.max(...ys) + margin;
  const x = (v) => L + (Math.log(v / x0) / Math.log(x1 / x0)) * (W - L - R);
  const y = (v) => H - B - ((v - y0) / (y1 - y0)) * (H - T - B);
  axes(svg, x, y, logTicks(x0, x1), niceTicks(y0, y1, 7), axis.label, "test accuracy (%)");

  const groups = points.map((point) => {
    const group = el("g", {}, svg), places = placesOf(point), colour = DATA.families[point.family][1];
    if (places.length === 2)
      el("line", { class: "tie", stroke: colour, x1: x(places[0].x), y1: y(places[0].y), x2: x(places[1].x), y2: y(places[1].y) }, group);
    for (const place of places) {
      const circle = el("circle", {
        class: "pt", cx: x(place.x), cy: y(place.y), r: 6.5, stroke: colour, tabindex: 0,
        fill: place.kind === "ours" ? colour : "var(--card)",
        "aria-label": `${point.title}, ${place.kind}, ${place.y.toFixed(2)} percent`,
      }, group);
      const enter = () => {
        groups.forEach((g) => g.classList.toggle("dim", g !== group));
        const values = [point.title];
        if (point.ours !== null) values.push(`ours ${point.ours.toFixed(2)} %`);
        if (point.paper !== null) values.push(`paper ${point.paper.toFixed(2)} %`);
        for (const a of DATA.axes)
          if (point.x[a.name] !== undefined) values.push(`${a.short} ${point.x[a.name].toPrecision(3)} ${a.unit}`);
        showTip(chart, x(place.x), y(place.y), values);
      };
      const leave = () => { groups.forEach((g) => g.classList.remove("dim")); chart.tip.style.opacity = 0; };
      circle.addEventListener("pointerenter", enter);
      circle.addEventListener("focus", enter);
      circle.addEventListener("pointerleave", leave);
      circle.addEventListener("blur", leave);
    }
    return group;
  });
  namePoints(groups, points, x, y);
}

// Names where they cover no point and no other name; a point without room has its name on hover only.
function namePoints(groups, points, x, y) {
  const taken = points.flatMap(placesOf).map((p) => [x(p.x) - 7, y(p.y) - 7, x(p.x) + 7, y(p.y) + 7]);
  const free = ([a, b, c, d]) => a > L && c < W - 2 && b > T && d < H - B && !taken.some((t) => a < t[2] && c > t[0] && b < t[3] && d > t[1]);
  for (const point of [...points].sort((p, q) => (p.family !== "recnet") - (q.family !== "recnet"))) {
    const at = placesOf(point).at(-1), px = x(at.x), py = y(at.y);
    const label = el("text", { class: "name", style: `fill:${DATA.families[point.family][1]}` }, groups[points.indexOf(point)], point.title);
    const w = label.getComputedTextLength(), h = 12;
    const spots = [1, 1.6, 2.4].flatMap((far) => [
      [10 * far, -h / 2], [-w - 10 * far, -h / 2], [-w / 2, -h - 9 * far], [-w / 2, 9 * far],
      [7 * far, -h - 6 * far], [7 * far, 6 * far], [-w - 7 * far, -h - 6 * far], [-w - 7 * far, 6 * far],
    ]);
    const boxes = spots.map(([dx, dy]) => [px + dx, py + dy, px + dx + w, py + dy + h]);
    const box = boxes.find(free);
    if (!box) { label.remove(); continue; }
    taken.push(box);
    label.setAttribute("x", box[0]);
    label.setAttribute("y", box[3] - 2);
    // A name that had to move away is tied to its point.
    const nx = Math.min(Math.max(px, box[0]), box[2]), ny = Math.min(Math.max(py, box[1]), box[3]), gap = Math.hypot(nx - px, ny - py);
    if (gap > 11)
      el("line", { class: "leader", stroke: DATA.families[point.family][1], x1: px + ((nx - px) * 7.5) / gap, y1: py + ((ny - py) * 7.5) / gap, x2: nx, y2: ny }, groups[points.indexOf(point)]);
  }
}

// -- training curves --------------------------------------------------------------------------------------------

const curves = { box: document.getElementById("curves"), value: "accuracy", dataset: null };

// Each name beside the end of its line, moved down where another is in the way.
function nameLines(svg, runs, series, x, y) {
  const ends = series.map((points, i) => ({ run: runs[i], end: points.at(-1) })).filter(({ end }) => end);
  const taken = [];
  for (const { run, end: [e, v] } of ends.sort((a, b) => b.end[1] - a.end[1])) {
    const left = x(e) + 8;
    let at = y(v) + 4;
    for (const [x1, y1] of taken) if (Math.abs(x1 - left) < 190 && Math.abs(y1 - at) < 14) at = y1 + 14;
    taken.push([left, at]);
    el("text", { class: "name", x: left, y: at, style: `fill:${run.colour}` }, svg, run.title);
  }
}

function drawCurves() {
  const runs = DATA.runs.filter((run) => run.dataset === curves.dataset);
  const chart = frame(curves.box, W, H), { svg } = chart;
  const series = runs.map((run) => run[curves.value].map((v, i) => [run.epochs[i], v]).filter(([, v]) => v !== null));
  const all = series.flat();
  if (!all.length) { curves.box.textContent = "No run yet."; return; }
  const last = Math.max(...all.map((p) => p[0]), 2), ys = all.map((p) => p[1]);
  const y0 = curves.value === "loss" ? 0 : Math.floor(Math.min(...ys)), y1 = Math.max(...ys) * 1.02;
  const room = runs.length <= 12 ? 190 : 0; // beside the lines, for their names; of more runs, names on hover only
  const x = (v) => L + ((v - 1) / (last - 1)) * (W - L - R - room), y = (v) => H - B - ((v - y0) / (y1 - y0)) * (H - T - B);
  axes(svg, x, y, niceTicks(1, last, 10).filter(Number.isInteger), niceTicks(y0, y1, 7), "epoch", curves.value === "loss" ? "training loss" : "test accuracy (%)");
  const lines = series.map((points, i) => el("polyline", {
    class: "run", stroke: runs[i].colour, points: points.map(([e, v]) => `${x(e).toFixed(1)},${y(v).toFixed(1)}`).join(" "),
  }, svg));
  if (room) nameLines(svg, runs, series, x, y);
  const clear = () => { lines.forEach((l) => l.classList.remove("on", "dim")); chart.tip.style.opacity = 0; };
  svg.addEventListener("pointerleave", clear);
  svg.addEventListener("pointermove", (event) => {
    const r = svg.getBoundingClientRect(), scale = W / r.width;
    const mx = (event.clientX - r.left) * scale, my = (event.clientY - r.top) * scale;
    let best = null;
    series.forEach((points, i) => points.forEach(([e, v]) => {
      const distance = Math.hypot((x(e) - mx) * 2, y(v) - my);
      if (!best || distance < best.distance) best = { distance, i, e, v };
    }));
    if (!best || best.distance > 60) return clear();
    lines.forEach((l, i) => { l.classList.toggle("on", i === best.i); l.classList.toggle("dim", i !== best.i); });
    const shown = curves.value === "loss" ? best.v.toFixed(4) : `${best.v.toFixed(2)} %`;
    showTip(chart, x(best.e), y(best.v), [runs[best.i].title, `epoch ${best.e}: ${shown}`, `last epoch: ${runs[best.i].final.toFixed(2)} %`]);
  });
}

// -- switches ---------------------------------------------------------------------------------------------------

function wire(id, state, key, draw) {
  const buttons = [...document.querySelectorAll(`#${id} button`)];
  if (!buttons.length) return;
  const choose = (button) => {
    state[key] = button.value;
    buttons.forEach((b) => b.setAttribute("aria-pressed", b === button));
  };
  choose(buttons.find((b) => b.hasAttribute("data-first")) || buttons[0]);
  buttons.forEach((b) => b.addEventListener("click", () => { choose(b); draw(); }));
}

wire("figure-axis", figure, "axis", drawFigure);
wire("figure-data", figure, "dataset", drawFigure);
drawFigure();
if (curves.box) {
  wire("curves-value", curves, "value", drawCurves);
  wire("curves-data", curves, "dataset", drawCurves);
  drawCurves();
}

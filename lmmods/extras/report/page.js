// The values under the pointer. All else on the page works without this.
"use strict";
const charts = JSON.parse(document.getElementById("points").textContent);
const svgName = "http://www.w3.org/2000/svg";
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function make(name, parent, attributes = {}, text = "") {
  const svg = ["line", "circle", "g"].includes(name);
  const node = svg ? document.createElementNS(svgName, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  parent.append(node);
  return node;
}

function nearest(points, x) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - points[low - 1][0] < points[low][0] - x ? points[low - 1] : points[low];
}

for (const plot of document.querySelectorAll(".plot")) {
  const chart = charts[Number(plot.dataset.chart)];
  const left = Number(plot.dataset.left), right = Number(plot.dataset.right), bottom = Number(plot.dataset.bottom);
  const width = plot.viewBox.baseVal.width;
  const place = (x) => left + (x / chart.end) * (right - left);
  const several = new Set(chart.lines.map((line) => line.metric)).size > 1;
  const shown = () => chart.lines.filter((line) => document.getElementById("run-" + line.run).checked);
  let cursor = null, tip = null, at = null;

  function hide() {
    cursor?.remove();
    tip?.remove();
    cursor = tip = null;
  }

  function show(x) {
    hide();
    const found = shown().map((line) => [line, nearest(line.at, x)]).sort(([a], [b]) => a.run - b.run);
    if (!found.length) return;
    at = found.reduce((best, [, point]) => Math.abs(point[0] - x) < Math.abs(best - x) ? point[0] : best, Infinity);
    cursor = make("g", plot, { class: "cursor" });
    make("line", cursor, { x1: place(at), x2: place(at), y1: 0, y2: bottom });
    tip = make("div", plot.parentElement, { class: "tip" });
    make("div", tip, { class: "soft" }, chart.x + " " + number.format(at));
    for (const [line, [px, py, text]] of found) {
      const source = document.querySelector(`label[for="run-${line.run}"]`);
      const row = make("div", tip);
      row.append(source.querySelector(".key").cloneNode(true));
      make("span", row, { class: "name" }, source.textContent.trim());
      if (several) make("span", row, {}, line.metric.split("/")[0]);
      if (px !== at) make("span", row, { class: "soft" }, "at " + number.format(px));
      make("b", row, {}, text);
      if (py !== null) make("circle", cursor, { cx: place(px), cy: py, r: 3.5, class: source.dataset.colour });
    }
    const figure = plot.parentElement.getBoundingClientRect(), box = plot.getBoundingClientRect();
    const middle = box.left - figure.left + (place(at) / width) * box.width;
    const beside = middle + 12 + tip.offsetWidth > figure.width ? middle - 12 - tip.offsetWidth : middle + 12;
    tip.style.left = Math.max(4, Math.min(beside, figure.width - tip.offsetWidth - 4)) + "px";
    tip.style.top = box.bottom - figure.top + 4 + "px"; // below, so that it hides no line
  }

  function point(event) {
    const box = plot.getBoundingClientRect();
    const unit = ((event.clientX - box.left) / box.width) * width;
    show(Math.max(0, Math.min(1, (unit - left) / (right - left))) * chart.end);
  }

  plot.tabIndex = 0;
  plot.addEventListener("pointermove", point);
  plot.addEventListener("pointerdown", point);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const sign = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!sign) return;
    event.preventDefault();
    const all = shown().flatMap((line) => line.at.map(([x]) => x)).filter((x) => at === null || (x - at) * sign > 0);
    if (all.length) show(sign > 0 ? Math.min(...all) : Math.max(...all));
  });
}

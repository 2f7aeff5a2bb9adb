// Shows the values at the pointer. The rest of the page works without this script.
"use strict";
const charts = JSON.parse(document.getElementById("points").textContent);
const svgNamespace = "http://www.w3.org/2000/svg";
const numberFormat = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function appendElement(name, parent, attributes = {}, text = "") {
  const isSvg = ["line", "circle", "g"].includes(name);
  const element = isSvg ? document.createElementNS(svgNamespace, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

function findNearest(points, x) {
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
  const toPlotX = (x) => left + (x / chart.end) * (right - left);
  const hasSeveralMetrics = new Set(chart.lines.map((line) => line.metric)).size > 1;
  const listVisibleLines = () => chart.lines.filter((line) => document.getElementById("run-" + line.run).checked);
  let cursor = null, tip = null, cursorX = null;

  function hide() {
    cursor?.remove();
    tip?.remove();
    cursor = tip = null;
  }

  function show(x) {
    hide();
    const nearestPoints = listVisibleLines().map((line) => [line, findNearest(line.at, x)])
      .sort(([a], [b]) => a.run - b.run);
    if (!nearestPoints.length) return;
    cursorX = nearestPoints.reduce(
      (best, [, point]) => Math.abs(point[0] - x) < Math.abs(best - x) ? point[0] : best, Infinity);
    cursor = appendElement("g", plot, { class: "cursor" });
    appendElement("line", cursor, { x1: toPlotX(cursorX), x2: toPlotX(cursorX), y1: 0, y2: bottom });
    tip = appendElement("div", plot.parentElement, { class: "tip" });
    appendElement("div", tip, { class: "soft" }, chart.x + " " + numberFormat.format(cursorX));
    for (const [line, [pointX, plotY, text]] of nearestPoints) {
      const label = document.querySelector(`label[for="run-${line.run}"]`);
      const row = appendElement("div", tip);
      row.append(label.querySelector(".key").cloneNode(true));
      appendElement("span", row, { class: "name" }, label.textContent.trim());
      if (hasSeveralMetrics) appendElement("span", row, {}, line.metric.split("/")[0]);
      if (pointX !== cursorX) appendElement("span", row, { class: "soft" }, "at " + numberFormat.format(pointX));
      appendElement("b", row, {}, text);
      if (plotY !== null) {
        appendElement("circle", cursor, { cx: toPlotX(pointX), cy: plotY, r: 3.5, class: label.dataset.colour });
      }
    }
    const figureBox = plot.parentElement.getBoundingClientRect(), plotBox = plot.getBoundingClientRect();
    const cursorLeft = plotBox.left - figureBox.left + (toPlotX(cursorX) / width) * plotBox.width;
    const isTooWide = cursorLeft + 12 + tip.offsetWidth > figureBox.width;
    const tipLeft = isTooWide ? cursorLeft - 12 - tip.offsetWidth : cursorLeft + 12;
    tip.style.left = Math.max(4, Math.min(tipLeft, figureBox.width - tip.offsetWidth - 4)) + "px";
    tip.style.top = plotBox.bottom - figureBox.top + 4 + "px"; // below, so that it hides no line
  }

  function onPointer(event) {
    const plotBox = plot.getBoundingClientRect();
    const plotX = ((event.clientX - plotBox.left) / plotBox.width) * width;
    show(Math.max(0, Math.min(1, (plotX - left) / (right - left))) * chart.end);
  }

  plot.tabIndex = 0;
  plot.addEventListener("pointermove", onPointer);
  plot.addEventListener("pointerdown", onPointer);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") hide();
    if (!direction) return;
    event.preventDefault();
    const candidates = listVisibleLines().flatMap((line) => line.at.map(([x]) => x))
      .filter((x) => cursorX === null || (x - cursorX) * direction > 0);
    if (candidates.length) show(direction > 0 ? Math.min(...candidates) : Math.max(...candidates));
  });
}

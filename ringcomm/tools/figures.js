// Draws the figures of a page that are ringcomm's own: bars or cells on a canvas, and texts over them as
// SVG. They take the width of the window and the colors of the page.
const SVG = "http://www.w3.org/2000/svg";
const tone = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function element(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function part(tag, css, text) {
  const made = document.createElement(tag);
  made.className = css;
  if (text !== undefined) made.textContent = text;
  return made;
}

const UNITS = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
const unitOf = (ns) => UNITS.find(([size]) => ns >= size) ?? UNITS[3];

function time(ns) {
  const [size, unit] = unitOf(ns);
  return ns ? `${Number((ns / size).toPrecision(3))} ${unit}` : "0";
}

// The canvas and the SVG of a figure, of the width of the page and this height.
function sheet(place, height) {
  place.replaceChildren();
  const width = place.clientWidth, sharp = window.devicePixelRatio || 1;
  const legend = part("div", "legend"), area = part("div", "area");
  const canvas = part("canvas", ""), svg = element("svg", { width, height, class: "over" });
  canvas.width = width * sharp;
  canvas.height = height * sharp;
  area.style.height = canvas.style.height = `${height}px`;
  canvas.style.width = `${width}px`;
  const paint = canvas.getContext("2d");
  paint.scale(sharp, sharp);
  const tip = part("div", "tip");
  tip.hidden = true;
  area.append(canvas, svg, tip);
  place.append(legend, area);
  const write = (x, y, words, attributes = {}) => {
    const made = element("text", { x, y, ...attributes }, words);
    svg.append(made);
    return made;
  };
  return { width, height, legend, area, svg, paint, tip, write };
}

// Shows at the pointer what `find(x, y)` says; nothing where it says nothing.
function hover({ area, tip, width }, find) {
  const hide = () => { tip.hidden = true; };
  area.addEventListener("pointerleave", hide);
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const words = find(x, y);
    if (!words) return hide();
    tip.textContent = words;
    tip.hidden = false;
    tip.style.left = `${Math.max(0, Math.min(x + 12, width - tip.offsetWidth))}px`;
    tip.style.top = `${y + 16}px`;
  });
}

// ---- the timeline: a row for each rank

const LEFT = 64, RIGHT = 12, AXIS = 48;

function pattern(paint, color) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const own = tile.getContext("2d");
  own.strokeStyle = color;
  own.lineWidth = 2;
  for (const at of [-6, 0, 6]) {
    own.moveTo(at - 1, -1);
    own.lineTo(at + 7, 7);
  }
  own.stroke();
  return paint.createPattern(tile, "repeat");
}

function ticks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((size) => size >= rough * (1 - 1e-9));
  const first = Math.ceil(low / step - 1e-9);
  return Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}

function timeline(place, figure) {
  const ranks = figure.ranks, row = ranks.length <= 24 ? 22 : Math.max(6, Math.floor(640 / ranks.length));
  const own = sheet(place, ranks.length * row + AXIS);
  const [low, high] = place.view ??= figure.view;
  const right = own.width - RIGHT, bottom = ranks.length * row;
  const x = (ns) => LEFT + (ns - low) / (high - low) * (right - LEFT);
  for (const kind of figure.kinds) {
    const key = part("span", "key", kind.name);
    key.style.setProperty("--key", `var(--${kind.color})`);
    key.classList.toggle("hatched", kind.hatched);
    own.legend.append(key);
  }
  const [size, unit] = unitOf(high - low);
  own.paint.fillStyle = tone("line");
  for (const at of ticks(low, high, Math.max(4, (right - LEFT) / 90))) {
    own.paint.fillRect(x(at), 0, 1, bottom);
    own.write(Math.min(x(at), right - 4), bottom + 16, String(Number((at / size).toPrecision(6))), { "text-anchor": "middle" });
  }
  own.write((LEFT + right) / 2, bottom + 38, `${unit} since the oldest operation here`, { "text-anchor": "middle", class: "soft" });
  const every = Math.ceil(14 / row);
  ranks.forEach((rank, i) => {
    if (i % every === 0) own.write(0, i * row + Math.max(row / 2 + 4, 10), `rank ${rank}`);
  });
  const ends = new Array(ranks.length).fill(LEFT);
  const gap = row > 10 ? 3 : 0.5;
  own.paint.save();
  own.paint.beginPath();
  own.paint.rect(LEFT, 0, right - LEFT, bottom);
  own.paint.clip();
  for (const kind of figure.kinds) {
    const color = tone(kind.color);
    own.paint.strokeStyle = color;
    own.paint.fillStyle = kind.hatched ? pattern(own.paint, color) : color;
    for (const [at, begin, lasts] of kind.bars) {
      if (begin + lasts < low || begin > high) continue;
      const from = Math.max(x(begin), LEFT - 2), to = Math.min(x(begin + lasts), right + 2);
      const wide = Math.max(to - from, 1);
      own.paint.fillRect(from, at * row + gap, wide, row - 2 * gap);
      if (kind.hatched && wide > 3) own.paint.strokeRect(from + 0.5, at * row + gap + 0.5, wide - 1, row - 2 * gap - 1);
      ends[at] = Math.max(ends[at], from + wide);
    }
  }
  own.paint.restore();
  for (const [at, words] of figure.notes) {
    if (row < 16) continue;
    const text = own.write(right - 4, at * row + row / 2 + 4, words, { "text-anchor": "end", class: "wrong" });
    if (text.getBBox().x < ends[at] + 4) text.remove();
  }
  hover(own, (px, py) => {
    const at = Math.floor(py / row), ns = low + (px - LEFT) / (right - LEFT) * (high - low);
    const near = (high - low) / (right - LEFT);
    if (px < LEFT || at >= ranks.length) return "";
    for (const kind of [...figure.kinds].reverse()) {
      const bar = kind.bars.find(([rank, begin, lasts]) => rank === at && begin <= ns && ns <= begin + Math.max(lasts, near));
      if (bar) return `rank ${ranks[at]}: ${figure.calls[bar[3]]}, ${kind.name} for ${time(bar[2])}`;
    }
    return "";
  });
  zooming(place, figure, own, (px) => low + (px - LEFT) / (right - LEFT) * (high - low));
}

// Buttons, and a drag over the bars; a double click shows all.
function zooming(place, figure, own, timeAt) {
  const [low, high] = place.view, [first, last] = figure.whole;
  const show = (from, to) => {
    const wide = Math.min(Math.max(to - from, 1000), last - first);
    const start = Math.max(first, Math.min(from, last - wide));
    place.view = [start, start + wide];
    timeline(place, figure);
  };
  const middle = (low + high) / 2, wide = high - low;
  const buttons = part("span", "buttons");
  for (const [words, name, from, to] of [
    ["◀", "earlier", low - wide / 2, high - wide / 2], ["▶", "later", low + wide / 2, high + wide / 2],
    ["+", "closer", middle - wide / 4, middle + wide / 4], ["−", "wider", middle - wide, middle + wide],
    ["all", "all", first, last],
  ]) {
    const button = part("button", "", words);
    button.title = name;
    button.ariaLabel = name;
    button.addEventListener("click", () => {
      show(from, to);
      place.querySelector(`button[title=${name}]`).focus();
    });
    buttons.append(button);
  }
  own.legend.append(buttons);
  const mark = element("rect", { y: 0, height: own.height - AXIS, class: "mark", visibility: "hidden" });
  own.svg.append(mark);
  let start = null;
  const at = (event) => Math.max(LEFT, Math.min(event.clientX - own.area.getBoundingClientRect().left, own.width - RIGHT));
  own.area.addEventListener("pointerdown", (event) => { if (event.pointerType === "mouse") start = at(event); });
  own.area.addEventListener("pointermove", (event) => {
    if (start === null) return;
    mark.setAttribute("x", Math.min(start, at(event)));
    mark.setAttribute("width", Math.abs(at(event) - start));
    mark.setAttribute("visibility", "visible");
  });
  own.area.addEventListener("pointerup", (event) => {
    const from = start, to = at(event);
    start = null;
    if (from !== null && Math.abs(to - from) > 4) show(timeAt(Math.min(from, to)), timeAt(Math.max(from, to)));
  });
  own.area.addEventListener("dblclick", () => show(first, last));
}

// ---- the heat map: rows wait, columns are waited for

function heat(place, figure) {
  const count = figure.ranks.length, top = 40;
  const tall = count <= 24 ? 24 : Math.max(3, Math.floor(560 / count));
  const own = sheet(place, top + count * tall + 4);
  const wide = Math.min(72, (own.width - LEFT - RIGHT) / count), gap = count <= 24 ? 1 : 0;
  const color = tone("waits");
  own.write(0, 12, "down: rank that waited; across: waited for rank", { class: "soft" });
  own.write(0, top - 8, "rank", { class: "soft" });
  const labels = (room) => Math.ceil(room);
  const across = labels(28 / wide), down = labels(14 / tall);
  figure.ranks.forEach((rank, i) => {
    if (i % across === 0) own.write(LEFT + (i + 0.5) * wide, top - 8, rank, { "text-anchor": "middle" });
    if (i % down === 0) own.write(0, top + i * tall + Math.max(tall / 2 + 4, 10), rank);
  });
  figure.cells.forEach((cells, y) => cells.forEach((ns, x) => {
    if (ns === null) return;
    const box = [LEFT + x * wide, top + y * tall, wide - gap, tall - gap];
    own.paint.globalAlpha = 1;
    own.paint.fillStyle = tone("raised");
    own.paint.fillRect(...box);
    own.paint.globalAlpha = figure.most ? ns / figure.most : 0;
    own.paint.fillStyle = color;
    own.paint.fillRect(...box);
    if (wide < 56 || count > 16) return;
    own.write(box[0] + wide / 2, box[1] + tall / 2 + 4, time(ns), { "text-anchor": "middle", class: "outlined" });
  }));
  own.legend.append(part("span", "", "0"), part("span", "ramp"), part("span", "", `${time(figure.most)} waited`));
  hover(own, (px, py) => {
    const x = Math.floor((px - LEFT) / wide), y = Math.floor((py - top) / tall);
    const ns = figure.cells[y]?.[x];
    return ns === undefined || ns === null ? "" : `rank ${figure.ranks[y]} waited ${time(ns)} for rank ${figure.ranks[x]}`;
  });
}

function drawAll() {
  for (const place of document.querySelectorAll(".plot.own")) {
    place.data ??= JSON.parse(place.nextElementSibling.textContent);
    ({ timeline, heat })[place.data.figure](place, place.data);
  }
}

drawers.push(drawAll);

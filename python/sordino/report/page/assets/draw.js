// Shared by all charts: elements, numbers as text, scales, and state that is kept from one drawing to the next.
const SVG = document.getElementById('seed').namespaceURI;
const DASHES = ['', '7 4', '2 3', '9 3 2 3', '14 4', '1 5'];
const SLOTS = 6;
const memory = new Map();  // choices of the reader, by the key of the control

function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function shape(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? '' : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function remembered(key, otherwise) {
  return memory.has(key) ? memory.get(key) : otherwise;
}

// Numbers in readable form.
function number(value, digits = 4) {
  if (value === null || value === undefined) return '–';
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return Number(value.toPrecision(digits)).toLocaleString('en', {maximumFractionDigits: 8});
}

function seconds(value) {
  if (value === null || value === undefined) return '–';
  const size = Math.abs(value);
  if (size === 0) return '0 s';
  if (size >= 1) return `${number(value, 3)} s`;
  if (size < 1e-6) return 'below 1 µs';
  return size >= 1e-3 ? `${number(value * 1e3, 3)} ms` : `${number(value * 1e6, 3)} µs`;
}

function bytes(value) {
  if (value === null || value === undefined) return '–';
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let place = 0;
  while (value >= 1000 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${number(value, 3)} ${units[place]}`;
}

// Round numbers for an axis from low to high.
function ticks(low, high, count = 5) {
  if (!(high > low)) return [low];
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-9; value += step) {
    found.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  }
  return found;
}

function scale(low, high, from, to) {
  const width = high > low ? high - low : 1;
  return (value) => from + ((value - low) / width) * (to - from);
}

function extent(lists, zero = false) {
  let low = zero ? 0 : Infinity, high = zero ? 0 : -Infinity;
  for (const list of lists) {
    for (const value of list) {
      if (value === null) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (!(low <= high)) return [0, 1];
  return low === high ? [low - (Math.abs(low) || 1) * 0.05, high + (Math.abs(high) || 1) * 0.05] : [low, high];
}

// Index of the value in a sorted list that is nearest to a given value.
function nearest(list, value) {
  let low = 0, high = list.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle; else high = middle;
  }
  return Math.abs(list[low] - value) <= Math.abs(list[high] - value) ? low : high;
}

// A mark that distinguishes curves where colors do not.
function mark(slot, x, y, size = 4) {
  const s = size, at = (...pairs) => pairs.map(([dx, dy]) => `${x + dx * s},${y + dy * s}`).join(' ');
  const names = `mark s${slot} f${slot}`;
  if (slot === 0) return shape('circle', {cx: x, cy: y, r: s, class: names});
  if (slot === 1) return shape('rect', {x: x - s, y: y - s, width: 2 * s, height: 2 * s, class: names});
  if (slot === 2) return shape('polygon', {points: at([0, -1.2], [1.1, 0.9], [-1.1, 0.9]), class: names});
  if (slot === 3) return shape('polygon', {points: at([0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]), class: names});
  if (slot === 4) return shape('circle', {cx: x, cy: y, r: s, class: `mark hollow s${slot}`});
  return shape('rect', {x: x - s, y: y - s, width: 2 * s, height: 2 * s, class: `mark hollow s${slot}`});
}

// Moving mean over `width` neighbors, fewer at the ends.
function moving(list, width) {
  const reach = (width - 1) / 2;
  return list.map((_, place) => {
    const some = list.slice(Math.max(0, place - reach), place + reach + 1);
    return some.reduce((sum, value) => sum + value, 0) / some.length;
  });
}

// Makes a box that is larger than its frame scrollable by keyboard, and shows a note if it is wider.
const sizes = new ResizeObserver((entries) => { for (const entry of entries) fits(entry.target.closest('.scroll')); });

function fits(box) {
  if (!box) return;
  const wide = box.scrollWidth > box.clientWidth + 1, tall = box.scrollHeight > box.clientHeight + 1;
  box.classList.toggle('wide', wide);
  if (wide || tall) box.setAttribute('tabindex', '0'); else box.removeAttribute('tabindex');
  box.nextSibling.hidden = !wide;
}

function scrolling(label, inside, caption = null) {
  const box = element('div', {class: 'scroll', role: 'region', 'aria-label': label}, inside);
  sizes.observe(box);
  sizes.observe(inside);
  return element('div', {class: 'holder'}, caption && element('p', {class: 'caption', 'aria-hidden': 'true'}, caption), box,
    element('p', {class: 'hint', hidden: true}, '→ There is more on the right: scroll, or choose the table by Tab and press → or ←.'));
}

function table(heads, rows, caption, attributes = {}) {
  const cell = (value, place) => {
    if (place === 0) return element('th', {scope: 'row', class: 'text'}, value);
    if (value instanceof Node) return element('td', {class: 'text'}, value);
    return element('td', {class: /^([-–\d]|below)/.test(value) ? null : 'text'}, String(value));
  };
  return scrolling(caption, element('table', {'aria-label': caption, ...attributes},
    element('thead', {}, element('tr', {}, ...heads.map((head, place) =>
      element('th', {scope: 'col', class: place === 0 ? 'text' : null}, head)))),
    element('tbody', {}, ...rows.map((row) => element('tr', {}, ...row.map(cell))))), caption);
}

// A table with the numbers of a chart, as an alternative to it. It is built only when it is opened.
function numbers(key, name, make) {
  const inside = element('div', {});
  const details = element('details', {open: remembered(`open ${key}`, false)}, element('summary', {'data-key': `open ${key}`}, name), inside);
  const fill = () => {
    memory.set(`open ${key}`, details.open);
    if (details.open && !inside.firstChild) inside.append(make());
  };
  details.addEventListener('toggle', fill);
  if (details.open) inside.append(make());
  return details;
}

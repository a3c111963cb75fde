// Charts: curves over steps, matrices of ranks, activities of ranks over time, and maps of skipped tensors. In each
// chart the keyboard moves a cursor, a line describes the point under it, and a table has all numbers.
const WIDTH = 760, LEFT = 74, RIGHT = 14, TOP = 12, BOTTOM = 40;

function frame(height, label) {
  return shape('svg', {class: 'chart', viewBox: `0 0 ${WIDTH} ${height}`, role: 'img', 'aria-label': label});
}

function axes(svg, height, xs, ys, xOf, yOf, xTitle, yTitle, yText) {
  for (const value of ys) {
    svg.append(shape('line', {class: 'grid', x1: LEFT, x2: WIDTH - RIGHT, y1: yOf(value), y2: yOf(value)}),
      shape('text', {class: 'tick', x: LEFT - 6, y: yOf(value) + 4, 'text-anchor': 'end'}, yText(value)));
  }
  for (const value of xs) {
    svg.append(shape('text', {class: 'tick', x: xOf(value), y: height - BOTTOM + 16, 'text-anchor': 'middle'}, number(value)));
  }
  svg.append(shape('line', {class: 'axis', x1: LEFT, x2: WIDTH - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM}),
    shape('text', {class: 'tick', x: (LEFT + WIDTH - RIGHT) / 2, y: height - 6, 'text-anchor': 'middle'}, xTitle));
  if (yTitle) svg.append(shape('text', {class: 'tick', x: 14, y: (TOP + height - BOTTOM) / 2, 'text-anchor': 'middle',
    transform: `rotate(-90 14 ${(TOP + height - BOTTOM) / 2})`}, yTitle));
}

// Lets the keyboard move a cursor in a chart: arrows by one, page keys by ten, home and end to the ends.
function walkable(svg, key, label, count, show) {
  let place = Math.min(remembered(`at ${key}`, -1), count - 1);
  const go = (next) => {
    place = Math.max(0, Math.min(count - 1, next));
    memory.set(`at ${key}`, place);
    svg.setAttribute('aria-valuenow', place);
    svg.setAttribute('aria-valuetext', show(place));
  };
  const keys = {ArrowRight: 1, ArrowLeft: -1, PageUp: 10, PageDown: -10};
  filled(svg, {
    role: 'slider', tabindex: 0, 'data-key': `at ${key}`, 'aria-label': label, 'aria-valuemin': 0, 'aria-valuemax': Math.max(count - 1, 0),
    'aria-valuenow': Math.max(place, 0),
    onkeydown: (event) => {
      if (event.key in keys) go(place + keys[event.key]);
      else if (event.key === 'Home') go(0);
      else if (event.key === 'End') go(count - 1);
      else return;
      event.preventDefault();
    },
    onfocus: () => { if (count > 0) go(Math.max(place, 0)); },
  }, []);
  if (place >= 0 && count > 0) go(place);
  return go;
}

function keyButton(key, name, sample, on, change) {
  const button = element('button', {type: 'button', class: 'key', 'aria-pressed': String(on), 'data-key': key}, sample, name);
  button.addEventListener('click', () => {
    const pressed = button.getAttribute('aria-pressed') !== 'true';
    button.setAttribute('aria-pressed', String(pressed));
    memory.set(key, pressed);
    change(pressed);
  });
  return button;
}

function lineSample(slot, dash) {
  return shape('svg', {viewBox: '0 0 34 12', 'aria-hidden': 'true'},
    shape('line', {class: `curve s${slot}`, x1: 1, x2: 33, y1: 6, y2: 6, 'stroke-dasharray': dash}), mark(slot, 17, 6));
}

// Curves over steps. `series`: {name, x, y, low, high, raw, off}. `low` and `high`, if given, bound a band. If `y` is
// a moving mean, `raw` has the original values: a faint line, whose rare peaks do not set the scale.
function curves({key, title, note, series, xTitle = 'step', yText = number, zero = false}) {
  const height = 290;
  const box = element('div', {});
  const readout = element('p', {class: 'readout', 'aria-live': 'polite'}, 'Point at the picture, or choose it and press ← or →.');
  const shown = () => series.filter((one) => remembered(`show ${key} ${one.name}`, !one.off));
  const draw = () => {
    const some = shown();
    const [xLow, xHigh] = extent(some.map((one) => one.x));
    const [yLow, yHigh] = extent(some.flatMap((one) => [one.y, one.low || [], one.high || [], mostly(one.raw || [])]), zero);
    const pad = (yHigh - yLow) * 0.05;
    const xOf = scale(xLow, xHigh, LEFT + 6, WIDTH - RIGHT - 6);
    const yOf = scale(zero ? yLow : yLow - pad, yHigh + pad, height - BOTTOM, TOP);
    const svg = frame(height, title);
    axes(svg, height, ticks(xLow, xHigh, 8), ticks(yLow, yHigh), xOf, yOf, xTitle, '', yText);
    for (const one of some) {
      const slot = one.slot % SLOTS;
      if (one.low) {
        const there = one.x.map((x, place) => `${xOf(x)},${yOf(one.high[place])}`);
        const back = one.x.map((x, place) => `${xOf(x)},${yOf(one.low[place])}`).reverse();
        svg.append(shape('polygon', {class: `band f${slot}`, points: [...there, ...back].join(' ')}));
      }
      if (one.raw) {
        svg.append(shape('polyline', {class: `raw s${slot}`,
          points: one.x.map((x, place) => `${xOf(x)},${Math.max(TOP, yOf(one.raw[place]))}`).join(' ')}));
      }
      svg.append(shape('polyline', {class: `curve s${slot}`, 'stroke-dasharray': DASHES[one.dash ?? slot],
        points: one.x.map((x, place) => `${xOf(x)},${yOf(one.y[place])}`).join(' ')}));
      const every = Math.max(1, Math.ceil(one.x.length / 12));
      one.x.forEach((x, place) => { if (place % every === 0 || one.x.length < 13) svg.append(mark(slot, xOf(x), yOf(one.y[place]), 3.2)); });
    }
    const cursor = shape('line', {class: 'cursor', y1: TOP, y2: height - BOTTOM, visibility: 'hidden'});
    svg.append(cursor);
    const grid = [...new Set(some.flatMap((one) => one.x))].sort((a, b) => a - b);
    const go = walkable(svg, key, title, grid.length, (place) => {
      const x = grid[place];
      filled(cursor, {x1: xOf(x), x2: xOf(x), visibility: 'visible'}, []);
      const texts = some.map((one) => {
        const near = nearest(one.x, x);
        const spread = one.low && one.high[near] > one.low[near] ? ` (${yText(one.low[near])} to ${yText(one.high[near])})` : '';
        const own = one.raw ? `, here ${yText(one.raw[near])}` : '';
        return `${one.name} ${yText(one.y[near])}${spread}${own}`;
      });
      readout.textContent = `${xTitle} ${number(x)}: ${texts.join(' · ')}`;
      return readout.textContent;
    });
    svg.addEventListener('pointermove', (event) => {
      const place = svg.getBoundingClientRect();
      const x = xLow + ((event.clientX - place.left) / place.width * WIDTH - LEFT - 6) / (WIDTH - LEFT - RIGHT - 12) * (xHigh - xLow);
      if (grid.length) go(nearest(grid, x));
    });
    const focused = document.activeElement && box.contains(document.activeElement);
    box.replaceChildren(svg);
    if (focused) svg.focus();
  };
  series.forEach((one, place) => { one.slot = one.slot ?? place; });
  draw();
  const legend = element('div', {class: 'legend', role: 'group', 'aria-label': `Curves of ${title}`},
    ...series.map((one) => keyButton(`show ${key} ${one.name}`, one.name, lineSample(one.slot % SLOTS, DASHES[one.dash ?? one.slot % SLOTS]),
      remembered(`show ${key} ${one.name}`, !one.off), draw)));
  const rows = () => {
    const columns = series.flatMap((one) => [[one.name, one, 'y'],
      ...(one.low ? [['least', one, 'low'], ['most', one, 'high']] : []), ...(one.raw ? [[`${one.name}, here`, one, 'raw']] : [])]);
    const heads = [xTitle, ...columns.map(([head]) => head)];
    const grid = [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
    const found = grid.map((x) => [number(x), ...columns.map(([, one, what]) => {
      const place = one.x.indexOf(x);
      return place < 0 ? '' : yText(one[what][place]);
    })]);
    return table(heads, found, title);
  };
  return element('figure', {}, element('figcaption', {}, title), note ? element('p', {class: 'quiet'}, note) : null,
    legend, box, readout, numbers(key, 'Numbers', rows));
}

// The 95th percentile, as the upper end of a scale.
function mostly(list) {
  return list.length ? [[...list].sort((a, b) => a - b)[Math.floor((list.length - 1) * 0.95)]] : [];
}

// Replaces noisy curves by their moving means, and adds that to the title. A mean keeps the size of values that recur
// every few steps; a median would lose them.
function smooth(title, series) {
  const width = 2 * Math.min(10, Math.floor(Math.max(0, ...series.map((one) => one.y.length)) / 16)) + 1;
  const still = series.every((one) => one.y.every((value) => value === one.y[0]));
  if (width < 5 || still) return {title, series, note: ''};
  return {title: `${title}: moving mean of ${width} points`, series: series.map((one) => ({...one, y: moving(one.y, width), raw: one.y})),
    note: ' Faint: the points themselves; their highest peaks are cut off, and are among the numbers.'};
}

function level(value, most) {
  if (!(value > 0) || !(most > 0)) return 0;
  return Math.min(7, 1 + Math.floor((value / most) * 6.999));
}

// Legend of shades, from empty to the maximum, with the text of both ends.
function shades(least, most) {
  const every = [...Array(8).keys()].map((one) => shape('rect', {class: `h${one} s-edge`, x: 1 + one * 16, y: 1, width: 16, height: 12}));
  return element('div', {class: 'legend'}, least, shape('svg', {class: 'shades', viewBox: '0 0 130 14', 'aria-hidden': 'true'}, ...every), most);
}

// A table of ranks by ranks, shaded by value. `most` is the value of the darkest shade, the same for all runs.
function matrix({title, note, names, ranks, columns = ranks, values, most, text, corner, extra}) {
  const dense = ranks.length > 16;
  const heads = [corner, ...columns, ...(extra ? [extra.name] : [])];
  const rows = ranks.map((rank, row) => element('tr', {},
    element('th', {scope: 'row', class: 'text'}, names[row]),
    ...values[row].map((value, column) => element('td',
      {class: `cell h${level(value, most)}`, title: `${names[row]} → ${columns[column]}: ${text(value)}`},
      value === 0 ? '' : text(value))),
    ...(extra ? [element('td', {}, text(extra.values[row]))] : [])));
  return element('figure', {}, element('figcaption', {}, title), note ? element('p', {class: 'quiet'}, note) : null,
    scrolling(title, element('table', {'aria-label': title, class: dense ? 'dense' : null},
      element('thead', {}, element('tr', {}, ...heads.map((head) => element('th', {scope: 'col'}, head)))),
      element('tbody', {}, ...rows))));
}

const DOES = {compute: 'computes', wait: 'waits', move: 'data on their way', pull: 'pulls', average: 'averages', besides: 'besides the steps'};

function spanText(span) {
  const peer = span[3] >= 0 && ['wait', 'pull', 'average'].includes(span[0])
    ? ` ${{wait: 'for', pull: 'from', average: 'with'}[span[0]]} rank ${span[3]}` : '';
  const what = span[0] === 'wait' && span[3] < 0 ? 'waits while data are on their way' : DOES[span[0]] + peer;
  return `${what}, ${seconds(span[1])} to ${seconds(span[2])} (${seconds(span[2] - span[1])})`;
}

function swatch(name) {
  return shape('svg', {viewBox: '0 0 34 12', 'aria-hidden': 'true'}, shape('rect', {class: `g-${name}`, x: 1, y: 1, width: 32, height: 10}));
}

// Activities over time, one row per rank. Arrow keys move between spans and ranks; plus and minus zoom.
function gantt({key, title, windows, note}) {
  const box = element('div', {});
  const readout = element('p', {class: 'readout', 'aria-live': 'polite'},
    'Choose the picture; ← → go from span to span, ↑ ↓ from rank to rank, + and − change how much is shown.');
  const chosen = () => Math.min(remembered(`window ${key}`, 0), windows.length - 1);
  const first = ({rows, seconds: whole, last, first: before}) => {  // initial view: some steps, up to "besides"
    const other = Math.min(...rows.map((row) => row.spans.find((span) => span[0] === 'besides' && span[1] > 0)?.[1] ?? Infinity));
    return [0, Math.min(1, 8 / Math.max(1, last - before), other / whole)];
  };
  const view = () => remembered(`view ${key} ${chosen()}`, first(windows[chosen()]));
  const draw = (focus) => {
    const {rows, seconds: whole} = windows[chosen()];
    const [from, to] = view().map((part) => part * whole);
    const lane = Math.max(14, Math.min(34, 420 / rows.length));
    const height = TOP + rows.length * lane + BOTTOM;
    const xOf = scale(from, to, LEFT, WIDTH - RIGHT);
    const svg = frame(height, title);
    axes(svg, height, ticks(from * 1e3, to * 1e3, 8), [], (ms) => xOf(ms / 1e3), () => 0, 'ms', '', number);
    rows.forEach(({rank, spans}, row) => {
      const y = TOP + row * lane;
      svg.append(shape('text', {class: 'tick', x: LEFT - 8, y: y + lane * 0.62, 'text-anchor': 'end'}, `rank ${rank}`));
      const ends = spans.length ? [spans[0][1], Math.max(...spans.map((span) => span[2]))] : [0, 0];
      const bar = (name, begin, end, top, tall) => {
        const left = Math.max(xOf(begin), LEFT), right = Math.min(xOf(end), WIDTH - RIGHT);
        if (right <= LEFT || left >= WIDTH - RIGHT) return null;
        return shape('rect', {class: `g-${name}`, x: left, y: y + top, width: Math.max(right - left, 0.8), height: tall});
      };
      svg.append(...[bar('compute', ends[0], ends[1], 1, lane * 0.58)].filter(Boolean));
      for (const span of spans) {
        if (span[2] < from || span[1] > to || span[0] === 'compute') continue;
        const thin = !['wait', 'besides'].includes(span[0]);
        const drawn = bar(span[0], span[1], span[2], thin ? lane * 0.62 : 1, thin ? lane * 0.26 : lane * 0.58);
        if (!drawn) continue;
        svg.append(drawn);
        const left = Math.max(xOf(span[1]), LEFT), right = Math.min(xOf(span[2]), WIDTH - RIGHT);
        if (!thin && span[3] >= 0 && right - left > 16 && lane > 18) {
          const label = String(span[3]), wide = 6 + 7 * label.length, middle = (left + right) / 2;
          svg.append(shape('rect', {class: 'plate', x: middle - wide / 2, y: y + lane * 0.3 - 7, width: wide, height: 14, rx: 3}),
            shape('text', {x: middle, y: y + lane * 0.3 + 4, 'text-anchor': 'middle'}, label));
        }
      }
    });
    const ring = shape('rect', {class: 'g-chosen', visibility: 'hidden', height: lane * 0.9});
    svg.append(ring);
    const place = remembered(`span ${key}`, {row: 0, span: -1});
    const show = () => {
      const row = rows[place.row];
      const span = row && row.spans[place.span];
      if (!span) return;
      const left = Math.max(xOf(span[1]), LEFT), right = Math.min(xOf(span[2]), WIDTH - RIGHT);
      filled(ring, {x: left - 1, y: TOP + place.row * lane, width: Math.max(right - left, 1) + 2, visibility: right > left ? 'visible' : 'hidden'}, []);
      readout.textContent = `rank ${row.rank} ${spanText(span)}`;
      svg.setAttribute('aria-valuetext', readout.textContent);
      memory.set(`span ${key}`, place);
    };
    const zoom = (factor, shift) => {
      const [low, high] = view();
      const wide = Math.min(1, Math.max((high - low) * factor, 1e-4));
      const begin = Math.min(Math.max((low + high) / 2 - wide / 2 + shift * wide, 0), 1 - wide);
      memory.set(`view ${key} ${chosen()}`, [begin, begin + wide]);
      draw(true);
    };
    const seen = () => {  // keep the chosen span in sight
      const span = rows[place.row].spans[place.span];
      const [low, high] = view();
      if (span && (span[2] / whole < low || span[1] / whole > high)) {
        const middle = span[1] / whole, wide = high - low;
        const begin = Math.min(Math.max(middle - wide / 4, 0), 1 - wide);
        memory.set(`view ${key} ${chosen()}`, [begin, begin + wide]);
        memory.set(`span ${key}`, place);
        draw(true);
      }
    };
    filled(svg, {
      role: 'slider', tabindex: 0, 'data-key': `gantt ${key}`, 'aria-valuenow': 0, 'aria-valuetext': readout.textContent,
      onkeydown: (event) => {
        const count = rows[place.row].spans.length;
        if (event.key === 'ArrowRight') place.span = Math.min(place.span + 1, count - 1);
        else if (event.key === 'ArrowLeft') place.span = Math.max(place.span - 1, 0);
        else if (event.key === 'ArrowDown' || event.key === 'ArrowUp') {
          const now = rows[place.row].spans[place.span];
          place.row = Math.min(Math.max(place.row + (event.key === 'ArrowDown' ? 1 : -1), 0), rows.length - 1);
          if (now) place.span = nearest(rows[place.row].spans.map((span) => span[1]), now[1]);
        } else if (event.key === '+' || event.key === '=') { event.preventDefault(); zoom(0.5, 0); return; }
        else if (event.key === '-') { event.preventDefault(); zoom(2, 0); return; }
        else return;
        event.preventDefault();
        show();
        seen();
      },
      onclick: (event) => {
        const at = svg.getBoundingClientRect();
        const row = Math.floor(((event.clientY - at.top) / at.height * height - TOP) / lane);
        const time = from + ((event.clientX - at.left) / at.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT) * (to - from);
        if (!rows[row]) return;
        const under = rows[row].spans.map((span, index) => [span, index]).filter(([span]) => span[1] <= time && span[2] >= time);
        const best = under.find(([span]) => span[0] === 'wait') || under[0];
        if (best) { place.row = row; place.span = best[1]; show(); }
      },
    }, []);
    box.replaceChildren(svg);
    show();
    if (focus === true) svg.focus();
    shift = (by) => zoom(1, by);
    widen = (factor) => zoom(factor, 0);
  };
  let shift = () => {}, widen = () => {};
  draw();
  const button = (text, label, work) => element('button', {type: 'button', 'aria-label': label, 'data-key': `${label} ${key}`, onclick: work}, text);
  const choice = element('select', {'aria-label': `Steps shown in ${title}`, 'data-key': `window ${key}`,
    onchange: (event) => { memory.set(`window ${key}`, event.target.selectedIndex); memory.delete(`span ${key}`); draw(); }},
    ...windows.map((one, place) => element('option', {selected: place === chosen()}, one.label || `steps ${one.first + 1} to ${one.last}`)));
  const sums = () => table(['rank', 'waited', 'waited for others', 'spans', 'not drawn'], windows[chosen()].rows.map(({rank, spans, left}) => {
    const waits = spans.filter((span) => span[0] === 'wait');
    const sum = (list) => list.reduce((total, span) => total + span[2] - span[1], 0);
    return [String(rank), seconds(sum(waits)), seconds(sum(waits.filter((span) => span[3] >= 0))), String(spans.length), String(left)];
  }), title);
  const every = Object.keys(DOES).filter((name) => name === 'compute' || windows.some((one) => one.rows.some((row) => row.spans.some((span) => span[0] === name))));
  return element('figure', {}, element('figcaption', {}, title), note ? element('p', {class: 'quiet'}, note) : null,
    element('div', {class: 'legend'}, choice, button('−', 'show more time', () => widen(2)), button('+', 'show less time', () => widen(0.5)),
      button('←', 'earlier', () => shift(-0.5)), button('→', 'later', () => shift(0.5)),
      ...every.map((name) => element('span', {class: 'key'}, swatch(name), DOES[name] + (name === 'wait' ? ' (the number: for which rank)' : '')))),
    box, readout, numbers(`gantt ${key}`, 'Numbers', sums));
}

// The skipped fraction of each tensor over the steps; a fuller cell is a larger fraction.
function skipMap({key, title, skips}) {
  const {names, step, skipped, unchanged, bytes: sizes} = skips;
  const left = 190, lane = Math.max(9, Math.min(18, 460 / names.length)), height = TOP + names.length * lane + BOTTOM;
  const svg = frame(height, title);
  const xOf = (place) => left + (place / step.length) * (WIDTH - RIGHT - left);
  names.forEach((name, row) => {
    const y = TOP + row * lane;
    svg.append(shape('text', {class: 'tick', x: left - 6, y: y + lane * 0.75, 'text-anchor': 'end'}, name.length > 28 ? `…${name.slice(-27)}` : name));
    for (let place = 0; place < step.length;) {
      const value = level(skipped[row][place], 1);
      let end = place + 1;
      while (end < step.length && level(skipped[row][end], 1) === value) end += 1;
      svg.append(shape('rect', {class: `h${value}`, x: xOf(place), y, width: xOf(end) - xOf(place) + 0.3, height: lane - 1}));
      place = end;
    }
  });
  for (const value of ticks(0, step.length - 1, 8).map(Math.round)) {
    if (value < step.length) svg.append(shape('text', {class: 'tick', x: xOf(value + 0.5), y: height - BOTTOM + 16, 'text-anchor': 'middle'}, number(step[value])));
  }
  svg.append(shape('text', {class: 'tick', x: (left + WIDTH - RIGHT) / 2, y: height - 6, 'text-anchor': 'middle'}, 'step'));
  const ring = shape('rect', {class: 'g-chosen', visibility: 'hidden', height: lane});
  svg.append(ring);
  const readout = element('p', {class: 'readout', 'aria-live': 'polite'}, 'Choose the picture; the arrows go from point to point and from tensor to tensor.');
  const share = (value) => value === null ? '–' : `${number(100 * value, 3)} %`;
  let row = 0;
  const go = walkable(svg, key, title, step.length, (place) => {
    filled(ring, {x: xOf(place) - 1, y: TOP + row * lane - 1, width: xOf(place + 1) - xOf(place) + 2, visibility: 'visible'}, []);
    readout.textContent = `step ${step[place]}, ${names[row]} (${bytes(sizes[row])}): ${share(skipped[row][place])} skipped, ${share(unchanged[row][place])} unchanged`;
    return readout.textContent;
  });
  svg.addEventListener('keydown', (event) => {
    if (event.key !== 'ArrowDown' && event.key !== 'ArrowUp') return;
    row = Math.min(Math.max(row + (event.key === 'ArrowDown' ? 1 : -1), 0), names.length - 1);
    event.preventDefault();
    go(Math.max(remembered(`at ${key}`, 0), 0));
  });
  svg.addEventListener('pointermove', (event) => {
    const at = svg.getBoundingClientRect();
    const found = Math.floor(((event.clientY - at.top) / at.height * height - TOP) / lane);
    if (found >= 0 && found < names.length) row = found;
    go(Math.floor(((event.clientX - at.left) / at.width * WIDTH - left) / (WIDTH - RIGHT - left) * step.length));
  });
  const mean = (list) => list.reduce((sum, value) => sum + (value || 0), 0) / list.length;
  const rows = () => table(['tensor', 'bytes', 'skipped, mean', 'skipped, last', 'unchanged, last'], names.map((name, index) =>
    [name, bytes(sizes[index]), share(mean(skipped[index])), share(skipped[index].at(-1)), share(unchanged[index].at(-1))]), title);
  return element('figure', {}, element('figcaption', {}, title), shades('0 %', '100 % skipped'), svg, readout, numbers(key, 'Numbers', rows));
}

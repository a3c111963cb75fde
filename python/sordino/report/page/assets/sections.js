// Sections of the page. An empty section gives the reason in one sentence.
function section(id, title, ...children) {
  return element('section', {id, 'aria-labelledby': `${id}-title`}, element('h2', {id: `${id}-title`}, title), ...children.filter(Boolean));
}

function quiet(text) {
  return element('p', {class: 'quiet'}, text);
}

// One part per run. Runs without data give the reason, once if it is the same.
function eachRun(runs, name, draw) {
  const parts = [], reasons = new Map();
  for (const run of runs) {
    const why = run.missing[name];
    if (why) reasons.set(why, [...(reasons.get(why) || []), run.name]);
    else parts.push(...[draw(run)].flat());
  }
  for (const [why, names] of reasons) parts.push(quiet(names.length === runs.length ? why : `${names.join(', ')}: ${why}`));
  return parts;
}

function titled(runs, run, text) {
  return runs.length > 1 ? `${run.name}: ${text}` : text;
}

const rises = (name) => /acc|score|f1|bleu|auc/i.test(name);
const plain = (name) => name.replaceAll('_', ' ');

// Summary: the results of each run, with the bytes sent and the time waited.
function glance(runs) {
  const some = runs.filter((run) => run.summary.steps > 0);
  if (!some.length) return null;
  const names = [...new Set(some.flatMap((run) => Object.keys(run.summary.metrics)))].sort((one, other) => rises(other) - rises(one));
  const bar = (kind, pick, text) => {
    const most = Math.max(...some.map((run) => pick(run.summary) || 0));
    return (run) => {
      const value = pick(run.summary);
      if (value === null || value === undefined) return '–';
      return element('div', {}, text(value, run.summary), some.length > 1 && most > 0
        ? shape('svg', {class: 'bar', viewBox: '0 0 100 6', preserveAspectRatio: 'none', 'aria-hidden': 'true'},
          shape('rect', {class: `b-${kind}`, width: 100 * value / most, height: 6})) : null);
    };
  };
  const columns = [
    ...names.slice(0, 3).map((name) => [plain(name), (run) => {
      const found = run.summary.metrics[name];
      return found ? number(found.last) : '–';
    }]),
    ['sent by a rank', bar('sent', (sum) => sum.whole.bytes, (value) => bytes(value))],
    ['waited by a rank', bar('exposed', (sum) => sum.whole.exposed, (value, sum) =>
      `${seconds(value)}${sum.whole.seconds > 0 ? `, ${number(100 * value / sum.whole.seconds, 2)} % of ${seconds(sum.whole.seconds)}` : ''}`)],
    ['in steps', (run) => number(run.summary.steps)],
    ['besides the steps', (run) => run.summary.besides.seconds > 0 ? `${bytes(run.summary.besides.bytes)}, ${seconds(run.summary.besides.seconds)}` : '–'],
    ['sent in all', (run) => run.summary.besides.seconds > 0 ? bytes(run.summary.whole.bytes + run.summary.besides.bytes) : '–'],
  ].filter(([, of]) => some.some((run) => of(run) !== '–'));
  return table(['run', ...columns.map(([name]) => name)], some.map((run) => [run.name, ...columns.map(([, of]) => of(run))]),
    'Results at the end, and the average cost of all steps of a rank. Besides: evaluations, broadcasts and other calls of the script between steps; the script determines their number. A single run per algorithm cannot show small differences of accuracy, because other seeds differ, too.',
    {class: 'glance'});
}

// Comparison of runs: one column per run, one row per measure.
function overview(runs) {
  const trained = (value) => (run) => run.summary.steps > 0 ? value(run.summary) : '–';
  const measures = [
    ['time of a step', trained((sum) => seconds(sum.step))],
    ['exposed communication of a step', trained((sum) => seconds(sum.exposed))],
    ['hidden communication of a step', trained((sum) => seconds(sum.hidden))],
    ['sent by a rank in a step', trained((sum) => bytes(sum.bytes))],
    ['age of averaged models', trained((sum) => seconds(sum.age))],
    ['ranks lost', trained((sum) => String(sum.lost))],
    ['restarts', trained((sum) => String(sum.restarts))],
    ...[...new Set(runs.flatMap((run) => Object.keys(run.summary.metrics)))].flatMap((name) => [
      [`${plain(name)}, last`, ({summary}) => number(summary.metrics[name]?.last)],
      [`${plain(name)}, ${rises(name) ? 'highest' : 'lowest'}`, ({summary}) => number(summary.metrics[name]?.[rises(name) ? 'most' : 'least'])],
    ]),
  ].map(([name, of]) => [name, ...runs.map(of)]).filter(([, ...values]) => values.some((value) => value !== '–'));
  const caption = runs.some((run) => run.summary.steps > 0)
    ? 'Means over steps and ranks. Exposed: calls waited for communication; hidden: it was in flight while the rank computed.' : 'The options.';
  const names = [...new Set(runs.flatMap((run) => run.facts.map(([name]) => name)))];
  const facts = names.map((name) => [name, ...runs.map((run) => run.facts.find(([other]) => other === name)?.[1] ?? '–')]);
  const notes = runs.flatMap((run) => run.notes.map((note) =>
    element('p', {}, element('strong', {}, 'Note: '), titled(runs, run, note))));
  return section('overview', 'Overview', glance(runs),
    ...notes,
    table(['', ...runs.map((run) => run.name)], [...facts.slice(0, 3), ...measures, ...facts.slice(3)],
      caption, {class: 'overview'}));
}

function training(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))];
  const virtual = runs.some((run) => run.virtual);
  const along = virtual ? 'time' : remembered('along', 'step');
  const choice = virtual ? null : element('select', {'aria-label': 'Horizontal axis of training curves', 'data-key': 'along', onchange: (event) => { memory.set('along', event.target.value); redraw('training'); }},
    ...[['step', 'over steps'], ['time', 'over seconds']].map(([value, text]) => element('option', {value, selected: value === along}, text)));
  const figures = names.map((name) => curves({
    key: `metric ${name}`, title: plain(name), xTitle: along === 'step' ? 'step' : virtual ? 'virtual s' : 's',
    series: runs.map((run, slot) => ({run, slot})).filter(({run}) => run.metrics[name]).map(({run, slot}) => {
      const curve = run.metrics[name];
      const spread = curve.low.some((value, place) => value < curve.high[place]);
      return {name: runs.length > 1 ? run.name : 'mean over ranks', slot, x: curve[along], y: curve.mean, ...(spread ? {low: curve.low, high: curve.high} : {})};
    }),
  }));
  return section('training', 'Training', ...(names.length ? [choice, quiet('Means over the ranks; the band shows the range over the ranks.'), ...figures] : []),
    ...eachRun(runs, 'metrics', () => []));
}

// Horizontal axis: steps, or virtual seconds for simulations, whose workers are at different steps at one time.
function across(runs) {
  return runs.some((run) => run.virtual) ? {along: 'time', xTitle: 'virtual s'} : {along: 'step', xTitle: 'step'};
}

function communication(runs) {
  const some = runs.filter((run) => run.steps.step.length);
  if (!some.length) return section('communication', 'Communication, step by step', ...eachRun(runs, 'steps', () => []));
  const {along, xTitle} = across(some), alone = runs.length === 1, hides = some.filter((run) => run.steps.hidden.length);
  const curve = (run, what, text, ownSlot, dash, off = false) => ({
    name: alone ? text : text ? `${run.name}, ${text}` : run.name, x: run.steps[along], y: run.steps[what], slot: alone ? ownSlot : runs.indexOf(run), dash, off});
  const picture = (key, title, series, yText, text = '') => {
    const {note, ...drawn} = smooth(title, series);
    return curves({key, ...drawn, xTitle, yText, zero: true, note: text + note});
  };
  const exposed = 'Exposed: a call of the rank waited for it.', hidden = 'Hidden: it was in flight while the rank computed.';
  const virtual = some.some((run) => run.virtual) ? ' In a simulation, a point is the mean since the previous point, and hidden communication is not known.' : '';
  const each = (what) => (run) => curve(run, what, '', 0, undefined);
  const waits = alone ? [picture('steps', 'Communication of a step, mean over ranks', [
    curve(some[0], 'exposed', 'exposed', 1, 0), ...hides.map((run) => curve(run, 'hidden', 'hidden', 0, 1)),
    curve(some[0], 'other', 'the rest of the step', 5, 2, true),
  ], seconds, `${exposed} ${hidden}${virtual}`)] : [
    picture('exposed', 'Exposed communication of a step, mean over ranks', some.map(each('exposed')), seconds, exposed + virtual),
    hides.length ? picture('hidden', 'Hidden communication of a step, mean over ranks', hides.map(each('hidden')), seconds, hidden) : null,
  ];
  return section('communication', 'Communication, step by step', ...waits,
    picture('sent', 'Bytes that a rank sent in a step', some.map((run) => curve(run, 'bytes', alone ? 'sent' : '', 0, undefined)), bytes),
    ...eachRun(runs, 'steps', () => []),
    ...some.map((run) => numbers(`ranks ${run.name}`, titled(runs, run, 'Numbers by rank'), () => table(['rank', 'host', 'steps', 'time', 'exposed', 'sent', 'sent besides steps', 'end'],
      run.ranks.map((one) => [String(one.rank), one.host, number(one.steps), seconds(one.seconds), seconds(one.exposed), bytes(one.bytes), bytes(one.besides), `${one.fate}. ${one.text}`]),
      titled(runs, run, 'by rank')))));
}

// Names of a matrix's rows: a rank, or several adjacent ranks, with the host if there is one.
function rowNames(run, labels) {
  return labels.map((label) => {
    const host = run.ranks.find((one) => String(one.rank) === label)?.host;
    const what = run.virtual ? 'worker' : 'rank';
    return `${what}${label.includes('–') ? 's' : ''} ${label}${host ? `, ${host}` : ''}`;
  });
}

// One scale for the matrices of all runs, and its legend.
function scaleOf(runs, name, tables, text) {
  const some = runs.filter((run) => !run.missing[name]);
  const most = Math.max(0, ...some.flatMap((run) => tables(run).flat()));
  const all = some.length > 1 ? ', the maximum over all runs; all tables here have one scale' : '';
  return {most, legend: most > 0 ? shades('empty: nothing', `${text(most)}${all}`) : null};
}

function traffic(runs) {
  const {most, legend} = scaleOf(runs, 'links', (run) => run.links.bytes, bytes);
  return section('links', 'Bytes by link', legend, ...eachRun(runs, 'links', (run) => matrix({
    title: titled(runs, run, 'bytes sent, from the rank of the row to that of the column'), corner: 'from \\ to', names: rowNames(run, run.links.ranks),
    ranks: run.links.ranks, columns: run.links.columns, values: run.links.bytes, most, text: bytes,
    note: run.virtual ? null : 'Payload, in steps and besides them. In shared memory an all-reduce counts as in a ring, with equal shares for all ranks of the node; a pull counts for the rank that copies.',
  })));
}

function waiting(runs) {
  const {most, legend} = scaleOf(runs, 'waits', (run) => run.waits.seconds, seconds);
  const waited = (run) => [...run.waits.seconds.flat(), ...(run.waits.data || [])].some((value) => value > 0);
  return section('waits', 'Waiting times between ranks', legend, ...eachRun(runs, 'waits', (run) => [
    !waited(run) ? quiet(titled(runs, run, 'no rank waited in the steps whose spans were recorded.')) : matrix({title: titled(runs, run, 'time that the rank of the row waited for that of the column'), corner: 'waiting \\ for', names: rowNames(run, run.waits.ranks),
      ranks: run.waits.ranks, values: run.waits.seconds, most, text: seconds, extra: run.waits.data && {name: 'for data', values: run.waits.data},
      note: 'In the steps whose spans were recorded. A wait counts for the rank that came last; "for data": all had come, and data were in flight.'}),
    gantt({key: run.name, title: titled(runs, run, 'activity of each rank'), windows: run.windows}),
  ]));
}

function staleness(runs) {
  const some = runs.filter((run) => run.ages.step.length), late = some.filter((run) => run.ages.behind.length);
  const {along, xTitle} = across(some);
  const one = (those, title, key, pick, text) => curves({key, title, xTitle, yText: text, zero: true,
    series: those.map((run) => ({name: runs.length > 1 ? run.name : title, slot: runs.indexOf(run), x: run.ages[along], ...pick(run.ages)}))});
  return section('ages', 'Ages', ...[
    some.length ? one(some, 'Age of averaged models', 'ages', (ages) => ({y: ages.mean, low: ages.low, high: ages.high}), seconds) : null,
    late.length ? one(late, 'Steps by which their senders were behind', 'behind', (ages) => ({y: ages.behind}), number) : null,
  ].filter(Boolean), ...eachRun(runs, 'ages', () => []));
}

function skipping(runs) {
  return section('skips', 'Skip maps', ...eachRun(runs, 'skips', (run) => [
    skipMap({key: `skips ${run.name}`, title: titled(runs, run, `share of each tensor that was skipped, on rank ${run.skips.rank}`), skips: run.skips}),
    run.skips.left > 0 ? quiet(`The ${run.skips.left} smallest tensors are not drawn.`) : null,
    curves({key: `sent ${run.name}`, title: titled(runs, run, 'share of the bytes that was sent'), zero: true, yText: (value) => `${number(100 * value, 3)} %`,
      series: [{name: 'sent', x: run.skips.step, y: run.skips.sent.map((sent, place) => run.skips.unskipped[place] ? sent / run.skips.unskipped[place] : 1)}]}),
  ].filter(Boolean)));
}

function faults(runs) {
  const parts = runs.flatMap((run) => {
    const bad = run.events.filter((event) => event.what !== 'end');
    const none = bad.length ? null : quiet(titled(runs, run, 'No fault, no recovery, no restart.'));
    const rows = run.events.map((event) => [seconds(event.time), event.who,
      element('span', {class: event.what === 'failure' ? 'bad' : null}, event.what), event.text]);
    return [none, rows.length ? table(['after', 'source', 'event', 'details'], rows, titled(runs, run, 'events'), {class: 'words'}) : null].filter(Boolean);
  });
  return section('faults', 'Faults and recoveries', ...parts);
}

function planned(runs) {
  const some = runs.filter((run) => run.what === 'plan' && run.result);
  return some.length ? section('plan', 'Plan', ...some.flatMap((run) => {
    const found = run.result;
    const rows = found.rows.map((row) => [row.name, seconds(row.communication), seconds(row.measured), row.error === null ? '–' : `${number(100 * row.error, 2)} %`,
      bytes(row.sent), seconds(row.step), seconds(row.epoch)]);
    return [element('p', {}, element('strong', {}, found.recommendation)),
      table(['algorithm', 'communication per step', 'measured', 'error', 'sent to other nodes', 'step', 'epoch'], rows, 'Predicted from the costs of the links here, and measured.')];
  })) : null;
}

const SECTIONS = {overview, plan: planned, training, communication, links: traffic, waits: waiting, ages: staleness, skips: skipping, faults};

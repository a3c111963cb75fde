// What the page says, section by section. A section without anything to show says why in one sentence.
function section(id, title, ...children) {
  return element('section', {id, 'aria-labelledby': `${id}-title`}, element('h2', {id: `${id}-title`}, title), ...children);
}

function quiet(text) {
  return element('p', {class: 'quiet'}, text);
}

// One part a run; runs that have none of it tell why, once where all tell the same.
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

// A column a run, a row a measure: what runs are compared by.
function overview(runs) {
  const trained = (value) => (run) => run.summary.steps > 0 ? value(run.summary) : '–';
  const rises = (name) => /acc|score|f1|bleu|auc/i.test(name);
  const measures = [
    ['steps', trained((sum) => number(sum.steps))],
    ['a step', trained((sum) => seconds(sum.step))],
    ['of it exposed communication', trained((sum) => seconds(sum.exposed))],
    ['hidden communication', trained((sum) => seconds(sum.hidden))],
    ['sent a step and rank', trained((sum) => bytes(sum.bytes))],
    ['age of what was averaged in', trained((sum) => seconds(sum.age))],
    ['ranks lost', trained((sum) => String(sum.lost))],
    ['restarts', trained((sum) => String(sum.restarts))],
    ...[...new Set(runs.flatMap((run) => Object.keys(run.summary.metrics)))].flatMap((name) => [
      [`${name}, last`, ({summary}) => number(summary.metrics[name]?.last)],
      [`${name}, ${rises(name) ? 'highest' : 'lowest'}`, ({summary}) => number(summary.metrics[name]?.[rises(name) ? 'most' : 'least'])],
    ]),
  ].map(([name, of]) => [name, ...runs.map(of)]).filter(([, ...values]) => values.some((value) => value !== '–'));
  const caption = runs.some((run) => run.summary.steps > 0)
    ? 'Means of a step. Exposed: calls waited for communication; hidden: it was under way while the rank computed. What happens between two steps, such as an evaluation, counts for the step after it.' : 'What was asked for.';
  const names = [...new Set(runs.flatMap((run) => run.facts.map(([name]) => name)))];
  const facts = names.map((name) => [name, ...runs.map((run) => run.facts.find(([other]) => other === name)?.[1] ?? '–')]);
  const notes = runs.flatMap((run) => run.notes.map((note) =>
    element('p', {}, element('strong', {}, 'Note: '), titled(runs, run, note))));
  return section('overview', 'Overview',
    table(['', ...runs.map((run) => run.name)], [...facts, ...measures],
      caption, {class: 'overview'}),
    ...notes);
}

function training(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))];
  const virtual = runs.some((run) => run.virtual);
  const along = virtual ? 'time' : remembered('along', 'step');
  const choice = virtual ? null : element('select', {'aria-label': 'Horizontal axis of training curves', 'data-key': 'along', onchange: (event) => { memory.set('along', event.target.value); redraw('training'); }},
    ...[['step', 'over steps'], ['time', 'over seconds']].map(([value, text]) => element('option', {value, selected: value === along}, text)));
  const figures = names.map((name) => curves({
    key: `metric ${name}`, title: name, xTitle: along === 'step' ? 'step' : virtual ? 'virtual s' : 's',
    series: runs.map((run, slot) => ({run, slot})).filter(({run}) => run.metrics[name]).map(({run, slot}) => {
      const curve = run.metrics[name];
      const spread = curve.low.some((value, place) => value < curve.high[place]);
      return {name: runs.length > 1 ? run.name : 'mean over ranks', slot, x: curve[along], y: curve.mean, ...(spread ? {low: curve.low, high: curve.high} : {})};
    }),
  }));
  return section('training', 'Training', ...(names.length ? [choice, quiet('Means over the ranks; the band goes from the least to the most of them.'), ...figures] : []),
    ...eachRun(runs, 'metrics', () => []));
}

function communication(runs) {
  const some = runs.filter((run) => run.steps.step.length);
  if (!some.length) return section('communication', 'Communication, step by step', ...eachRun(runs, 'steps', () => []));
  const series = some.flatMap((run) => {
    const slot = runs.indexOf(run);
    const name = (text) => runs.length > 1 ? `${run.name}, ${text}` : text;
    const alone = runs.length === 1;
    return [
      {name: name('exposed'), x: run.steps.step, y: run.steps.exposed, slot: alone ? 1 : slot, dash: 0},
      {name: name('hidden'), x: run.steps.step, y: run.steps.hidden, slot: alone ? 0 : slot, dash: 1},
      {name: name('the rest of the step'), x: run.steps.step, y: run.steps.other, slot: alone ? 5 : slot, dash: 2, off: true},
    ];
  });
  return section('communication', 'Communication, step by step',
    curves({key: 'steps', title: 'Exposed and hidden communication of a step, mean over ranks', series, yText: seconds, zero: true,
      note: 'Exposed: a call of the rank waited for it. Hidden: it was under way while the rank computed.'}),
    ...eachRun(runs, 'steps', () => []),
    ...some.map((run) => numbers(`ranks ${run.name}`, titled(runs, run, 'Numbers by rank'), () => table(['rank', 'host', 'steps', 'time', 'exposed', 'sent', 'what became of it'],
      run.ranks.map((one) => [String(one.rank), one.host, number(one.steps), seconds(one.seconds), seconds(one.exposed), bytes(one.bytes), `${one.fate}. ${one.text}`]),
      titled(runs, run, 'by rank')))));
}

function traffic(runs) {
  return section('links', 'Bytes by link', ...eachRun(runs, 'links', (run) => matrix({
    title: titled(runs, run, 'bytes sent, from the rank of the row to that of the column'), corner: 'from \\ to', ranks: run.links.ranks, columns: run.links.columns,
    values: run.links.bytes, text: bytes,
    note: run.virtual ? null : 'Payload. In shared memory an all-reduce counts as in a ring, as much to each rank of the node; a pull counts for who copies.',
  })));
}

function waiting(runs) {
  return section('waits', 'Who waited for whom', ...eachRun(runs, 'waits', (run) => [
    matrix({title: titled(runs, run, 'time that the rank of the row waited for that of the column'), corner: 'who \\ for whom', ranks: run.waits.ranks,
      values: run.waits.seconds, text: seconds, extra: run.waits.data && {name: 'for data', values: run.waits.data},
      note: 'In the steps whose spans were recorded. A wait is for the rank that came last; "for data": all had come, and data were on their way.'}),
    gantt({key: run.name, title: titled(runs, run, 'what each rank did'), windows: run.windows}),
  ]));
}

function staleness(runs) {
  const some = runs.filter((run) => run.ages.step.length);
  const one = (title, key, pick, text) => curves({key, title, yText: text, zero: true,
    series: some.map((run) => ({name: runs.length > 1 ? run.name : title, slot: runs.indexOf(run), x: run.ages.step, ...pick(run.ages)}))});
  return section('ages', 'Ages', ...(some.length ? [
    one('Age of what was averaged in', 'ages', (ages) => ({y: ages.mean, low: ages.low, high: ages.high}), seconds),
    one('Steps that its sender was behind', 'behind', (ages) => ({y: ages.behind}), number),
  ] : []), ...eachRun(runs, 'ages', () => []));
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
    const told = bad.length ? null : quiet(titled(runs, run, 'No fault, no recovery, no restart.'));
    const rows = run.events.map((event) => [seconds(event.time), event.who,
      element('span', {class: event.what === 'failure' ? 'bad' : null}, event.what), event.text]);
    return [told, rows.length ? table(['after', 'who', 'what', 'told'], rows, titled(runs, run, 'what happened'), {class: 'words'}) : null].filter(Boolean);
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
      table(['algorithm', 'communication a step', 'measured', 'error', 'sent to other nodes', 'step', 'epoch'], rows, 'Predicted from what links cost here, and measured.')];
  })) : null;
}

const SECTIONS = {overview, plan: planned, training, communication, links: traffic, waits: waiting, ages: staleness, skips: skipping, faults};

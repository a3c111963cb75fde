// Draws all sections. During a live run it polls the server and redraws the sections that have changed.
let shown = JSON.parse(document.getElementById('data').textContent);
const drawn = new Map();  // data that each section was drawn from

function redraw(name) {
  const focus = document.activeElement?.getAttribute?.('data-key');
  const plans = shown.runs.every((run) => run.what === 'plan');
  const made = plans && !['overview', 'plan'].includes(name) ? null : SECTIONS[name](shown.runs);
  const old = document.getElementById(`holder-${name}`);
  old.replaceChildren(...(made ? [made] : []));
  old.hidden = !made;
  if (focus && old.querySelector(`[data-key="${CSS.escape(focus)}"]`)) old.querySelector(`[data-key="${CSS.escape(focus)}"]`).focus();
}

const PARTS = {
  overview: ['summary', 'facts', 'notes'], plan: ['result'], training: ['metrics'], communication: ['steps', 'ranks'], links: ['links', 'ranks'],
  waits: ['windows', 'waits', 'ranks'], ages: ['ages'], skips: ['skips'], faults: ['events'],
};

function render() {
  document.getElementById('title').textContent = shown.title;
  for (const name of Object.keys(SECTIONS)) {
    const of = JSON.stringify(shown.runs.map((run) => [run.missing, ...PARTS[name].map((part) => run[part])]));
    if (drawn.get(name) === of) continue;
    drawn.set(name, of);
    redraw(name);
  }
  const links = [...document.querySelectorAll('main section')].map((one) =>
    element('li', {}, element('a', {href: `#${one.id}`}, one.querySelector('h2').textContent)));
  const list = document.getElementById('toc');
  if (list.childElementCount !== links.length) list.replaceChildren(...links);
}

function follow() {
  const state = document.getElementById('state'), pause = document.getElementById('pause');
  let paused = false;
  document.getElementById('live').hidden = false;
  pause.addEventListener('click', () => {
    paused = !paused;
    pause.setAttribute('aria-pressed', String(paused));
    pause.textContent = paused ? 'Go on' : 'Pause';
  });
  const ask = async () => {
    let wait = 2000;
    if (!paused) {
      try {
        const answer = await fetch('data.json', {cache: 'no-store'});
        if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
        const news = await answer.json();
        if (news.error) throw new Error(news.error);
        shown = news;
        render();
        state.setAttribute('aria-live', 'off');
        state.textContent = `Live; last look at ${new Date().toLocaleTimeString()}.`;
      } catch (error) {
        state.setAttribute('aria-live', 'polite');
        state.textContent = `No news: ${error.message}. Trying again.`;
        wait = 5000;
      }
    }
    setTimeout(ask, wait);
  };
  setTimeout(ask, 1000);
}

document.getElementById('main').append(...Object.keys(SECTIONS).map((name) => element('div', {id: `holder-${name}`})));
render();
if (shown.live) follow();

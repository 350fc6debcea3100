// page.mjs - loads a model and translates while the user types; the translator runs in worker.mjs.
const $ = id => document.getElementById(id);
const from = $('from'), to = $('to'), input = $('in'), out = $('out'), file = $('file'), progress = $('progress');
const SHIPPED = 'model.bin', DELAY = 250, PATIENCE = 1500; // milliseconds: before translating, before forcing a stop
let worker = null, number = 0, waiting = new Map(), ready = false, timer = 0, turn = 0, plain = '', languages = '';
let opened = null; // last argument of load(), unless it failed or was stopped

// ---- Worker ----

function start() {
  worker = new Worker(new URL('worker.mjs', import.meta.url), { type: 'module' });
  worker.onmessage = ({ data }) => {
    if (data.progress !== undefined) {
      progress.max = data.size || 1;
      if (data.size) progress.value = data.progress;
      return;
    }
    const answer = waiting.get(data.id);
    waiting.delete(data.id);
    if (data.error === undefined) answer?.resolve(data.result);
    else answer?.reject(Object.assign(new Error(data.error), { cancelled: data.cancelled }));
  };
  worker.onerror = event => {
    ready = false; // a new worker has no model
    stop(event.message || 'cannot start the worker');
  };
}

// End the worker and reject its pending requests.
function stop(reason, cancelled = false) {
  worker?.terminate();
  worker = null;
  for (const { reject } of waiting.values()) reject(Object.assign(new Error(reason), { cancelled }));
  waiting.clear();
}

function ask(task, values) {
  if (!worker) start();
  return new Promise((resolve, reject) => {
    waiting.set(++number, { resolve, reject });
    worker.postMessage({ id: number, task, ...values });
  });
}

// ---- Page ----

function say(text, bad) {
  $('state').textContent = text;
  $('state').className = bad ? 'bad' : '';
}

function name(code) {
  try {
    return new Intl.DisplayNames([navigator.language, 'en'], { type: 'language' }).of(code.replace('_', '-')) || code;
  } catch {
    return code;
  }
}

// Return the stored languages. Browsers that forbid storage throw.
function stored() {
  try {
    return localStorage.getItem('moe-web');
  } catch {
    return '';
  }
}

function showLanguages(codes) {
  $('languages').hidden = codes.length < 2; // fewer: the model has one direction
  for (const list of [from, to]) list.replaceChildren(...codes.map(code => new Option(name(code), code)));
  from.value = codes.includes('en') ? 'en' : codes[0] ?? '';
  to.value = codes.find(code => code !== from.value) ?? '';
  const last = (languages || stored() || '').split(' ');
  [from, to].forEach((list, i) => { if (codes.includes(last[i])) list.value = last[i]; });
}

// Load a model from {model: file} or {url}, in a new worker, which frees the previous model's memory.
async function load(where) {
  stop('', true);
  ready = false;
  opened = where;
  $('languages').hidden = true;
  $('model').textContent = '';
  progress.hidden = $('cancel').hidden = false;
  progress.removeAttribute('value');
  say(`Loading ${where.name} …`);
  try {
    const { languages: codes, name: title, version } = await ask('open', where);
    ready = true;
    showLanguages(codes);
    $('model').textContent = `Model: ${title || where.name} · moe ${version} · ` +
      'nothing you type or open leaves this page.';
    progress.hidden = $('cancel').hidden = true;
    say('');
    translate();
  } catch (error) {
    if (opened === where) unload(`Cannot open the model: ${error.message}`, true); // else another model is being opened
  }
}

function unload(text, bad) {
  ready = false;
  opened = null;
  stop('', true);
  progress.hidden = $('cancel').hidden = true;
  say(text, bad);
}

async function translate() {
  clearTimeout(timer);
  if (!ready) return;
  const mine = ++turn, began = performance.now(), text = input.value;
  if (!text.trim()) { show(''); say(''); return; }
  $('cancel').hidden = false;
  say('…');
  try {
    const options = !$('languages').hidden ? { from: from.value, to: to.value } : {};
    const translation = await ask('translate', { text, options });
    if (mine !== turn || text !== input.value) return;
    show(translation);
    say(`${Math.round(performance.now() - began)} ms`);
  } catch (error) {
    if (mine !== turn || !opened) return;
    if (!error.cancelled) say(error.message, true);
    else if (text === input.value && ready) say('Stopped.');
  } finally {
    if (!waiting.size) $('cancel').hidden = true;
  }
}

function show(text) {
  plain = out.textContent = text;
  $('copy').disabled = !text;
}

// Stop the translation. If a long line keeps the worker busy, end the worker and reload the model.
async function cancel() {
  if (!waiting.size) return;
  if (!ready) return unload('Stopped. Choose a model file.');
  const patience = setTimeout(() => { stop('', true); load(opened); input.focus(); }, PATIENCE);
  await ask('cancel').catch(() => {});
  clearTimeout(patience);
}

function swap() {
  [from.value, to.value] = [to.value, from.value];
  if (plain) input.value = plain;
  remember();
}

function remember() {
  languages = `${from.value} ${to.value}`;
  try {
    localStorage.setItem('moe-web', languages);
  } catch {} // this visit only
  translate();
}

async function copy() {
  try {
    await navigator.clipboard.writeText(plain);
    say('Copied.');
  } catch {
    say('Cannot access the clipboard: select the translation and press Ctrl+C.', true);
  }
}

const grow = () => { input.style.height = 'auto'; input.style.height = input.scrollHeight + 'px'; };

input.oninput = () => {
  clearTimeout(timer);
  timer = setTimeout(translate, DELAY);
  grow();
};
from.onchange = to.onchange = remember;
file.onclick = () => { file.value = ''; }; // the same file may have changed
file.onchange = () => file.files[0] && load({ model: file.files[0], name: file.files[0].name });
$('shipped').onclick = () => load({ url: new URL(SHIPPED, location.href).href, name: SHIPPED });
$('swap').onclick = swap;
$('copy').onclick = copy;
$('cancel').onclick = cancel;
for (const form of document.forms) form.onsubmit = () => false;
document.addEventListener('keydown', event => {
  if (event.altKey && event.key.toLowerCase() === 's') { event.preventDefault(); if (!$('languages').hidden) swap(); }
  if (event.altKey && event.key.toLowerCase() === 'c') { event.preventDefault(); copy(); }
  if (event.key === 'Escape') cancel();
});
const hasFiles = event => event.dataTransfer.types.includes('Files');
document.addEventListener('dragover', event => {
  if (!hasFiles(event)) return; // text for the box
  event.preventDefault();
  document.body.classList.add('over');
});
document.addEventListener('dragleave', () => document.body.classList.remove('over'));
document.addEventListener('drop', event => {
  if (!hasFiles(event)) return;
  event.preventDefault();
  document.body.classList.remove('over');
  const model = event.dataTransfer.files[0];
  if (model) load({ model, name: model.name });
});

// Offer the model in the page's folder, if it contains one.
fetch(SHIPPED, { method: 'HEAD' }).then(reply => { $('shipped').hidden = !reply.ok; }).catch(() => {});
say('Choose a model file.');

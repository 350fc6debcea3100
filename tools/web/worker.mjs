// worker.mjs - runs the translator of page.mjs, so that the page stays responsive.
import { Translator } from './moe.mjs';

let translator = null, running = null;

const tasks = {
  async open({ model, url, name }) {
    translator?.close();
    translator = null;
    const reply = url && await fetch(url);
    if (reply && !reply.ok) throw new Error(`cannot load ${url}: status ${reply.status}`);
    const size = reply ? Number(reply.headers.get('Content-Length')) || 0 : model.size;
    const onProgress = got => postMessage({ progress: got, size });
    translator = await Translator.open(reply || model, { name, onProgress });
    return { languages: translator.languages, name: translator.name, version: translator.version };
  },
  async translate({ text, options }) {
    running?.abort();
    running = new AbortController();
    if (!translator) throw new Error('no model is open');
    return translator.translate(text, { ...options, signal: running.signal });
  },
  async cancel() { running?.abort(); },
};

addEventListener('message', async ({ data: { id, task, ...values } }) => {
  try {
    postMessage({ id, result: await tasks[task](values) });
  } catch (error) {
    postMessage({ id, error: error.message, cancelled: error.name === 'AbortError' });
  }
});

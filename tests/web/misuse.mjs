// Use moe-web's module wrongly: node tests/web/misuse.mjs MODULE MODEL. Writes an object of JSON: the text of each
// result, or "NAME: MESSAGE" of the error, or "nothing after 20 s".
import { readFile } from 'node:fs/promises';
import { createContext, runInContext } from 'node:vm';
import { pathToFileURL } from 'node:url';

const { Translator } = await import(pathToFileURL(process.argv[2]).href);
const bytes = new Uint8Array(await readFile(process.argv[3])), text = 'Where is my book?', results = {};
const stream = (...parts) => new ReadableStream({
  start(control) { parts.forEach(part => control.enqueue(part)); control.close(); },
});
const huge = size => ({ size, stream: () => stream(bytes) }); // like a File
const after = (ms, body) => { setTimeout(body, ms); };

async function tell(name, body) {
  const silence = new Promise(resolve => setTimeout(() => resolve('nothing after 20 s'), 20000).unref());
  try {
    const result = await Promise.race([body(), silence]);
    results[name] = typeof result === 'string' ? result : 'opened';
    result?.close?.();
  } catch (error) {
    results[name] = `${error?.name}: ${error?.message}`;
  }
}

for (const size of [2 ** 31, 2 ** 32 + 100, 17e9])
  await tell(`file of ${size} bytes`, () => Translator.open(huge(size)));
for (const size of [-1, NaN, '100', {}]) await tell(`size ${size}`, () => Translator.open(stream(bytes), { size }));
await tell('no size', () => Translator.open(stream(bytes), { size: null }));
await tell('missing file', () => Translator.open(new Response('Not Found', { status: 404 })));
await tell('stream of strings', () => Translator.open(stream('MOEMODEL')));
await tell('stream of words', () => Translator.open(stream(new Uint16Array(100))));
await tell('stopped silent stream', () => {
  const stop = new AbortController();
  after(50, () => stop.abort());
  return Translator.open(new ReadableStream({}), { signal: stop.signal });
});
await tell('stopped before', () => Translator.open(bytes, { signal: AbortSignal.abort() }));
await tell('buffer of another realm', () => Translator.open(runInContext('new ArrayBuffer(100)', createContext())));
await tell('option of open with ;', () => Translator.open(bytes, { 'beam=2;batch': 3 }));
await tell('option of prototypes', () => Translator.open(bytes, { constructor: 1 }));

const translator = await Translator.open(bytes, { to: 'fr', from: null });
for (const value of [undefined, null, 5, [text], {}])
  await tell(`text ${typeof value} ${value}`, () => translator.translate(value));
for (const to of [['de'], {}, 'de\0xx'])
  await tell(`to ${JSON.stringify(to)}`, () => translator.translate(text, { to }));
const wrong = ['de', ['de'], { signal: 5 }];
const empty = [null, { to: undefined }, { to: null, beam: null }, { signal: null }];
for (const options of [...wrong, ...empty])
  await tell(`options ${JSON.stringify(options)}`, () => translator.translate(text, options));
let thrown = false;
try {
  translator.translate(text, { to: Symbol('de') }).catch(() => {});
} catch {
  thrown = true;
}
results['throws instead of rejecting'] = String(thrown);
await tell('several at once', async () => (await Promise.all(['de', 'fr', 'es'].map(
  to => translator.translate(text, { to })))).join(' | '));
await tell('closed while translating', () => {
  after(20, () => translator.close());
  return translator.translate(`${text}\n`.repeat(2000));
});
await tell('closed', () => translator.translate(''));
translator.close(), translator.cancel();
console.log(JSON.stringify(results));
process.exit(0);

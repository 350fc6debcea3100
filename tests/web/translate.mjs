// Translate with moe-web's module: node tests/web/translate.mjs MODULE < TASKS. A task is a line of JSON: { model,
// bytes (length to truncate the file to), damage (offset of a byte to invert), options, texts: [[text, options]] }.
// Writes a line per task: a list of translations, or of { error, name, trap }.
import { readFile } from 'node:fs/promises';
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

const { Translator } = await import(pathToFileURL(process.argv[2]).href);
const failure = error => ({ error: error.message, name: error.name, trap: error instanceof WebAssembly.RuntimeError });

for await (const line of createInterface({ input: process.stdin })) {
  const { model, bytes, damage, options, texts } = JSON.parse(line), results = [];
  let translator = null;
  try {
    const file = new Uint8Array(await readFile(model)).subarray(0, bytes);
    if (damage !== undefined) file[damage] ^= 255;
    translator = await Translator.open(new Blob([file]), options);
    for (const [text, more] of texts) {
      const stop = new AbortController(), { cancelled, ...rest } = more || {};
      if (cancelled) setTimeout(() => stop.abort());
      results.push(await translator.translate(text, { ...rest, signal: stop.signal }).catch(failure));
    }
  } catch (error) {
    results.push(failure(error));
  }
  translator?.close();
  console.log(JSON.stringify(results));
}

// moe.mjs - translates text with a moe model, in browsers and in Node.js 18 or later:
//
//     import { Translator } from './moe.mjs';
//     const translator = await Translator.open(bytes);
//     console.log(await translator.translate('Where is my book?', { to: 'fr' }));
//     translator.close();
//
// Translations run in the thread that calls translate(), so pages should use a worker, as worker.mjs does.

const ENOSYS = 52, PAUSE = 40; // milliseconds between returns to the event loop
const WHOLE = ['context', 'form']; // with these options, lines depend on each other
const LARGEST = 2 ** 31 - 2 ** 25; // bytes of a model: moe.wasm is limited to 2 GB
const encoder = new TextEncoder(), decoder = new TextDecoder();
let compiled = null;

// ---- The WebAssembly module ----

async function bytesOfModule(url) {
  if (url.protocol === 'file:' && typeof process === 'object') {
    const { readFile } = await import('node:fs/promises');
    return readFile(url);
  }
  const reply = await fetch(url);
  if (!reply.ok) throw new Error(`cannot load ${url.href}: status ${reply.status}`);
  return reply.arrayBuffer();
}

function compile() {
  if (!compiled) {
    const loaded = bytesOfModule(new URL('moe.wasm', import.meta.url)).then(bytes => WebAssembly.compile(bytes));
    compiled = loaded.catch(error => {
      compiled = null;
      throw error instanceof WebAssembly.CompileError
        ? new Error(`this browser cannot run moe.wasm, which needs SIMD and exceptions: ${error.message}`) : error;
    });
  }
  return compiled;
}

// The module has no files, environment or arguments. The only WASI function it needs is the clock.
function imports(module, memory) {
  const known = {
    clock_time_get(id, precision, at) {
      const now = id === 0 ? Date.now() : performance.now();
      new DataView(memory().buffer).setBigUint64(at, BigInt(Math.round(now * 1e6)), true);
      return 0;
    },
    environ_sizes_get(count, size) {
      const view = new DataView(memory().buffer);
      view.setUint32(count, 0, true), view.setUint32(size, 0, true);
      return 0;
    },
    environ_get: () => 0,
    emscripten_notify_memory_growth: () => {},
    proc_exit(code) { throw new Error(`status ${code}`); },
  };
  const found = {};
  for (const { module: from, name, kind } of WebAssembly.Module.imports(module))
    if (kind === 'function')
      (found[from] ||= {})[name] = known[name] || (() => (from === 'env' ? -ENOSYS : ENOSYS));
  return found;
}

// ---- Options ----

const NAMES = new Map([['from', 'source'], ['to', 'target']]);
const dashed = name => name.replace(/[A-Z]/g, letter => '-' + letter.toLowerCase()).replaceAll('_', '-');

// Return the options without those that are undefined or null, which mean the default.
function given(options) {
  const all = Object.entries(options).filter(([, value]) => value !== undefined && value !== null);
  for (const [name, value] of all) {
    if (!/^[A-Za-z][\w-]*$/.test(name)) throw new Error(`unknown option '${name}'`);
    if (!['string', 'number', 'bigint', 'boolean'].includes(typeof value))
      throw new TypeError(`option ${name}: expected a string or number, not a value of type ${typeof value}`);
    if (/[;\0]/.test(value)) throw new Error(`option ${name}: ';' and NUL are not supported in values`);
  }
  return Object.fromEntries(all);
}

function optionText(options) {
  return Object.entries(options).map(([name, value]) =>
    `${NAMES.get(name) ?? dashed(name)}=${typeof value === 'boolean' ? Number(value) : value}`).sort().join(';');
}

function checkSignal(signal) {
  if (signal !== undefined && signal !== null && typeof signal.addEventListener !== 'function')
    throw new TypeError('signal is not an AbortSignal');
}

// ---- Model files ----

// The name of a type, also for objects of other windows and of Node.js's vm.
const typeOf = value => Object.prototype.toString.call(value).slice(8, -1);

async function* chunksOf(model, signal) {
  if (typeOf(model) === 'ArrayBuffer' || ArrayBuffer.isView(model)) {
    yield ArrayBuffer.isView(model) ? new Uint8Array(model.buffer, model.byteOffset, model.byteLength)
      : new Uint8Array(model);
    return;
  }
  if (model?.ok === false) throw new Error(`cannot load ${model.url || 'the model'}: status ${model.status}`);
  const stream = typeof model?.stream === 'function' ? model.stream() : model?.body || model;
  if (typeof stream?.getReader !== 'function')
    throw new TypeError('invalid model: expected an ArrayBuffer, a view, a Blob, a Response or a ReadableStream');
  const reader = stream.getReader(), stop = () => reader.cancel(signal.reason).catch(() => {});
  signal?.addEventListener('abort', stop); // the stream may never continue
  try {
    for (let part; !(part = await reader.read()).done;) {
      if (typeOf(part.value) !== 'Uint8Array') throw new TypeError('the stream of a model must consist of Uint8Array');
      yield part.value;
    }
  } finally {
    signal?.removeEventListener('abort', stop);
    reader.cancel().catch(() => {});
  }
}

const aborted = signal => signal?.reason ?? new DOMException('the translation was cancelled', 'AbortError');
const pause = () => new Promise(resolve => setTimeout(resolve, 0)); // handle pending events
const SECRET = Symbol('open');

// ---- Translator ----

export class Translator {
  #wasm;
  #state = 0;
  #defaults = {};
  #last = Promise.resolve();
  #cancelled = 0;
  #failure = 'the translator is closed';

  constructor(secret, module) {
    if (secret !== SECRET) throw new TypeError('use await Translator.open(model)');
    const instance = new WebAssembly.Instance(module, imports(module, () => this.#wasm.memory));
    this.#wasm = instance.exports;
    this.#wasm._initialize?.();
    this.#state = this.#wasm.web_new();
    if (!this.#state) throw new Error('out of memory');
    this.version = this.#string(this.#wasm.web_version());
    this.languages = [];
    this.name = '';
  }

  static async open(model, settings) {
    const { onProgress, size, signal, name, ...options } = settings ?? {};
    checkSignal(signal);
    const defaults = given(options);
    const translator = new Translator(SECRET, await compile());
    try {
      await translator.#load(model, onProgress, size, signal);
      translator.#open(String(name ?? 'model'), defaults);
      return translator;
    } catch (error) {
      translator.close();
      throw error;
    }
  }

  async translate(text, settings) {
    if (typeof text !== 'string') throw new TypeError(`the text is not a string: it is of type ${typeOf(text)}`);
    if (Array.isArray(settings) || typeof (settings ?? {}) !== 'object')
      throw new TypeError('options: expected an object');
    const { signal, ...rest } = settings ?? {}, options = given(rest);
    checkSignal(signal);
    const cancelled = this.#cancelled, stop = () => signal?.aborted || this.#cancelled !== cancelled;
    const run = this.#last.then(() => this.#translate(text, options, stop, signal));
    this.#last = run.catch(() => {});
    return run;
  }

  cancel() { this.#cancelled++; }

  close() {
    const state = this.#state;
    this.#state = 0;
    if (state) this.#call(() => this.#wasm.web_free(state));
    this.#wasm = null; // releases its memory
  }

  // Call the module. A trap leaves its memory in an undefined state, so the translator is not used again.
  #call(body) {
    try {
      return body();
    } catch (error) {
      this.#state = 0;
      this.#failure = `moe.wasm failed: open the model again (${error.message || error})`;
      throw new Error(this.#failure);
    }
  }

  #check(status) {
    if (status) throw new Error(this.#string(this.#wasm.web_message(this.#state)) || `status ${status}`);
  }

  #string(at, length) {
    const bytes = new Uint8Array(this.#wasm.memory.buffer);
    return at ? decoder.decode(bytes.subarray(at, length === undefined ? bytes.indexOf(0, at) : at + length)) : '';
  }

  // Call body with the addresses of NUL-terminated copies of the strings, and 0 for null.
  #with(strings, body) {
    const at = [];
    try {
      for (const text of strings) {
        const bytes = text === null ? null : encoder.encode(text);
        at.push(bytes ? this.#wasm.web_allocate(bytes.length + 1) : 0);
        if (!bytes) continue;
        if (!at.at(-1)) throw new Error('out of memory');
        const to = new Uint8Array(this.#wasm.memory.buffer, at.at(-1), bytes.length + 1);
        to.set(bytes);
        to[bytes.length] = 0;
      }
      return this.#call(() => body(...at));
    } finally {
      if (this.#state) for (const address of at) this.#wasm.web_release(address);
    }
  }

  async #load(model, onProgress, size, signal) {
    const total = model?.byteLength ?? (typeof model?.stream === 'function' ? model.size : size ?? undefined);
    let at = 0, got = 0, parts = [];
    const reserve = bytes => {
      if (!Number.isSafeInteger(bytes) || bytes < 0) throw new TypeError('size is not a number of bytes');
      if (bytes > LARGEST)
        throw new Error(`the model has ${Math.ceil(bytes / 1e6)} MB; in WebAssembly models are limited to 2 GB`);
      at = this.#wasm.web_reserve(this.#state, bytes) >>> 0;
      if (!at) throw new Error(`out of memory: the model has ${Math.ceil(bytes / 1e6)} MB`);
    };
    if (signal?.aborted) throw aborted(signal);
    if (total !== undefined) reserve(total);
    for await (const part of chunksOf(model, signal)) {
      if (signal?.aborted) throw aborted(signal);
      if (at && got + part.length > total) throw new Error(`the model has more than the expected ${total} bytes`);
      if (at) new Uint8Array(this.#wasm.memory.buffer).set(part, at + got);
      else parts.push(part);
      got += part.length;
      if (got > LARGEST) reserve(got);
      onProgress?.(got, total);
    }
    if (signal?.aborted) throw aborted(signal);
    if (total !== undefined && got < total) throw new Error(`the model is truncated: ${got} of ${total} bytes`);
    if (total !== undefined) return;
    reserve(got);
    for (const part of parts) {
      new Uint8Array(this.#wasm.memory.buffer).set(part, at);
      at += part.length;
    }
  }

  #open(name, options) {
    this.#check(this.#with([name, optionText(options)], (...at) => this.#wasm.web_open(this.#state, ...at)));
    for (let i = 0, at; (at = this.#wasm.web_language(this.#state, i)); i++) this.languages.push(this.#string(at));
    this.name = this.#with(['general.name'], key => this.#string(this.#wasm.web_meta(this.#state, key)));
    this.#defaults = { batch: 8, ...options };
    this.ofModel = [];
    for (let i = 0, at; (at = this.#wasm.web_option(i)); i++)
      if (this.#wasm.web_option_of_model(i)) this.ofModel.push(this.#string(at));
  }

  async #translate(text, options, stop, signal) {
    const late = Object.keys(options).map(dashed).find(name => this.ofModel.includes(name));
    if (late) throw new Error(`option ${late} belongs to the model: pass it to Translator.open`);
    const all = { ...this.#defaults, ...options }, { from = null, to = null, ...others } = all;
    const whole = from === 'auto' || WHOLE.some(name => name in all);
    const lines = whole ? [text] : text.split('\n'), translated = [];
    let began = -Infinity;
    for (const line of lines) {
      if (performance.now() - began > PAUSE) await pause(), began = performance.now();
      if (stop()) throw aborted(signal);
      if (!this.#state) throw new Error(this.#failure);
      translated.push(this.#line(line, optionText(others), from, to));
    }
    return translated.join('\n');
  }

  #line(line, options, from, to) {
    const wasm = this.#wasm, length = encoder.encode(line).length;
    this.#check(this.#with([options, line, from, to], (settings, at, source, target) =>
      wasm.web_prepare(this.#state, settings) || wasm.web_translate(this.#state, at, length, source, target)));
    return this.#string(wasm.web_text(this.#state), wasm.web_length(this.#state));
  }
}

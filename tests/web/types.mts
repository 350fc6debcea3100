// A program that uses moe-web's types; web.py compiles it next to the module.
import { Translator, type Model, type OpenOptions, type TranslateOptions } from './moe.mjs';

export async function translate(model: Model, signal: AbortSignal): Promise<string> {
  const onProgress = (got: number, total?: number) => console.log(got, total);
  const settings: OpenOptions = { signal, to: 'fr', beam: 4, name: 'a.bin', onProgress };
  const translator = await Translator.open(model, settings);
  const options: TranslateOptions = { from: 'en', to: null, maxLenOffset: 3, protect: false, signal };
  const text: string = await translator.translate('Where is my book?', options);
  translator.cancel();
  translator.close();
  // @ts-expect-error
  await translator.translate(5);
  // @ts-expect-error
  await translator.translate('a', { beam: [4] });
  // @ts-expect-error
  await Translator.open('model.bin');
  // @ts-expect-error
  new Translator();
  return [text, translator.name, translator.version, ...translator.languages].join();
}

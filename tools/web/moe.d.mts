/** A model file: its bytes, a file, a response of fetch, or a stream. */
export type Model = ArrayBuffer | ArrayBufferView | Blob | Response | ReadableStream<Uint8Array>;

export type Progress = (bytes: number, total?: number) => void;

/** Options of moetext.h by name, such as beam or maxLen; undefined and null mean the default. Unknown options are
 * errors. */
export interface Options {
  /** Language of the text, or "auto" to detect it. Required by models with several source languages. */
  from?: string | null;
  /** Language of the translation. */
  to?: string | null;
  /** Number of hypotheses, 1 to 64. */
  beam?: number | null;
  /** Signals and functions are valid only where declared below. */
  [name: string]: string | number | bigint | boolean | null | undefined | AbortSignal | Progress;
}

export interface OpenOptions extends Options {
  /** Called while the model is read, with the bytes read so far and, if known, the total. */
  onProgress?: Progress;
  /** Size of a stream in bytes, if known. Without it, loading needs memory for two copies of the model. */
  size?: number;
  /** Name of the model in error messages. */
  name?: string;
  /** Stops reading the model; the promise is then rejected with the signal's reason. */
  signal?: AbortSignal;
}

export interface TranslateOptions extends Options {
  /** Stops the translation before the next line; its promise is then rejected with the signal's reason. */
  signal?: AbortSignal;
}

export class Translator {
  private constructor();
  /** Open a model. The options also apply to translations. */
  static open(model: Model, options?: OpenOptions): Promise<Translator>;
  readonly version: string;
  /** Codes of the model's languages. */
  readonly languages: string[];
  readonly name: string;
  /** Translate a text of any length. Calls run one after the other. */
  translate(text: string, options?: TranslateOptions): Promise<string>;
  /** Stop all translations before their next line: their promises are rejected with an AbortError. */
  cancel(): void;
  /** Free the model's memory. */
  close(): void;
}

"""Prompted models that give chosen answers.

    write(path, answers)     answers[last character of the prompt] is the answer
"""
import byte_bpe
import moefile
import numpy as np


def write(path, answers, **more):
    """Write a model whose answer depends only on the last token of the prompt. Prompts after lost placeholders end with
    "!". `more` is additional metadata, such as wordings."""
    stand_ins, texts = byte_bpe.BYTE_CHARS, sorted(set(answers.values()))
    tokens = {b: stand_ins[b] for b in range(256)}
    tokens.update({256 + i: "".join(stand_ins[b] for b in x.encode()) for i, x in enumerate(texts) if x})
    width = end = 256 + len(texts)
    follows = np.zeros((width + 1, width), np.float32)
    follows[end] = 1
    for key, text in answers.items():
        follows[256 + texts.index(text) if text else end, ord(key)] = 9
    tensors = {"embedding.weight": np.eye(width + 1, width, dtype=np.float32), "output.weight": follows,
               "decoder.0.norm.weight": np.ones(width, np.float32)}
    meta = {"general.architecture": "decoder", "general.name": "made up", "vocab.size": width + 1,
            "model.width": width, "token.bos": 0, "token.eos": end, "decode.rules": "hf", "decode.beam": 1,
            "decode.max_new": 64, "limit.source": 2048, "limit.target": 64, "decoder.layers": 1,
            "decoder.0.kind": "norm", "decoder.0.norm.kind": "rms", "source.tag": 0, "tokenizer.kind": byte_bpe.KIND,
            "tokenizer.model": byte_bpe.pack(tokens, [], [byte_bpe.Added(end, "<end>", True)], ["[0-9]+"]),
            "prompt.prefix": "", "prompt.suffix": "", "prompt.name": "made up",
            "prompt.plain.en": "{target_lang}: {source_text}", "prompt.delimiters.en": "{target_lang}: {source_text}!",
            "languages.codes": ["de", "en"], "languages.tags": np.arange(2), "languages.english": ["German", "English"],
            "languages.chinese": ["德语", "英语"], **more}
    moefile.write_model(path, meta, {key: moefile.Tensor.encode(x) for key, x in tensors.items()})
    return path

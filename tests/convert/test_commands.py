#!/usr/bin/env python3
"""Run the commands that the Markdown pages of tools/ show, as printed and in their order, in a new folder.

Usage: tests/python tests/convert/test_commands.py [NAME]
Small stand-ins have the names of checkpoints, models and texts that the pages name but the repository does not contain.
Commands that need another machine, the network or a corpus are listed with the reason; each must occur on its page.
Prints `ok NAME` or `FAIL NAME` per test. Requires NumPy, Jinja2 and gguf. BIN is the folder of the programs.
"""
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile

from converting import BIN, ROOT, convert_quietly
from suite import Suite

try:
    import make_decoder
    import make_gguf
    import make_marian
    import numpy as np
    import test_hf_tokens
    from test_marian import write_spm
except ImportError:
    np = None
test = Suite()
page_test = test.needs(np, "NumPy, Jinja2 or gguf")

NETWORK, CORPUS, MACHINE, TESTED = "the network", "a corpus", "another machine", "another suite runs it"
NOT_RUN = {  # beginnings of commands, and the reason
    "tools/convert/README.md": {
        "tools/convert/convert.py --from fairseq": TESTED, "tools/convert/convert.py model_best.pth": TESTED,
        "tools/convert/convert.py translate.ckpt": TESTED, "./moe-quantize gnmt.bin": TESTED,
        "tools/convert/moses-bpe.py": TESTED, "tools/convert/convert.py opus-mt-en-de.bin": TESTED,
        "./moe-translate -m fast.bin": TESTED, "tools/convert/convert.py --from hf madlad400": TESTED,
        "echo 'How was your day?' | ./moe-translate -m madlad": TESTED, "./moe-translate -m nllb-ct2": TESTED,
        "./moe-translate -m translate-en_es": TESTED, "./moe-quantize translate-en_de": TESTED},
    "tools/MACHINES.md": {"./moe-make-random": "54 billion weights", "./moe-bench": "54 billion weights",
                          "sudo tests/bench/limited.py": MACHINE, "tokens/s": "a formula",
                          "bytes per token": "a formula"},
    "tools/MODELS.md": {},
    "tools/programs/README.md": {"make MPI=1": MACHINE, "mpirun": MACHINE,
                                 "./moe-calibrate -m model.bin -o sure.bin --confidence": TESTED},
    "tools/python/README.md": {"python3 -m venv": NETWORK, ".venv/bin/pip": NETWORK, "make wheel": TESTED,
                               "make sdist": TESTED, "tools/install-deps": NETWORK},
}
TEMPLATE = "{{ '<｜User｜>' + messages[0].content + '<｜end▁of｜>' }}"
KEPT = "could not be translated"  # a model with random weights may fail to
TYPES = ('<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types"><Override '
         'PartName="/word/document.xml" ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.'
         'document.main+xml"/></Types>')
DOCX = ('<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body><w:p><w:r><w:t>'
        'Where is my book?</w:t></w:r></w:p></w:body></w:document>')
CONTAINER = ('<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles><rootfile '
             'full-path="content.opf"/></rootfiles></container>')
PACKAGE = ('<package xmlns="http://www.idpf.org/2007/opf"><manifest><item id="a" href="a.xhtml" '
           'media-type="application/xhtml+xml"/></manifest><spine><itemref idref="a"/></spine></package>')
XHTML = '<html xmlns="http://www.w3.org/1999/xhtml"><body><p>The book is small.</p></body></html>'
SENTENCES = "Good morning, my friend.\nWhere is my book?\nThe dog is small.\n" * 4
GERMAN = "Guten Morgen, mein Freund.\nWo ist mein Buch?\nDer Hund ist klein.\n" * 4


def commands(page):
    """Yield the commands of a page's code blocks, without comments; continued lines are joined."""
    with open(os.path.join(ROOT, page), encoding="utf-8") as file:
        text = re.sub(r"^```(?!console).*?^```", "", file.read(), flags=re.S | re.M)
    lines = "\n".join(x[4:] for x in text.split("\n") if x.startswith("    ") and x.strip())
    for line in re.sub(r"(\s+#\s.*)?\\\n\s*", " ", re.sub(r"(?<=\\)\s+#.*", "", lines)).split("\n"):
        command = re.sub(r"\s+#\s.*", "", line).strip()
        if command:
            yield command


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def archive(path, files):
    with zipfile.ZipFile(path, "w") as file:
        for name, text in files.items():
            file.writestr(name, text)


def pairs(source, target):
    return "".join(f"{x}\t{y}\n" for x, y in zip(source.split("\n")[:-1], target.split("\n")[:-1], strict=True))


def decoder(folder, family):
    """Write a decoder-only checkpoint with a tokeniser and a chat template; return (config, arrays)."""
    config, arrays = make_decoder.make(folder, family, vocab_size=448, max_position_embeddings=4096, rope_scaling=None)
    make_decoder.write_tokeniser(folder)
    write(folder + "/chat_template.jinja", TEMPLATE)
    return config, {name: x.astype(np.float32) for name, x in arrays.items()}


def checkpoints(at):
    """Write the checkpoints that the pages name."""
    nllb = test_hf_tokens.Checkpoint(at + "/nllb-200-distilled-600M", "nllb")
    mixture = test_hf_tokens.Checkpoint(at + "/nllb-moe-54b", "nllb", family="nllb-moe", spm=nllb.spm)
    shutil.copytree(mixture.folder, at + "/DIR")
    os.mkdir(at + "/firefox")
    make_marian.make(at + "/firefox", "student", "intgemm8")
    os.unlink(at + "/firefox/vocab.yml")
    write_spm(at + "/firefox/vocab.enpt.spm", make_marian.TOKENS)
    pair = test_hf_tokens.Checkpoint(at + "/opus-mt-en-de", "marian", spm=nllb.spm, other=nllb.other)
    pair.marian(test_hf_tokens.lines(), codes=())
    for name, family in ("Hy-MT2-30B-A3B", "hy_v3"), ("Hy-MT2-1.8B", "hunyuan_v1_dense"):
        os.mkdir(f"{at}/{name}")
        config, arrays = decoder(f"{at}/{name}", family)
    make_gguf.write(at + "/Hy-MT2-1.8B-Q8_0.gguf", config, arrays, tokens=True, tokenizer__chat_template=TEMPLATE)


def material(at):
    """Write the texts that the pages name, and links to the repository's contents; models are copied, since commands
    write models."""
    shutil.copytree(ROOT + "/models", at + "/models")
    for name in ("tools", "tests", ".venv"):
        if os.path.exists(os.path.join(ROOT, name)):
            os.symlink(os.path.join(ROOT, name), os.path.join(at, name))
    for name in os.listdir(BIN):
        if name.startswith("moe-") and os.access(os.path.join(BIN, name), os.X_OK):
            os.symlink(os.path.join(BIN, name), os.path.join(at, name))
    for name in "in.txt", "in.en", "mono.en", "text.en", "big.txt":
        write(f"{at}/{name}", SENTENCES)
    write(at + "/out.de", GERMAN)
    write(at + "/pairs.tsv", pairs(GERMAN, SENTENCES))
    write(at + "/sample.tsv", "".join("eng_Latn\tdeu_Latn\t" + x + "\n" for x in pairs(SENTENCES, GERMAN).splitlines()))
    write(at + "/begun.tsv", "Where is my book?\tMein\n")
    write(at + "/terms.tsv", "book\tBand\n")


def run_page(page, prepare=lambda at: None):
    """Run the commands of a page in a new folder; return their number."""
    begins, done, met = NOT_RUN[page], 0, set()
    with tempfile.TemporaryDirectory() as at:
        material(at)
        prepare(at)
        env = {**os.environ, "PATH": os.path.dirname(sys.executable) + ":" + os.environ["PATH"]}
        for command in commands(page):
            skipped = [x for x in begins if command.startswith(x)]
            met.update(skipped)
            if skipped:
                continue
            result = subprocess.run(["bash", "-o", "pipefail", "-c", command], cwd=at, env=env, capture_output=True,
                                    encoding="utf-8", timeout=300)
            assert result.returncode == (1 if KEPT in result.stderr else 0), \
                (page, command, result.returncode, result.stderr[-600:])
            done += 1
    assert met == set(begins), (page, set(begins) - met)
    return done


def models(at):
    """Convert the checkpoints, under the names that the pages give to models."""
    checkpoints(at)
    for kind, folder, name, *options in (("hf", "nllb-moe-54b", "nllb"), ("hf", "nllb-moe-54b", "topk"),
                                         ("hf", "nllb-moe-54b", "f32", "--type", "f32"),
                                         ("hf", "Hy-MT2-1.8B", "hy-mt2"), ("marian", "firefox", "en-pt")):
        complaint = convert_quietly("--from", kind, f"{at}/{folder}", "-o", f"{at}/{name}.bin", *options)
        assert complaint is None, complaint
    shutil.copy(ROOT + "/models/en-de-fr-es.bin", at + "/en-de.bin")
    write(at + "/experts.json", json.dumps({"eng_Latn-deu_Latn": list(range(0, 32, 2))}))


@page_test
def the_page_about_converters():
    def prepare(at):
        models(at)
        shutil.rmtree(at + "/DIR")
        os.rename(at + "/firefox", at + "/DIR")
    assert run_page("tools/convert/README.md", prepare) > 10


@page_test
def the_page_about_programs():
    def prepare(at):
        models(at)
        for name, head, size in ("images", (0x803, 5, 36, 36), 5 * 36 * 36), ("labels", (0x801, 5), 5):
            with open(f"{at}/{name}.idx", "wb") as file:
                file.write(struct.pack(f">{len(head)}I", *head) + bytes(size))
    assert run_page("tools/programs/README.md", prepare) > 15


@page_test
def the_page_about_models():
    assert run_page("tools/MODELS.md", models) > 5


@page_test
def the_page_about_machines():
    assert run_page("tools/MACHINES.md", models) > 3


@page_test
def the_page_about_documents():
    def prepare(at):
        write(at + "/page.html", "<p>Where is my <b>book</b>?</p>")
        write(at + "/a.po", 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\nmsgid "book"\nmsgstr ""\n')
        write(at + "/terms.csv", "book,Band\n")
        write(at + "/test.tsv", pairs(SENTENCES, GERMAN))
        write(at + "/table.tsv", "reference\tmoe\tother\n" + "a b c d\ta b c d\ta b c\n" * 3)
        archive(at + "/a.docx", {"[Content_Types].xml": TYPES, "word/document.xml": DOCX})
        archive(at + "/book.epub", {"META-INF/container.xml": CONTAINER, "content.opf": PACKAGE, "a.xhtml": XHTML})
    assert run_page("tools/python/README.md", prepare) > 2


if __name__ == "__main__":
    sys.exit(test.run(*sys.argv[1:2]))

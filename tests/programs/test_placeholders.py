#!/usr/bin/env python3
"""Translate 2,000 lines with numbers, symbols and placeholders of all forms in all contexts. Each placeholder occurs
once in the translation, with the same kind of neighbours. The test knows the inserted text and parses no placeholders.

    tests/run tests/programs/test_placeholders.py
"""
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile

from suite import Suite

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BIN = ROOT / os.environ.get("BIN", ".")
MODEL = ROOT / "models" / "en-de-fr-es.bin"
test = Suite()

# Placeholders of programs. The line that starts with %(object_name)s is from bash, Django, git, Sphinx and Qt.
FORMS = """%s %d %-5.2f %1$s %2$d %*d %lld %zu %Zd %i %u %x %.1f %r %(name)s %(count)d %(num).2f {0} {} {name!r:>10}
{user}
%<name>s %{name} %@ %1$@ {{x}} ${x} ${HOME} #{x} $name $HOME $(cmd) <%=x%> <<x>> [[x]] :attribute :user
%(object_name)s %(verbose_name)s %(total)d %'d %<PRIu64> %c %02d %08lx %.*s %ld %1 %2 %L1 {0!s} {1:d} %n %(prog)s %S
https://ex.org/{id}/edit https://ex.org/a?b=c&d=%20 mailto:me@ex.org me.you@ex.org /usr/lib/x.so C:\\Temp\\x.doc a_b.c
`ls` :heart: :+1: %d%% {n}px {first}{last} %s/%s %d:%02d {a}-{b} AT&amp;T &copy; &amp; $x^2$ \\(a+b\\)
B<-l> C<$x> E<lt> #page# #%d %%name%% make(1) Foo::Bar(3pm) writeObject() `cc' R&D C# [y/N] a-z a–z YYYY-MM-DD
[_1] [*,_1,item] [quant,_2,file,files]""".split()
NUMBERS = ["10⁶", "3½", "m²", "½", "①", "1e6", "2^10", "1/2", "10-20", "12:30", "1.2.3", "v2.0.1", "0x1F", "CO₂",
           "85 kg", "$5", "1,234.50", "2024-05-01", "-5", "±3", "10–20", "1e-6", "x²", "1920x1080",
           "Windows™", "Linux®"]
LINES = {
    "en": ["Please send {} to my brother.", "{} is not here.", "I have seen {}.", "Where is {}?",
           "The letter ({}) is long.",
           'Open "{}" now.', "We know “{}” and {}.", "My house: {}",
           "Is it {}, or {}?", "<b>{}</b> is my friend.",
           "We read {}; they do not.", "I AM VERY HAPPY WITH {} TODAY", "The dog saw {} and {} in the garden!"],
    "de": ["Bitte schicken Sie {} meinem Bruder.", "{} ist nicht hier.", "Ich habe {} gesehen.", "Wo ist {}?",
           "Der Brief ({}) ist lang.", "Wir kennen „{}“ und {}.", "Mein Haus: {}", "Ist es {}, oder {}?",
           "<b>{}</b> ist mein Freund.", "ICH BIN HEUTE SEHR GLÜCKLICH MIT {}"],
    "fr": ["Veuillez envoyer {} à mon frère.", "{} n'est pas ici.", "J'ai vu {}.", "Où est {} ?",
           "La lettre ({}) est longue.",
           "Nous connaissons « {} » et {}.", "Ma maison : {}", "<b>{}</b> est mon ami."],
    "es": ["Por favor, envíe {} a mi hermano.", "{} no está aquí.", "He visto {}.", "¿Dónde está {}?",
           "La carta ({}) es larga.", "Conocemos «{}» y {}.", "Mi casa: {}", "<b>{}</b> es mi amigo."],
}


def make_line(rng, language):
    line, things = rng.choice(LINES[language]), []
    parts = line.split("{}")
    for _ in parts[1:]:
        things.append(rng.choice(FORMS if rng.random() < 0.75 else NUMBERS))
    return "".join(a + b for a, b in zip(parts, things + [""])), things


def sides_of(text, thing):
    """Return, for each occurrence, whether a letter or digit precedes it and whether one follows."""
    wordlike = lambda at: 0 <= at < len(text) and bool(re.match(r"\w", text[at]))
    return sorted((wordlike(m.start() - 1), wordlike(m.end())) for m in re.finditer(re.escape(thing), text))


def losses(line, things, got):
    bad = [t for t in set(things) if sides_of(line, t) != sides_of(got, t)]
    if "\ufffd" in got or re.search(r"\bX ?\d*\b|\[\d", got):
        bad.append("stand-in")
    if "<b>" in line and not (got.count("<b>") == got.count("</b>") == 1 and got.index("<b>") < got.index("</b>")):
        bad.append("tags")
    return bad


@test
def all_lines_keep_their_placeholders():
    rng, shown = random.Random(43), []
    for target in LINES:
        made = [make_line(rng, rng.choice([l for l in LINES if l != target])) for _ in range(500)]
        done = subprocess.run([BIN / "moe-translate", "-m", MODEL, "-t", target, "--beam", "2", "--rerank", "0", "-q"],
                              input="".join(line + "\n" for line, _ in made), capture_output=True, text=True,
                              check=False)
        assert done.returncode == 0, done.stderr
        out = done.stdout.split("\n")[:-1]
        assert len(out) == len(made)
        shown += [(bad, line, got) for (line, things), got in zip(made, out) if (bad := losses(line, things, got))]
        copied = sum(line == got for (line, _), got in zip(made, out))
        print(f"# {target}: {copied} of {len(made)} lines are unchanged")
        assert copied < 0.05 * len(made), copied
    for bad, line, got in shown[:12]:
        print(f"#   {bad}: {line!r} -> {got!r}")
    assert not shown, len(shown)


def refused(messages):
    """Return the errors that msgfmt -c reports for translated C format strings."""
    quoted = lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t") + '"'
    entries = "".join(f"\n#, c-format\nmsgid {quoted(a)}\nmsgstr {quoted(b)}\n" for a, b in messages)
    with tempfile.NamedTemporaryFile("w", suffix=".po") as file:
        file.write('msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n' + entries)
        file.flush()
        done = subprocess.run(["msgfmt", "-c", "-o", "/dev/null", file.name], capture_output=True, text=True)
    return done.stderr.strip().split("\n") if done.returncode else []


@test.needs(shutil.which("msgfmt"), "msgfmt")
def msgids_of_programs_pass_msgfmt():
    lines = [line for line in (HERE / "msgids.txt").read_text().split("\n")[:-1] if not line.startswith("# ")]
    assert len(lines) > 180 and not refused((line, line) for line in lines)
    assert refused([(lines[0], "nothing")]) and refused([("in string %Zd here", "in %d hier")])
    for target in "de", "fr", "es":
        done = subprocess.run([BIN / "moe-translate", "-m", MODEL, "-t", target, "--beam", "2", "--rerank", "0", "-q"],
                              input="".join(line + "\n" for line in lines), capture_output=True, text=True)
        assert done.returncode in (0, 1), done.stderr  # 1 if a line lost its placeholders and stays as it is
        out = done.stdout.split("\n")[:-1]
        assert len(out) == len(lines)
        bad = refused(zip(lines, out))
        copied = sum(line == got for line, got in zip(lines, out))
        print(f"# {target}: {copied} of {len(lines)} are unchanged")
        assert not bad and copied < 0.15 * len(lines), (bad[:5], copied)


@test
def the_check_detects_losses():
    assert losses("Say %s now", ["%s"], "Sag %sjetzt") and losses("Say %s now", ["%s"], "Sag jetzt")
    assert losses("Say %s now", ["%s"], "Sag %s X 1") and not losses("Say %s now", ["%s"], "Sag jetzt %s")


if __name__ == "__main__":
    sys.exit(test.run())

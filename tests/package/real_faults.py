"""faults(source, translation) yields (kind, detail) of what a translation lost or added. Both are lists of items from
real_pairs.py. The module shares no code with the package.
"""

import re
import unicodedata
from collections import Counter

PLACEHOLDER = re.compile(
    r"\{%.*?%\}|\{\{.*?\}\}|\{#.*?#\}|\$\{[^{}]*\}|%\{\w+\}|%\(\w+\)[-#0 +]?\d*(?:\.\d+)?[sdiurfxXgeEc]|%<\w+>\w?"
    r"|%\d+\$[-+#0]?\d*(?:\.\d+)?(?:hh?|ll?|[qjzt])?[sdiufxXgeEcop@]"
    r"|(?<![\d\w])%[-+#0]?(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:hh?|ll?|[qjztL])?[sdiufxXgeEcop@](?![^\W\d_])"
    r"|%\w+%|(?<!\d)%L?\d+(?![\d%])|%n(?![^\W\d_])|\{[\w.:]*\}|\$\w+\$|#\w+#|<[\w-]+>|\$\d+(?!\d|[.,]\d)|&\w+;|\{\w+,\s*\w+\}"
)
ICU = re.compile(r"\{\s*\w+\s*,\s*(?:plural|select|selectordinal)\s*,")
OPTION = re.compile(r"(?<![\w\-–—/.])(?:--[A-Za-z][\w-]*|-[A-Za-z])(?![\w\-–—])")
URL = r"(?:https?|ftp|file)://(?=[\w/~%{\[$])[^\s<>\"'»“”)\]}]+|www\.[^\s<>\"'()]+\w|[\w.+-]+@[\w-]+(?:\.[\w-]+)+"
FOLDERS = "etc|usr|var|dev|proc|home|bin|sbin|tmp|opt|sys|lib|boot|run|srv"
PATH = rf"(?<![\w/.:<])(?:~|\.{{1,2}})?/(?:[\w.+*-]+/)+[\w.+*-]*|(?<![\w/.<])/(?:{FOLDERS})\b"
SUFFIXES = "conf|txt|html?|py|sh|gz|xz|bz2|deb|xml|json|ya?ml|ini|cfg|rb|js|png|docx?|log|so|exe|tar|md|css|pdf"
NAME = rf"\$[A-Z_][A-Z0-9_]+|\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b|\b[\w-]+\.(?:{SUFFIXES})\b"
ADDRESS = re.compile(f"{URL}|{PATH}|{NAME}")
WORD = re.compile(r"[^\W\d_]{2,}")
LATIN = re.compile(r"[A-Za-zÀ-ɏ]{2,}")
PARTICLES = set("de del der van von la le di da du of".split())
COUNTED = re.compile(
    r"\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fifteen|sixteen|twenty|thirty|forty|fifty|"
    r"sixty|hundred|thousand|million|first|second|third|fourth|fifth|dozen|half|noon|midnight|January|February|March|April|"
    r"May|June|July|August|September|October|November|December)",
    re.I,
)
PAIRS = {")": "(", "]": "[", "}": "{"}
LEFT = re.compile(r"</?x\d+/?>|\[P\d+\]|\ufffd|⁇|<unk>|[\ue000-\uf8ff]")
MADE = {"€": "euro", "°": "degree|°", "%": "percent", "§": "section|par", "$": "dollar", "£": "pound", "&": "and",
        "+": "plus", "=": "equal", "#": "number|hash", "~": "about|approx", "*": "times|star"}  # fmt: skip


def plain(items, mark=""):
    return "".join(item if isinstance(item, str) else mark for item in items)


def words(items):
    """Return the space-separated words of a text, excluding placeholders, options and addresses."""
    text = plain([item if isinstance(item, str) else " " for item in items])
    for expression in (PLACEHOLDER, ADDRESS, OPTION):
        text = expression.sub(" ", text)
    return [found[0] for word in text.split() if "_" not in word and (found := LATIN.search(word))]


def is_name(items):
    """Return whether a text may consist only of names, i.e. has no lower-case words."""
    return not any(word[0].islower() and word not in PARTICLES for word in words(items))


def is_same(source, translation):
    return ["".join(plain(at).lower().split()) for at in (source, translation)]


# ---- Marks -------------------------------------------------------------


def nested(items):
    """Return the (mark, enclosing mark) pairs of a text, the words of its pairs, and an error."""
    around, found, inside, wrong = [], Counter(), {}, ""
    for item in items:
        if isinstance(item, str):
            for name in around:
                inside[name] = inside.get(name, "") + item
            continue
        sign, name = item
        if sign == ")":
            key = name.split(" ")[0] if name.split(" ")[0] not in ("code", "x", "link") else name
            if around and (
                around[-1] == name or around[-1].split(" ")[0] == key and not name.startswith(("code ", "x ", "link "))
            ):
                around.pop()
            else:
                wrong = wrong or f"end of {name} without its begin"
        else:
            found[name, around[-1] if around else ""] += 1
            if sign == "(":
                around.append(name)
                inside.setdefault(name, "")
    return found, inside, wrong or (f"{around[-1]} does not end" if around else "")


def marks(source, translation):
    old, new = nested(source), nested(translation)
    names = [Counter(item for item in each if not isinstance(item, str)) for each in (source, translation)]
    if names[0] != names[1]:
        yield "tags", f"lost {list(names[0] - names[1])[:3]}, new {list(names[1] - names[0])[:3]}"
    elif new[2] and not old[2]:
        yield "order", new[2]
    elif old[0] != new[0] and not old[2]:
        yield "nesting", f"{list(old[0] - new[0])[:3]} became {list(new[0] - old[0])[:3]}"
    for name, text in old[1].items():
        # A pair around a single letter, such as a drop cap, may become empty.
        if len(re.findall(r"\w", text)) > 1 and name in new[1] and not re.search(r"\w", new[1][name]):
            yield "emptied", f"{name}: {text!r} became {new[1][name]!r}"
        elif not re.search(r"\w", text) and re.search(r"\w", new[1].get(name, "")):
            yield "filled", f"{name}: {text!r} became {new[1][name]!r}"


# ---- Texts -------------------------------------------------------------


def taken(expression, text, strip=""):
    """Return the matches of an expression, and the text without them."""
    found = Counter(match.rstrip(strip) if strip else match for match in expression.findall(text))
    return found, expression.sub(
        lambda match: " " if not strip else " " + match[0][len(match[0].rstrip(strip)) :], text
    )


def numbers(text):
    text = re.sub(r"(?<=\d)[.,'’\u00a0\u202f\u2009](?=\d{3}(?!\d))", "", text)
    return Counter(int(number) for number in re.findall(r"\d+", text))


def balanced(text):
    text = re.sub(r"[:;][-']?[()]", " ", text)
    waiting = []
    for sign in text:
        if sign in "([{":
            waiting.append(sign)
        elif sign in PAIRS and (not waiting or waiting.pop() != PAIRS[sign]):
            return False
    return not waiting


def difference(kind, old, new):
    if old != new:
        yield kind, f"lost {list((old - new).elements())[:4]}, new {list((new - old).elements())[:4]}"


def afternoon(old, new, text):
    """Replace hours in the target with those in the source if the source uses the 12-hour clock."""
    lost, more = old - new, new - old
    if re.search(r"\d\s*[ap]\.?\s?m\b", text, re.I):
        for number in list(lost):
            if number + 12 in more or number == 12 and 0 in more:
                new = new - Counter([number + 12 if number + 12 in more else 0]) + Counter([number])
    return new


def faults(source, translation):
    """Yield (kind, detail). Kinds that start with "?" are hints, not faults."""
    yield from marks(source, translation)
    old, new = (plain(at, ">").replace("\u2011", "-").replace("\u00ad", "") for at in (source, translation))
    if ICU.search(old):
        shape = [
            Counter(re.findall(r"\{\s*\w+\s*,\s*\w+|(?:=\d+|zero|one|two|few|many|other|\w+)\s*\{|#", at))
            for at in (old, new)
        ]
        yield from difference("placeholders", *shape)
        if balanced(old) and not balanced(new):
            yield "brackets", ""
        return
    (old_signs, old), (new_signs, new) = taken(PLACEHOLDER, old), taken(PLACEHOLDER, new)
    yield from difference("placeholders", old_signs, new_signs)
    (old_signs, old), (new_signs, new) = taken(ADDRESS, old, ".,;:!?'’"), taken(ADDRESS, new, ".,;:!?'’")
    yield from difference("addresses", old_signs, new_signs)
    (old_signs, old), (new_signs, new) = taken(OPTION, old), taken(OPTION, new)
    yield from difference("options", old_signs, new_signs)
    one, other = numbers(old), afternoon(numbers(old), numbers(new), old)
    ordinals = Counter(int(number) for number in re.findall(r"(\d+)(?:st|nd|rd|th)\b", old))  # may be written as words
    if one - other - ordinals:
        yield "numbers", f"lost {list((one - other).elements())[:4]}, new {list((other - one).elements())[:4]}"
    elif (other - one) and not COUNTED.search(old):
        yield "numbers added", f"{list((other - one).elements())[:4]}"
    if balanced(old) and not balanced(new):
        yield "brackets", ""
    elif any(new.count(sign) != old.count(sign) for sign in "()[]{}"):
        yield "?brackets lost or added", ""
    for sign in Counter(LEFT.findall(new)) - Counter(LEFT.findall(old)):
        yield "residue", sign
    for sign, more in (Counter(new) - (Counter(old) | Counter(unicodedata.normalize("NFKC", old)))).items():
        odd = unicodedata.category(sign) in ("Sm", "Sk", "So", "Co", "Cn") or sign in "<>[]{}|\\^~@#$&*_=+§"
        if odd and not LEFT.match(sign) and not re.search(MADE.get(sign, "$^"), old, re.I):
            yield "residue", f"{more} x {sign!r} added"
    for sign, more in (Counter(old) - Counter(new)).items():
        if (
            unicodedata.category(sign) in ("Sm", "Sk", "So")
            and sign not in "+=<>|~^`´"
            or sign in "[]{}*#_@\\"
            and more
        ):
            yield "?sign lost", f"{more} x {sign!r}"
    if old.count('"') % 2 == 0 and sum(map(new.count, '"„“”«»')) % 2:
        yield "?quotes", ""
    if (again := re.search(r"\b(\w+)(?:\W+\1\b){3,}", new)) and not re.search(r"\b(\w+)(?:\W+\1\b){3,}", old):
        yield "loop", again[0][:60]
    if len(WORD.findall(new)) < len(WORD.findall(old)) / 3 and len(WORD.findall(old)) > 5:
        yield "?short", f"{len(WORD.findall(old))} words became {len(WORD.findall(new))}"
    if len(new) > 4 * len(old) + 40:
        yield "loop", f"{len(old)} characters became {len(new)}"

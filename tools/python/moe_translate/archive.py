"""Documents that are zip archives of XML: docx, pptx, xlsx, odt, epub. Members without text are copied byte for byte;
the order, dates and compression methods of members do not change."""

import io
import re
import zipfile

from .conversions import prose
from .documents import charset
from .segments import Segment
from .xmltree import Tree

MOST = 1 << 30  # maximum bytes of an unpacked document
LARGEST = 1 << 28  # maximum bytes of an unpacked member
RATIO = 300
# Characters between members and around object numbers. XML contains no lone surrogates.
BETWEEN = "\ud800"
OBJECT = re.compile("\ud801(\\d+)\ud802")
ENCODING = re.compile(r"(<\?xml[^>]*?)\s+encoding=\S+?(?=\s|\?>)")
DECLARED = re.compile(rb"\A\s*<\?xml[^>]{0,100}?encoding=[\"']([\w.:-]+)")
# Alternative texts that programs write: names of files and of pictures
NAMED = re.compile(
    r".*\.(?:bmp|emf|eps|gif|ico|jpe?g|pdf|png|svg|tiff?|webp|wmf)|(?:picture|image|graphic|bild|grafik) ?\d+", re.I
)


class Archive:
    def __init__(self, data):
        try:
            self.file = zipfile.ZipFile(io.BytesIO(data))
        except Exception as error:  # noqa: BLE001 - damaged directories raise many kinds of exceptions
            raise ValueError(f"not a zip file, or damaged: {reason(error)}") from None
        self.infos = self.file.infolist()
        self.names = {info.filename for info in self.infos}
        sizes = [info.file_size for info in self.infos]
        if len(sizes) > 50000 or sum(sizes) > MOST or any(size > LARGEST for size in sizes):
            raise ValueError(f"too large: {sum(sizes)} bytes in {len(sizes)} files when unpacked")
        for info in self.infos:
            if info.file_size > 1 << 22 and info.file_size > RATIO * max(1, info.compress_size):
                raise ValueError(f"{info.filename}: suspected zip bomb, {info.file_size} bytes when unpacked")
            if info.flag_bits & 1:
                raise ValueError(f"{info.filename} is encrypted")
        if len(self.names) < len(self.infos):
            raise ValueError("duplicate file name in the archive")

    def read(self, name):
        if name not in self.names:
            raise ValueError(f"{name} is missing")
        try:
            return self.file.read(name)
        except Exception as error:  # noqa: BLE001 - as above
            raise ValueError(f"{name} is damaged: {reason(error)}") from None

    def text(self, name):
        """Return a member's XML, decoded as UTF-8, UTF-16 or as it declares."""
        data = self.read(name)
        declared = DECLARED.match(data)
        other = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else declared and charset(declared[1].decode())
        for encoding in filter(None, ("utf-8", other)):
            try:
                text = data.decode(encoding)
            except UnicodeError:
                continue
            return text if encoding == "utf-8" else ENCODING.sub(r"\1", text, count=1)
        raise ValueError(f"{name} is not valid UTF-8")

    def tree(self, name):
        """Return the tree of a member, which must not declare entities."""
        text = self.text(name)
        if "<!ENTITY" in text:
            raise ValueError(f"{name}: unsupported entity declaration")
        try:
            return Tree(text, numbered=False)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def written(self, changed):
        """Return the archive with the members of `changed` replaced."""
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as file:
            file.comment = self.file.comment
            for info in self.infos:
                data = changed.get(info.filename)
                data = self.read(info.filename) if data is None else data
                new = zipfile.ZipInfo(info.filename, info.date_time)
                new.compress_type, new.external_attr = info.compress_type, info.external_attr
                new.create_system, new.comment = info.create_system, info.comment
                file.writestr(new, data)
        return out.getvalue()


def reason(error):
    """Return a description of the error; exceptions from zipfile and its decompressors often have no message."""
    text = "" if isinstance(error, UnicodeError) else str(error)
    return text[:1].lower() + text[1:] if text and not text.startswith("<") else "unexpected end of data"


def description(text, escape):
    """Return the parts of an alternative text; [] if it is the name of a file or one that a program gave to a picture."""
    if not prose(text) or NAMED.fullmatch(text.strip()):
        return []
    parts = re.split(r"([\t\r\n]+)", text)
    return [escape(part) if part.isspace() else Segment([part], escape) for part in parts if part]


class Flow:
    """The parts of all members in one list, so that a single call translates the document. Anchored content inside a
    sentence (a picture or footnote with text) is an object with its own list of parts."""

    def __init__(self, archive):
        self.archive, self.members, self.objects = archive, [], []
        self.shared = {}  # data that the parts of a document share
        self.named = []  # texts left unchanged because other parts of the document refer to them
        self.after = []  # functions that adjust {member: translated bytes} and may add members

    def member(self, name, parts):
        self.members.append((name, parts))

    def put(self, parts):
        """Add an object; return the characters that represent the object until finish()."""
        self.objects.append(parts)
        return f"\ud801{len(self.objects) - 1}\ud802"

    def parts(self):
        found = []
        for at, (name, parts) in enumerate(self.members):
            number = 0
            for part in parts:
                if not isinstance(part, str):
                    number += 1
                    part.place = f"{name}, text {number}"
            found += [*([BETWEEN] if at else []), *parts]
        for parts in self.objects:
            for part in parts:
                if not isinstance(part, str):
                    part.place = "a text box, picture or note"
            found += [BETWEEN, *parts]
        self.members, self.objects = [name for name, _ in self.members], []
        return [part for part in found if part != ""]

    def finish(self, text, report):
        pieces = text.split(BETWEEN)
        objects, changed = pieces[len(self.members) :], {}
        for at, piece in enumerate(objects):  # an object contains only objects before it
            objects[at] = OBJECT.sub(lambda match: objects[int(match[1])], piece)
        for name, piece in zip(self.members, pieces):
            changed[name] = OBJECT.sub(lambda match: objects[int(match[1])], piece).encode("utf-8")
        changed = self.checked(changed, report)
        for step in self.after:
            step(changed)
        self.tell_named(report)
        return self.archive.written(changed)

    def tell_named(self, report):
        if self.named:
            texts = ", ".join(map(repr, self.named))
            report("", f"kept because formulas, filters or tables refer to these texts: {texts}")

    def checked(self, changed, report):
        """Drop changes that are not well-formed XML."""
        for name in list(changed):
            try:
                Tree(changed[name])
            except ValueError as error:
                del changed[name]
                report(name, f"left untranslated: the translation is {error}")
        return changed

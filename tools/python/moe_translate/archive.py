"""Documents that are zip archives of XML: docx, odt, epub. Members without text are copied byte for byte; the order,
dates and compression methods of members do not change."""

import io
import re
import zipfile

MOST = 1 << 30  # maximum bytes of an unpacked document
LARGEST = 1 << 28  # maximum bytes of an unpacked member
RATIO = 300
OBJECT = re.compile("\x01(\\d+)\x02")


class Archive:
    def __init__(self, data):
        try:
            self.file = zipfile.ZipFile(io.BytesIO(data))
        except (zipfile.BadZipFile, NotImplementedError, OSError) as error:
            raise ValueError(f"not a zip file: {error}") from None
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
        try:
            return self.file.read(name)
        except (zipfile.BadZipFile, KeyError, NotImplementedError, EOFError, OSError) as error:
            raise ValueError(f"{name}: {error}") from None
        except Exception as error:  # noqa: BLE001 - zlib.error, lzma.LZMAError
            raise ValueError(f"{name} is damaged: {error}") from None

    def text(self, name):
        """Return a member's XML, decoded as UTF-8, or UTF-16 with a byte order mark."""
        data = self.read(name)
        if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
            return re.sub(r"(<\?xml[^>]*?)\s+encoding=\S+?(?=\s|\?>)", r"\1", data.decode("utf-16"), count=1)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{name} is not valid UTF-8") from None

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


class Flow:
    """The parts of all members in one list, so that a single call translates the document. Anchored content inside a
    sentence (a picture or footnote with text) is an object with its own list of parts."""

    def __init__(self, archive):
        self.archive, self.members, self.objects = archive, [], []

    def member(self, name, parts):
        self.members.append((name, parts))

    def put(self, parts):
        """Add an object; return the characters that represent the object until finish()."""
        self.objects.append(parts)
        return f"\x01{len(self.objects) - 1}\x02"

    def parts(self):
        found = []
        for at, (name, parts) in enumerate(self.members):
            number = 0
            for part in parts:
                if not isinstance(part, str):
                    number += 1
                    part.place = f"{name}, text {number}"
            found += [*(["\x00"] if at else []), *parts]
        for parts in self.objects:
            for part in parts:
                if not isinstance(part, str):
                    part.place = "a text box or note"
            found += ["\x00", *parts]
        return found

    def finish(self, text, report):
        pieces = text.split("\x00")
        objects = pieces[len(self.members) :]
        changed = {}
        for (name, _), piece in zip(self.members, pieces):
            while OBJECT.search(piece):
                piece = OBJECT.sub(lambda match: objects[int(match[1])], piece)
            changed[name] = piece.encode("utf-8")
        return self.archive.written(self.checked(changed, report))

    def checked(self, changed, report):
        """Drop changes that are not well-formed XML."""
        from .xmltree import Tree

        for name in list(changed):
            try:
                Tree(changed[name])
            except ValueError as error:
                del changed[name]
                report(name, f"left untranslated: the translation is {error}")
        return changed

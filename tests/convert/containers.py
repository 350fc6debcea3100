"""Take apart and rebuild files of tensors, so that tests can damage one part and keep the rest well-formed.

    file = READERS["model.safetensors"](data)     file.tensors: [Tensor], file.head: format-specific
    file.build()                                  bytes again; equal to `data` if nothing changed

Classes: Safetensors, Gguf, Ct2 (model.bin of CTranslate2), Marian (.bin).
"""
import json
import struct


class Tensor:
    """A tensor as stored; kind: number format in the file's own notation; shape in the file's own order."""

    def __init__(self, name, shape, kind, data):
        self.name, self.shape, self.kind, self.data = name, list(shape), kind, data


class Safetensors:
    """head: __metadata__, or None."""
    UNKNOWN = "I4", "F8_E8M0", "F4", "C64", "bf16", "", None, 7

    def __init__(self, data):
        size = struct.unpack_from("<Q", data)[0]
        header, body = json.loads(data[8:8 + size]), data[8 + size:]
        self.head = header.pop("__metadata__", None)
        self.tensors = [Tensor(name, t["shape"], t["dtype"], body[slice(*t["data_offsets"])])
                        for name, t in sorted(header.items(), key=lambda x: x[1]["data_offsets"])]

    def build(self):
        rows, at = [] if self.head is None else [("__metadata__", self.head)], 0
        for t in self.tensors:
            rows.append((t.name, {"dtype": t.kind, "shape": t.shape, "data_offsets": [at, at + len(t.data)]}))
            at += len(t.data)
        text = ("{" + ", ".join(f"{json.dumps(name)}: {json.dumps(t)}" for name, t in rows) + "}").encode()
        return struct.pack("<Q", len(text)) + text + b"".join(t.data for t in self.tensors)


class Gguf:
    """head: {key: (type, bytes)}, in order; shapes have the fastest dimension first."""
    SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    STRING, ARRAY, ALIGNMENT = 8, 9, 32
    UNKNOWN = 99, 4, 36, 1 << 31

    def __init__(self, data):
        self.data, self.at = data, 8
        tensors, keys = self.number(8), self.number(8)
        self.head = {}
        for _ in range(keys):
            key, kind, begin = self.text(), self.number(4), self.at
            self.skip(kind)
            self.head[key] = kind, data[begin:self.at]
        entries = []
        for _ in range(tensors):
            name, dims = self.text(), self.number(4)
            entries.append((name, [self.number(8) for _ in range(dims)], self.number(4), self.number(8)))
        start = -(-self.at // self.ALIGNMENT) * self.ALIGNMENT
        ends = [x[3] for x in entries[1:]] + [len(data) - start]
        self.tensors = [Tensor(*x[:3], data[start + x[3]:start + end]) for x, end in zip(entries, ends)]

    def number(self, size):
        self.at += size
        return int.from_bytes(self.data[self.at - size:self.at], "little")

    def text(self):
        size = self.number(8)
        self.at += size
        return self.data[self.at - size:self.at].decode()

    def skip(self, kind):
        if kind == self.ARRAY:
            inner, count = self.number(4), self.number(8)
            for _ in range(count if inner == self.STRING else 0):
                self.text()
            self.at += 0 if inner == self.STRING else count * self.SIZES[inner]
        elif kind == self.STRING:
            self.text()
        else:
            self.at += self.SIZES[kind]

    @staticmethod
    def value(x):
        """Return (type, bytes) of a Python value."""
        if isinstance(x, tuple):
            return x
        if isinstance(x, bool):
            return 7, bytes([x])
        if isinstance(x, int):
            return (4, struct.pack("<I", x)) if 0 <= x < 1 << 32 else (11, struct.pack("<q", x))
        if isinstance(x, float):
            return 6, struct.pack("<f", x)
        if isinstance(x, list):
            inner = [Gguf.value(y) for y in x]
            kind = inner[0][0] if inner else 4
            return 9, struct.pack("<IQ", kind, len(x)) + b"".join(data for _, data in inner)
        text = x if isinstance(x, bytes) else x.encode()
        return 8, struct.pack("<Q", len(text)) + text

    def texts(self, key):
        """Return a list of texts."""
        self.data, self.at = self.head[key][1], 4
        return [self.text() for _ in range(self.number(8))]

    def build(self):
        out = struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), len(self.head))
        for key, (kind, data) in self.head.items():
            out += self.value(key)[1] + struct.pack("<I", kind) + data
        at, body = 0, b""
        for t in self.tensors:
            out += self.value(t.name)[1] + struct.pack(f"<I{len(t.shape)}QIQ", len(t.shape), *t.shape, t.kind, at)
            body += t.data + bytes(-len(t.data) % self.ALIGNMENT)
            at = len(body)
        return out + bytes(-len(out) % self.ALIGNMENT) + body


class Ct2:
    """head: (version, specification, revision, [(alias, name)])."""
    UNKNOWN = 6, 7, 255

    def __init__(self, data):
        self.data, self.at = data, 0
        version, spec, revision, count = self.number(4), self.text(), self.number(4), self.number(4)
        self.tensors = []
        for _ in range(count):
            name = self.text()
            shape = [self.number(4) for _ in range(self.number(1))]
            kind, size = self.number(1), self.number(4)
            self.at += size
            self.tensors.append(Tensor(name, shape, kind, data[self.at - size:self.at]))
        self.head = [version, spec, revision, [(self.text(), self.text()) for _ in range(self.number(4))]]

    number = Gguf.number

    def text(self):
        size = self.number(2)
        self.at += size
        return self.data[self.at - size:self.at - 1].decode()

    def build(self):
        encoded = lambda text: struct.pack("<H", len(text) + 1) + text.encode() + b"\0"
        version, spec, revision, aliases = self.head
        out = struct.pack("<I", version) + encoded(spec) + struct.pack("<II", revision, len(self.tensors))
        for t in self.tensors:
            out += encoded(t.name) + struct.pack(f"<B{len(t.shape)}IBI", len(t.shape), *t.shape, t.kind, len(t.data))
            out += t.data
        return out + struct.pack("<I", len(aliases)) + b"".join(encoded(a) + encoded(b) for a, b in aliases)


class Marian:
    """head: None; the last tensor is special:model.yml."""
    UNKNOWN = 0x999, 0x402, 0x108, 0

    def __init__(self, data):
        count = struct.unpack_from("<Q", data, 8)[0]
        rows, at = [struct.unpack_from("<4Q", data, 16 + 32 * i) for i in range(count)], 16 + 32 * count
        names, shapes, self.head, self.tensors = [], [], None, []
        for length, *_ in rows:
            names.append(data[at:at + length - 1].decode())
            at += length
        for _, _, dims, _ in rows:
            shapes.append(struct.unpack_from(f"<{dims}i", data, at))
            at += 4 * dims
        at += 8 + struct.unpack_from("<Q", data, at)[0]
        for name, shape, (_, kind, _, size) in zip(names, shapes, rows):
            self.tensors.append(Tensor(name, shape, kind, data[at:at + size]))
            at += size

    def build(self):
        head = struct.pack("<QQ", 1, len(self.tensors))
        for t in self.tensors:
            head += struct.pack("<4Q", len(t.name) + 1, t.kind, len(t.shape), len(t.data))
        head += b"".join(t.name.encode() + b"\0" for t in self.tensors)
        head += b"".join(struct.pack(f"<{len(t.shape)}i", *t.shape) for t in self.tensors)
        pad = -(len(head) + 8) % 256
        return head + struct.pack("<Q", pad) + bytes(pad) + b"".join(t.data for t in self.tensors)

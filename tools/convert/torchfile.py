"""Read torch.save files without PyTorch and without executing code from them.

    checkpoint = torchfile.load("model.pt")      # dicts, lists, strings, numbers; tensors as Tensor
    checkpoint["state_dict"]["bias"].array()     # read the data as a NumPy array

A checkpoint is untrusted input. A pickle is a program for a stack machine; the interpreter here implements the
instructions of protocols 2 to 5 and never calls a function that a pickle names. MAKERS and NAMES map permitted names to
placeholders in this file, which only store their arguments; any other name is an error. Memory is limited to a fixed
multiple of the file's size: numbers of objects, lengths, storages, shapes and strides are checked against the available
bytes before objects are created.

Both containers are supported: the zip archive of PyTorch 1.6 and later, and the earlier sequence of pickles and raw
storages.
"""
import contextlib
import io
import os
import struct
import sys
import zipfile
import zlib

import numpy as np

from moefile import FormatError, open_regular

LARGEST_PICKLE = 1 << 26  # bytes
FREE_MEMORY, MULTIPLE = 1 << 25, 8  # bytes allowed for a pickle's objects: a constant plus a multiple of the file size
PAIR, ELEMENT, INSTANCE = 120, 64, 400  # bytes of a dictionary entry, a set element and an object with attributes
MAX_DIMENSIONS = 8
LARGEST_INTEGER = 16  # bytes
LONGEST_NAME = 1000
LONGEST_KEY = 8  # maximum elements of a tuple used as a dictionary key
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
BFLOAT16 = "bfloat16"  # a type that NumPy lacks
STORAGES = {"FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "BFloat16Storage": BFLOAT16,
            "LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1",
            "BoolStorage": "?"}


# ---- Placeholders ----------------------------------------------------------------------------------------------------

class Name:
    """A name that a pickle refers to but never calls, such as a dtype."""

    def __init__(self, name):
        self.name = name


class Object:
    """An instance of a permitted class: attributes without methods."""

    def __init__(self, *arguments):
        self.arguments, self.attributes = arguments, {}

    def get(self, name, default=None):
        return self.attributes.get(name, default)


class Tensor:
    """A tensor in a storage; `array` reads the numbers."""

    def __init__(self, storage, offset, shape, stride):
        if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(stride, tuple) \
                or not len(shape) == len(stride) <= MAX_DIMENSIONS \
                or not all(type(x) is int and 0 <= x < 1 << 62 for x in (offset, *shape, *stride)):
            raise FormatError("a tensor has no storage or an invalid shape")
        self.storage, self.offset, self.shape, self.stride = storage, offset, shape, stride
        count, last = 1, offset + sum((n - 1) * step for n, step in zip(shape, stride))
        for n in shape:
            count *= n
        # a stride of 0 could expand one number into many; checkpoints have no such tensors
        if count > storage.count or count and last >= storage.count:
            raise FormatError(f"a tensor of shape {list(shape)} and strides {list(stride)} exceeds its storage")

    def contiguous(self):
        """Return True if the tensor is contiguous in row-major order."""
        wanted = 1
        for n, step in zip(self.shape[::-1], self.stride[::-1]):
            if n != 1 and step != wanted:
                return False
            wanted *= n
        return True

    def open(self):
        """Open the file at the start of a contiguous tensor."""
        file = self.storage.source.open(self.storage.key)
        file.seek(self.offset * self.storage.itemsize(), os.SEEK_CUR)
        return file

    def array(self):
        """Return the tensor as an array; bfloat16 becomes float32."""
        data = self.storage.read()
        if 0 in self.shape:
            return np.zeros(self.shape, data.dtype)
        if self.storage.kind == BFLOAT16:
            data = (data.astype(np.uint32) << 16).view(np.float32)
        steps = [step * data.itemsize for step in self.stride]
        return np.lib.stride_tricks.as_strided(data[self.offset:], self.shape, steps, writeable=False)


def make_dict(*arguments):
    """Convert OrderedDict and defaultdict to dict; ignore attributes such as a state_dict's _metadata."""
    out = {}
    for argument in arguments:
        for pair in argument.items() if isinstance(argument, dict) else argument if isinstance(argument, list) else ():
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise FormatError("a dictionary must consist of pairs")
            out[checked_key(pair[0])] = pair[1]
    return out


def make_size(shape=()):
    return tuple(shape) if isinstance(shape, (tuple, list)) else Name("Size")


def make_tensor(storage=None, offset=None, shape=None, stride=None, *_):
    return Tensor(storage, offset, shape, stride)


def make_parameter(tensor=None, *_):
    return tensor


MAKERS = {("collections", "OrderedDict"): make_dict, ("collections", "defaultdict"): make_dict,
          ("functools", "partial"): Object, ("argparse", "Namespace"): Object, ("subword_nmt.apply_bpe", "BPE"): Object,
          ("apply_bpe", "BPE"): Object, ("torch", "Size"): make_size, ("torch", "device"): Object,
          ("torch._utils", "_rebuild_tensor"): make_tensor, ("torch._utils", "_rebuild_tensor_v2"): make_tensor,
          ("torch._utils", "_rebuild_parameter"): make_parameter}
NAMES = {(module, name) for module in ("torch", "torch.cuda") for name in STORAGES} \
    | {("torch", name) for name in ("float16", "bfloat16", "float32", "float64", "int64", "int32", "bool")} \
    | {(module, "int") for module in ("builtins", "__builtin__")}


class Maker:
    """A permitted class or function and its placeholder."""

    def __init__(self, name, make):
        self.name, self.make = name, make


def known(module, name, more):
    """Return the placeholder of a name; more: prefixes of additional modules whose classes are permitted."""
    if (module, name) in MAKERS:
        return Maker(name, MAKERS[module, name])
    if (module, name) in NAMES:
        return Name(name)
    if any(module == x or module.startswith(x + ".") for x in more) and "." not in name:
        return Maker(name, Object)
    raise FormatError(f"the pickle refers to {module[:100]}.{name[:100]}, which is not permitted in a checkpoint: "
                      "nothing was executed")


def checked_key(key):
    """Reject nested keys: hashing deeply nested tuples would exhaust the stack."""
    if isinstance(key, tuple) and len(key) > LONGEST_KEY:
        raise FormatError(f"dictionary key has {len(key)} elements; the limit is {LONGEST_KEY}")
    for x in key if isinstance(key, tuple) else (key,):
        if x is not None and not isinstance(x, (str, bytes, int, float)):
            raise FormatError("a dictionary key must be a string or a number")
    return key


# ---- Pickles ---------------------------------------------------------------------------------------------------------

class Bytes:
    """Read at most `left` bytes of a file, from the current position."""

    def __init__(self, file, left):
        self.file, self.left, self.at = file, left, 0

    def count(self, data):
        self.left, self.at = self.left - len(data), self.at + len(data)
        return data

    def take(self, size):
        data = self.count(self.file.read(size) if size <= self.left else b"")
        if len(data) < size:
            raise FormatError(f"cannot read {size} bytes: truncated or too large")
        return data

    def number(self, size, signed=False):
        return int.from_bytes(self.take(size), "little", signed=signed)

    def line(self):
        data = self.count(self.file.readline(min(self.left, LONGEST_NAME)))
        if not data.endswith(b"\n"):
            raise FormatError("unterminated name")
        return data[:-1]


class Machine:
    """Run a pickle: `load` returns the object. storage: creates a Storage for a persistent id. All created objects are
    charged to a memory budget, since one byte of a pickle can create an empty set, which takes 216 bytes."""

    def __init__(self, file, size, storage, more):
        self.bytes, self.storage, self.more = Bytes(file, LARGEST_PICKLE), storage, more
        self.stack, self.marks, self.memo, self.budget = [], [], {}, FREE_MEMORY + MULTIPLE * size

    def load(self):
        try:
            while (code := self.bytes.take(1)) != b".":
                if code not in STEPS:
                    raise FormatError(f"instruction {code!r} does not exist in protocols 2 to 5")
                STEPS[code](self)
            return self.pop()
        except FormatError as error:
            raise FormatError(f"the pickle is damaged or not a checkpoint (byte {self.bytes.at}): {error}") from None

    def pay(self, size):
        self.budget -= size
        if self.budget < 0:
            raise FormatError("objects take far more memory than is plausible for the file size")

    def push(self, x, known=False):
        """Push an object; known: it exists already, so do not charge for it."""
        self.pay(8 if known else 8 + sys.getsizeof(x))
        self.stack.append(x)

    def mark(self):
        self.pay(40)
        self.marks.append(len(self.stack))

    def pop(self):
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise FormatError("the stack is empty")
        return self.stack.pop()

    def top(self, *kinds):
        """Return the top of the stack, which the current instruction modifies."""
        if not self.stack or not isinstance(self.stack[-1], kinds):
            raise FormatError("the top of the stack has the wrong type for the instruction")
        return self.stack[-1]

    def marked(self):
        """Pop the last mark and the items above the mark."""
        if not self.marks:
            raise FormatError("missing mark")
        at = self.marks.pop()
        items, self.stack[at:] = self.stack[at:], []
        return items

    def protocol(self):
        version = self.bytes.number(1)
        if not 2 <= version <= 5:
            raise FormatError(f"protocol {version} is not supported: expected 2 to 5")

    def text(self, width, strict):
        """Push a string; width: bytes of the length field; strict=False: a Python 2 string, which need not be UTF-8."""
        data = self.bytes.take(self.bytes.number(width))
        try:
            self.push(data.decode())
        except UnicodeDecodeError:
            if strict:
                raise FormatError("a string is not UTF-8") from None
            self.push(data)

    def long(self, width):
        size = self.bytes.number(width)
        if size > LARGEST_INTEGER:
            raise FormatError(f"integer has {size} bytes; the limit is {LARGEST_INTEGER}")
        self.push(self.bytes.number(size, True))

    def tuple(self, size):
        self.push(tuple([self.pop() for _ in range(size)][::-1]))

    def put(self, key):
        self.pay(PAIR)
        self.memo[key] = self.top(object)

    def get(self, key):
        if key not in self.memo:
            raise FormatError(f"memo entry {key} is missing")
        self.push(self.memo[key], known=True)

    def append(self, items):
        into = self.top(list, set)
        self.pay((8 if isinstance(into, list) else ELEMENT) * len(items))
        if isinstance(into, list):
            into.extend(items)
        else:
            into.update(map(checked_key, items))

    def frozen_set(self):
        items = self.marked()
        self.pay(ELEMENT * len(items))
        self.push(set(map(checked_key, items)))

    def set_items(self, items):
        if len(items) % 2:
            raise FormatError("a dictionary key has no value")
        into = self.top(dict)
        self.pay(PAIR * (len(items) // 2))
        for key, value in zip(items[::2], items[1::2]):
            into[checked_key(key)] = value

    def names(self, module, name):
        try:
            module, name = (x.decode() if isinstance(x, bytes) else x for x in (module, name))
        except UnicodeDecodeError:
            raise FormatError("a name is not UTF-8") from None
        if not isinstance(module, str) or not isinstance(name, str):
            raise FormatError("a name is not a string")
        self.pay(INSTANCE)
        self.push(known(module, name, self.more))

    def reduce(self):
        arguments, function = self.pop(), self.pop()
        if not isinstance(function, Maker) or not isinstance(arguments, tuple):
            raise FormatError("cannot call an object that is not a permitted class")
        self.pay(INSTANCE + PAIR * sum(len(x) for x in arguments if isinstance(x, (dict, list, tuple))))
        try:
            self.push(function.make(*arguments))
        except TypeError:
            raise FormatError(f"invalid arguments to {function.name}") from None

    def build(self):
        state, target = self.pop(), self.top(dict, Object)
        if isinstance(target, Object) and isinstance(state, dict):
            self.pay(PAIR * len(state))
            target.attributes.update(state)

    def persistent(self):
        about = self.pop()
        if not isinstance(about, tuple) or len(about) < 5 or about[0] != "storage" or not isinstance(about[1], Name):
            raise FormatError("invalid storage reference")
        kind, key, count = STORAGES.get(about[1].name), about[2], about[4]
        if self.storage is None or kind is None or not isinstance(key, str) or type(count) is not int or count < 0:
            raise FormatError("invalid storage")
        if len(about) > 5 and about[5] is not None:
            raise FormatError("views of storages, as written by PyTorch before 0.4, are not supported")
        self.pay(INSTANCE)
        self.push(self.storage(key, kind, count))


STEPS = {  # implementations of the instructions, by opcode
    b"\x80": Machine.protocol, b"\x95": lambda m: m.bytes.take(8),
    b"N": lambda m: m.push(None), b"\x88": lambda m: m.push(True), b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.bytes.number(1)), b"M": lambda m: m.push(m.bytes.number(2)),
    b"J": lambda m: m.push(m.bytes.number(4, True)), b"\x8a": lambda m: m.long(1), b"\x8b": lambda m: m.long(4),
    b"G": lambda m: m.push(struct.unpack(">d", m.bytes.take(8))[0]),
    b"X": lambda m: m.text(4, True), b"\x8c": lambda m: m.text(1, True), b"\x8d": lambda m: m.text(8, True),
    b"T": lambda m: m.text(4, False), b"U": lambda m: m.text(1, False),
    b"B": lambda m: m.push(m.bytes.take(m.bytes.number(4))), b"C": lambda m: m.push(m.bytes.take(m.bytes.number(1))),
    b"\x8e": lambda m: m.push(m.bytes.take(m.bytes.number(8))),
    b"\x96": lambda m: m.push(m.bytes.take(m.bytes.number(8))),
    b"(": Machine.mark, b"0": Machine.pop, b"1": Machine.marked, b"2": lambda m: m.push(m.top(object), known=True),
    b")": lambda m: m.push(()), b"\x85": lambda m: m.tuple(1), b"\x86": lambda m: m.tuple(2),
    b"\x87": lambda m: m.tuple(3), b"t": lambda m: m.push(tuple(m.marked())),
    b"]": lambda m: m.push([]), b"l": lambda m: m.push(m.marked()), b"a": lambda m: m.append([m.pop()]),
    b"e": lambda m: m.append(m.marked()), b"\x8f": lambda m: m.push(set()), b"\x90": lambda m: m.append(m.marked()),
    b"\x91": Machine.frozen_set, b"}": lambda m: m.push({}), b"u": lambda m: m.set_items(m.marked()),
    b"s": lambda m: m.set_items([m.pop(), m.pop()][::-1]),
    b"q": lambda m: m.put(m.bytes.number(1)), b"r": lambda m: m.put(m.bytes.number(4)),
    b"\x94": lambda m: m.put(len(m.memo)), b"h": lambda m: m.get(m.bytes.number(1)),
    b"j": lambda m: m.get(m.bytes.number(4)), b"c": lambda m: m.names(m.bytes.line(), m.bytes.line()),
    b"\x93": lambda m: m.names(*[m.pop(), m.pop()][::-1]),
    b"R": Machine.reduce, b"\x81": Machine.reduce, b"b": Machine.build, b"Q": Machine.persistent}


def unpickle(file, size, storage=None, more=()):
    """Return the next object in a pickle file; size: size of the checkpoint in bytes."""
    return Machine(file, size, storage, more).load()


# ---- Containers ------------------------------------------------------------------------------------------------------

class Storage:
    """An array of numbers in the file, read on demand."""

    def __init__(self, source, key, kind, count):
        self.source, self.key, self.kind, self.count = source, key, kind, count

    def read(self):
        dtype = np.dtype("<u2" if self.kind == BFLOAT16 else self.kind)
        return np.frombuffer(self.source.read(self.key, self.bytes()), dtype, self.count)

    def itemsize(self):
        return 2 if self.kind == BFLOAT16 else np.dtype(self.kind).itemsize

    def bytes(self):
        return self.count * self.itemsize()


class Source:
    """Base class of both containers: storages by key, and the bytes of the last storage read."""

    def __init__(self, path, more):
        self.path, self.more, self.size = path, more, os.path.getsize(path)
        self.storages, self.last = {}, (None, b"")

    def storage(self, key, kind, count):
        found = self.storages.setdefault(key, Storage(self, key, kind, count))
        if (found.kind, found.count) != (kind, count):
            raise FormatError(f"storage {key[:100]} has conflicting descriptions")
        if found.bytes() > self.room(key):
            raise FormatError(f"storage {key[:100]} is truncated: {self.room(key)} of {found.bytes()} bytes")
        return found

    def read(self, key, size):
        if self.last[0] != key:
            self.last = key, self.fetch(key)
        if len(self.last[1]) < size:
            raise FormatError(f"storage {key[:100]} is truncated: {len(self.last[1])} of {size} bytes")
        return self.last[1]


@contextlib.contextmanager
def reading(what):
    """Convert zipfile's errors for damaged archives to FormatError."""
    try:
        yield
    except FormatError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, OSError, OverflowError, RuntimeError,
            ValueError, struct.error):
        raise FormatError(f"{what} is truncated, damaged or not supported") from None


class Entry:
    """An archive entry as a file; reading to the end verifies the checksum."""

    def __init__(self, file, key):
        self.file, self.key = file, key

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def seek(self, offset, whence):
        with reading(f"storage {self.key[:100]}"):
            self.file.seek(offset, whence)

    def read(self, count):
        with reading(f"storage {self.key[:100]}"):
            return self.file.read(count)


class ZipSource(Source):
    """PyTorch 1.6 and later: NAME/data.pkl and NAME/data/KEY, uncompressed."""

    def __init__(self, path, more):
        Source.__init__(self, path, more)
        with reading("the zip archive"):
            self.zip = zipfile.ZipFile(path)
        pickles = [name for name in self.zip.namelist() if name.split("/")[1:] == ["data.pkl"]]
        if len(pickles) != 1:
            raise FormatError("a zip archive, but not written by torch.save: data.pkl is missing")
        self.prefix = pickles[0][:-len("data.pkl")]

    def entry(self, name):
        try:
            about = self.zip.getinfo(self.prefix + name)
        except KeyError:
            raise FormatError(f"{name[:100]} is missing from the archive") from None
        if about.compress_type != zipfile.ZIP_STORED or about.file_size != about.compress_size:
            raise FormatError(f"{name[:100]} is compressed, which is not supported")
        if not 0 <= about.header_offset <= self.size - about.file_size:
            raise FormatError(f"{name[:100]} exceeds the archive: truncated")
        return about

    def room(self, key):
        return self.entry("data/" + key).file_size

    def open(self, key):
        with reading(f"storage {key[:100]}"):
            return Entry(self.zip.open(self.entry("data/" + key)), key)

    def fetch(self, key):
        with self.open(key) as file:
            return file.read(self.room(key))

    def load(self):
        if self.prefix + "byteorder" in self.zip.namelist():
            with reading("byteorder"):
                if self.zip.read(self.entry("byteorder")) != b"little":
                    raise FormatError("big-endian numbers are not supported")
        about = self.entry("data.pkl")
        if about.file_size > LARGEST_PICKLE:
            raise FormatError(f"the pickle has {about.file_size} bytes; the limit is {LARGEST_PICKLE}")
        with reading("data.pkl"):
            data = self.zip.read(about)
        return unpickle(io.BytesIO(data), self.size, self.storage, self.more)


class LegacySource(Source):
    """Versions before PyTorch 1.6: pickles of a magic number, the protocol, the machine, the checkpoint and the storage
    keys, followed by the length (int64) and numbers of each storage, in the order of the keys."""

    def load(self):
        with open_regular(self.path) as file:
            if unpickle(file, self.size) != LEGACY_MAGIC or unpickle(file, self.size) != LEGACY_PROTOCOL:
                raise FormatError("not a file written by torch.save")
            machine = unpickle(file, self.size)
            if not isinstance(machine, dict) or machine.get("little_endian") is not True:
                raise FormatError("big-endian numbers are not supported")
            checkpoint = unpickle(file, self.size, self.storage, self.more)
            keys = unpickle(file, self.size)
            if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) \
                    or sorted(keys) != sorted(self.storages):
                raise FormatError("the list of storages does not match the tensors")
            self.places, at = {}, file.tell()
            for key in keys:
                storage, head = self.storages[key], file.read(8)
                if len(head) < 8 or struct.unpack("<q", head)[0] != storage.count \
                        or storage.bytes() > self.size - at - 8:
                    raise FormatError(f"length of storage {key[:100]} does not match its tensors: truncated or damaged")
                self.places[key] = at + 8, storage.bytes()
                at = file.seek(at + 8 + storage.bytes())
        return checkpoint

    def room(self, _):
        return self.size

    def open(self, key):
        file = open_regular(self.path)
        file.seek(self.places[key][0])
        return file

    def fetch(self, key):
        with self.open(key) as file:
            return file.read(self.places[key][1])


def load(path, more=()):
    """Load a checkpoint written by torch.save; raise FormatError if the file is invalid or contains more than data.
    more: additional modules whose classes are permitted, as objects without methods."""
    with open_regular(path) as file:
        start = file.read(4)
    if start != b"PK\3\4" and start[:1] != b"\x80":
        raise FormatError("not a file written by torch.save")
    return (ZipSource if start == b"PK\3\4" else LegacySource)(path, more).load()

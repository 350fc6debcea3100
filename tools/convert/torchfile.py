"""Reads what torch.save wrote, without PyTorch and without running anything that is in it.

    checkpoint = torchfile.load("model.pt")      # dicts, lists, strings, numbers; a Tensor where a tensor was
    checkpoint["state_dict"]["bias"].array()     # a NumPy array, read from the file now

A checkpoint is untrusted input: a pickle names what is to be called when it is read. Here it can name only what KNOWN
lists, and each entry is a stand-in from this file that holds what it is given and does nothing; another name is
refused, and named. Both containers are read: the zip archive of PyTorch 1.6 and later, and the row of pickles and raw
storages of before.
"""
import collections
import os
import pickle
import struct
import zipfile

import numpy as np

from moefile import FormatError

LARGEST_PICKLE = 1 << 28
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
BFLOAT16 = "bfloat16"  # NumPy has none
STORAGES = {"FloatStorage": "<f4", "DoubleStorage": "<f8", "HalfStorage": "<f2", "BFloat16Storage": BFLOAT16,
            "LongStorage": "<i8", "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "i1", "ByteStorage": "u1",
            "BoolStorage": "?"}


# ---- Stand-ins -------------------------------------------------------------------------------------------------------

class Dict(dict):
    """OrderedDict and defaultdict: a dict. Attributes (the _metadata of a state_dict) are kept and not looked at."""

    def __init__(self, *arguments):
        dict.__init__(self, *[a for a in arguments if isinstance(a, (dict, list, tuple))])


class Object:
    """An instance of a known class: its attributes, none of its methods."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __setstate__(self, state):
        if isinstance(state, dict):
            self.__dict__.update(state)


class Tensor:
    """A tensor's place in a storage; `array` reads it."""

    def __init__(self, storage, offset, shape, stride):
        numbers = [offset, *shape, *stride]
        if not isinstance(storage, Storage) or len(shape) != len(stride) or not all(type(x) is int and x >= 0
                                                                                    for x in numbers):
            raise FormatError("a tensor without a storage, or with an impossible shape")
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride))
        if 0 not in shape and last >= storage.count:
            raise FormatError(f"a tensor {list(shape)} reaches past the end of its storage of {storage.count} numbers")
        self.storage, self.offset, self.shape, self.stride = storage, offset, tuple(shape), tuple(stride)

    def contiguous(self):
        """Whether its numbers lie one behind the other, the last dimension fastest."""
        wanted = 1
        for n, step in zip(self.shape[::-1], self.stride[::-1]):
            if n != 1 and step != wanted:
                return False
            wanted *= n
        return True

    def open(self):
        """A file that is read from where a contiguous tensor begins."""
        file = self.storage.source.open(self.storage.key)
        file.seek(self.offset * self.storage.itemsize(), os.SEEK_CUR)
        return file

    def array(self):
        """Its numbers; bfloat16 as float32."""
        data = self.storage.read()
        if self.storage.kind == BFLOAT16:
            data = (data.astype(np.uint32) << 16).view(np.float32)
        steps = [step * data.itemsize for step in self.stride]
        return np.lib.stride_tricks.as_strided(data[self.offset:], self.shape, steps,
                                               writeable=False) if 0 not in self.shape \
            else np.zeros(self.shape, data.dtype)


def rebuild_tensor(storage, offset, shape, stride, *_):
    return Tensor(storage, offset, shape, stride)


def rebuild_parameter(tensor, *_):
    return tensor


class Name:
    """A name that is referred to and never called, such as a dtype."""

    def __init__(self, name):
        self.name = name


KNOWN = {("collections", "OrderedDict"): Dict, ("collections", "defaultdict"): Dict, ("functools", "partial"): Object,
         ("argparse", "Namespace"): Object, ("subword_nmt.apply_bpe", "BPE"): Object, ("apply_bpe", "BPE"): Object,
         ("torch", "Size"): lambda shape=(): tuple(shape), ("torch", "device"): Object,
         ("torch._utils", "_rebuild_tensor"): rebuild_tensor, ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
         ("torch._utils", "_rebuild_parameter"): rebuild_parameter}
KNOWN.update({(module, name): Name(name) for module in ("torch", "torch.cuda") for name in STORAGES})
KNOWN.update({("torch", name): Name(name) for name in ("float16", "bfloat16", "float32", "float64", "int64", "int32",
                                                       "bool")})
KNOWN.update({(module, "int"): Name("int") for module in ("builtins", "__builtin__")})


# ---- Pickles ---------------------------------------------------------------------------------------------------------

class Unpickler(pickle.Unpickler):
    """An unpickler that knows KNOWN and nothing else; `storage` makes a Storage of a persistent id."""

    def __init__(self, file, storage):
        pickle.Unpickler.__init__(self, file, encoding="utf-8")
        self.storage = storage

    def find_class(self, module, name):
        if (module, name) not in KNOWN:
            raise FormatError(f"its pickle asks for {module}.{name}, which has no place in a checkpoint: nothing was "
                              f"run")
        return KNOWN[module, name]

    def persistent_load(self, about):
        if not isinstance(about, tuple) or len(about) < 5 or about[0] != "storage" or not isinstance(about[1], Name):
            raise FormatError("its pickle refers to something that is no storage")
        kind, key, count = STORAGES.get(about[1].name), about[2], about[4]
        if kind is None or not isinstance(key, str) or type(count) is not int or count < 0:
            raise FormatError("its pickle refers to an impossible storage")
        if len(about) > 5 and about[5] is not None:
            raise FormatError("it holds views of storages, as PyTorch before 0.4 wrote them")
        return self.storage(key, kind, count)


def unpickle(file, storage=lambda *_: None):
    """The next object of a file of pickles."""
    try:
        return Unpickler(file, storage).load()
    except (FormatError, OSError):
        raise
    except MemoryError:
        raise FormatError("its pickle asks for more memory than there is") from None
    except Exception as error:  # noqa: BLE001 - broken pickles fail in every way there is
        raise FormatError(f"its pickle is broken or cut off ({type(error).__name__}: {error})") from None


# ---- Containers ------------------------------------------------------------------------------------------------------

class Storage:
    """A row of numbers in the file, read when asked for."""

    def __init__(self, source, key, kind, count):
        self.source, self.key, self.kind, self.count = source, key, kind, count

    def read(self):
        dtype = np.dtype("<u2" if self.kind == BFLOAT16 else self.kind)
        return np.frombuffer(self.source.read(self.key, self.count * dtype.itemsize), dtype, self.count)

    def itemsize(self):
        return 2 if self.kind == BFLOAT16 else np.dtype(self.kind).itemsize

    def bytes(self):
        return self.count * self.itemsize()


class Source:
    """What both containers share: storages by key, and the bytes of the one that was read last."""

    def __init__(self, path):
        self.path, self.storages, self.last = path, {}, (None, b"")

    def storage(self, key, kind, count):
        found = self.storages.setdefault(key, Storage(self, key, kind, count))
        if (found.kind, found.count) != (kind, count):
            raise FormatError(f"storage {key} is described in two ways")
        return found

    def read(self, key, size):
        if self.last[0] != key:
            self.last = key, self.fetch(key)
        if len(self.last[1]) < size:
            raise FormatError(f"storage {key} has {len(self.last[1])} bytes, its tensors need {size}: cut off")
        return self.last[1]


class Entry:
    """An entry of an archive as a file; reading to its end compares its checksum."""

    def __init__(self, file, key):
        self.file, self.key = file, key

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def seek(self, offset, whence):
        self.file.seek(offset, whence)

    def read(self, count):
        try:
            return self.file.read(count)
        except (zipfile.BadZipFile, EOFError, OSError, struct.error):
            raise FormatError(f"storage {self.key} is damaged or cut off") from None


class ZipSource(Source):
    """PyTorch 1.6 and later: NAME/data.pkl and NAME/data/KEY, uncompressed."""

    def __init__(self, path):
        Source.__init__(self, path)
        try:
            self.zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
            raise FormatError("a damaged or cut off zip archive") from None
        pickles = [name for name in self.zip.namelist() if name.split("/")[1:] == ["data.pkl"]]
        if len(pickles) != 1:
            raise FormatError("a zip archive, but not one of torch.save: it has no data.pkl")
        self.prefix = pickles[0][:-len("data.pkl")]

    def entry(self, name):
        try:
            about = self.zip.getinfo(self.prefix + name)
        except KeyError:
            raise FormatError(f"its archive has no {name}") from None
        if about.compress_type != zipfile.ZIP_STORED or about.file_size > os.path.getsize(self.path):
            raise FormatError(f"{name} is compressed: torch.save does not do that")
        return about

    def open(self, key):
        entry = self.entry("data/" + key)
        if entry.file_size < self.storages[key].bytes():
            raise FormatError(f"storage {key} has {entry.file_size} bytes, its tensors need "
                              f"{self.storages[key].bytes()}: cut off")
        try:
            return Entry(self.zip.open(entry), key)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, struct.error):
            raise FormatError(f"storage {key} is damaged or cut off") from None

    def fetch(self, key):
        try:
            return self.zip.read(self.entry("data/" + key))
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error):
            raise FormatError(f"storage {key} is damaged or cut off") from None

    def load(self):
        if self.prefix + "byteorder" in self.zip.namelist() and self.zip.read(self.entry("byteorder")) != b"little":
            raise FormatError("its numbers are big-endian")
        if self.entry("data.pkl").file_size > LARGEST_PICKLE:
            raise FormatError("its pickle is too large")
        try:
            with self.zip.open(self.entry("data.pkl")) as file:
                return unpickle(file, self.storage)
        except (zipfile.BadZipFile, NotImplementedError, RuntimeError, struct.error):
            raise FormatError("data.pkl is damaged or cut off") from None


class LegacySource(Source):
    """Before: pickles of a magic number, the protocol, the machine, the checkpoint and the storages' keys; then, in the
    order of the keys, each storage's length as an int64 and its numbers."""

    def load(self):
        size = os.path.getsize(self.path)
        with open(self.path, "rb") as file:
            if unpickle(file) != LEGACY_MAGIC or unpickle(file) != LEGACY_PROTOCOL:
                raise FormatError("not a file of torch.save")
            machine = unpickle(file)
            if not isinstance(machine, dict) or not machine.get("little_endian", False):
                raise FormatError("its numbers are big-endian")
            checkpoint, keys = unpickle(file, self.storage), unpickle(file)
            if not isinstance(keys, list) or sorted(map(str, keys)) != sorted(self.storages):
                raise FormatError("its list of storages is not that of its tensors")
            self.places, at = {}, file.tell()
            for key in keys:
                storage, head = self.storages[key], file.read(8)
                if len(head) < 8 or struct.unpack("<q", head)[0] != storage.count or storage.bytes() > size - at - 8:
                    raise FormatError(f"storage {key} has another length than its tensors say: damaged or cut off")
                self.places[key] = at + 8, storage.bytes()
                at = file.seek(at + 8 + storage.bytes())
        return checkpoint

    def open(self, key):
        file = open(self.path, "rb")
        file.seek(self.places[key][0])
        return file

    def fetch(self, key):
        with self.open(key) as file:
            return file.read(self.places[key][1])


def load(path):
    """The checkpoint in a file of torch.save; FormatError where there is none, or one that is not only data."""
    with open(path, "rb") as file:
        start = file.read(4)
    if start != b"PK\3\4" and start[:1] != b"\x80":
        raise FormatError("not a file of torch.save")
    return (ZipSource(path) if start == b"PK\3\4" else LegacySource(path)).load()

#!/usr/bin/env python3
"""Report characters that two versions of PCRE2 classify differently, as byte-level
BPE splits text at character classes.

Usage: tests/python tests/convert/pcre2_classes.py LIBPCRE2_8_SO LIBPCRE2_8_SO

Prints for each class how many characters only one version contains, and which
of these existed before Unicode 14."""
import ctypes
import sys
import unicodedata

CLASSES = r"\p{L} \p{Lu} \p{Ll} \p{Lt} \p{Lm} \p{Lo} \p{N} \p{M} \p{P} \p{S} \p{Z} \p{Han} \s \w".split()
UTF_UCP, NO_UTF_CHECK, UNICODE_VERSION = 0x00080000 | 0x00020000, 0x40000000, 10


class Library:
    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        for name in "compile", "match_data_create_from_pattern":
            getattr(self.library, f"pcre2_{name}_8").restype = ctypes.c_void_p
        text = ctypes.create_string_buffer(64)
        self.library.pcre2_config_8(UNICODE_VERSION, text)
        self.unicode = text.value.decode()

    def characters(self, expression):
        code, where, length = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_size_t(len(expression))
        made = ctypes.c_void_p(self.library.pcre2_compile_8(expression.encode(), length, UTF_UCP, ctypes.byref(code),
                                                            ctypes.byref(where), None))
        found = ctypes.c_void_p(self.library.pcre2_match_data_create_from_pattern_8(made, None))

        def matches(text):
            return self.library.pcre2_match_8(made, text, ctypes.c_size_t(len(text)), ctypes.c_size_t(0), NO_UTF_CHECK,
                                              found, None) > 0
        return {c for c in range(0x110000) if not 0xD800 <= c < 0xE000 and matches(chr(c).encode())}


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sides = [Library(path) for path in sys.argv[1:]]
    print(f"Unicode {sides[0].unicode} and {sides[1].unicode}; this Python knows {unicodedata.unidata_version}")
    for name in CLASSES:
        one, other = (x.characters(name) for x in sides)
        old = sorted(c for c in one ^ other if unicodedata.category(chr(c)) != "Cn")
        print(f"{name}: {len(one - other)} and {len(other - one)} alone; known before: {len(old)}",
              *(f"U+{c:04X}" for c in old[:16]))


if __name__ == "__main__":
    main()

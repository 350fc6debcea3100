// spm.cc - SentencePiece for C. See spm.h.
#include "tools/text/spm.h"

#include "tools/text/unigram.h"

#include <sentencepiece_processor.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#ifndef SPM_LIBRARY_VERSION
#define SPM_LIBRARY_VERSION "unknown"
#endif

// A tokeniser is computed by `own` if that is not null, otherwise by the library.
struct spm {
    unigram *own = nullptr;
    sentencepiece::SentencePieceProcessor processor;
    int32_t size = 0;       // pieces, cached because the library computes their number slowly
    std::string normaliser; // the normaliser's character map
    size_t joining = 1;     // bytes of the longest replacement in a decoded text
    size_t unknown = 5;     // bytes of an unknown token in a decoded text

    spm() = default;
    ~spm() { unigram_free(own); }
    spm(const spm &) = delete;
    spm &operator=(const spm &) = delete;
};

namespace {

// Write a message as one safe line, because SentencePiece quotes rejected parts of untrusted files. Throws nothing,
// even if memory runs out.
void say(char *error, size_t error_size, const char *message) {
    text_bytes line = {};
    text_append_clean(&line, message, std::strlen(message));
    if (error && error_size)
        std::snprintf(error, error_size, "%s", line.failed ? "out of memory in the tokeniser" : line.data);
    text_bytes_free(&line);
}

// ---- 1. Checks ----------------------------------------------------------------------------------------------
//
// A .model file is a protocol buffer:
//   1 piece, repeated { 1 text, 2 score (float), 3 type (4 user-defined, 6 byte) }
//   3 normaliser, 5 denormaliser { 2 character map }
// The library parses the buffer safely, but trusts its contents in three places. A crafted file can make it read out of
// bounds or abort:
//   - the character map is a double-array trie that is searched without bounds checks; an array holds 32 matches, but
//     the library counts and then reads more;
//   - user-defined pieces that are prefixes of one another are collected in an array of 64 in the same way;
//   - a byte piece that is not spelled <0xHH> ends the program when it is decoded.
// The library also uses stack for every byte of the longest piece, and memory for every self-test sentence in the model
// (field 4) and for the surface of unknown pieces (44 in field 2). Therefore the lengths of these are limited.

struct bad_model : std::runtime_error {
    using std::runtime_error::runtime_error;
};

using view = std::string_view;

// One message of the wire format; next() steps over its fields.
class fields {
  public:
    uint64_t number = 0, value = 0; // value of a varint or fixed field
    view bytes;                     // value of a length-delimited field
    unsigned wire = 0;

    explicit fields(view message) : rest_(message) {}

    bool next() {
        if (rest_.empty()) return false;
        uint64_t key = varint();
        number = key >> 3;
        wire = static_cast<unsigned>(key & 7);
        if (!number || key > UINT32_MAX) throw bad_model("the tokeniser is not a SentencePiece model (invalid field)");
        switch (wire) {
        case 0: value = varint(); break;
        case 1: value = fixed(8); break;
        case 2: bytes = take(varint()); break;
        case 5: value = fixed(4); break;
        default: throw bad_model("the tokeniser is not a SentencePiece model (unknown wire type)");
        }
        return true;
    }

  private:
    view rest_;

    view take(uint64_t n) {
        if (n > rest_.size()) throw bad_model("the tokeniser is not a SentencePiece model, or is cut short");
        view taken = rest_.substr(0, static_cast<size_t>(n));
        rest_.remove_prefix(static_cast<size_t>(n));
        return taken;
    }
    uint64_t varint() {
        uint64_t v = 0;
        for (unsigned shift = 0; shift < 64; shift += 7) {
            auto byte = static_cast<unsigned char>(take(1)[0]);
            v |= static_cast<uint64_t>(byte & 127) << shift;
            if (byte < 128) return v;
        }
        throw bad_model("the tokeniser is not a SentencePiece model (endless number)");
    }
    uint64_t fixed(unsigned n) {
        view b = take(n);
        uint64_t v = 0;
        for (unsigned i = 0; i < n; i++) v |= static_cast<uint64_t>(static_cast<unsigned char>(b[i])) << (8 * i);
        return v;
    }
};

// Units of a Darts double array: the child of unit i for byte c is unit (i ^ offset(i) ^ c), if its label is c.
// A unit with the leaf bit has its value in child 0.
uint32_t darts_offset(uint32_t unit) { return (unit >> 10) << ((unit & (1u << 9)) >> 6); }
bool darts_has_leaf(uint32_t unit) { return (unit >> 8) & 1; }
uint32_t darts_label(uint32_t unit) { return unit & ((1u << 31) | 0xff); }
uint32_t darts_value(uint32_t unit) { return unit & 0x7fffffffu; }

// Check a character map. Return the length of its longest replacement.
size_t check_character_map(view map) {
    constexpr int most_matches = 32; // Normalizer::kMaxTrieResultsSize
    const bad_model broken("the tokeniser's normalisation table is damaged");
    size_t longest = 0;
    if (map.empty()) return longest;
    if (map.size() <= 4) throw broken;
    uint32_t trie_bytes;
    std::memcpy(&trie_bytes, map.data(), 4);
    map.remove_prefix(4);
    if (trie_bytes >= map.size() || trie_bytes % 4 || trie_bytes < 4) throw broken;
    std::vector<uint32_t> units(trie_bytes / 4);
    std::memcpy(units.data(), map.data(), trie_bytes);
    view strings = map.substr(trie_bytes);
    if (strings.back() != '\0') throw broken; // every replacement is read up to its NUL

    // A unit with label c is the child for c of the unit with base (unit ^ c), so children are found by sorting by
    // base.
    auto base_of = [&](uint32_t i) { return i ^ darts_label(units[i]); };
    std::vector<uint32_t> first(units.size() + 1), children;
    auto is_child = [&](uint32_t i) { return darts_label(units[i]) - 1 < 255 && base_of(i) < units.size(); };
    for (uint32_t i = 0; i < units.size(); i++)
        if (is_child(i)) first[base_of(i) + 1]++;
    for (size_t i = 0; i < units.size(); i++) first[i + 1] += first[i];
    children.resize(first.back());
    std::vector<uint32_t> fill(first.begin(), first.end() - 1);
    for (uint32_t i = 0; i < units.size(); i++)
        if (is_child(i)) children[fill[base_of(i)]++] = i;

    // Visit the units that input can reach, depth first. They must form a tree with shared branches, without cycles.
    // matches[i] is the maximum number of values on a path from unit i.
    constexpr int unseen = -1, open = -2;
    std::vector<int> matches(units.size(), unseen);
    struct step {
        uint32_t unit, at, end; // children[at .. end) are not visited yet
        int best;
    };
    std::vector<step> path;
    auto enter = [&](uint32_t i) {
        uint32_t base = i ^ darts_offset(units[i]);
        if ((base | 0xff) >= units.size()) throw broken;
        if (darts_has_leaf(units[i]) && i != 0) {
            if (darts_value(units[base]) >= strings.size()) throw broken;
            longest = std::max(longest, std::strlen(strings.data() + darts_value(units[base])));
        }
        matches[i] = open;
        path.push_back({ i, first[base], first[base + 1], 0 });
    };
    enter(0);
    while (!path.empty()) {
        step &here = path.back();
        if (here.at == here.end) {
            int found = here.best + (here.unit != 0 && darts_has_leaf(units[here.unit]) ? 1 : 0);
            if (found > most_matches) throw broken;
            matches[here.unit] = found;
            path.pop_back();
            if (!path.empty()) path.back().best = std::max(path.back().best, found);
            continue;
        }
        uint32_t child = children[here.at++];
        if (matches[child] == open) throw broken;
        if (matches[child] == unseen) enter(child); // may invalidate `here`
        else here.best = std::max(here.best, matches[child]);
    }
    return longest;
}

// Return the maximum bytes of a text after a checked character map has replaced its longest matches. Spaces, and the
// space that is added before the text, then have three bytes each.
size_t normalised_bytes(view map, view text) {
    uint32_t trie_bytes = 0, unit;
    size_t bytes = 3;
    if (!map.empty()) std::memcpy(&trie_bytes, map.data(), 4);
    auto at = [&](size_t i) { return std::memcpy(&unit, map.data() + 4 + 4 * i, 4), unit; };
    for (size_t begin = 0; begin < text.size();) {
        size_t end = begin + 1, length = text[begin] == ' ' ? 3 : 1;
        for (size_t i = begin, node = trie_bytes ? darts_offset(at(0)) : 0; trie_bytes && i < text.size(); i++) {
            auto byte = static_cast<unsigned char>(text[i]);
            node ^= byte;
            if (darts_label(at(node)) != byte) break;
            const bool leaf = darts_has_leaf(unit);
            node ^= darts_offset(unit);
            if (!leaf) continue;
            length = 3 * std::strlen(map.data() + 4 + trie_bytes + darts_value(at(node))); // spaces in the worst case
            end = i + 1;
        }
        bytes += length;
        begin = end;
    }
    return bytes;
}

bool is_byte_piece(view piece) {
    auto hex = [](char c) { return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'F'); };
    return piece.size() == 6 && piece.substr(0, 3) == "<0x" && hex(piece[3]) && hex(piece[4]) && piece[5] == '>';
}

// Return the maximum memory for encoding a text; the measured maximum was 200 bytes per byte of text.
size_t encode_bytes(size_t length) { return (size_t(1) << 14) + 256 * length; }

void check_user_defined(std::vector<view> pieces) {
    constexpr size_t most_nested = 64; // kResultSize in PrefixMatcher::PrefixMatch
    std::sort(pieces.begin(), pieces.end());
    std::vector<view> nested; // each starts with its predecessor
    for (view piece : pieces) {
        while (!nested.empty() && piece.substr(0, nested.back().size()) != nested.back()) nested.pop_back();
        nested.push_back(piece);
        if (nested.size() > most_nested) throw bad_model("the tokeniser's own symbols are nested too deep");
    }
}

// Check one piece.
unigram_piece check_piece(view message) {
    view text;
    unigram_piece found = { nullptr, 0, 0, UNIGRAM_NORMAL };
    for (fields piece(message); piece.next();) {
        if (piece.number == 1 && piece.wire == 2) text = piece.bytes;
        if (piece.number == 3 && piece.wire == 0) found.kind = piece.value;
        if (piece.number == 2 && piece.wire == 5) {
            auto bits = static_cast<uint32_t>(piece.value);
            std::memcpy(&found.score, &bits, 4);
            if (!std::isfinite(found.score))
                throw bad_model("a piece of the tokeniser has a score that is not a number");
        }
    }
    if (text.empty() || text.find('\0') != view::npos)
        throw bad_model("a piece of the tokeniser is empty or contains a NUL byte");
    if (text.size() > SPM_MAX_PIECE) throw bad_model("a piece of the tokeniser is longer than 1024 bytes");
    if (found.kind == UNIGRAM_BYTE && !is_byte_piece(text))
        throw bad_model("a byte piece of the tokeniser is not spelled <0xHH>");
    found.text = text.data();
    found.length = text.size();
    return found;
}

// A checked model.
struct contents {
    std::vector<unigram_piece> pieces;
    unigram_model rules = {};
    bool simple = true; // unigram.c supports it
    size_t loading = 0; // maximum memory for loading it with the library
};

// Check the normaliser's rules.
void check_rules(view message, contents *found) {
    for (fields rules(message); rules.next();) {
        const int on = rules.value != 0;
        if (rules.number == 2 && rules.wire == 2) {
            check_character_map(rules.bytes);
            found->rules.map = rules.bytes.data();
            found->rules.map_bytes = rules.bytes.size();
        }
        if (rules.number == 3 && rules.wire == 0) found->rules.prefix = on;
        if (rules.number == 4 && rules.wire == 0) found->rules.collapse = on;
        if (rules.number == 5 && rules.wire == 0) found->rules.escape = on;
    }
}

// Check the settings of training.
void check_training(view message, contents *found) {
    for (fields rules(message); rules.next();) {
        if (rules.number == 3 && (rules.wire || rules.value != 1)) found->simple = false;  // not a Unigram model
        if (rules.number == 24 && (rules.wire || rules.value != 0)) found->simple = false; // spaces end words
        if (rules.number == 35 && rules.wire == 0) found->rules.fallback = rules.value != 0;
        if (rules.number == 44 && rules.wire == 2) {
            found->rules.unknown = rules.bytes.data();
            found->rules.unknown_bytes = rules.bytes.size();
        }
    }
    if (found->rules.unknown_bytes > SPM_MAX_PIECE)
        throw bad_model("the tokeniser's word for unknown pieces is too long");
}

// Check a model, and set the members of `made` for the library.
contents check_model(view model, spm *made) {
    constexpr size_t most_samples = 1 << 20;
    static const char unknown[] = " \u2047 ";
    contents found;
    std::vector<view> user_defined, samples;
    size_t text_bytes = 0, sample_bytes = 0;
    found.rules.prefix = found.rules.collapse = found.rules.escape = 1;
    found.rules.unknown = unknown;
    found.rules.unknown_bytes = sizeof unknown - 1;
    for (fields top(model); top.next();) {
        if (top.wire != 2) continue;
        if (top.number == 1) {
            if (found.pieces.size() == SPM_MAX_PIECES) throw bad_model("the tokeniser has too many pieces");
            const unigram_piece piece = check_piece(top.bytes);
            text_bytes += piece.length;
            if (piece.kind == UNIGRAM_USER_DEFINED) user_defined.emplace_back(piece.text, piece.length);
            found.pieces.push_back(piece);
        } else if (top.number == 2) {
            check_training(top.bytes, &found);
        } else if (top.number == 3) {
            check_rules(top.bytes, &found);
        } else if (top.number == 4) {
            if (!top.bytes.empty()) samples.push_back(top.bytes);
        } else if (top.number == 5) {
            for (fields rules(top.bytes); rules.next();)
                if (rules.number == 2 && rules.wire == 2 && !rules.bytes.empty()) {
                    found.simple = false;
                    made->joining = std::max(made->joining, check_character_map(rules.bytes));
                }
        }
    }
    made->unknown = std::max(made->unknown, found.rules.unknown_bytes);
    const view map(found.rules.map, found.rules.map_bytes);
    for (view sample : samples) sample_bytes += normalised_bytes(map, sample);
    if (sample_bytes > most_samples) throw bad_model("the tokeniser's sentences to test itself are too long");
    if (found.pieces.empty()) throw bad_model("the tokeniser is not a SentencePiece model: it has no pieces");
    check_user_defined(std::move(user_defined));
    if (!samples.empty()) found.simple = false; // the library checks them
    found.rules.pieces = found.pieces.data();
    found.rules.n_pieces = found.pieces.size();
    // Measured with SentencePiece 0.1.97: 340 bytes for a piece of seven letters, 15 bytes per byte of a long piece.
    // This reserves more, up to twice as much for long pieces, because full tables double their size.
    found.loading =
        (size_t(1) << 18) + 400 * found.pieces.size() + 32 * text_bytes + 3 * model.size() + encode_bytes(sample_bytes);
    return found;
}

// ---- 2. Memory ----------------------------------------------------------------------------------------------
//
// SentencePiece does not survive a failed allocation: it dereferences a null pointer, or its destructors end the
// program. Therefore every call into it first reserves all memory that it can need. If operator new then fails, it
// calls the handler below, which frees the reserved block, and tries again. The handler is set once for the process. It
// calls the previous handler for other allocations.

#ifdef __GLIBC__ // in shared libraries, other models allocate at a thread's first access, and abort on failure
__attribute__((tls_model("initial-exec")))
#endif
thread_local void *aside; // block reserved by the current call
std::new_handler next_handler;

void give_back() {
    if (aside) std::free(std::exchange(aside, nullptr));
    else if (next_handler) next_handler();
    else throw std::bad_alloc();
}

class put_aside {
  public:
    explicit put_aside(size_t bytes) {
        static const bool set = (next_handler = std::set_new_handler(give_back), true);
        aside = set ? std::malloc(bytes) : nullptr;
        if (!aside) throw std::bad_alloc();
    }
    ~put_aside() { std::free(std::exchange(aside, nullptr)); }
    put_aside(const put_aside &) = delete;
    put_aside &operator=(const put_aside &) = delete;
};

// Return the result of `body`. If it throws, write one line to `error`, and return -1 or SPM_NO_MEMORY.
template <class Body> int guarded(char *error, size_t error_size, Body body) {
    try {
        return body();
    } catch (const std::bad_alloc &) {
        say(error, error_size, "out of memory in the tokeniser");
        return SPM_NO_MEMORY;
    } catch (const std::exception &e) { say(error, error_size, e.what()); } catch (...) {
        say(error, error_size, "the tokeniser failed for an unknown reason");
    }
    return -1;
}

void check(const sentencepiece::util::Status &status) {
    if (!status.ok()) throw std::runtime_error(status.error_message());
}

// Encode a text with unigram.c, or with the library, in `body`.
template <class Body>
int encode(const spm *t, view text, const unigram_tokens &out, char *error, size_t error_size, Body body) {
    return guarded(error, error_size, [&]() {
        if (text.size() > SPM_MAX_TEXT) throw std::length_error("the text is longer than 16 MiB");
        if (text.find('\0') != view::npos) throw std::invalid_argument("the text contains a NUL byte");
        if (t->own) {
            if (!unigram_encode(t->own, text.data(), text.size(), &out)) throw std::bad_alloc();
            return 0;
        }
        const put_aside memory(encode_bytes(normalised_bytes(t->normaliser, text)));
        body();
        return 0;
    });
}

void give(const std::string &from, text_bytes *to) {
    text_append(to, from.data(), from.size());
    if (to->failed) throw std::bad_alloc();
}

// Set *to to `n` ids or offsets.
template <class Items, class Item> void give(size_t n, Items *to, Item item) {
    void *grown = text_grown(to->data, &to->capacity, n, sizeof *to->data);
    if (!grown) throw std::bad_alloc();
    to->data = static_cast<decltype(to->data)>(grown);
    for (size_t i = 0; i < n; i++) to->data[i] = item(i);
    to->length = n;
}

void give_begins(const sentencepiece::ImmutableSentencePieceText &pieces, text_offsets *begins) {
    give(pieces.pieces_size(), begins, [&](size_t i) { return pieces.pieces(static_cast<int>(i)).begin(); });
}

bool in_range(const spm *t, int32_t id) { return t && id >= 0 && id < t->size; }

void check_ids(const spm *t, const int32_t *ids, size_t count) {
    if (count > SPM_MAX_TEXT) throw std::length_error("more than 16 Mi token ids");
    for (size_t i = 0; i < count; i++)
        if (!in_range(t, ids[i]))
            throw std::out_of_range("token id " + std::to_string(ids[i]) + " is not in the tokeniser");
}

// Return the maximum memory for decoding pieces of `bytes` bytes.
size_t decode_bytes(const spm *t, size_t pieces, size_t bytes) {
    return (size_t(1) << 14) + 512 * pieces + 8 * (bytes + pieces * t->unknown) * t->joining;
}

// Decode ids with unigram.c, or with the library, in `body`. `begins` may be NULL.
template <class Body>
int decode(const spm *t, const int32_t *ids, size_t n, text_bytes *text, text_offsets *begins, char *error,
           size_t error_size, Body body) {
    return guarded(error, error_size, [&]() {
        check_ids(t, ids, n);
        if (t->own) {
            if (!unigram_decode(t->own, ids, nullptr, n, text, begins)) throw std::bad_alloc();
            return 0;
        }
        size_t bytes = 0;
        for (size_t i = 0; i < n; i++) bytes += t->processor.IdToPiece(ids[i]).size();
        const put_aside memory(decode_bytes(t, n, bytes));
        body();
        return 0;
    });
}

} // namespace

// ---- 3. Life ------------------------------------------------------------------------------------------------

static spm *make(const void *bytes, size_t size, bool library, char *error, size_t error_size) {
    spm *made = nullptr;
    const int failed = guarded(error, error_size, [&]() {
        if (!bytes || !size) throw bad_model("the tokeniser is empty");
        if (size > SPM_MAX_MODEL) throw bad_model("the tokeniser is larger than 32 MiB");
        view model(static_cast<const char *>(bytes), size);
        made = new spm;
        const contents found = check_model(model, made);
        made->size = static_cast<int32_t>(found.pieces.size());
        if (found.simple && !library) {
            made->own = unigram_new(&found.rules);
            if (!made->own && errno == ENOMEM) throw std::bad_alloc();
        }
        if (made->own) return 0;
        if (found.rules.map) made->normaliser.assign(found.rules.map, found.rules.map_bytes);
        const put_aside memory(found.loading);
        auto status = made->processor.LoadFromSerializedProto(model);
        if (!status.ok())
            throw bad_model(std::string("SentencePiece rejects the tokeniser: ") + status.error_message());
        // The first IdToPiece allocates. After it, spm_piece, which cannot return an error, needs no memory.
        static_cast<void>(made->processor.IdToPiece(0));
        return 0;
    });
    if (!failed) return made;
    delete made;
    errno = failed == SPM_NO_MEMORY ? ENOMEM : EINVAL;
    return nullptr;
}

extern "C" spm *spm_new(const void *bytes, size_t size, char *error, size_t error_size) {
    return make(bytes, size, false, error, error_size);
}

extern "C" spm *spm_new_by_library(const void *bytes, size_t size, char *error, size_t error_size) {
    return make(bytes, size, true, error, error_size);
}

extern "C" void spm_free(spm *tokeniser) { delete tokeniser; }

// ---- 4. Text and ids ----------------------------------------------------------------------------------------

extern "C" int spm_encode(const spm *t, const char *text, size_t length, text_ids *ids, char *error,
                          size_t error_size) {
    ids->length = 0;
    return encode(t, view(text, length), { ids, nullptr, nullptr }, error, error_size, [&]() {
        std::vector<int> out;
        check(t->processor.Encode(view(text, length), &out));
        give(out.size(), ids, [&](size_t i) { return out[i]; });
    });
}

extern "C" int spm_decode(const spm *t, const int32_t *ids, size_t n, text_bytes *text, char *error,
                          size_t error_size) {
    text_clear(text);
    return decode(t, ids, n, text, nullptr, error, error_size, [&]() {
        std::string out;
        check(t->processor.Decode(std::vector<int>(ids, ids + n), &out));
        give(out, text);
    });
}

extern "C" int spm_encode_begins(const spm *t, const char *text, size_t length, text_offsets *begins, char *error,
                                 size_t error_size) {
    begins->length = 0;
    return encode(t, view(text, length), { nullptr, begins, nullptr }, error, error_size,
                  [&]() { give_begins(t->processor.EncodeAsImmutableProto(view(text, length)), begins); });
}

extern "C" int spm_decode_begins(const spm *t, const int32_t *ids, size_t n, text_offsets *begins, char *error,
                                 size_t error_size) {
    text_bytes text = {};
    begins->length = 0;
    const int failed = decode(t, ids, n, &text, begins, error, error_size,
                              [&]() { give_begins(t->processor.DecodeIdsAsImmutableProto({ ids, ids + n }), begins); });
    text_bytes_free(&text);
    return failed;
}

extern "C" int spm_encode_pieces(const spm *t, const char *text, size_t length, text_bytes *pieces, char *error,
                                 size_t error_size) {
    text_clear(pieces);
    return encode(t, view(text, length), { nullptr, nullptr, pieces }, error, error_size, [&]() {
        std::vector<std::string> out;
        check(t->processor.Encode(view(text, length), &out));
        for (const std::string &piece : out) give(piece, pieces), text_append(pieces, "", 1);
    });
}

extern "C" int spm_decode_pieces(const spm *t, const char *pieces, size_t bytes, text_bytes *text, char *error,
                                 size_t error_size) {
    text_clear(text);
    return guarded(error, error_size, [&]() {
        if (bytes > SPM_MAX_TEXT) throw std::length_error("more than 16 MiB of pieces");
        const auto n = static_cast<size_t>(std::count(pieces, pieces + bytes, '\0'));
        if (t->own) {
            if (!unigram_decode(t->own, nullptr, pieces, n, text, nullptr)) throw std::bad_alloc();
            return 0;
        }
        const put_aside memory(decode_bytes(t, n, bytes));
        std::vector<std::string> in;
        for (size_t at = 0; at < bytes; at += in.back().size() + 1) in.emplace_back(pieces + at);
        std::string out;
        check(t->processor.Decode(in, &out));
        give(out, text);
        return 0;
    });
}

// ---- 5. Pieces ----------------------------------------------------------------------------------------------

extern "C" int32_t spm_size(const spm *t) { return t->size; }

extern "C" const char *spm_piece(const spm *t, int32_t id) {
    size_t length;
    if (!in_range(t, id)) return "";
    return t->own ? unigram_text(t->own, id, &length) : t->processor.IdToPiece(id).c_str();
}

extern "C" int32_t spm_id(const spm *t, const char *piece) {
    if (t->own) return unigram_id(t->own, piece, std::strlen(piece));
    return guarded(nullptr, 0, [&]() -> int {
        int id = t->processor.PieceToId(piece); // unknown pieces have the unknown id
        return in_range(t, id) && t->processor.IdToPiece(id) == piece ? id : -1;
    });
}

extern "C" int spm_is_unknown(const spm *t, int32_t id) {
    if (!in_range(t, id)) return 0;
    return t->own ? unigram_kind_of(t->own, id) == UNIGRAM_UNKNOWN : t->processor.IsUnknown(id);
}

extern "C" int spm_is_control(const spm *t, int32_t id) {
    if (!in_range(t, id)) return 0;
    return t->own ? unigram_kind_of(t->own, id) == UNIGRAM_CONTROL : t->processor.IsControl(id);
}

extern "C" int spm_is_byte(const spm *t, int32_t id) {
    if (!in_range(t, id)) return 0;
    return t->own ? unigram_kind_of(t->own, id) == UNIGRAM_BYTE : t->processor.IsByte(id);
}

extern "C" int32_t spm_unk(const spm *t) { return t->own ? unigram_unknown(t->own) : t->processor.unk_id(); }

extern "C" const char *spm_library_version(void) { return SPM_LIBRARY_VERSION; }

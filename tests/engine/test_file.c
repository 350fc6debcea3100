/* test_file.c - model files: reading, rejecting damaged files with useful messages, verifying, saving, hostile
 * files. */
#include "watched.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>

/* ---- Helpers ---- */

static moe_model_params hooked(mw_heap *heap, int verify) {
    memset(heap, 0, sizeof *heap);
    return (moe_model_params){ { mw_heap_allocate, mw_heap_reallocate, mw_heap_release, heap },
                               .verify = verify ? 1 : -1 };
}

/* Check that the image is rejected with status `want`, that the message names `culprit` (and `companion`, if any), and
 * that nothing leaks. */
static void refuse(mw_image image, int verify, moe_status want, const char *culprit, const char *companion) {
    mw_heap heap;
    moe_model_params params = hooked(&heap, verify);
    char untouched, all[512];
    moe_model *model = (moe_model *)(void *)&untouched;
    moe_error e;
    moe_status status;
    memset(&e, 0, sizeof e);
    status = moe_model_open_memory(image.data, image.bytes, &params, &model, &e);
    if (status == MOE_OK) moe_model_close(model);
    snprintf(all, sizeof all, "%s: %s", e.where, e.message);
    CHECK(status == want, "%s expected, got %s (%s), culprit %s", moe_status_name(want), moe_status_name(status), all,
          culprit);
    assert_int_equal(e.code, want);
    CHECK(strstr(all, culprit) != NULL, "'%s' does not name %s", all, culprit);
    CHECK(!companion || strstr(all, companion) != NULL, "'%s' lacks '%s'", all, companion);
    CHECK(strlen(e.message) > 0 && !strchr(e.message, '\n'), "the message is not one line: '%s'", e.message);
    assert_ptr_equal(model, (void *)&untouched);
    assert_int_equal(heap.blocks, 0);
    assert_int_equal(heap.wrong_sizes, 0);
    assert_int_equal(moe_model_open_memory(image.data, image.bytes, &params, &model, NULL),
                     want); /* `error` may be NULL */
}

static void refuse_format(mw_image image, const char *culprit) { refuse(image, 0, MOE_ERROR_FORMAT, culprit, NULL); }

static moe_model *open_image(mw_image image) {
    moe_model *model = NULL;
    moe_error e = { MOE_OK, "", "" };
    const moe_model_params unread = { .verify = -1 };
    moe_status status = moe_model_open_memory(image.data, image.bytes, &unread, &model, &e);
    CHECK(status == MOE_OK, "%s: %s", e.where, e.message);
    return model;
}

/* A model and its image. Most tests damage a field of the image, seal the image, and check that it is rejected. */
typedef struct fixture {
    mw_model *m;
    mw_image image;
} fixture;

static fixture build(mw_model *m) { return (fixture){ m, mw_build(m) }; }
static fixture small(void) { return build(mw_small(MW_GNMT, MW_F32, 1)); }

static void drop(fixture *f) {
    free(f->image.data);
    mw_free(f->m);
}

static mw_image copy_image(mw_image from, size_t bytes) {
    mw_image image = mw_allocate_image(bytes);
    memcpy(image.data, from.data, bytes < from.bytes ? bytes : from.bytes);
    return image;
}

static const char *tensor_where(const mw_tensor *t) {
    static char where[4][96];
    static int next;
    snprintf(where[next % 4], 96, "tensor %s", t ? t->name : "that the test forgot");
    return where[next++ % 4];
}

static const char *offset_where(size_t offset) {
    static char where[4][96];
    static int next;
    snprintf(where[next % 4], 96, "offset %zu", offset);
    return where[next++ % 4];
}

/* Change a field, check that the image is rejected, and restore it. */
static void break32(const fixture *f, size_t at, uint32_t v, moe_status want, const char *culprit) {
    const uint32_t old = mw_get32(f->image.data + at);
    mw_put32(f->image.data + at, v);
    mw_seal(f->image);
    refuse(f->image, 0, want, culprit, NULL);
    mw_put32(f->image.data + at, old);
    mw_seal(f->image);
}

static void break64(const fixture *f, size_t at, uint64_t v, moe_status want, const char *culprit) {
    const uint64_t old = mw_get64(f->image.data + at);
    mw_put64(f->image.data + at, v);
    mw_seal(f->image);
    refuse(f->image, 0, want, culprit, NULL);
    mw_put64(f->image.data + at, old);
    mw_seal(f->image);
}

static void break_byte(const fixture *f, size_t at, unsigned char v, moe_status want, const char *culprit) {
    const unsigned char old = f->image.data[at];
    f->image.data[at] = v;
    mw_seal(f->image);
    refuse(f->image, 0, want, culprit, NULL);
    f->image.data[at] = old;
    mw_seal(f->image);
}

/* Build an invalid model and check that it is rejected. */
static void refuse_model(mw_model *m, const char *culprit, const char *companion) {
    fixture f = build(m);
    refuse(f.image, 0, MOE_ERROR_FORMAT, culprit, companion);
    drop(&f);
}

/* ---- A valid file ---- */

TEST(every_small_model_opens_in_every_type) {
    for (int variant = 0; variant < MW_VARIANTS; variant++)
        for (uint32_t type = 0; type < 8; type++) {
            mw_model *m = mw_small(variant, type % 4, 3);
            fixture f;
            mw_heap heap;
            moe_model_params params = hooked(&heap, 1);
            moe_model *model = NULL;
            moe_error e = { MOE_OK, "", "" };
            m->version = 1 + type / 4;
            f = build(m);
            CHECK(moe_model_open_memory(f.image.data, f.image.bytes, &params, &model, &e) == MOE_OK,
                  "variant %d: %s: %s", variant, e.where, e.message);
            assert_int_equal(moe_model_vocabulary(model), MW_VOCABULARY);
            assert_int_equal(moe_model_file_bytes(model), f.image.bytes);
            assert_int_equal(moe_model_file_version(model), m->version);
            assert_int_equal(moe_model_tensor_count(model), f.m->n_tensors);
            assert_int_equal(moe_model_meta_count(model), f.m->n_meta);
            moe_model_close(model);
            assert_int_equal(heap.blocks, 0);
            assert_int_equal(heap.wrong_sizes, 0);
            drop(&f);
        }
    moe_model_close(NULL);
}

TEST(metadata_round_trips_within_its_range) {
    static const int64_t ints[] = { -1, INT64_MIN, INT64_MAX };
    static const double reals[] = { 0.5, -1e300 };
    static const char *const texts[] = { "", "eight by", "\xc3\xa9t\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "end" };
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    fixture f;
    moe_model *model;
    size_t i;
    mw_ints(m, "info.ints", ints, 3);
    mw_blob(m, "info.bytes", MW_BYTES, "\xff\0\x80", 3);
    mw_texts(m, "info.texts", texts, 4);
    mw_text(m, "info.empty", "");
    {
        unsigned char value[24];
        mw_put64(value, 2);
        memcpy(value + 8, reals, 16);
        mw_set(m, "info.reals", MW_REALS, value, 24);
    }
    f = build(m);
    model = open_image(f.image);
    i = (size_t)moe_model_meta_find(model, "info.ints");
    assert_int_equal(moe_model_meta_kind(model, i), MOE_META_INTS);
    assert_int_equal(moe_model_meta_length(model, i), 3);
    for (size_t k = 0; k < 3; k++) assert_true(moe_model_meta_int(model, i, k) == ints[k]);
    assert_true(moe_model_meta_int(model, i, 3) == 0);
    assert_true(moe_model_meta_real(model, i, 0) == -1.0);
    assert_int_equal(moe_model_meta_text(model, i, 0).length, 0);
    i = (size_t)moe_model_meta_find(model, "info.reals");
    assert_true(moe_model_meta_real(model, i, 1) == -1e300 && moe_model_meta_real(model, i, 2) == 0);
    assert_true(moe_model_meta_int(model, i, 0) == 0);
    i = (size_t)moe_model_meta_find(model, "info.bytes");
    assert_int_equal(moe_model_meta_text(model, i, 0).length, 3);
    assert_memory_equal(moe_model_meta_text(model, i, 0).data, "\xff\0\x80", 3);
    assert_int_equal(moe_model_meta_text(model, i, 1).length, 0);
    i = (size_t)moe_model_meta_find(model, "info.texts");
    assert_int_equal(moe_model_meta_length(model, i), 4);
    for (size_t k = 0; k < 4; k++) {
        moe_span s = moe_model_meta_text(model, i, k);
        assert_int_equal(s.length, strlen(texts[k]));
        assert_memory_equal(s.data, texts[k], s.length);
    }
    assert_int_equal(moe_model_meta_text(model, i, 4).length, 0);
    i = (size_t)moe_model_meta_find(model, "info.empty");
    assert_int_equal(moe_model_meta_text(model, i, 0).length, 0);
    assert_int_equal(moe_model_meta_length(model, i), 1);
    assert_true(moe_model_meta_find(model, "info.int") == -1);
    assert_true(moe_model_meta_find(model, "") == -1);
    i = moe_model_meta_count(model);
    assert_int_equal(moe_model_meta_key(model, i).length, 0);
    assert_int_equal(moe_model_meta_length(model, i), 0);
    assert_true(moe_model_meta_int(model, i, 0) == 0 && moe_model_meta_real(model, i, 0) == 0);
    assert_int_equal(moe_model_meta_text(model, i, 0).length, 0);
    assert_int_equal(moe_model_tensor(model, moe_model_tensor_count(model)).n_dims, 0);
    moe_model_close(model);
    drop(&f);
}

TEST(languages_and_tags_are_found) {
    fixture f = small();
    moe_model *model = open_image(f.image);
    assert_int_equal(moe_model_language_count(model), 2);
    assert_memory_equal(moe_model_language(model, 1).data, "de", 2);
    assert_int_equal(moe_model_language(model, 2).length, 0);
    assert_int_equal(moe_model_language_tag(model, "en"), MW_TAG_EN);
    assert_int_equal(moe_model_language_tag(model, "de"), MW_TAG_DE);
    assert_int_equal(moe_model_language_tag(model, "d"), -1);
    assert_int_equal(moe_model_language_tag(model, "deu"), -1);
    assert_int_equal(moe_model_language_tag(model, ""), -1);
    moe_model_close(model);
    drop(&f);
    f = build(mw_small(MW_PRODUCT, MW_F32, 1));
    model = open_image(f.image);
    assert_int_equal(moe_model_language_count(model), 0);
    assert_int_equal(moe_model_language_tag(model, "en"), -1);
    assert_int_equal(moe_model_language(model, 0).length, 0);
    moe_model_close(model);
    drop(&f);
}

TEST(layers_and_lists_of_texts_match_the_file) {
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    static const char *const texts[] = { "one", "", "three" };
    fixture f;
    moe_model *model;
    moe_span found[4];
    size_t settings = 0, hidden = 0, words = 0;
    ptrdiff_t list;
    mw_texts(m, "general.list", texts, 3);
    f = build(m);
    model = open_image(f.image);
    for (size_t i = 0; i < moe_model_layer_count(model); i++)
        for (size_t k = 0; moe_model_layer_setting(model, i, k).key; k++, settings++) {
            const moe_setting s = moe_model_layer_setting(model, i, k);
            hidden += strcmp(s.key, "hidden") == 0 && s.number == (double)MW_WIDTH;
            words += s.text && strcmp(s.key, "gate") == 0 && moe_gate_parse(s.text, &(moe_gate){ MOE_GATE_TOPK });
        }
    assert_true(settings > 10 && hidden > 0 && words > 0);
    assert_null(moe_model_layer_setting(model, moe_model_layer_count(model), 0).key);
    assert_null(moe_model_layer_setting(model, 0, SIZE_MAX).key);
    list = moe_model_meta_find(model, "general.list");
    assert_int_equal(moe_model_meta_texts(model, (size_t)list, found, 4), 3);
    assert_memory_equal(found[0].data, "one", 3);
    assert_int_equal(found[1].length, 0);
    assert_memory_equal(found[2].data, "three", 5);
    assert_int_equal(moe_model_meta_texts(model, (size_t)list, found, 2), 2);
    assert_int_equal(moe_model_meta_texts(model, (size_t)moe_model_meta_find(model, "vocab.size"), found, 4), 0);
    assert_int_equal(moe_model_meta_texts(model, moe_model_meta_count(model), found, 4), 0);
    assert_int_equal(moe_model_source_vocabulary(model), moe_model_vocabulary(model));
    assert_string_equal(moe_gate_name(MOE_GATE_BATCHWISE), "batchwise");
    assert_string_equal(moe_gate_name((moe_gate)9), "?");
    assert_string_equal(moe_version(), MOE_VERSION);
    assert_string_equal(moe_status_name(MOE_ERROR_DEVICE), "device");
    moe_model_close(model);
    drop(&f);
}

TEST(the_directory_lists_tensors_and_offsets) {
    fixture f = build(mw_small(MW_GNMT, MW_Q8, 1));
    moe_model *model = open_image(f.image);
    for (size_t i = 0; i < f.m->n_tensors; i++) {
        const mw_tensor *t = &f.m->tensors[i];
        const moe_tensor_info info = moe_model_tensor(model, i);
        uint64_t parameters = t->layout ? 2 : 1;
        for (size_t d = 0; d < t->n_dims; d++) {
            assert_int_equal(info.dims[d], t->dims[d]);
            parameters *= t->dims[d];
        }
        assert_int_equal(info.name.length, strlen(t->name));
        assert_memory_equal(info.name.data, t->name, info.name.length);
        assert_int_equal(info.type, t->type);
        assert_int_equal(info.n_dims, t->n_dims);
        assert_int_equal(info.experts, t->layout);
        assert_int_equal(info.offset, t->offset);
        assert_int_equal(info.bytes, t->bytes);
        assert_int_equal(info.parameters, parameters);
        if (!t->layout) assert_int_equal(info.checksum, mw_crc(t->data, t->bytes));
        assert_int_equal(info.slabs != NULL, t->layout);
        for (size_t x = 0; t->layout && x < t->dims[0]; x++)
            assert_int_equal(info.slabs[x],
                             mw_crc(t->data + x * (t->bytes / t->dims[0]), (size_t)(t->bytes / t->dims[0])));
    }
    moe_model_close(model);
    drop(&f);
}

TEST(crc32_is_the_standard_one) {
    assert_int_equal(moe_crc32(0, "123456789", 9), 0xcbf43926u);
    assert_int_equal(moe_crc32(moe_crc32(0, "1234", 4), "56789", 5), 0xcbf43926u);
    assert_int_equal(moe_crc32(0, "", 0), 0);
    assert_int_equal(~moe_crc_bits(~0u, (const uint8_t *)"123456789", 9), 0xcbf43926u);
    assert_int_equal(mw_crc((const unsigned char *)"123456789", 9), 0xcbf43926u);
}

/* ---- Truncated ---- */

/* Check that the first n bytes of a file, with an unchanged header, are rejected. */
static void refuse_length(const fixture *f, size_t n, const char *culprit) {
    mw_image image = copy_image(f->image, n);
    refuse_format(image, culprit);
    free(image.data);
}

/* Check that the first n bytes of a file are rejected with file size n and, unless 0, header size `header`. */
static void refuse_claimed_length(const fixture *f, size_t n, size_t header, const char *culprit) {
    mw_image image = copy_image(f->image, n);
    mw_put64(image.data + 24, n);
    if (header) mw_put64(image.data + 16, header);
    mw_seal(image);
    refuse_format(image, culprit);
    free(image.data);
}

TEST(truncated_at_every_byte_of_the_first_200) {
    fixture f = small();
    for (size_t n = 0; n < 200; n++) refuse_length(&f, n, n < 64 ? "offset 0" : "offset 24");
    drop(&f);
}

TEST(truncated_with_a_header_that_fits) {
    fixture f = small();
    for (size_t n = 64; n < f.image.bytes; n += n < 400 ? 1 : n < f.m->header_bytes + 64 ? 8 : 509) {
        refuse_claimed_length(&f, n, 0, n < f.m->header_bytes ? "offset 16" : "tensor ");
        if (n < f.m->header_bytes && n % 8 == 0) refuse_claimed_length(&f, n, n, "");
    }
    drop(&f);
}

TEST(truncated_at_every_section_boundary) {
    fixture f = small();
    size_t cuts[512], n = 0;
    for (size_t i = 0; i < f.m->n_meta; i++) cuts[n++] = f.m->meta[i].at;
    for (size_t i = 0; i < f.m->n_tensors; i++) {
        cuts[n++] = f.m->tensors[i].at;
        cuts[n++] = f.m->tensors[i].offset;
        if (i + 1 < f.m->n_tensors) cuts[n++] = f.m->tensors[i].offset + f.m->tensors[i].bytes;
    }
    cuts[n++] = f.m->header_bytes;
    cuts[n++] = f.image.bytes - 1;
    for (size_t i = 0; i < n; i++)
        for (size_t end = cuts[i] - 1; end <= cuts[i] + 1 && end < f.image.bytes; end++)
            refuse_length(&f, end, end < 64 ? "offset 0" : "offset 24");
    drop(&f);
}

/* ---- Header ---- */

TEST(foreign_files_are_recognised) {
    fixture f = small();
    for (size_t i = 0; i < 8; i++) break_byte(&f, i, '?', MOE_ERROR_FORMAT, "offset 0");
    drop(&f);
}

TEST(other_version_is_unsupported) {
    fixture f = small();
    break32(&f, 8, 0, MOE_ERROR_UNSUPPORTED, "offset 8");
    break32(&f, 8, 3, MOE_ERROR_FORMAT, "version 3");
    break32(&f, 8, 4, MOE_ERROR_UNSUPPORTED, "version 4");
    break32(&f, 8, UINT32_MAX, MOE_ERROR_UNSUPPORTED, "offset 8");
    drop(&f);
}

TEST(any_flipped_bit_in_the_header_is_detected) {
    fixture f = small();
    for (size_t at = 0; at < f.m->header_bytes; at++) {
        f.image.data[at] ^= (unsigned char)(1u << at % 8);
        {
            moe_model *model = NULL;
            moe_error e;
            const moe_status status = moe_model_open_memory(f.image.data, f.image.bytes, NULL, &model, &e);
            CHECK(status != MOE_OK, "a flipped bit at %zu is not detected", at);
            if (at >= 40) assert_string_equal(e.where, "offset 12");
        }
        f.image.data[at] ^= (unsigned char)(1u << at % 8);
    }
    drop(&f);
}

TEST(impossible_header_size_is_refused) {
    fixture f = small();
    static const uint64_t sizes[] = { 0, 8, 16, 56, UINT64_MAX, UINT64_MAX - 7, (uint64_t)1 << 63, (uint64_t)1 << 32 };
    for (size_t i = 0; i < MOE_COUNT(sizes); i++) break64(&f, 16, sizes[i], MOE_ERROR_FORMAT, "offset 16");
    break64(&f, 16, f.m->header_bytes + 4, MOE_ERROR_FORMAT, "offset 16");
    break64(&f, 16, f.image.bytes + 8, MOE_ERROR_FORMAT, "offset 16");
    break64(&f, 16, f.m->header_bytes - 8, MOE_ERROR_FORMAT, "");
    break64(&f, 16, f.m->header_bytes + 8, MOE_ERROR_FORMAT, "");
    break64(&f, 16, 64, MOE_ERROR_FORMAT, "offset 32");
    drop(&f);
}

TEST(a_file_size_unlike_the_header_is_refused) {
    fixture f = small();
    break64(&f, 24, f.image.bytes + 1, MOE_ERROR_FORMAT, "offset 24");
    break64(&f, 24, f.image.bytes - 1, MOE_ERROR_FORMAT, "offset 24");
    break64(&f, 24, UINT64_MAX, MOE_ERROR_FORMAT, "offset 24");
    break64(&f, 24, 0, MOE_ERROR_FORMAT, "offset 24");
    drop(&f);
}

TEST(reserved_header_bytes_are_refused) {
    fixture f = small();
    for (size_t at = 40; at < 64; at++) break_byte(&f, at, 1, MOE_ERROR_UNSUPPORTED, "offset 40");
    drop(&f);
}

TEST(counts_that_do_not_fit_are_refused) {
    fixture f = small();
    for (size_t at = 32; at <= 36; at += 4) {
        break32(&f, at, UINT32_MAX, MOE_ERROR_FORMAT, "offset 32");
        break32(&f, at, (uint32_t)(f.m->header_bytes / 24) + 1, MOE_ERROR_FORMAT, "offset 32");
        break32(&f, at, mw_get32(f.image.data + at) + 1, MOE_ERROR_FORMAT, "");
        break32(&f, at, mw_get32(f.image.data + at) - 1, MOE_ERROR_FORMAT, "");
        break32(&f, at, 0, MOE_ERROR_FORMAT, "");
    }
    drop(&f);
}

TEST(bytes_after_the_last_tensor_are_refused) {
    fixture f = small();
    refuse_length(&f, f.image.bytes + 64, "offset 24");
    refuse_claimed_length(&f, f.image.bytes + 64, 0, "end of file");
    drop(&f);
}

TEST(bytes_after_the_directory_are_refused) {
    fixture f = small();
    break32(&f, 36, (uint32_t)f.m->n_tensors - 1, MOE_ERROR_FORMAT, "header");
    drop(&f);
}

TEST(an_empty_image_is_refused) {
    mw_image image = mw_allocate_image(64);
    memcpy(image.data, "MOEMODEL", 8);
    mw_put32(image.data + 8, 1);
    mw_put64(image.data + 16, 64);
    mw_put64(image.data + 24, 64);
    mw_seal(image);
    refuse_format(image, "general.architecture");
    free(image.data);
}

TEST(misaligned_memory_is_an_argument_error) {
    fixture f = small();
    moe_model *model = NULL;
    moe_error e;
    assert_int_equal(moe_model_open_memory(f.image.data + 8, f.image.bytes - 8, NULL, &model, &e), MOE_ERROR_ARGUMENT);
    assert_int_equal(moe_model_open_memory(NULL, 100, NULL, &model, &e), MOE_ERROR_ARGUMENT);
    assert_string_equal(e.where, "data");
    assert_null(model);
    drop(&f);
}

/* ---- Metadata ---- */

TEST(unknown_metadata_kind_is_refused_at_its_offset) {
    fixture f = small();
    for (size_t i = 0; i < f.m->n_meta; i += 7) {
        break32(&f, f.m->meta[i].at, 0, MOE_ERROR_FORMAT, offset_where(f.m->meta[i].at));
        break32(&f, f.m->meta[i].at, 8, MOE_ERROR_FORMAT, offset_where(f.m->meta[i].at));
        break32(&f, f.m->meta[i].at, UINT32_MAX, MOE_ERROR_FORMAT, offset_where(f.m->meta[i].at));
    }
    drop(&f);
}

TEST(impossible_key_length_is_refused_at_its_offset) {
    static const uint32_t lengths[] = { 0, 256, 65536, 0x7fffffffu, UINT32_MAX };
    fixture f = small();
    for (size_t i = 0; i < MOE_COUNT(lengths); i++)
        break32(&f, f.m->meta[3].at + 4, lengths[i], MOE_ERROR_FORMAT, offset_where(f.m->meta[3].at));
    drop(&f);
}

TEST(foreign_characters_in_keys_are_refused) {
    static const unsigned char bad[] = { 'A', 'Z', ' ', '/', ':', '`', '{', 0, 0x80, 0xff, '\n', '%' };
    fixture f = small();
    for (size_t i = 0; i < sizeof bad; i++)
        break_byte(&f, f.m->meta[2].at + 9, bad[i], MOE_ERROR_FORMAT, offset_where(f.m->meta[2].at));
    drop(&f);
}

TEST(used_padding_in_metadata_is_refused) {
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    fixture f;
    const mw_meta *e;
    mw_text(m, "general.name", "12345");
    f = build(m);
    e = mw_find_meta(m, "general.name");
    break_byte(&f, e->at + 8 + strlen(e->key), 1, MOE_ERROR_FORMAT, offset_where(e->at));
    break_byte(&f, mw_at_value(e) + 8 + 5, 1, MOE_ERROR_FORMAT, "general.name");
    drop(&f);
}

TEST(duplicate_keys_are_refused_by_name) {
    fixture f = small();
    const mw_meta *a = mw_find_meta(f.m, "token.bos"), *b = mw_find_meta(f.m, "token.eos");
    memcpy(f.image.data + b->at + 8, a->key, strlen(a->key));
    mw_seal(f.image);
    refuse_format(f.image, "token.bos");
    drop(&f);
}

TEST(broken_utf8_is_refused_by_key) {
    static const char *const broken[] = { "\x80",
                                          "\xc0\x80",
                                          "\xc1\xbf",
                                          "\xc3",
                                          "\xc3(",
                                          "\xe0\x80\x80",
                                          "\xe0\x9f\xbf",
                                          "\xe2\x82",
                                          "\xe2\x82(",
                                          "\xed\xa0\x80",
                                          "\xed\xbf\xbf",
                                          "\xf0\x80\x80\x80",
                                          "\xf0\x8f\xbf\xbf",
                                          "\xf0\x9f\x98",
                                          "\xf4\x90\x80\x80",
                                          "\xf5\x80\x80\x80",
                                          "\xf8\x88\x80\x80\x80",
                                          "\xfe",
                                          "\xff",
                                          "good until here \xbf" };
    static const char *const good[] = { "",
                                        "a",
                                        "\x7f",
                                        "\xc2\x80",
                                        "\xdf\xbf",
                                        "\xe0\xa0\x80",
                                        "\xed\x9f\xbf",
                                        "\xee\x80\x80",
                                        "\xef\xbf\xbf",
                                        "\xf0\x90\x80\x80",
                                        "\xf4\x8f\xbf\xbf" };
    for (size_t i = 0; i < MOE_COUNT(broken); i++) {
        const char *texts[2] = { "fine", broken[i] };
        mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
        mw_text(m, "general.name", broken[i]);
        refuse_model(m, "general.name", NULL);
        m = mw_small(MW_GNMT, MW_F32, 1);
        mw_texts(m, "source.licences", texts, 2);
        refuse_model(m, "source.licences", NULL);
    }
    for (size_t i = 0; i < MOE_COUNT(good); i++) assert_true(moe_utf8_valid(good[i], strlen(good[i])));
    assert_true(moe_utf8_valid("a\0b", 3));
}

TEST(text_lengths_that_overflow_are_refused_by_key) {
    static const uint64_t lengths[] = { UINT64_MAX,        UINT64_MAX - 7, (uint64_t)1 << 63,
                                        (uint64_t)1 << 32, 1 << 20,        INT64_MAX };
    static const char *const keys[] = { "general.name", "languages.codes", "languages.tags", "info.bytes",
                                        "info.reals" };
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    const uint64_t zero = 0;
    fixture f;
    mw_blob(m, "info.bytes", MW_BYTES, "abc", 3);
    mw_set(m, "info.reals", MW_REALS, &zero, 8);
    f = build(m);
    for (size_t k = 0; k < MOE_COUNT(keys); k++)
        for (size_t i = 0; i < MOE_COUNT(lengths); i++) {
            const mw_meta *e = mw_find_meta(m, keys[k]);
            break64(&f, mw_at_value(e), lengths[i], MOE_ERROR_FORMAT, e->key);
        }
    { /* these counts times 8 overflow to small numbers */
        const mw_meta *e = mw_find_meta(m, "languages.tags");
        break64(&f, mw_at_value(e), ((uint64_t)1 << 61) + 2, MOE_ERROR_FORMAT, e->key);
        break64(&f, mw_at_value(e), (uint64_t)1 << 61, MOE_ERROR_FORMAT, e->key);
    }
    drop(&f);
}

TEST(a_text_in_a_list_that_overflows_is_refused_by_key) {
    static const uint64_t lengths[] = { UINT64_MAX, UINT64_MAX - 7, (uint64_t)1 << 63, 1 << 20 };
    fixture f = small();
    const mw_meta *e = mw_find_meta(f.m, "languages.codes");
    for (size_t i = 0; i < MOE_COUNT(lengths); i++) {
        break64(&f, mw_at_value(e) + 8, lengths[i], MOE_ERROR_FORMAT, "languages.codes");
        break64(&f, mw_at_value(e) + 24, lengths[i], MOE_ERROR_FORMAT, "languages.codes");
    }
    break64(&f, mw_at_value(e), 65537, MOE_ERROR_FORMAT, "languages.codes");
    drop(&f);
}

TEST(a_long_list_of_texts_is_limited) { /* the time to read an element grows with its index */
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    const char **texts = mw_zeros(65537 * sizeof *texts);
    fixture f;
    for (size_t i = 0; i < 65537; i++) texts[i] = "";
    mw_texts(m, "info.many", texts, 65536);
    f = build(m);
    moe_model_close(open_image(f.image));
    free(f.image.data);
    mw_texts(m, "info.many", texts, 65537);
    refuse_model(m, "info.many", NULL);
    free(texts);
}

/* ---- Tensor directory ---- */

TEST(unknown_number_format_is_unsupported_and_names_the_tensor) {
    fixture f = small();
    for (size_t i = 0; i < f.m->n_tensors; i += 3) {
        break32(&f, f.m->tensors[i].at, MOE_TYPE_COUNT, MOE_ERROR_UNSUPPORTED, tensor_where(&f.m->tensors[i]));
        break32(&f, f.m->tensors[i].at, 16, MOE_ERROR_UNSUPPORTED, tensor_where(&f.m->tensors[i]));
        break32(&f, f.m->tensors[i].at, UINT32_MAX, MOE_ERROR_UNSUPPORTED, tensor_where(&f.m->tensors[i]));
    }
    drop(&f);
}

TEST(impossible_layout_names_the_tensor) {
    fixture f = small();
    const mw_tensor *matrix = mw_find_tensor(f.m, "embedding.weight"),
                    *experts = mw_find_tensor(f.m, "encoder.1.experts");
    const mw_tensor *vector = mw_find_tensor(f.m, "attention.v");
    break32(&f, matrix->at + 4, 1, MOE_ERROR_FORMAT, tensor_where(matrix));
    break32(&f, matrix->at + 4, 2, MOE_ERROR_FORMAT, tensor_where(matrix));
    break32(&f, experts->at + 4, 0, MOE_ERROR_FORMAT, tensor_where(experts));
    break32(&f, vector->at + 4, 1, MOE_ERROR_FORMAT, tensor_where(vector));
    break32(&f, vector->at, 1, MOE_ERROR_FORMAT, tensor_where(vector)); /* vectors must be F32 */
    break32(&f, vector->at, 3, MOE_ERROR_FORMAT, tensor_where(vector));
    drop(&f);
}

TEST(impossible_number_of_dimensions_is_refused_at_its_offset) {
    static const uint32_t counts[] = { 0, 4, 5, 255, UINT32_MAX };
    fixture f = small();
    const mw_tensor *t = &f.m->tensors[2];
    for (size_t i = 0; i < MOE_COUNT(counts); i++)
        break32(&f, t->at + 8, counts[i], MOE_ERROR_FORMAT, offset_where(t->at));
    drop(&f);
}

TEST(impossible_tensor_name_is_refused_at_its_offset) {
    static const uint32_t lengths[] = { 0, 256, 1 << 20, UINT32_MAX };
    static const unsigned char bad[] = { 'A', ' ', '/', 0, 0x80, 0xff, '%' };
    fixture f = small();
    const mw_tensor *t = &f.m->tensors[4];
    for (size_t i = 0; i < MOE_COUNT(lengths); i++)
        break32(&f, t->at + 12, lengths[i], MOE_ERROR_FORMAT, offset_where(t->at));
    for (size_t i = 0; i < sizeof bad; i++)
        break_byte(&f, mw_at_name(t) + 2, bad[i], MOE_ERROR_FORMAT, offset_where(t->at));
    drop(&f);
}

TEST(reserved_word_of_a_tensor_entry_is_refused) {
    fixture f = small();
    const mw_tensor *t = &f.m->tensors[1];
    break32(&f, mw_at_bytes(t) + 12, 1, MOE_ERROR_FORMAT, offset_where(t->at));
    drop(&f);
}

TEST(impossible_dimensions_name_the_tensor) {
    static const uint64_t dims[] = { 0, (uint64_t)1 << 31, (uint64_t)1 << 32, (uint64_t)1 << 62, UINT64_MAX };
    fixture f = small();
    for (size_t i = 0; i < f.m->n_tensors; i += 2)
        for (size_t d = 0; d < f.m->tensors[i].n_dims; d++)
            for (size_t k = 0; k < MOE_COUNT(dims); k++)
                break64(&f, f.m->tensors[i].at + 16 + 8 * d, dims[k], MOE_ERROR_FORMAT, tensor_where(&f.m->tensors[i]));
    drop(&f);
}

/* Each dimension is valid, but the product overflows to the number of stored bytes, or to 0. */
TEST(dimensions_whose_product_overflows_name_the_tensor) {
    for (uint32_t type = 0; type < 4; type++) {
        fixture f = build(mw_small(MW_GNMT, type, 1));
        const mw_tensor *matrix = mw_find_tensor(f.m, "embedding.weight"),
                        *experts = mw_find_tensor(f.m, "encoder.1.experts");
        for (uint64_t v = (uint64_t)1 << 30; v <= INT32_MAX; v += 0x3fffffff) {
            mw_put64(f.image.data + matrix->at + 16, v);
            break64(&f, matrix->at + 24, v, MOE_ERROR_FORMAT, tensor_where(matrix));
            mw_put64(f.image.data + matrix->at + 16, matrix->dims[0]);
            mw_put64(f.image.data + experts->at + 16, v);
            mw_put64(f.image.data + experts->at + 24, v);
            break64(&f, experts->at + 32, v, MOE_ERROR_FORMAT, tensor_where(experts));
            mw_put64(f.image.data + experts->at + 16, 2);
            break64(&f, experts->at + 32, v, MOE_ERROR_FORMAT, tensor_where(experts));
            mw_put64(f.image.data + experts->at + 16, experts->dims[0]);
            mw_put64(f.image.data + experts->at + 24, experts->dims[1]);
        }
        drop(&f);
    }
}

TEST(misaligned_tensors_are_named) {
    fixture f = small();
    const mw_tensor *matrix = mw_find_tensor(f.m, "embedding.weight"),
                    *experts = mw_find_tensor(f.m, "encoder.1.experts");
    for (size_t by = 1; by < 64; by *= 2)
        break64(&f, mw_at_offset(matrix), matrix->offset + by, MOE_ERROR_FORMAT, tensor_where(matrix));
    break64(&f, mw_at_offset(experts), experts->offset + 64, MOE_ERROR_FORMAT, tensor_where(experts));
    break64(&f, mw_at_offset(experts), experts->offset + 2048, MOE_ERROR_FORMAT, tensor_where(experts));
    drop(&f);
}

TEST(overlapping_tensors_are_named) {
    fixture f = small();
    for (size_t i = 1; i < f.m->n_tensors; i++) {
        const mw_tensor *t = &f.m->tensors[i];
        break64(&f, mw_at_offset(t), f.m->tensors[i - 1].offset, MOE_ERROR_FORMAT, tensor_where(t));
        break64(&f, mw_at_offset(t), f.m->tensors[0].offset, MOE_ERROR_FORMAT, tensor_where(t));
    }
    break64(&f, mw_at_offset(&f.m->tensors[0]), 0, MOE_ERROR_FORMAT,
            tensor_where(&f.m->tensors[0])); /* the data would overlap the header */
    break64(&f, mw_at_offset(&f.m->tensors[0]), f.m->header_bytes / 64 * 64 - 64, MOE_ERROR_FORMAT,
            tensor_where(&f.m->tensors[0]));
    drop(&f);
}

TEST(tensors_outside_the_file_are_named) {
    fixture f = small();
    for (size_t i = 0; i < f.m->n_tensors; i += 3) {
        const mw_tensor *t = &f.m->tensors[i];
        break64(&f, mw_at_offset(t), mw_up(f.image.bytes, 4096), MOE_ERROR_FORMAT, tensor_where(t));
        break64(&f, mw_at_offset(t), UINT64_MAX - 4095, MOE_ERROR_FORMAT, tensor_where(t));
        break64(&f, mw_at_offset(t), (uint64_t)1 << 63, MOE_ERROR_FORMAT, tensor_where(t));
        break64(&f, mw_at_offset(t), (0 - t->bytes) & ~(uint64_t)4095, MOE_ERROR_FORMAT,
                tensor_where(t)); /* the end of the data overflows */
    }
    drop(&f);
}

/* 2^26 - 1 experts of (2^26 + 1) * 4096 bytes have 2^64 - 4096 bytes in total, so offset + bytes overflows. */
TEST(an_end_that_wraps_around_names_the_tensor) {
    fixture f = small();
    const mw_tensor *t = mw_find_tensor(f.m, "encoder.1.experts");
    mw_put64(f.image.data + t->at + 16, ((uint64_t)1 << 26) - 1);
    mw_put64(f.image.data + t->at + 24, ((uint64_t)1 << 26) + 1);
    mw_put64(f.image.data + t->at + 32, 512);
    mw_put64(f.image.data + mw_at_bytes(t), 0 - (uint64_t)4096);
    mw_seal(f.image);
    refuse(f.image, 0, MOE_ERROR_FORMAT, tensor_where(t), "outside the file");
    drop(&f);
}

TEST(sizes_unlike_the_shape_name_the_tensor) {
    fixture f = small();
    for (size_t i = 0; i < f.m->n_tensors; i++) {
        const mw_tensor *t = &f.m->tensors[i];
        break64(&f, mw_at_bytes(t), t->bytes + 64, MOE_ERROR_FORMAT, tensor_where(t));
        break64(&f, mw_at_bytes(t), t->bytes - 1, MOE_ERROR_FORMAT, tensor_where(t));
        break64(&f, mw_at_bytes(t), 0, MOE_ERROR_FORMAT, tensor_where(t));
        break64(&f, mw_at_bytes(t), UINT64_MAX, MOE_ERROR_FORMAT, tensor_where(t));
    }
    drop(&f);
}

TEST(duplicate_tensors_are_refused_by_name) {
    fixture f = small();
    const mw_tensor *a = mw_find_tensor(f.m, "encoder.0.fwd.w_r"), *b = mw_find_tensor(f.m, "encoder.0.bwd.w_r");
    memcpy(f.image.data + mw_at_name(b), a->name, strlen(a->name));
    mw_seal(f.image);
    refuse_format(f.image, "encoder.0.fwd.w_r");
    drop(&f);
}

/* ---- Structure described by metadata ---- */

TEST(every_missing_tensor_is_named) {
    for (int variant = 0; variant < MW_VARIANTS; variant++) {
        mw_model *m = mw_small(variant, MW_F32, 1);
        const size_t n = m->n_tensors;
        mw_free(m);
        for (size_t i = 0; i < n; i++) {
            char name[64];
            m = mw_small(variant, MW_F32, 1);
            snprintf(name, sizeof name, "%s", m->tensors[i].name);
            mw_drop_tensor(m, name);
            if (strcmp(name, "attention.bias") == 0 || strncmp(name, "output.", 7) == 0) { /* optional tensors */
                fixture f = build(m);
                moe_model_close(open_image(f.image));
                drop(&f);
            } else {
                refuse_model(m, strcmp(name, "embedding.weight") == 0 ? "source.embedding.weight" : name, "missing");
            }
        }
    }
}

TEST(every_wrong_shape_names_the_tensor_and_both_shapes) {
    for (int variant = 0; variant < MW_VARIANTS; variant++) {
        mw_model *m = mw_small(variant, MW_F32, 1);
        const size_t n = m->n_tensors;
        mw_free(m);
        for (size_t i = 0; i < n; i++) {
            char name[64], is[64], needs[64];
            mw_tensor *t;
            size_t a, b, c;
            m = mw_small(variant, MW_F32, 1);
            t = &m->tensors[i];
            snprintf(name, sizeof name, "%s", t->name);
            a = (size_t)t->dims[0], b = (size_t)t->dims[1], c = (size_t)t->dims[2];
            if (t->n_dims == 1) {
                snprintf(is, sizeof is, "is [%zu]", a + 1);
                snprintf(needs, sizeof needs, "needs [%zu]", a);
                mw_drop_tensor(m, name);
                mw_random_vector(m, name, a + 1, 0, 1);
            } else if (t->layout) {
                snprintf(is, sizeof is, "[%zu, %zu, %zu]", a + 1, b, c);
                snprintf(needs, sizeof needs, "[%zu, %zu, %zu]", a, b, c);
                mw_drop_tensor(m, name);
                mw_random_experts(m, name, MW_F32, a + 1, b, c, 1);
            } else {
                snprintf(is, sizeof is, "[%zu, %zu]", a + 1, b);
                snprintf(needs, sizeof needs, "[%zu, %zu]", a, b);
                mw_drop_tensor(m, name);
                mw_random_matrix(m, name, MW_F32, a + 1, b, 1);
            }
            {
                fixture f = build(m);
                refuse(f.image, 0, MOE_ERROR_FORMAT, name, is);
                refuse(f.image, 0, MOE_ERROR_FORMAT, name, needs);
                drop(&f);
            }
            if (c || !b) continue; /* transpose the matrix if that changes the shape; otherwise try a vector */
            m = mw_small(variant, MW_F32, 1);
            mw_drop_tensor(m, name);
            if (a == b) mw_random_vector(m, name, a, 0, 1);
            else mw_random_matrix(m, name, MW_F32, b, a, 1);
            refuse_model(m, name, needs);
        }
    }
}

TEST(every_missing_required_key_is_named) {
    static const char *const keys[] = {
        "general.architecture", "vocab.size",       "model.width",     "token.bos",         "token.eos",
        "encoder.layers",       "decoder.layers",   "attention.kind",  "attention.size",    "attention.query",
        "encoder.0.kind",       "encoder.0.hidden", "encoder.1.kind",  "encoder.1.experts", "encoder.1.gate",
        "encoder.1.k",          "encoder.1.hidden", "decoder.2.hidden"
    };
    for (size_t i = 0; i < MOE_COUNT(keys); i++) {
        mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
        mw_drop(m, keys[i]);
        refuse_model(m, keys[i], "missing");
    }
}

TEST(unknown_words_are_refused_by_key) {
    static const char *const keys[] = { "general.architecture", "encoder.0.kind",       "encoder.1.kind",
                                        "encoder.0.merge",      "encoder.1.gate",       "encoder.1.empty",
                                        "encoder.1.output",     "encoder.1.activation", "decoder.0.context",
                                        "attention.kind",       "attention.query",      "attention.start",
                                        "decoder.init" };
    static const char *const words[] = { "", "LSTM", "lst", "lstmm", "something else" };
    for (size_t i = 0; i < MOE_COUNT(keys); i++) {
        mw_model *m;
        for (size_t w = 0; w < MOE_COUNT(words); w++) {
            m = mw_small(MW_GNMT, MW_F32, 1);
            mw_text(m, keys[i], words[w]);
            refuse_model(m, keys[i], NULL);
        }
        m = mw_small(MW_GNMT, MW_F32, 1);
        mw_int(m, keys[i], 0); /* a number instead of text */
        refuse_model(m, keys[i], NULL);
    }
}

TEST(numbers_out_of_range_are_refused_by_key) {
    static const struct {
        const char *key;
        int64_t value;
    } cases[] = { { "vocab.size", 0 },
                  { "vocab.size", 1 },
                  { "vocab.size", -5 },
                  { "vocab.size", INT64_MAX },
                  { "vocab.size", (int64_t)1 << 32 },
                  { "model.width", 0 },
                  { "model.width", INT64_MIN },
                  { "model.width", (int64_t)1 << 33 },
                  { "token.pad", MW_VOCABULARY },
                  { "token.pad", -2 },
                  { "token.unk", MW_VOCABULARY },
                  { "token.unk", INT64_MIN },
                  { "token.bos", -1 },
                  { "token.bos", MW_VOCABULARY },
                  { "token.eos", -1 },
                  { "token.eos", MW_VOCABULARY },
                  { "token.eos", INT64_MAX },
                  { "source.tag", 3 },
                  { "source.tag", -1 },
                  { "source.bos", 2 },
                  { "source.eos", 7 },
                  { "encoder.layers", 0 },
                  { "encoder.layers", -1 },
                  { "encoder.layers", 257 },
                  { "decoder.layers", 0 },
                  { "decoder.layers", 257 },
                  { "decoder.layers", INT64_MAX },
                  { "encoder.0.hidden", 0 },
                  { "encoder.0.hidden", -1 },
                  { "encoder.0.hidden", INT64_MAX },
                  { "encoder.0.proj", -1 },
                  { "encoder.0.proj", INT64_MAX },
                  { "encoder.0.bidirectional", 2 },
                  { "encoder.0.residual", 2 },
                  { "encoder.1.experts", 0 },
                  { "encoder.1.experts", -1 },
                  { "encoder.1.experts", INT64_MAX },
                  { "encoder.1.k", 0 },
                  { "encoder.1.k", 5 },
                  { "encoder.1.k", -1 },
                  { "encoder.1.hidden", 0 },
                  { "encoder.1.groups", 5 },
                  { "encoder.1.groups", -1 },
                  { "encoder.1.residual", 2 },
                  { "decoder.1.k", 6 },
                  { "decoder.1.k", 0 },
                  { "attention.size", 0 },
                  { "attention.size", INT64_MAX },
                  { "attention.layer", -1 },
                  { "attention.layer", 3 },
                  { "attention.layer", INT64_MAX } };
    for (size_t i = 0; i < MOE_COUNT(cases); i++) {
        mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
        mw_int(m, cases[i].key, cases[i].value);
        refuse_model(m, cases[i].key, "must be");
    }
    for (size_t i = 0; i < MOE_COUNT(cases); i++) {
        mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
        mw_text(m, cases[i].key, "3");
        refuse_model(m, cases[i].key, NULL);
    }
}

TEST(reals_out_of_range_are_refused_by_key) {
    static const char *const keys[] = { "embedding.scale", "decoder.0.forget_bias", "decoder.1.scale" };
    static const double values[] = { (double)NAN, (double)INFINITY, -(double)INFINITY, 1e300, -1e300 };
    for (size_t i = 0; i < MOE_COUNT(keys); i++) {
        mw_model *m;
        for (size_t v = 0; v < MOE_COUNT(values); v++) {
            m = mw_small(MW_GNMT, MW_F32, 1);
            mw_real(m, keys[i], values[v]);
            refuse_model(m, keys[i], "must be");
        }
        m = mw_small(MW_GNMT, MW_F32, 1);
        mw_text(m, keys[i], "1");
        refuse_model(m, keys[i], "number");
    }
}

TEST(hidden_sizes_unlike_the_tensors_name_a_tensor) {
    static const int64_t sizes[] = { 1, 13, 1 << 20 };
    for (size_t i = 0; i < MOE_COUNT(sizes); i++) {
        mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
        mw_int(m, "encoder.0.hidden", sizes[i]);
        refuse_model(m, "encoder.0.fwd.w_x", NULL);
        m = mw_small(MW_GNMT, MW_F32, 1);
        mw_int(m, "encoder.1.hidden", sizes[i]);
        refuse_model(m, "encoder.1.experts", NULL);
        m = mw_small(MW_GNMT, MW_F32, 1);
        mw_int(m, "model.width", sizes[i]);
        refuse_model(m, "embedding.weight", NULL);
        m = mw_small(MW_GNMT, MW_F32, 1);
        mw_int(m, "attention.size", sizes[i]);
        refuse_model(m, "attention.w_key", NULL);
    }
}

TEST(token_lists_out_of_range_are_refused_by_key) {
    static const int64_t lists[][2] = { { MW_VOCABULARY, 4 },
                                        { 4, -1 },
                                        { INT64_MAX, 4 },
                                        { 4, INT64_MIN },
                                        { (int64_t)1 << 32, 4 } };
    for (size_t i = 0; i < MOE_COUNT(lists); i++) {
        mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
        mw_ints(m, "languages.tags", lists[i], 2);
        refuse_model(m, "languages.tags", NULL);
        m = mw_small(MW_GNMT, MW_F32, 1);
        mw_ints(m, "token.never", lists[i], 2);
        refuse_model(m, "token.never", NULL);
    }
    {
        mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
        mw_int(m, "token.never", 3);
        refuse_model(m, "token.never", NULL);
        m = mw_small(MW_GNMT, MW_F32, 1);
        mw_text(m, "languages.tags", "4 5");
        refuse_model(m, "languages.tags", NULL);
    }
}

TEST(languages_and_tags_must_agree) {
    static const int64_t tags[] = { 4, 5, 6 };
    static const char *const codes[] = { "en", "de", "fr" };
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    mw_ints(m, "languages.tags", tags, 3);
    refuse_model(m, "languages.codes", "languages.tags");
    m = mw_small(MW_GNMT, MW_F32, 1);
    mw_texts(m, "languages.codes", codes, 3);
    refuse_model(m, "languages.codes", NULL);
    m = mw_small(MW_GNMT, MW_F32, 1);
    mw_drop(m, "languages.tags");
    refuse_model(m, "languages.codes", NULL);
    m = mw_small(MW_GNMT, MW_F32, 1);
    mw_text(m, "languages.codes", "en de");
    refuse_model(m, "languages.codes", NULL);
}

TEST(attention_layer_must_be_an_lstm) {
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    mw_int(m, "attention.layer", 1);
    refuse_model(m, "attention.layer", "lstm");
}

/* The layer named by align.layer must attend to the source and have the heads listed in align.heads. */
TEST(alignment_heads_must_exist) {
    static const struct {
        int64_t layer, heads;
        const char *key, *needs;
    } cases[] = { { 4, 1, "align.layer", "must be 0 to 3" },
                  { -1, 1, "align.layer", "must be" },
                  { 0, 1, "align.layer", "decoder.0, which does not attend" },
                  { 2, 1, "align.layer", "decoder.2" },
                  { 1, 0, "align.heads", "must be 1 to 3" },
                  { 1, 4, "align.heads", "must be 1 to 3" },
                  { 1, -1, "align.heads", "must be" },
                  { 1, INT64_MAX, "align.heads", NULL } };
    for (size_t i = 0; i < MOE_COUNT(cases); i++) {
        mw_model *m = mw_transformer(MW_MARIAN, MW_F32, 1);
        mw_int(m, "align.layer", cases[i].layer);
        if (cases[i].needs) mw_int(m, "align.heads", cases[i].heads);
        refuse_model(m, cases[i].key, cases[i].needs ? cases[i].needs : "missing");
    }
}

/* Encoders cannot have a GNMT attention layer, and classifiers can only have mixtures. */
TEST(unexpected_layers_are_refused) {
    static const char *const others[] = { "gnmt-attention", "lstm", "ffn", "norm", "attention" };
    for (int variant = 0; variant <= MW_TRANSFORMERS; variant++) {
        mw_model *m = variant == MW_TRANSFORMERS ? mw_small(MW_GNMT, MW_F32, 1) : mw_transformer(variant, MW_F32, 1);
        mw_text(m, "encoder.1.kind", "gnmt-attention");
        refuse_model(m, "encoder.1.kind", "not supported in the encoder");
    }
    for (size_t i = 0; i < MOE_COUNT(others); i++) {
        mw_model *m = mw_classifier(MW_F32, 1);
        mw_text(m, "network.1.kind", others[i]);
        refuse_model(m, "network.1.kind", "not supported in the network");
    }
}

/* A decoder with cross-attention layers may have an LSTM only if it does not read a context. */
TEST(a_context_without_its_attention_is_refused) {
    for (int context = 0; context < 2; context++) {
        mw_model *m = mw_transformer(MW_STUDENT, MW_F32, 1);
        mw_int(m, "decoder.layers", 5);
        mw_lstm(m, "decoder.4.", context ? 2 * MW_WIDTH : MW_WIDTH, MW_WIDTH, 0, 1);
        if (context) mw_text(m, "decoder.4.context", "previous");
        if (context) {
            refuse_model(m, "decoder.4.context", "none");
        } else {
            fixture f = build(m);
            moe_model_close(open_image(f.image));
            drop(&f);
        }
    }
}

TEST(current_context_before_the_attention_layer_is_refused) {
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    mw_text(m, "decoder.0.context", "current");
    refuse_model(m, "decoder.0.context", "current");
    m = mw_small(MW_PRODUCT, MW_F32, 1);
    mw_int(m, "attention.layer", 1); /* this layer would need the context before it is computed */
    refuse_model(m, "decoder.1.context", NULL);
}

TEST(residual_over_different_widths_names_the_layer) {
    mw_model *m = mw_small(MW_BOTH_CONTEXTS, MW_F32, 1);
    mw_int(m, "encoder.0.residual", 1);
    refuse_model(m, "encoder.0.residual", "22");
}

TEST(decoder_must_end_with_the_models_width) {
    mw_model *m = mw_small(MW_CARRIED_QUERY, MW_F32, 1);
    mw_drop_tensor(m, "decoder.1.w_x");
    mw_drop_tensor(m, "decoder.1.w_r");
    mw_drop_tensor(m, "decoder.1.bias");
    mw_lstm(m, "decoder.1.", MW_WIDTH, 24, 0, 0);
    mw_int(m, "decoder.1.residual", 0);
    refuse_model(m, "model.width", "24");
}

TEST(nan_in_vectors_names_the_tensor) {
    static const char *const vectors[] = { "encoder.0.fwd.bias", "encoder.1.gate.threshold",
                                           "attention.v",        "attention.bias",
                                           "output.bias",        "decoder.0.bias" };
    static const uint32_t bad[] = { 0x7fc00000u, 0x7f800000u, 0xff800000u, 0x7f800001u, 0xffffffffu };
    fixture f = small();
    for (size_t i = 0; i < MOE_COUNT(vectors); i++)
        for (size_t b = 0; b < MOE_COUNT(bad); b++) {
            const mw_tensor *t = mw_find_tensor(f.m, vectors[i]);
            break32(&f, t->offset, bad[b], MOE_ERROR_FORMAT, tensor_where(t));
            break32(&f, t->offset + t->bytes - 4, bad[b], MOE_ERROR_FORMAT, tensor_where(t));
        }
    drop(&f);
}

TEST(broken_q8_scales_name_the_tensor) {
    static const uint32_t bad[] = { 0x7fc00000u, 0x7f800000u, 0xbf800000u, 0xff800000u, 0x7f800001u };
    fixture f = build(mw_small(MW_GNMT, MW_Q8, 1));
    for (size_t i = 0; i < f.m->n_tensors; i++) {
        const mw_tensor *t = &f.m->tensors[i];
        if (t->type != MW_Q8 || t->layout) continue;
        for (size_t b = 0; b < MOE_COUNT(bad); b++) {
            const size_t scales = t->offset + mw_up((size_t)t->dims[0], 16) * mw_up((size_t)t->dims[1], 64);
            break32(&f, scales, bad[b], MOE_ERROR_FORMAT, tensor_where(t));
            break32(&f, scales + 4 * (size_t)(t->dims[0] - 1), bad[b], MOE_ERROR_FORMAT, tensor_where(t));
        }
    }
    drop(&f);
}

/* If an empty mask yields zero, a NaN in a gate would select no experts and remain undetected. */
TEST(nan_in_gates_names_the_tensor) {
    static const uint32_t bad[] = { 0x7fc00000u, 0x7f800000u, 0xff800000u, 0x7f800001u };
    fixture f = small();
    const mw_tensor *t = mw_find_tensor(f.m, "encoder.1.gate.weight");
    for (size_t b = 0; b < MOE_COUNT(bad); b++) {
        break32(&f, t->offset, bad[b], MOE_ERROR_FORMAT, "encoder.1.gate.weight");
        break32(&f, t->offset + t->bytes - 4, bad[b], MOE_ERROR_FORMAT, "encoder.1.gate.weight");
    }
    drop(&f);
}

/* 127 * 127 * 133200 > 2^31, so the integer sum over such a row would overflow. */
TEST(q8_rows_too_long_for_a_32_bit_sum_name_the_tensor) {
    mw_model *m = mw_small(MW_GNMT, MW_Q8, 1);
    mw_drop_tensor(m, "decoder.1.gate.weight");
    mw_drop_tensor(m, "decoder.1.experts");
    mw_moe(m, "decoder.1.", 1, 1, 133200, "topk");
    refuse_model(m, "decoder.1.experts", NULL);
}

TEST(quantised_gates_are_refused_by_name) {
    for (uint32_t type = 1; type < 4; type++) {
        mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
        mw_drop_tensor(m, "encoder.1.gate.weight");
        mw_random_matrix(m, "encoder.1.gate.weight", type, 4, MW_WIDTH, 1);
        refuse_model(m, "encoder.1.gate.weight", "f32");
    }
}

TEST(experts_stored_as_a_matrix_are_refused_by_name) {
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    mw_drop_tensor(m, "encoder.1.experts");
    mw_random_matrix(m, "encoder.1.experts", MW_F32, 4 * 20, MW_WIDTH, 1);
    refuse_model(m, "encoder.1.experts", NULL);
    m = mw_small(MW_GNMT, MW_F32, 1);
    mw_drop_tensor(m, "decoder.0.w_x");
    mw_random_experts(m, "decoder.0.w_x", MW_F32, 80, 32, 1, 1);
    refuse_model(m, "decoder.0.w_x", NULL);
}

/* ---- Files ---- */

static char directory[64];

static const char *in_directory(const char *name) {
    static char path[4][192];
    static int next;
    snprintf(path[next % 4], 192, "%s/%s", directory, name);
    return path[next++ % 4];
}

FIXTURE(make_directory) {
    snprintf(directory, sizeof directory, "/tmp/moe-test-file-XXXXXX");
    return mkdtemp(directory) ? 0 : -1;
}

FIXTURE(remove_directory) {
    static const char *const names[] = { "model.bin", "saved.bin", "again.bin", "empty.bin", "short.bin", "kept.bin" };
    for (size_t i = 0; i < MOE_COUNT(names); i++) remove(in_directory(names[i]));
    return rmdir(directory); /* fails if any file remains, e.g. a temporary file */
}

static int exists(const char *path) { return access(path, F_OK) == 0; }

static size_t files_in_directory(void) {
    DIR *dir = opendir(directory);
    size_t n = 0;
    assert_non_null(dir);
    while (readdir(dir)) n++;
    closedir(dir);
    return n - 2; /* skip "." and ".." */
}

static void write_file(const char *path, const void *data, size_t bytes) {
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_true(fwrite(data, 1, bytes, file) == bytes);
    assert_int_equal(fclose(file), 0);
}

static mw_image read_file(const char *path) {
    FILE *file = fopen(path, "rb");
    mw_image image;
    assert_non_null(file);
    fseek(file, 0, SEEK_END);
    image = mw_allocate_image((size_t)ftell(file));
    fseek(file, 0, SEEK_SET);
    assert_true(fread(image.data, 1, image.bytes, file) == image.bytes);
    fclose(file);
    return image;
}

static void refuse_path(const char *path, moe_status want) {
    char untouched;
    moe_model *model = (moe_model *)(void *)&untouched;
    moe_error e;
    memset(&e, 0, sizeof e);
    assert_int_equal(moe_model_open(path, NULL, &model, &e), want);
    CHECK(strstr(e.message, path) != NULL || want == MOE_ERROR_FORMAT, "'%s' does not name %s", e.message, path);
    assert_ptr_equal(model, (void *)&untouched);
    assert_int_equal(moe_model_open(path, NULL, &model, NULL), want);
}

TEST(missing_file_is_an_io_error_that_names_it) {
    refuse_path(in_directory("there is no such file"), MOE_ERROR_IO);
    refuse_path("", MOE_ERROR_IO);
}

TEST(directory_instead_of_a_file_is_an_io_error) { refuse_path(directory, MOE_ERROR_IO); }

static volatile sig_atomic_t alarms;
static void count_alarm(int number) { (void)number, alarms++; }

/* Opening a FIFO that has no writer blocks forever. */
TEST(opening_a_pipe_does_not_block) {
    struct sigaction action, old;
    memset(&action, 0, sizeof action);
    action.sa_handler = count_alarm; /* without SA_RESTART, so that the signal interrupts open() */
    assert_int_equal(mkfifo(in_directory("pipe"), 0600), 0);
    assert_int_equal(sigaction(SIGALRM, &action, &old), 0);
    alarms = 0;
    alarm(2);
    {
        moe_model *model = NULL;
        moe_error e;
        assert_int_equal(moe_model_open(in_directory("pipe"), NULL, &model, &e), MOE_ERROR_IO);
    }
    alarm(0);
    sigaction(SIGALRM, &old, NULL);
    remove(in_directory("pipe"));
    assert_int_equal(alarms, 0);
}

TEST(empty_and_tiny_files_are_refused) {
    write_file(in_directory("empty.bin"), "", 0);
    refuse_path(in_directory("empty.bin"), MOE_ERROR_FORMAT);
    write_file(in_directory("short.bin"), "MOEMODEL", 8);
    refuse_path(in_directory("short.bin"), MOE_ERROR_FORMAT);
}

TEST(file_on_disk_opens_like_one_in_memory) {
    fixture f = build(mw_small(MW_GNMT, MW_Q8, 1));
    mw_heap heap;
    moe_model_params params = hooked(&heap, 1);
    moe_model *model = NULL;
    moe_error e;
    write_file(in_directory("model.bin"), f.image.data, f.image.bytes);
    for (int round = 0; round < 50; round++) { /* success and failure must both release mappings and descriptors */
        assert_int_equal(moe_model_open(in_directory("model.bin"), &params, &model, &e), MOE_OK);
        assert_int_equal(moe_model_file_bytes(model), f.image.bytes);
        moe_model_close(model);
    }
    assert_int_equal(heap.blocks, 0);
    assert_int_equal(heap.wrong_sizes, 0);
    f.image.data[f.m->header_bytes - 1] ^= 1;
    write_file(in_directory("model.bin"), f.image.data, f.image.bytes);
    for (int round = 0; round < 50; round++) refuse_path(in_directory("model.bin"), MOE_ERROR_FORMAT);
    assert_int_equal(heap.blocks, 0);
    {
        int next = open("/dev/null", O_RDONLY);
        CHECK(next >= 0 && next < 32, "descriptors leak: the next one is %d", next);
        close(next);
    }
    drop(&f);
}

/* ---- Other sources ---- */

typedef struct reading {
    const char *data;
    size_t calls;
    int code; /* errno of the third call; 0 for no failure */
} reading;

static int read_image(void *user, void *out, size_t bytes, uint64_t offset) {
    reading *r = user;
    memcpy(out, r->data + offset, bytes);
    return r->code;
}

/* A model within a file or memory opens from each source at every alignment, or the error explains how. */
TEST(models_open_from_parts_of_files_and_memory) {
    static const size_t offsets[] = { 0, 64, 4096, 4096 + 64, 1, 100 };
    fixture f = build(mw_small(MW_GNMT, MW_Q8, 1));
    const size_t room = f.image.bytes + 3 * 4096;
    char *all = aligned_alloc(4096, (room + 4095) / 4096 * 4096);
    assert_non_null(all);
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++)
        for (int kind = 0; kind < 4; kind++)
            for (int mode = 0; mode < 3; mode++) { /* mapped, copied, streamed */
                const size_t at = offsets[i];
                const char *path = in_directory("archive");
                reading r = { .data = all };
                memset(all, 0x5a, room);
                memcpy(all + at, f.image.data, f.image.bytes);
                write_file(path, all, room);
                const int fd = open(path, O_RDONLY);
                moe_source s = { .name = kind == 1 ? NULL : "the model", .offset = at, .bytes = f.image.bytes };
                if (kind == 0) s.fd = fd;
                if (kind == 1) s.path = path;
                if (kind == 2) s.data = all;
                if (kind == 3) s.read = read_image, s.user = &r;
                const moe_model_params params = { .verify = 1, .copy = mode == 1, .stream = mode == 2 };
                const int fits = (mode == 1 || kind == 3 || at % 64 == 0) && (mode != 2 || kind < 2);
                moe_model *model = NULL;
                moe_error e = { MOE_OK, "", "" };
                const moe_status status = moe_model_open_source(&s, &params, &model, &e);
                close(fd);
                CHECK(status == (fits ? MOE_OK : MOE_ERROR_ARGUMENT), "offset %zu, kind %d, mode %d: %s", at, kind,
                      mode, e.message);
                if (fits) {
                    assert_int_equal(moe_model_file_bytes(model), f.image.bytes);
                    assert_int_equal(moe_model_verify(model, &e), MOE_OK);
                } else {
                    const char *name = kind == 1 ? path : "the model: ";
                    CHECK(strncmp(e.message, name, strlen(name)) == 0 &&
                              strstr(e.message, mode == 2 && kind > 1 ? "only files can be streamed" : "copied"),
                          "%s", e.message);
                }
                moe_model_close(model);
                unlink(path);
            }
    free(all);
    drop(&f);
}

TEST(invalid_sources_are_refused) {
    fixture f = build(mw_small(MW_GNMT, MW_Q8, 1));
    reading fails = { .data = (const char *)f.image.data, .code = EACCES };
    const char *path = in_directory("whole.bin");
    write_file(path, f.image.data, f.image.bytes);
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    const struct {
        moe_source source;
        moe_status status;
        const char *says;
    } cases[] = {
        { { .path = path, .data = f.image.data, .bytes = f.image.bytes }, MOE_ERROR_ARGUMENT, "only one of" },
        { { .path = path, .offset = 64 * f.image.bytes }, MOE_ERROR_FORMAT, "exceed the file" },
        { { .path = path, .bytes = f.image.bytes + 1 }, MOE_ERROR_FORMAT, "exceed the file" },
        { { .path = path, .offset = 64 }, MOE_ERROR_FORMAT, "not a moe model file" },
        { { .path = path, .bytes = f.image.bytes - 64 }, MOE_ERROR_FORMAT, "truncated or damaged" },
        { { .name = "app.zip, model.bin", .fd = -1 }, MOE_ERROR_IO, "app.zip, model.bin: cannot use the descriptor" },
        { { .fd = ends[0] }, MOE_ERROR_IO, "not a regular file" },
        { { .name = "asset", .data = f.image.data }, MOE_ERROR_FORMAT, "asset: empty" },
        { { .name = "asset", .read = read_image, .user = &fails, .bytes = f.image.bytes },
          MOE_ERROR_IO,
          "asset: cannot read the model: Permission" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        moe_model *model = NULL;
        moe_error e = { MOE_OK, "", "" };
        const moe_status status = moe_model_open_source(&cases[i].source, NULL, &model, &e);
        CHECK(status == cases[i].status && strstr(e.message, cases[i].says), "case %zu: %d %s", i, status, e.message);
    }
    close(ends[0]), close(ends[1]);
    unlink(path);
    drop(&f);
}

/* The message keeps the end of a long path and the whole reason. */
TEST(messages_name_the_file) {
    char path[600] = "/";
    moe_model *model = NULL;
    moe_error e;
    for (int i = 0; i < 20; i++) strcat(path, "a-folder-with-a-name/");
    strcat(path, "model.bin");
    assert_int_equal(moe_model_open_source(&(moe_source){ .name = path,
                                                          .data = "not a model at all, but long enough to "
                                                                  "be read as a header of 64 bytes.....",
                                                          .bytes = 70 },
                                           &(moe_model_params){ .copy = 1 }, &model, &e),
                     MOE_ERROR_FORMAT);
    CHECK(strncmp(e.message, "...", 3) == 0 && strstr(e.message, "a-name/model.bin: not a moe model file") &&
              strstr(e.message, "does not start with MOEMODEL"),
          "%s", e.message);
}

/* ---- Verifying ---- */

TEST(verify_finds_and_names_a_flipped_byte_in_every_tensor) {
    for (int variant = 0; variant < MW_VARIANTS; variant++) {
        fixture f = build(mw_small(variant, MW_Q8, 1));
        for (size_t i = 0; i < f.m->n_tensors; i++) {
            const mw_tensor *t = &f.m->tensors[i];
            const size_t places[] = { t->offset, t->offset + t->bytes / 2, t->offset + t->bytes - 1 };
            for (size_t p = 0; p < 3; p++) {
                moe_model *model = NULL;
                moe_error e;
                f.image.data[places[p]] ^= 1;
                refuse(f.image, 1, MOE_ERROR_FORMAT, tensor_where(t), "checksum");
                assert_int_equal(moe_model_open_memory(f.image.data, f.image.bytes, NULL, &model, &e),
                                 MOE_ERROR_FORMAT);
                assert_non_null(strstr(e.message, "checksum")); /* small files are verified by default */
                f.image.data[places[p]] ^= 1;
            }
        }
        drop(&f);
    }
}

TEST(without_verify_the_contents_are_not_read) {
    fixture f = small();
    f.image.data[mw_find_tensor(f.m, "embedding.weight")->offset + 2] ^= 1;
    moe_model_close(open_image(f.image));
    drop(&f);
}

/* By default, files of up to MOE_VERIFY_BYTES are verified when they are opened. */
TEST(large_files_are_verified_only_on_demand) {
    for (int over = 0; over < 2; over++) {
        mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
        fixture f = build(m);
        const size_t spare = (MOE_VERIFY_BYTES - f.image.bytes) / 4096 - 1 + 2 * (size_t)over;
        mw_tensor *t;
        moe_model *model = NULL;
        moe_error e;
        moe_status status;
        drop(&f);
        m = mw_small(MW_GNMT, MW_F32, 1);
        t = mw_add_tensor(m, "spare", MW_F32, 0, spare * 4096);
        t->n_dims = 2, t->dims[0] = spare, t->dims[1] = 1024;
        f = build(m);
        assert_int_equal(f.image.bytes > MOE_VERIFY_BYTES, over);
        f.image.data[mw_find_tensor(f.m, "embedding.weight")->offset + 2] ^= 1;
        status = moe_model_open_memory(f.image.data, f.image.bytes, NULL, &model, &e);
        assert_int_equal(status, over ? MOE_OK : MOE_ERROR_FORMAT);
        if (over) moe_model_close(model);
        refuse(f.image, 1, MOE_ERROR_FORMAT, "embedding.weight", "checksum");
        drop(&f);
    }
}

/* Gaps between tensors must be zero, since checksums do not cover them. */
TEST(gaps_must_be_zero) {
    size_t gaps = 0;
    for (int variant = 0; variant < MW_VARIANTS; variant++) {
        fixture f = build(mw_small(variant, MW_Q8, 1));
        size_t end = f.m->header_bytes;
        for (size_t i = 0; i < f.m->n_tensors; i++) {
            const mw_tensor *t = &f.m->tensors[i];
            for (size_t at = end; at < t->offset; at += at + 1 < t->offset ? t->offset - 1 - at : 1, gaps++) {
                f.image.data[at] = 0x40;
                refuse(f.image, 0, MOE_ERROR_FORMAT, tensor_where(t), "gap");
                f.image.data[at] = 0;
            }
            end = t->offset + t->bytes;
        }
        drop(&f);
    }
    assert_true(gaps > 20);
}

TEST(a_gap_is_smaller_than_the_largest_alignment) {
    fixture f = build(mw_small(MW_GNMT, MW_Q8, 1));
    const mw_tensor *t = &f.m->tensors[f.m->n_tensors - 1];
    mw_image image = mw_allocate_image(f.image.bytes + 4096);
    memset(image.data, 0, image.bytes);
    memcpy(image.data, f.image.data, t->offset);
    memcpy(image.data + t->offset + 4096, f.image.data + t->offset, t->bytes);
    mw_put64(image.data + mw_at_offset(t), t->offset + 4096);
    mw_put64(image.data + 24, image.bytes);
    mw_seal(image);
    refuse(image, 0, MOE_ERROR_FORMAT, tensor_where(t), "gap");
    free(image.data);
    drop(&f);
}

/* Opening a file without verifying does not check the scales of experts, which would mean reading every expert. */
TEST(broken_scales_of_experts_are_found_by_verifying) {
    static const float wrong[] = { NAN, INFINITY, -1.0f };
    for (size_t k = 0; k < 6; k++) {
        mw_model *m = mw_small(MW_GNMT, MW_Q8, 1);
        const mw_tensor *t = &m->tensors[0];
        mw_image image;
        while (!t->layout) t++;
        const size_t hidden = (size_t)t->dims[1], width = (size_t)t->dims[2], last = (size_t)t->dims[0] - 1;
        unsigned char *slab = t->data + last * mw_slab_stride(MW_Q8, hidden, width);
        const size_t rows = k < 3 ? hidden : width, cols = k < 3 ? width : hidden;
        if (k >= 3) slab += mw_slab_down(MW_Q8, hidden, width);
        /* Scales follow the codes, which are padded to 16 rows and 64 columns. */
        memcpy(slab + mw_up(rows, 16) * mw_up(cols, 64) + 4 * (rows - 1), &wrong[k % 3], 4);
        image = mw_build(m); /* the checksums are correct */
        refuse(image, 1, MOE_ERROR_FORMAT, tensor_where(t), "scale");
        moe_model_close(open_image(image));
        free(image.data);
        mw_free(m);
    }
}

/* ---- Memory ---- */

TEST(open_survives_the_failure_of_every_allocation) {
    fixture f = small();
    for (size_t n = 1; n < 100; n++) {
        mw_heap heap;
        moe_model_params params = hooked(&heap, 1);
        moe_model *model = NULL;
        moe_error e;
        moe_status status;
        heap.fail_at = n;
        direct_allocations = 0;
        status = moe_model_open_memory(f.image.data, f.image.bytes, &params, &model, &e);
        assert_int_equal(direct_allocations, 0);
        if (heap.calls < n) { /* this run has fewer allocations */
            assert_int_equal(status, MOE_OK);
            moe_model_close(model);
            assert_int_equal(heap.blocks, 0);
            assert_true(n > 4);
            n = 100;
        } else {
            assert_int_equal(status, MOE_ERROR_MEMORY);
            assert_int_equal(e.code, MOE_ERROR_MEMORY);
            assert_null(model);
        }
        assert_int_equal(heap.blocks, 0);
        assert_int_equal(heap.bytes, 0);
        assert_int_equal(heap.wrong_sizes, 0);
    }
    drop(&f);
}

/* ---- Saving ---- */

/* Convert a matrix to floats, following the description of the format. */
static float *unpack(uint32_t type, size_t rows, size_t cols, const unsigned char *blob) {
    float *w = mw_zeros(rows * cols * 4);
    const size_t np = mw_up(rows, 16), kp = mw_up(cols, 64);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < cols; c++) {
            uint16_t h;
            if (type == MW_F32) {
                memcpy(&w[r * cols + c], blob + 4 * (r * cols + c), 4);
            } else if (type == MW_Q8) {
                float scale;
                memcpy(&scale, blob + np * kp + 4 * r, 4);
                w[r * cols + c] = (float)(int8_t)blob[(r / 16 * (kp / 4) + c / 4) * 64 + r % 16 * 4 + c % 4] * scale;
            } else {
                const int bits = type == MW_BF16 ? 7 : 10, bias = type == MW_BF16 ? 127 : 15;
                int exponent, mantissa;
                double v;
                memcpy(&h, blob + 2 * (r * cols + c), 2);
                exponent = (h & 0x7fff) >> bits, mantissa = h & ((1 << bits) - 1);
                v = exponent ? ldexp(mantissa + (1 << bits), exponent - bias - bits) : ldexp(mantissa, 1 - bias - bits);
                w[r * cols + c] = (float)(h & 0x8000 ? -v : v);
            }
        }
    return w;
}

static void convert(uint32_t from, uint32_t to, size_t rows, size_t cols, const unsigned char *blob,
                    unsigned char *out) {
    float *w = unpack(from, rows, cols, blob);
    mw_pack(to, rows, cols, w, out);
    free(w);
}

static int gate_or_vector(const mw_tensor *t) {
    const char *dot = strstr(t->name, ".gate.weight");
    return t->n_dims == 1 || (dot && strlen(dot) == strlen(".gate.weight"));
}

/* Return the expected data of tensor t, saved in type `to`. */
static unsigned char *expected_tensor(const mw_tensor *t, uint32_t to, size_t *bytes) {
    const size_t a = (size_t)t->dims[0], b = (size_t)t->dims[1], c = (size_t)t->dims[2];
    unsigned char *out;
    if (to == t->type || gate_or_vector(t)) {
        *bytes = t->bytes;
        out = mw_zeros(*bytes);
        memcpy(out, t->data, *bytes);
    } else if (t->layout) {
        const size_t stride = mw_slab_stride(to, b, c), old = mw_slab_stride(t->type, b, c);
        *bytes = a * stride;
        out = mw_zeros(*bytes);
        for (size_t e = 0; e < a; e++) {
            convert(t->type, to, b, c, t->data + e * old, out + e * stride);
            convert(t->type, to, c, b, t->data + e * old + mw_slab_down(t->type, b, c),
                    out + e * stride + mw_slab_down(to, b, c));
        }
    } else {
        *bytes = mw_matrix_bytes(to, a, b);
        out = mw_zeros(*bytes);
        convert(t->type, to, a, b, t->data, out);
    }
    return out;
}

static moe_save_params to_type(moe_type type) { return (moe_save_params){ .type = type, .experts = type }; }

static void save_as(const moe_model *model, const char *path, uint32_t type) {
    moe_error e = { MOE_OK, "", "" };
    moe_save_params p = to_type((moe_type)type);
    CHECK(moe_model_save(model, path, &p, &e) == MOE_OK, "%s: %s", e.where, e.message);
}

static void add_golden(mw_model *m) {
    static const char *const texts[] = { "one", "two" };
    mw_texts(m, "golden.source", texts, 2);
    mw_texts(m, "golden.target_ids", texts, 2);
    mw_real(m, "quality.bleu.en-de", 12.5);
    mw_text(m, "golden", "a key of its own");
    mw_text(m, "goldenrod.colour", "yellow");
}

/* If a file has an unused tensor that is named like the last matrix of a feed-forward layer, saving must not mistake a
 * mixture's gate for a feed-forward layer's gate. */
TEST(saving_keeps_gates_of_mixtures) {
    mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
    moe_model *model, *saved = NULL;
    moe_model_params params = { 0 };
    moe_error e = { MOE_OK, "", "" };
    fixture f;
    mw_random_matrix(m, "encoder.1.down.weight", MW_F32, MW_WIDTH, MW_WIDTH, 1);
    f = build(m);
    model = open_image(f.image);
    save_as(model, in_directory("saved.bin"), MW_Q8);
    CHECK(moe_model_open(in_directory("saved.bin"), &params, &saved, &e) == MOE_OK, "%s: %s", e.where, e.message);
    moe_model_close(saved);
    moe_model_close(model);
    drop(&f);
}

/* Conversions between the four types produce the expected bytes. */
TEST(saving_converts_by_the_format) {
    for (int variant = 0; variant < MW_VARIANTS; variant++)
        for (uint32_t from = 0; from < 4; from++)
            for (uint32_t to = 0; to < 4; to++) {
                mw_model *m;
                fixture f;
                moe_model *model, *saved = NULL;
                moe_model_params params = { .verify = 1 };
                moe_error e = { MOE_OK, "", "" };
                mw_image image;
                size_t end = 0;
                if (mw_slow() && variant) continue;
                m = mw_small(variant, from, 1);
                add_golden(m);
                f = build(m);
                model = open_image(f.image);
                save_as(model, in_directory("saved.bin"), to);
                image = read_file(in_directory("saved.bin"));
                CHECK(moe_model_open(in_directory("saved.bin"), &params, &saved, &e) == MOE_OK, "%s: %s", e.where,
                      e.message);
                assert_int_equal(moe_model_tensor_count(saved), m->n_tensors);
                end = (size_t)mw_get64(image.data + 16);
                for (size_t i = 0; i < m->n_tensors; i++) {
                    const mw_tensor *t = &m->tensors[i];
                    const moe_tensor_info info = moe_model_tensor(saved, i);
                    size_t bytes;
                    unsigned char *want = expected_tensor(t, to, &bytes);
                    assert_memory_equal(info.name.data, t->name, strlen(t->name));
                    assert_int_equal(info.type, gate_or_vector(t) ? MW_F32 : to);
                    assert_int_equal(info.bytes, bytes);
                    CHECK(memcmp(image.data + info.offset, want, bytes) == 0, "%s, %u to %u: other bytes", t->name,
                          from, to);
                    for (; end < info.offset; end++) assert_int_equal(image.data[end], 0); /* bytes in gaps are zero */
                    end = (size_t)(info.offset + info.bytes);
                    free(want);
                }
                assert_int_equal(end, image.bytes);
                for (size_t i = 0; i < m->n_meta; i++) { /* golden.* and quality.* apply to the original weights only */
                    const char *key = m->meta[i].key;
                    const int bound = strncmp(key, "golden.", 7) == 0 || strncmp(key, "quality.", 8) == 0;
                    CHECK((moe_model_meta_find(saved, key) >= 0) == (from == to || !bound), "%s, %u to %u", key, from,
                          to);
                }
                moe_model_close(saved);
                moe_model_close(model);
                free(image.data);
                drop(&f);
            }
}

TEST(saving_in_the_same_type_copies_the_file) {
    for (uint32_t type = 0; type < 4; type++) {
        mw_model *m = mw_small(MW_GNMT, type, 2);
        fixture f;
        moe_model *model;
        mw_image image;
        add_golden(m);
        f = build(m);
        model = open_image(f.image);
        save_as(model, in_directory("saved.bin"), type);
        image = read_file(in_directory("saved.bin"));
        assert_int_equal(image.bytes, f.image.bytes);
        assert_memory_equal(image.data, f.image.data, image.bytes);
        moe_model_close(model);
        free(image.data);
        drop(&f);
    }
}

TEST(wide_formats_preserve_narrow_ones) { /* f16 -> f32 -> f16 restores the file */
    for (uint32_t type = MW_F16; type <= MW_BF16; type++) {
        fixture f = build(mw_small(MW_GNMT, type, 2));
        moe_model *model = open_image(f.image), *wide = NULL;
        moe_error e;
        mw_image image;
        save_as(model, in_directory("saved.bin"), MW_F32);
        assert_int_equal(moe_model_open(in_directory("saved.bin"), NULL, &wide, &e), MOE_OK);
        save_as(wide, in_directory("again.bin"), type);
        image = read_file(in_directory("again.bin"));
        assert_int_equal(image.bytes, f.image.bytes);
        assert_memory_equal(image.data, f.image.data, image.bytes);
        moe_model_close(model);
        moe_model_close(wide);
        free(image.data);
        drop(&f);
    }
}

TEST(a_model_can_be_saved_over_its_own_file) {
    fixture f = small();
    moe_model *model = NULL;
    moe_error e;
    write_file(in_directory("model.bin"), f.image.data, f.image.bytes);
    assert_int_equal(moe_model_open(in_directory("model.bin"), NULL, &model, &e), MOE_OK);
    save_as(model, in_directory("model.bin"), MW_Q8);
    assert_int_equal(moe_model_file_bytes(model), f.image.bytes); /* the open model still has the old file */
    moe_model_close(model);
    assert_int_equal(moe_model_open(in_directory("model.bin"), NULL, &model, &e), MOE_OK);
    assert_true(moe_model_file_bytes(model) < f.image.bytes + 4096);
    moe_model_close(model);
    drop(&f);
}

static void no_rows(void *user, size_t tensor, size_t piece, size_t row, float *out, size_t cols) {
    (void)tensor, (void)piece, (void)row;
    (*(size_t *)user)++;
    for (size_t c = 0; c < cols; c++) out[c] = 0;
}

/* Invalid tensors and entries are rejected before any rows are requested from the caller. */
TEST(invalid_tensors_are_not_written) {
    static const moe_tensor_spec wrong[] = {
        { "Upper", MOE_TYPE_F32, 1, { 4 } },
        { "", MOE_TYPE_F32, 1, { 4 } },
        { NULL, MOE_TYPE_F32, 1, { 4 } },
        { "a", MOE_TYPE_COUNT, 2, { 4, 4 } },
        { "a", MOE_TYPE_Q8, 1, { 4 } },
        { "a", MOE_TYPE_F32, 0, { 4 } },
        { "a", MOE_TYPE_F32, 4, { 4, 4, 4 } },
        { "a", MOE_TYPE_F32, 2, { 4, 0 } },
        { "a", MOE_TYPE_F32, 2, { 4, (uint64_t)1 << 40 } },
    };
    const char *path = in_directory("written.bin");
    size_t rows = 0;
    moe_error e;
    for (size_t i = 0; i < MOE_COUNT(wrong); i++) {
        moe_write_params p = { .tensors = &wrong[i], .n_tensors = 1, .fill = no_rows, .user = &rows };
        assert_int_equal(moe_model_write(path, &p, &e), MOE_ERROR_ARGUMENT);
        CHECK(strncmp(e.where, "tensor", 6) == 0, "%zu: %s: %s", i, e.where, e.message);
    }
    {
        const moe_meta_entry entries[] = { { .key = "a.b", .kind = MOE_META_INT },
                                           { .key = "a.b", .kind = MOE_META_REAL } };
        moe_write_params p = { .entries = entries, .n_entries = 2, .fill = no_rows, .user = &rows };
        assert_int_equal(moe_model_write(path, &p, &e), MOE_ERROR_ARGUMENT);
        CHECK(strstr(e.message, "a.b") != NULL, "'%s' does not name the key", e.message);
    }
    { /* valid tensors, but the file would be invalid */
        static const moe_tensor_spec twice[] = { { "a", MOE_TYPE_F32, 1, { 4 } }, { "a", MOE_TYPE_F32, 2, { 4, 4 } } };
        static const moe_tensor_spec wide[] = { { "a", MOE_TYPE_Q8, 2, { 1, 131073 } },
                                                { "a", MOE_TYPE_Q4, 3, { 1, 131073, 1 } } };
        for (size_t i = 0; i < 3; i++) {
            moe_write_params p = { .tensors = i ? &wide[i - 1] : twice,
                                   .n_tensors = i ? 1 : 2,
                                   .fill = no_rows,
                                   .user = &rows };
            assert_int_equal(moe_model_write(path, &p, &e), MOE_ERROR_ARGUMENT);
            CHECK(strstr(e.message, i ? "131072" : "duplicate name 'a'") != NULL, "%s: %s", e.where, e.message);
        }
    }
    assert_int_equal(rows, 0);
    assert_false(exists(path));
}

/* Fill a row with a value that identifies it: 100 * piece + row. */
static void numbered_rows(void *user, size_t tensor, size_t piece, size_t row, float *out, size_t cols) {
    (void)user, (void)tensor;
    for (size_t c = 0; c < cols; c++) out[c] = (float)(100 * piece + row);
}

/* An expert consists of gate, up and down matrix, in this order; only gated experts have a gate matrix. */
TEST(gated_and_plain_experts_are_written) {
    enum { N = 3, HIDDEN = 5, WIDTH = 7 };
    static const moe_tensor_spec experts = { "experts", MOE_TYPE_F32, 3, { N, HIDDEN, WIDTH } };
    const char *path = in_directory("written.bin");
    for (int gated = 0; gated < 2; gated++) {
        const moe_write_params p = { .tensors = &experts, .n_tensors = 1, .fill = numbered_rows, .gated = gated };
        const size_t above = (size_t)(1 + gated) * HIDDEN * WIDTH, stride = 4096 / sizeof(float);
        moe_error e;
        mw_image image;
        assert_int_equal(moe_model_write(path, &p, &e), MOE_OK);
        image = read_file(path);
        assert_int_equal(image.bytes, (size_t)4096 * (1 + N));
        for (size_t piece = 0; piece < N; piece++) {
            const float *slab = (const float *)(const void *)(image.data + 4096) + piece * stride;
            const float *down = slab + (above + 15) / 16 * 16;
            for (size_t i = 0; i < above; i++) assert_true(slab[i] == (float)(100 * piece + i / WIDTH));
            for (size_t i = 0; i < WIDTH * HIDDEN; i++)
                assert_true(down[i] == (float)(100 * piece + above / WIDTH + i / HIDDEN));
        }
        free(image.data);
        remove(path);
    }
}

/* Codes of row `row`: -row to row; the last tensor has none. */
static int some_codes(void *user, size_t tensor, size_t row, int8_t *codes, size_t cols, float *scale) {
    if (tensor) return 0;
    for (size_t c = 0; c < cols; c++) codes[c] = (int8_t)(c % (2 * row + 1)) - (int8_t)row;
    *scale = *(const float *)user;
    return 1;
}

/* Codes of the caller are stored unchanged; other rows are quantised. */
TEST(given_codes_are_written) {
    enum { ROWS = 129, COLS = 300 };
    static const moe_tensor_spec both[] = { { "a", MOE_TYPE_Q8, 2, { ROWS - 1, COLS } },
                                            { "b", MOE_TYPE_Q8, 2, { 3, 4 } },
                                            { "a", MOE_TYPE_Q8, 2, { ROWS, COLS } } };
    static const float wrong[] = { -1.0f, NAN, INFINITY };
    const char *path = in_directory("written.bin");
    float scale = 0.25f, row[COLS];
    moe_write_params p = { .tensors = both,
                           .n_tensors = 2,
                           .fill = numbered_rows,
                           .codes = some_codes,
                           .user = &scale };
    moe_error e;
    assert_int_equal(moe_model_write(path, &p, &e), MOE_OK);
    mw_image image = read_file(path);
    const char *data = (const char *)image.data + image.bytes - moe_matrix_bytes(MOE_TYPE_Q8, 3, 4);
    const moe_matrix b = moe_matrix_view(MOE_TYPE_Q8, 3, 4, data);
    const moe_matrix a =
        moe_matrix_view(MOE_TYPE_Q8, ROWS - 1, COLS, data - moe_matrix_bytes(MOE_TYPE_Q8, ROWS - 1, COLS));
    for (size_t r = 0; r < ROWS - 1; r++) {
        int32_t sum = 0;
        moe_matrix_row(&a, r, row);
        for (size_t c = 0; c < COLS; c++) {
            const int code = (int)(c % (2 * r + 1)) - (int)r;
            sum += code;
            assert_true(row[c] == 0.25f * (float)code);
        }
        assert_int_equal(((const int32_t *)(const void *)(a.scales + moe_round_up(ROWS - 1, MOE_Q8_ROWS)))[r], sum);
    }
    moe_matrix_row(&b, 2, row);
    assert_true(row[0] > 1.99f && row[0] < 2.01f);
    free(image.data);
    remove(path);
    p.tensors = &both[2]; /* its last row has the code -128 */
    p.n_tensors = 1;
    assert_int_equal(moe_model_write(path, &p, &e), MOE_ERROR_ARGUMENT);
    assert_string_equal(e.message, "tensor a has an invalid code or scale");
    p.tensors = both;
    for (size_t i = 0; i < MOE_COUNT(wrong); i++) {
        scale = wrong[i];
        assert_int_equal(moe_model_write(path, &p, &e), MOE_ERROR_ARGUMENT);
    }
    assert_false(exists(path));
}

/* Metadata of every kind that can be written. */
TEST(bytes_integers_and_texts_are_written) {
    static const int64_t numbers[] = { -1, 0, INT64_MAX };
    static const moe_tensor_spec one = { "a", MOE_TYPE_F32, 1, { 4 } };
    const moe_meta_entry entries[] = {
        { .key = "bytes", .kind = MOE_META_BYTES, .text = { "a\n\0\xff", 4 } },
        { .key = "ints", .kind = MOE_META_INTS, .text = { (const char *)numbers, sizeof numbers } },
        { .key = "none", .kind = MOE_META_INTS },
        { .key = "texts",
          .kind = MOE_META_TEXTS,
          .integer = 0xff,
          .text = { "a\nb\xff\xff"
                    "c\0",
                    7 } },
        { .key = "lines", .kind = MOE_META_TEXTS, .text = { "a\n\nb", 4 } },
        { .key = "real", .kind = MOE_META_REALS },
    };
    const char *path = in_directory("written.bin");
    size_t rows = 0;
    moe_write_params p = { .entries = entries,
                           .n_entries = 5,
                           .tensors = &one,
                           .n_tensors = 1,
                           .fill = no_rows,
                           .user = &rows };
    moe_error e;
    moe_file f;
    const moe_allocator a = moe_allocator_or_default(&p.allocator);
    assert_int_equal(moe_model_write(path, &p, &e), MOE_OK);
    mw_image image = read_file(path);
    assert_int_equal(moe_file_parse(&f, (const char *)image.data, image.bytes, image.bytes, &a, &e), MOE_OK);
    assert_int_equal(f.n_meta, 5);
    assert_memory_equal(f.meta[0].data, "\4\0\0\0\0\0\0\0a\n\0\xff", 12);
    assert_int_equal(f.meta[1].count, 3);
    assert_memory_equal(f.meta[1].data, numbers, sizeof numbers);
    assert_int_equal(f.meta[2].count, 0);
    assert_int_equal(f.meta[3].count, 3);
    assert_memory_equal(f.meta[3].data + f.meta[3].texts[0], "\3\0\0\0\0\0\0\0a\nb", 11);
    assert_memory_equal(f.meta[3].data + f.meta[3].texts[1], "\0\0\0\0\0\0\0\0\2\0\0\0\0\0\0\0c", 18);
    assert_int_equal(f.meta[4].count, 3);
    moe_file_free(&f, &a);
    free(image.data);
    remove(path);
    p.n_entries = 6;
    assert_int_equal(moe_model_write(path, &p, &e), MOE_ERROR_ARGUMENT);
    assert_false(exists(path));
}

/* Q3 and Q2 need version 3, which earlier engines refuse; files without them keep version 2. */
TEST(low_types_need_version_3) {
    static const moe_type types[] = { MOE_TYPE_Q4, MOE_TYPE_Q3, MOE_TYPE_Q2 };
    for (size_t i = 0; i < MOE_COUNT(types); i++) {
        mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
        mw_image image = mw_build(m);
        moe_model *model = open_image(image), *read;
        moe_error e = { MOE_OK, "", "" };
        const char *path = in_directory("low.bin");
        uint64_t expert = 0;
        const moe_save_params p = { .type = MOE_TYPE_Q8, .experts = types[i] };
        CHECK(moe_model_save(model, path, &p, &e) == MOE_OK, "%s", e.message);
        moe_model_close(model), free(image.data), mw_free(m);
        image = read_file(path);
        unsigned char *data = image.data;
        assert_int_equal(data[8], i ? 3 : 2);
        CHECK(moe_model_open_memory(data, image.bytes, NULL, &read, &e) == MOE_OK, "%s", e.message);
        assert_int_equal(moe_model_file_version(read), i ? 3 : 2);
        for (size_t t = 0; t < moe_model_tensor_count(read); t++) {
            const moe_tensor_info info = moe_model_tensor(read, t);
            if (info.experts) assert_int_equal(info.type, types[i]);
            if (info.experts) expert = info.offset + info.bytes / info.dims[0];
        }
        moe_model_close(read);
        data[expert] ^= 1;
        assert_int_equal(moe_model_open_memory(data, image.bytes, NULL, &read, &e), MOE_ERROR_FORMAT);
        CHECK(strstr(e.message, "checksum mismatch in expert 1"), "%s", e.message);
        data[expert] ^= 1;
        data[8] = 2; /* not part of the checksum */
        assert_int_equal(moe_model_open_memory(data, image.bytes, NULL, &read, &e), i ? MOE_ERROR_FORMAT : MOE_OK);
        if (i) CHECK(strstr(e.message, "version 2 does not match"), "%s", e.message);
        else moe_model_close(read);
        free(data), remove(path);
    }
}

/* A mixture may have a type of its own; an invalid entry is an error. */
TEST(mixtures_may_have_their_own_type) {
    static const struct {
        const char *name;
        moe_type type;
        int fine;
    } cases[] = { { "encoder.1.experts", MOE_TYPE_Q2, 1 },
                  { "encoder.1.experts", MOE_TYPE_F16, 1 },
                  { "encoder.1.experts", MOE_TYPE_COUNT, 0 },
                  { "embedding.weight", MOE_TYPE_Q4, 0 },
                  { "nothing", MOE_TYPE_Q4, 0 },
                  { NULL, MOE_TYPE_Q4, 0 } };
    for (size_t i = 0; i < MOE_COUNT(cases); i++) {
        mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
        mw_image image = mw_build(m);
        moe_model *model = open_image(image), *read;
        moe_error e = { MOE_OK, "", "" };
        const char *path = in_directory("types.bin");
        const moe_types_entry entry = { cases[i].name, cases[i].type };
        const moe_save_params p = { .type = MOE_TYPE_Q8, .experts = MOE_TYPE_Q4, .types = &entry, .n_types = 1 };
        const moe_status status = moe_model_save(model, path, &p, &e);
        CHECK(status == (cases[i].fine ? MOE_OK : MOE_ERROR_ARGUMENT), "case %zu: %s", i, e.message);
        if (!cases[i].fine) CHECK(strstr(e.message, "entry 0"), "case %zu: %s", i, e.message);
        moe_model_close(model), free(image.data), mw_free(m);
        if (!cases[i].fine) continue;
        CHECK(moe_model_open(path, NULL, &read, &e) == MOE_OK, "%s", e.message);
        for (size_t t = 0; t < moe_model_tensor_count(read); t++) {
            const moe_tensor_info info = moe_model_tensor(read, t);
            const size_t n = strlen(entry.name);
            if (info.experts)
                assert_int_equal(info.type, info.name.length == n && !memcmp(info.name.data, entry.name, n)
                                                ? entry.type
                                                : MOE_TYPE_Q4);
        }
        moe_model_close(read), remove(path);
    }
}

/* A number that is finite in F32 may be infinite in a coarser type. */
TEST(numbers_beyond_the_type_are_refused) {
    const struct {
        moe_type type;
        float number;
        int fits;
    } cases[] = { { MOE_TYPE_F16, 65519.996f, 1 }, { MOE_TYPE_F16, 65520.0f, 0 }, { MOE_TYPE_F16, -1e6f, 0 },
                  { MOE_TYPE_BF16, 1e38f, 1 },     { MOE_TYPE_BF16, FLT_MAX, 0 }, { MOE_TYPE_Q8, 1e38f, 1 },
                  { MOE_TYPE_Q4, 1e6f, 1 },        { MOE_TYPE_Q8B, FLT_MAX, 1 } };
    for (size_t i = 0; i < MOE_COUNT(cases); i++) {
        mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
        const mw_tensor *t;
        mw_image image;
        moe_model *model = NULL;
        moe_error e = { MOE_OK, "", "" };
        const size_t before = files_in_directory();
        const moe_save_params p = { .type = cases[i].type, .experts = cases[i].type };
        t = mw_find_tensor(m, "encoder.0.fwd.w_x");
        memcpy(t->data + 8, &cases[i].number, 4);
        image = mw_build(m);
        model = open_image(image);
        if (cases[i].fits) {
            CHECK(moe_model_save(model, in_directory("held.bin"), &p, &e) == MOE_OK, "%s: %s", moe_type_name(p.type),
                  e.message);
            remove(in_directory("held.bin"));
        } else {
            assert_int_equal(moe_model_save(model, in_directory("held.bin"), &p, &e), MOE_ERROR_ARGUMENT);
            CHECK(strstr(e.message, "encoder.0.fwd.w_x") && strstr(e.message, moe_type_name(p.type)), "'%s'",
                  e.message);
            assert_int_equal(files_in_directory(), before);
        }
        moe_model_close(model);
        free(image.data);
        mw_free(m);
    }
}

TEST(saving_to_an_unwritable_place_is_an_io_error) {
    fixture f = small();
    mw_heap heap;
    moe_model_params params = hooked(&heap, 0);
    moe_model *model = NULL;
    moe_error e;
    size_t before;
    assert_int_equal(moe_model_open_memory(f.image.data, f.image.bytes, &params, &model, &e), MOE_OK);
    before = heap.bytes;
    assert_int_equal(moe_model_save(model, in_directory("no/such/place.bin"),
                                    &(moe_save_params){ .type = MOE_TYPE_Q8, .experts = MOE_TYPE_Q8 }, &e),
                     MOE_ERROR_IO);
    CHECK(strstr(e.message, "no/such/place.bin") != NULL, "'%s' does not name the file", e.message);
    assert_int_equal(moe_model_save(model, directory, &(moe_save_params){ .type = MOE_TYPE_Q8, .experts = MOE_TYPE_Q8 },
                                    &e),
                     MOE_ERROR_IO); /* the path is a directory */
    assert_false(exists(in_directory("no")));
    assert_int_equal(moe_model_save(model, in_directory("no/such/place.bin"),
                                    &(moe_save_params){ .type = MOE_TYPE_Q8, .experts = MOE_TYPE_Q8 }, NULL),
                     MOE_ERROR_IO);
    assert_int_equal(moe_model_save(model, in_directory("saved.bin"), &(moe_save_params){ .type = MOE_TYPE_COUNT }, &e),
                     MOE_ERROR_ARGUMENT);
    assert_int_equal(moe_model_save(model, in_directory("saved.bin"), &(moe_save_params){ .experts = (moe_type)16 },
                                    &e),
                     MOE_ERROR_ARGUMENT);
    assert_string_equal(e.where, "type");
    assert_int_equal(heap.bytes, before);
    assert_int_equal(heap.wrong_sizes, 0);
    moe_model_close(model);
    drop(&f);
}

/* If the disk is full at any point, the old file remains and no temporary file does. The signal for the file size limit
 * neither kills the process nor reaches the caller. */
TEST(a_full_disk_leaves_only_the_old_file) {
    fixture f = small();
    moe_model *model = open_image(f.image);
    moe_error e;
    struct rlimit old, limit;
    size_t whole, before;
    sigset_t waiting;
    save_as(model, in_directory("kept.bin"), MW_F16);
    {
        mw_image image = read_file(in_directory("kept.bin"));
        whole = image.bytes;
        free(image.data);
    }
    write_file(in_directory("kept.bin"), "old", 3);
    before = files_in_directory();
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    for (size_t n = 0; n < whole; n += n < 200 ? 50 : whole / 13) {
        moe_status status;
        mw_image image;
        limit = old;
        limit.rlim_cur = n;
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        memset(&e, 0, sizeof e);
        status = moe_model_save(model, in_directory("kept.bin"),
                                &(moe_save_params){ .type = MOE_TYPE_F16, .experts = MOE_TYPE_F16 }, &e);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
        CHECK(status == MOE_ERROR_IO, "limit %zu: %s, %s", n, moe_status_name(status), e.message);
        CHECK(strstr(e.message, "kept.bin") && strstr(e.message, strerror(EFBIG)), "'%s'", e.message);
        image = read_file(in_directory("kept.bin"));
        assert_int_equal(image.bytes, 3);
        free(image.data);
        assert_int_equal(files_in_directory(), before);
    }
    assert_int_equal(sigpending(&waiting), 0);
    assert_false(sigismember(&waiting, SIGXFSZ));
    moe_model_close(model);
    drop(&f);
}

static mode_t mode_of(const char *path) {
    struct stat info;
    assert_int_equal(lstat(path, &info), 0);
    return info.st_mode;
}

/* Check that the file at `path` is a complete model with tensors of type `type`. */
static void is_model(const char *path, moe_type type) {
    const moe_model_params verify = { .verify = 1 };
    moe_model *model = NULL;
    moe_error e;
    CHECK(moe_model_open(path, &verify, &model, &e) == MOE_OK, "%s: %s", path, e.message);
    for (size_t i = 0; i < moe_model_tensor_count(model); i++)
        if (moe_model_tensor(model, i).experts) assert_int_equal(moe_model_tensor(model, i).type, type);
    moe_model_close(model);
}

TEST(symbolic_links_are_kept_and_their_targets_replaced) {
    fixture f = small();
    moe_model *model = open_image(f.image);
    moe_error e;
    const moe_save_params p = to_type(MOE_TYPE_Q8);
    assert_int_equal(mkdir(in_directory("folder"), 0777), 0);
    assert_int_equal(symlink("folder/link.bin", in_directory("link.bin")), 0); /* a link to a link to a missing file */
    assert_int_equal(symlink("target.bin", in_directory("folder/link.bin")), 0);
    for (uint32_t type = MW_Q8; type + 1 > MW_F16; type--) { /* the first file is new, others are replaced */
        save_as(model, in_directory("link.bin"), type);
        assert_true(S_ISLNK(mode_of(in_directory("link.bin"))) && S_ISLNK(mode_of(in_directory("folder/link.bin"))));
        is_model(in_directory("folder/target.bin"), (moe_type)type);
    }
    assert_int_equal(remove(in_directory("link.bin")), 0);
    assert_int_equal(symlink(in_directory("folder/target.bin"), in_directory("link.bin")), 0); /* absolute path */
    save_as(model, in_directory("link.bin"), MW_Q8);
    is_model(in_directory("folder/target.bin"), MOE_TYPE_Q8);
    assert_int_equal(remove(in_directory("link.bin")), 0);
    assert_int_equal(symlink("link.bin", in_directory("link.bin")), 0);
    assert_int_equal(moe_model_save(model, in_directory("link.bin"), &p, &e), MOE_ERROR_IO); /* a link to itself */
    assert_non_null(strstr(e.message, strerror(ELOOP)));
    remove(in_directory("link.bin")), remove(in_directory("folder/link.bin")),
        remove(in_directory("folder/target.bin"));
    assert_int_equal(rmdir(in_directory("folder")), 0);
    moe_model_close(model);
    drop(&f);
}

/* Regression: temporary files were named FILE.partial. Users' files and link targets with such a name must remain. */
TEST(neighbouring_files_are_kept) {
    fixture f = small();
    moe_model *model = open_image(f.image);
    mw_image image;
    for (int link = 0; link < 2; link++) {
        write_file(in_directory(link ? "kept.bin" : "saved.bin.partial"), "mine", 4);
        if (link) assert_int_equal(symlink("kept.bin", in_directory("saved.bin.partial")), 0);
        save_as(model, in_directory("saved.bin"), MW_Q8);
        image = read_file(in_directory("saved.bin.partial"));
        assert_int_equal(image.bytes, 4);
        assert_memory_equal(image.data, "mine", 4);
        free(image.data);
        assert_int_equal(remove(in_directory("saved.bin.partial")), 0);
    }
    moe_model_close(model);
    drop(&f);
}

TEST(permissions_follow_the_old_file_or_the_umask) {
    fixture f = small();
    moe_model *model = open_image(f.image);
    const mode_t mask = umask(027);
    remove(in_directory("saved.bin"));
    save_as(model, in_directory("saved.bin"), MW_Q8);
    assert_int_equal(mode_of(in_directory("saved.bin")) & 07777, 0640);
    assert_int_equal(chmod(in_directory("saved.bin"), 0606), 0);
    save_as(model, in_directory("saved.bin"), MW_F16);
    assert_int_equal(mode_of(in_directory("saved.bin")) & 07777, 0606);
    is_model(in_directory("saved.bin"), MOE_TYPE_F16);
    umask(mask);
    moe_model_close(model);
    drop(&f);
}

/* Users cannot replace files that they cannot write to. Root can, so the test drops root privileges. */
TEST(write_protected_files_are_kept) {
    fixture f = small();
    moe_model *model = open_image(f.image);
    int child, result = 0;
    mw_image image;
    write_file(in_directory("kept.bin"), "mine", 4);
    assert_int_equal(chmod(in_directory("kept.bin"), 0444), 0);
    assert_int_equal(chmod(directory, 0777), 0);
    if ((child = fork()) == 0) {
        moe_error e;
        if (geteuid() == 0 && setuid(65534) != 0) _exit(9);
        _exit(moe_model_save(model, in_directory("kept.bin"), &(moe_save_params){ .type = MOE_TYPE_Q8 }, &e) !=
                  MOE_ERROR_IO ||
              !strstr(e.message, strerror(EACCES)));
    }
    while (waitpid(child, &result, 0) < 0) assert_int_equal(errno, EINTR);
    assert_int_equal(result, 0);
    assert_int_equal(chmod(in_directory("kept.bin"), 0644), 0);
    image = read_file(in_directory("kept.bin"));
    assert_int_equal(image.bytes, 4);
    free(image.data);
    moe_model_close(model);
    drop(&f);
}

/* Temporary files have short names, so a model's file name can have the maximum length. */
TEST(a_file_can_have_the_longest_name) {
    fixture f = small();
    moe_model *model = open_image(f.image);
    char name[256], path[512];
    memset(name, 'n', 255);
    name[255] = 0;
    snprintf(path, sizeof path, "%s/%s", directory, name);
    save_as(model, path, MW_Q8);
    is_model(path, MOE_TYPE_Q8);
    remove(path);
    moe_model_close(model);
    drop(&f);
}

/* Return the path of a device node in the test's folder, or in /dev if only root can create nodes. */
static const char *device(const char *name) {
    static char path[192];
    struct stat info;
    snprintf(path, sizeof path, "/dev/%s", name);
    if (stat(path, &info) != 0) skip();
    snprintf(path, sizeof path, "%s/%s", directory, name);
    if (mknod(path, S_IFCHR | 0666, info.st_rdev) != 0) snprintf(path, sizeof path, "/dev/%s", name);
    return path;
}

TEST(models_are_written_to_files_only) {
    fixture f = small();
    moe_model *model = open_image(f.image);
    const moe_save_params p = to_type(MOE_TYPE_Q8);
    const char *null = device("null");
    moe_error e;
    size_t before;
    assert_int_equal(mkfifo(in_directory("pipe"), 0666), 0);
    before = files_in_directory();
    assert_int_equal(moe_model_save(model, in_directory("pipe"), &p, &e),
                     MOE_ERROR_IO); /* must not wait for a reader */
    CHECK(strstr(e.message, "pipe") && strstr(e.message, "not a regular file"), "'%s'", e.message);
    assert_true(S_ISFIFO(mode_of(in_directory("pipe"))));
    assert_int_equal(moe_model_save(model, null, &p, &e), MOE_ERROR_IO);
    CHECK(strstr(e.message, null) && strstr(e.message, "not a regular file"), "'%s'", e.message);
    assert_true(S_ISCHR(mode_of(null)));
    assert_int_equal(files_in_directory(), before);
    if (exists("/proc/self/fd")) { /* a deleted file */
        char nameless[64];
        const int fd = open(in_directory("null-model"), O_RDWR | O_CREAT, 0666);
        assert_true(fd >= 0);
        assert_int_equal(remove(in_directory("null-model")), 0);
        snprintf(nameless, sizeof nameless, "/proc/self/fd/%d", fd);
        assert_int_equal(moe_model_save(model, nameless, &p, &e), MOE_ERROR_IO);
        assert_int_equal(files_in_directory(), before);
        close(fd);
    }
    remove(in_directory("pipe")), remove(in_directory("null"));
    moe_model_close(model);
    drop(&f);
}

/* While two processes write a file, readers always find a complete model. Afterwards no temporary files remain. */
TEST(two_writers_of_one_file_leave_a_complete_file) {
    fixture f = small();
    moe_model *model = open_image(f.image);
    int child[2], result, rounds = 60;
    moe_error e;
    size_t opened = 0, before;
    remove(in_directory("saved.bin"));
    before = files_in_directory();
    for (int i = 0; i < 2; i++) {
        if ((child[i] = fork()) != 0) continue;
        for (int k = 0; k < rounds; k++) {
            const moe_save_params p = to_type(i ? MOE_TYPE_Q8 : MOE_TYPE_F32);
            if (moe_model_save(model, in_directory("saved.bin"), &p, &e) != MOE_OK) _exit(1);
        }
        _exit(0);
    }
    for (int k = 0; k < 400 || !opened; k++) {
        const moe_model_params verify = { .verify = 1 };
        moe_model *other = NULL;
        moe_status status = moe_model_open(in_directory("saved.bin"), &verify, &other, &e);
        CHECK(status == MOE_OK || (status == MOE_ERROR_IO && !opened), "%s", e.message);
        opened += status == MOE_OK;
        moe_model_close(other);
    }
    for (int i = 0; i < 2; i++) {
        while (waitpid(child[i], &result, 0) < 0) assert_int_equal(errno, EINTR);
        assert_int_equal(result, 0);
    }
    assert_true(opened > 0);
    remove(in_directory("saved.bin"));
    assert_int_equal(files_in_directory(), before);
    moe_model_close(model);
    drop(&f);
}

typedef struct signaller {
    int number, rows;
} signaller;

static volatile sig_atomic_t handled;
static void on_signal(int number) { handled = number; }

static void rows_and_a_signal(void *user, size_t tensor, size_t piece, size_t row, float *out, size_t cols) {
    signaller *s = user;
    (void)tensor, (void)piece, (void)row;
    for (size_t c = 0; c < cols; c++) out[c] = 0;
    if (s->rows++ == 5) raise(s->number);
}

static moe_status write_and_signal(int number) {
    static const moe_tensor_spec tensors[] = { { "a", MOE_TYPE_F32, 2, { 8, 4 } }, { "b", MOE_TYPE_F32, 2, { 8, 4 } } };
    signaller s = { number, 0 };
    const moe_write_params p = { .tensors = tensors, .n_tensors = 2, .fill = rows_and_a_signal, .user = &s };
    moe_error e = { MOE_OK, "", "" };
    return moe_model_write(in_directory("written.bin"), &p, &e);
}

/* A process that a signal ends during a write leaves no temporary file; a process that handles the signal continues. */
TEST(an_interrupted_save_leaves_no_file) {
    static const int numbers[] = { SIGHUP, SIGINT, SIGTERM };
    for (size_t i = 0; i < MOE_COUNT(numbers); i++) {
        const size_t before = files_in_directory();
        struct sigaction action = { .sa_handler = on_signal }, old;
        sigset_t mask_before, mask_after;
        int result = 0, child = fork();
        if (child == 0) {
            signal(numbers[i], SIG_DFL);
            write_and_signal(numbers[i]);
            _exit(0);
        }
        while (waitpid(child, &result, 0) < 0) assert_int_equal(errno, EINTR);
        CHECK(WIFSIGNALED(result) && WTERMSIG(result) == numbers[i], "signal %d: status %x", numbers[i], result);
        assert_int_equal(files_in_directory(), before);
        pthread_sigmask(SIG_SETMASK, NULL, &mask_before);
        sigaction(numbers[i], &action, &old);
        handled = 0;
        assert_int_equal(write_and_signal(numbers[i]), MOE_OK);
        assert_int_equal(handled, numbers[i]);
        sigaction(numbers[i], &old, NULL);
        pthread_sigmask(SIG_SETMASK, NULL, &mask_after);
        for (int k = 1; k < 32; k++) assert_int_equal(sigismember(&mask_before, k), sigismember(&mask_after, k));
        remove(in_directory("written.bin"));
        assert_int_equal(files_in_directory(), before);
    }
}

TEST(saving_survives_the_failure_of_every_allocation) {
    fixture f = small();
    mw_heap heap;
    moe_model_params params = hooked(&heap, 0);
    moe_model *model = NULL;
    moe_error e;
    size_t before, before_files;
    assert_int_equal(moe_model_open_memory(f.image.data, f.image.bytes, &params, &model, &e), MOE_OK);
    before = heap.bytes;
    remove(in_directory("again.bin"));
    before_files = files_in_directory();
    for (size_t n = 1;; n++) {
        moe_status status;
        heap.calls = 0;
        heap.fail_at = n;
        direct_allocations = 0;
        status = moe_model_save(model, in_directory("again.bin"),
                                &(moe_save_params){ .type = MOE_TYPE_Q8, .experts = MOE_TYPE_Q8 }, &e);
        assert_int_equal(direct_allocations, 0);
        assert_int_equal(heap.bytes, before);
        assert_int_equal(heap.wrong_sizes, 0);
        if (heap.calls < n) {
            assert_int_equal(status, MOE_OK);
            break;
        }
        assert_int_equal(status, MOE_ERROR_MEMORY);
        assert_false(exists(in_directory("again.bin")));
        assert_int_equal(files_in_directory(), before_files);
    }
    heap.fail_at = 0;
    moe_model_close(model);
    assert_int_equal(heap.blocks, 0);
    drop(&f);
}

/* Saving a damaged tensor must not give it a correct checksum. */
TEST(saving_does_not_hide_damaged_tensors) {
    static const char *const names[] = { "encoder.1.gate.weight", "encoder.0.fwd.w_x", "encoder.1.experts" };
    for (uint32_t version = 1; version <= 2; version++)
        for (size_t i = 0; i < MOE_COUNT(names); i++)
            for (uint32_t type = 0; type < 4; type += 3) { /* tensors are copied, then converted */
                mw_model *m = mw_small(MW_GNMT, MW_F32, 1);
                const moe_save_params p = to_type((moe_type)type);
                const mw_tensor *t;
                fixture f;
                moe_model *model;
                moe_error e;
                size_t before;
                m->version = version;
                f = build(m);
                t = mw_find_tensor(m, names[i]);
                f.image.data[t->offset + t->bytes - 1] ^= 1;
                model = open_image(f.image);
                before = files_in_directory();
                assert_int_equal(moe_model_save(model, in_directory("healed.bin"), &p, &e), MOE_ERROR_FORMAT);
                assert_string_equal(e.where, tensor_where(t));
                assert_int_equal(files_in_directory(), before);
                moe_model_close(model);
                drop(&f);
            }
}

/* ---- Hostile bytes ---- */

typedef struct one_request {
    int32_t source[3];
    int sent;
    size_t delivered;
} one_request;

static int one_pull(void *user, int wait, moe_request *r) {
    one_request *one = user;
    (void)wait;
    if (one->sent++) return MOE_PULL_END;
    r->source = one->source;
    r->n_source = 3;
    return MOE_PULL_REQUEST;
}

static void one_done(void *user, const moe_result *r) {
    ((one_request *)user)->delivered++;
    if (r->status != MOE_OK) assert_true(strlen(r->message) > 0);
}

/* Read all data and translate a sentence. Nothing may crash, and the request must get a result. */
static void use_model(const moe_model *model) {
    moe_session_params p = moe_session_params_default(model);
    moe_session *session = NULL;
    moe_error e;
    one_request one = { { 1, 0, 1 }, 0, 0 };
    size_t sum = 0;
    for (size_t i = 0; i < moe_model_meta_count(model); i++) {
        sum += moe_model_meta_key(model, i).length;
        for (size_t k = 0; k < moe_model_meta_length(model, i) && k < 20; k++) {
            const moe_span s = moe_model_meta_text(model, i, k);
            sum += (size_t)moe_model_meta_int(model, i, k);
            if (s.length) sum += (unsigned char)s.data[0] + (unsigned char)s.data[s.length - 1];
        }
    }
    for (size_t i = 0; i < moe_model_language_count(model); i++) sum += moe_model_language(model, i).length;
    assert_true(sum > 0);
    p.threads = 1, p.batch = 1, p.max_source = 6, p.max_target = 5, p.beam = 2, p.nbest = 2;
    if (moe_model_vocabulary(model) < 6) return;
    p.target_tag = 5;
    if (moe_session_new(model, &p, &session, &e) != MOE_OK) return;
    assert_int_equal(moe_translate(session, one_pull, one_done, &one, &e), MOE_OK);
    assert_int_equal(one.delivered, 1);
    moe_session_free(session);
}

TEST(random_damage_never_crashes) {
    static const uint64_t odd[] = { 0,
                                    1,
                                    2,
                                    3,
                                    7,
                                    8,
                                    63,
                                    64,
                                    255,
                                    256,
                                    4096,
                                    INT32_MAX,
                                    UINT32_MAX,
                                    (uint64_t)1 << 31,
                                    (uint64_t)1 << 32,
                                    (uint64_t)1 << 61,
                                    INT64_MAX,
                                    (uint64_t)1 << 63,
                                    UINT64_MAX,
                                    0x7fc00001,
                                    0x7f800000,
                                    0xffc00000 };
    uint64_t random = 2024;
    size_t opened = 0, tried = 0;
    mw_heap heap;
    for (int variant = 0; variant < MW_VARIANTS; variant++) {
        mw_model *m = mw_small(variant, variant % 2 ? MW_F32 : MW_Q8, 5);
        fixture f;
        mw_image image;
        m->version = 1 + (uint32_t)variant / 2 % 2;
        f = build(m);
        image = copy_image(f.image, f.image.bytes);
        for (size_t round = 0; round < mw_rounds(6000); round++, tried++) {
            const size_t changes = mw_below(&random, 2) ? 1 : 1 + mw_below(&random, 3);
            moe_model *model = NULL;
            moe_error e;
            moe_model_params params = hooked(&heap, 0);
            memcpy(image.data, f.image.data, image.bytes);
            for (size_t c = 0; c < changes; c++) {
                const int body = mw_below(&random, 3) == 0;
                const size_t at = body ? f.m->header_bytes + mw_below(&random, image.bytes - f.m->header_bytes - 8)
                                       : 8 + mw_below(&random, f.m->header_bytes - 16);
                switch (mw_below(&random, 5)) {
                case 0: image.data[at] = (unsigned char)mw_next(&random); break;
                case 1: image.data[at] ^= (unsigned char)(1u << mw_below(&random, 8)); break;
                case 2: mw_put32(image.data + at / 4 * 4, (uint32_t)odd[mw_below(&random, MOE_COUNT(odd))]); break;
                case 3: mw_put64(image.data + at / 8 * 8, odd[mw_below(&random, MOE_COUNT(odd))]); break;
                default:
                    image.data[at / 8 * 8] = (unsigned char)(image.data[at / 8 * 8] + (mw_next(&random) & 1 ? 1 : 255));
                    break;
                }
            }
            if (mw_below(&random, 4))
                mw_put32(image.data + 8, m->version), mw_put64(image.data + 16, f.m->header_bytes),
                    mw_put64(image.data + 24, image.bytes);
            mw_seal(image);
            if (moe_model_open_memory(image.data, image.bytes, &params, &model, &e) == MOE_OK) {
                use_model(model);
                moe_model_close(model);
                opened++;
            } else {
                assert_true(strlen(e.message) > 0 && strlen(e.where) > 0);
            }
            assert_int_equal(heap.blocks, 0);
            assert_int_equal(heap.wrong_sizes, 0);
        }
        free(image.data);
        drop(&f);
    }
    print_message("# %zu mutations, %zu opened\n", tried, opened);
    assert_true(opened > 0 && opened < tried);
}

int main(void) { return run_all_tests(make_directory, remove_directory); }

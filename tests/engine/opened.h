/* opened.h - a model of model_writer.h, opened from memory with a counted allocator. */
#ifndef OPENED_H
#define OPENED_H

#include "watched.h"

typedef struct fixture {
    mw_model *m;
    mw_image image;
    moe_model *model;
    mw_heap heap;
} fixture;

static inline fixture *open_model(mw_model *m) {
    fixture *f = mw_zeros(sizeof *f);
    moe_model_params params = { { mw_heap_allocate, mw_heap_reallocate, mw_heap_release, &f->heap }, .verify = 0 };
    moe_error e = { MOE_OK, "", "" };
    f->m = m;
    f->image = mw_build(m);
    CHECK(moe_model_open_memory(f->image.data, f->image.bytes, &params, &f->model, &e) == MOE_OK, "%s: %s", e.where,
          e.message);
    return f;
}

#endif /* OPENED_H */

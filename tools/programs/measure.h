/* measure.h - the quality loss of a model against its original; for moe-quantize and moe-prune. */
#ifndef MEASURE_H
#define MEASURE_H

#include "tools/text/text.h"

/* Compare the model file `out` with `in` on a sample (text_sample_read, every line with its target), tokenised by `in`.
 * Print the losses and the share of equal translations to standard error, and store them in OUT for moe-info. Errors:
 * those of sessions, text_sample_read and moe_model_save; MOE_ERROR_ARGUMENT (no line can be scored),
 * MOE_ERROR_NUMERIC. */
moe_status measure_loss(const text_front *in, const char *out, const char *sample, int ids, moe_error *error);

#endif

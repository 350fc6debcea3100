/* repair.h - repairs the translation of a fuzzy match (Ortega et al. 2016) with a model that has an encoder.
 *
 * The change consists of the words of the memory's translation that the model finds less probable for the new text than
 * for the memory's text. The model translates the new text, beginning with the words before the change. Each beginning
 * of this translation, followed by the memory's words after the change, is a candidate. The best one is used if it
 * changes few words and keeps numbers, placeholders and signs. All other words are the memory's.
 */
#ifndef TEXT_REPAIR_H
#define TEXT_REPAIR_H

#include "tools/text/jobs.h"

#define TEXT_REPAIR_SHARE 0.5f  /* share of the words that a change must not reach */
#define TEXT_REPAIR_WEIGHT 2.0f /* of the similarity to the memory's translation, in nats per token */

/* Complete the next request for a repair. Set *asks to 0 if the job needs no more. Errors: MOE_ERROR_MEMORY. */
moe_status text_repair_request(const text_front *front, text_job *job, moe_request *request, int *asks,
                               moe_error *error);
/* Use the result of such a request; set *used to 0 if it is the result of another one. After the last one, `recalled`
 * of the job is the repaired translation and match.kind is TEXT_MATCH_REPAIRED, or both are unchanged. Errors:
 * MOE_ERROR_MEMORY and those of the tokeniser. */
moe_status text_repair_take(const text_front *front, text_job *job, const moe_result *result, int *used,
                            moe_error *error);
int text_repair_is_busy(const text_repair *repair); /* 1 if the job's current request is for a repair */
void text_repair_clear(text_repair *repair);        /* for another job; may be NULL */
void text_repair_free(text_repair *repair);         /* may be NULL */

#endif

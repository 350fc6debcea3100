/* html.h - HTML in which texts, and attributes that a reader sees, are translated and every other byte stays.
 *
 * A document is cut into segments: what stands between two block tags, without the markup and the white space at its
 * ends; a link or the like whose neighbours are not words is a segment of its own. Code, names and formulas are words
 * that stay: the translator sees a stand-in, {1}. It sees a segment's words alone; html_place puts the tags inside it
 * around the words that are linked to those which they stood around. Each tag comes once, in pairs that are well
 * nested, whatever the links say.
 *
 * The cutting follows the tokeniser of the HTML standard and builds no tree: the libraries that give the bytes of a
 * token build one, for which a hostile page needs memory that grows with the square of its length.
 */
#ifndef SERVER_HTML_H
#define SERVER_HTML_H

#include "tools/text/bytes.h"
#include "tools/text/moetext.h"

typedef struct html html;

typedef struct html_wish {
    int whole; /* 0: without links to place tags by, every text between two tags is a segment of its own */
    int xml;   /* it is XML: elements have no meaning by their names, and attributes stay */
    const char *source, *target; /* the lang of <html> that is `source` ("": any) becomes `target` (NULL: it stays) */
} html_wish;

/* `data` [length] is UTF-8; it and the languages must live as long as the document. NULL: out of memory. */
html *html_read(const char *data, size_t length, const html_wish *wish);
void html_free(html *document); /* NULL is fine */

size_t html_count(const html *document); /* segments that have words */
/* The words of a segment, as a reader sees them. */
const char *html_source(const html *document, size_t segment, size_t *length);
/* The translation of a segment as html_write wants it, appended to *out. 0: a pair of tags that held words holds none,
 * or a word that stays is lost: nothing is appended. */
int html_place(const html *document, size_t segment, const char *text, size_t length, const moetext_link *links,
               size_t n_links, text_bytes *out);
/* The second try: the texts between the tags of a segment, a line each; and the segment with their translations. */
void html_pieces(const html *document, size_t segment, text_bytes *out);
void html_place_pieces(const html *document, size_t segment, const char *text, size_t length, text_bytes *out);
/* The document, appended to *out. translation(user, i): what html_place made of segment i. */
void html_write(const html *document, const text_bytes *(*translation)(const void *user, size_t segment),
                const void *user, text_bytes *out);

#endif

/* mlxzip lookup: the ids that followed an earlier occurrence of a text's last ids. Base ids in, base ids out. */
#ifndef MLXZIP_LOOKUP_H
#define MLXZIP_LOOKUP_H

#include <stddef.h>
#include <stdint.h>

/* BEGIN CFFI */
enum { MLXZIP_LOOKUP_SHORTEST = 2, MLXZIP_LOOKUP_LONGEST = 32 };

typedef struct mlxzip_lookup mlxzip_lookup;

/* Returns an empty text, or NULL if there is no memory. */
mlxzip_lookup *mlxzip_lookup_new(void);
void mlxzip_lookup_free(mlxzip_lookup *text);
/* Appends n ids, each in constant time on average. Returns 0, or -1 if there is no memory; then none was appended. */
int mlxzip_lookup_append(mlxzip_lookup *text, const uint32_t *ids, size_t n);
/* Writes `most` ids that followed an earlier occurrence of the end of the text: the last one of the longest run of 2, 4,
 * 8, 16 or 32 ids that occurred. At the end of the text they repeat from the occurrence on. Returns how many ids before
 * the occurrence's end match the end of the text, at most 32; 0, and nothing is written, without an occurrence. */
size_t mlxzip_lookup_propose(const mlxzip_lookup *text, uint32_t *out, size_t most);
/* END CFFI */

#endif

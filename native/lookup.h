/* mlxzip lookup: what followed the last time that a text ended as it ends now. Base ids in, base ids out. */
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
 * 8, 16 or 32 ids that occurred. What reaches the end of the text goes on from the occurrence again. Returns the length
 * of the run that both have in common, at most 32; 0, and nothing is written, if there is none. */
size_t mlxzip_lookup_propose(const mlxzip_lookup *text, uint32_t *out, size_t most);
/* END CFFI */

#endif

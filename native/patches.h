/* mlxzip patches: the second stage of hierarchical BPE. Bytes of tokens in, short runs of symbols out.
 *
 * Symbols. 0..255 are bytes, 256 is the mark that ends every patch, 257 + k stands for the two symbols of merge k. The
 * mark never merges. A token of n symbols makes a patch of n + 1 and fits a size S if n + 1 <= S.
 *
 * Learning: as long as some token does not fit, the most frequent pair of neighbours in the tokens that do not is
 * merged, everywhere in them and from left to right; those that fit then leave. Overlapping pairs count each (x x x: two);
 * of equally frequent pairs the smallest is taken. Encoding replays the merges in order and stops as soon as the token
 * fits, or, for size 0, never. Source: arXiv 2510.15517, algorithm 1.
 *
 * Tokens. n byte strings stand one behind the other: string i is bytes[offsets[i] .. offsets[i + 1]); offsets holds n + 1
 * rising numbers and begins with 0; bytes may be NULL where there are none.
 *
 * Buffers belong to the caller and are not kept; no globals. On an error what was written to them is undefined. */
#ifndef MLXZIP_PATCHES_H
#define MLXZIP_PATCHES_H

#include "mlxzip.h"

/* BEGIN CFFI */
enum {
  MLXZIP_MARK = 256,
  MLXZIP_MAX_PATCH = 256,
  MLXZIP_MAX_MERGES = 65279,          /* so that a symbol is 16 bits */
  MLXZIP_MAX_TOKEN_BYTES = 65535,     /* of one token */
  MLXZIP_MAX_TOKENS_BYTES = 268435456 /* of all that are learned from */
};

typedef struct {
  uint16_t left, right;
} mlxzip_merge;

/* Learns merges for patches of at most `size` symbols, 2..MLXZIP_MAX_PATCH, from n tokens, each counted. merges, counts
 * and left: room for `cap`; count of the pair when it was merged, and how many tokens fit because of it. E_SPACE: more
 * than cap merges are needed. E_ARG: a size, an offset or a length outside its range. E_MEMORY. */
mlxzip_status mlxzip_patches_learn(const uint8_t *bytes, const size_t *offsets, size_t n, size_t size,
                                   mlxzip_merge *merges, uint32_t *counts, uint32_t *left, size_t cap,
                                   size_t *n_merges);
/* Encodes n tokens for patches of `size` symbols, or with all merges if it is 0. Patch i begins at dst[offsets[i] + i]
 * and has lengths[i] symbols, the mark among them; more than `size` if the merges do not suffice. dst: offsets[n] + n.
 * E_MERGE: merge *bad has the mark in it, or a symbol not made before it, or a pair merged before. E_ARG, E_MEMORY. */
mlxzip_status mlxzip_patches_encode(const mlxzip_merge *merges, size_t n_merges, size_t size, const uint8_t *bytes,
                                    const size_t *offsets, size_t n, uint16_t *dst, uint32_t *lengths, size_t *bad);
/* END CFFI */

#endif

/* mlxzip patches: the second stage of hierarchical BPE. Bytes of tokens in, short runs of symbols out.
 * Source: arXiv 2510.15517, algorithm 1.
 *
 * SYMBOLS
 * 0..255 are bytes. 256 is the end mark, the last symbol of every patch; it never merges. 257 + k stands for the two
 * symbols of merge k. A token of n symbols makes a patch of n + 1 symbols; it fits a size S if n + 1 <= S.
 *
 * LEARNING
 * Repeat until every token fits: among the tokens that do not fit, merge the most frequent pair of neighbouring
 * symbols, everywhere in these tokens and from left to right. Overlapping pairs all count (x x x has two); of equally
 * frequent pairs the smallest is merged.
 *
 * ENCODING
 * Apply the merges to a token in the order in which they were learned, and stop as soon as it fits; with size 0 apply
 * all of them.
 *
 * TOKENS
 * n byte strings lie one after the other: string i is bytes[offsets[i] .. offsets[i + 1]). offsets holds n + 1 rising
 * numbers, the first of them 0. bytes may be NULL if all strings are empty.
 *
 * The caller owns all buffers; none is kept. After an error their contents are undefined. */
#ifndef MLXZIP_PATCHES_H
#define MLXZIP_PATCHES_H

#include "mlxzip.h"

/* BEGIN CFFI */
enum {
  MLXZIP_MARK = 256,
  MLXZIP_MAX_PATCH = 256,
  MLXZIP_MAX_MERGES = 65279,          /* so that a symbol has 16 bits */
  MLXZIP_MAX_TOKEN_BYTES = 65535,     /* in one token */
  MLXZIP_MAX_TOKENS_BYTES = 268435456 /* in all tokens that are learned from */
};

typedef struct {
  uint16_t left, right;
} mlxzip_merge;

/* Learns *n_merges merges from n tokens, for patches of at most `size` symbols, 2..MLXZIP_MAX_PATCH. A token that
 * occurs twice counts twice. merges, counts, left: room for cap each. counts[k]: occurrences of pair k when it was
 * merged. left[k]: tokens that fit because of merge k. E_SPACE: more than cap merges are needed. E_ARG: a size, an
 * offset or a length outside its range. E_MEMORY. */
mlxzip_status mlxzip_patches_learn(const uint8_t *bytes, const size_t *offsets, size_t n, size_t size,
                                   mlxzip_merge *merges, uint32_t *counts, uint32_t *left, size_t cap,
                                   size_t *n_merges);
/* Encodes n tokens, for patches of `size` symbols, or with all merges if size is 0. Patch i begins at dst[offsets[i] +
 * i] and has lengths[i] symbols, end mark included; that is more than size if the merges are not enough. dst: room for
 * offsets[n] + n. E_MERGE: merge *bad uses the end mark or a later symbol, or repeats a pair. E_ARG, E_MEMORY. */
mlxzip_status mlxzip_patches_encode(const mlxzip_merge *merges, size_t n_merges, size_t size, const uint8_t *bytes,
                                    const size_t *offsets, size_t n, uint16_t *dst, uint32_t *lengths, size_t *bad);
/* END CFFI */

#endif

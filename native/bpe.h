/* mlxzip bpe: byte pair encoding in which merges can also be undone. Bytes in, token ids out.
 *
 * WORDS
 * token        a byte (ids 0..255) or the result of merge m (id 256 + m).
 * merge list   each merge joins two tokens that are bytes or results of earlier merges.
 * piece        a part of the text that the pre-tokenizer cuts out; no merge crosses the end of a piece.
 *
 * TIMES
 * Every merge has a time at which it is applied, and a time at which its tokens are split into their two parts again.
 * Either time may be "never". A piece starts as its bytes. Then the times are worked through in rising order; what is
 * due at a time happens everywhere in the piece, from left to right. If a part of a split token is itself due to be
 * split by then, it is split as well. What was due at a time that has passed does not happen later. Examples:
 *
 *   plain BPE, first n merges   merges are applied at their rank, the others never; nothing is split
 *   a kept subset               merges are applied at their rank; those not kept are split after the last one
 *   swaps (p out, q in)         the first n at their rank; for swap i, p is split at n + 2 i, q applied at n + 2 i + 1
 *
 * PIECES
 * PIECE_WHOLE does not cut the text. GPT2 and CL100K cut by the published patterns of GPT-2 and cl100k_base (Llama 3);
 * DIGITS is CL100K with every digit on its own (Qwen). A byte that is not valid UTF-8 counts as a character that is no
 * letter, number or space. Every byte is in exactly one piece, so the tokens' bytes are the text.
 *
 * Ownership is as in mlxzip.h. An encoder caches the ids of pieces, a few MB at most, so it is used by one thread at a
 * time. Cutting has no state. After an error the output is undefined.
 *
 * COST
 * A piece that is not in the cache: O(k log k) for k merges and splits. A piece in the cache: one lookup. */
#ifndef MLXZIP_BPE_H
#define MLXZIP_BPE_H

#include <stddef.h>
#include <stdint.h>

/* BEGIN CFFI */
enum { MLXZIP_BPE_LONGEST = 1024 }; /* maximum bytes of a token */

enum { MLXZIP_PIECE_WHOLE = 0, MLXZIP_PIECE_GPT2 = 1, MLXZIP_PIECE_CL100K = 2, MLXZIP_PIECE_DIGITS = 3 };

typedef struct mlxzip_bpe mlxzip_bpe;

/* parts: n_merges pairs of tokens. apply_at, split_at: n_merges times, each 0..2 * n_merges, or 2^32-1 for never. No
 * two merges are applied at the same time, and none at a time of splitting. No two applied merges have the same pair.
 * */
typedef struct {
  size_t n_merges;
  const uint32_t *parts, *apply_at, *split_at;
} mlxzip_bpe_spec;

/* Makes an encoder; the arrays of spec are copied. On MLXZIP_OK the caller frees *out with mlxzip_bpe_free; on error
 * *out is NULL. MLXZIP_E_ARG (also for a token that is too long), MLXZIP_E_MEMORY. */
int mlxzip_bpe_new(const mlxzip_bpe_spec *spec, mlxzip_bpe **out);
void mlxzip_bpe_free(mlxzip_bpe *bpe);

/* Cuts a text of n bytes and writes where each piece ends. ends: room for n. Returns the number of pieces. */
size_t mlxzip_pieces(int kind, const uint8_t *text, size_t n, size_t *ends);
/* Encodes a text of n bytes to *n_out ids. dst: room for n ids. MLXZIP_E_ARG for an unknown kind or a piece of 4 GiB or
 * more, MLXZIP_E_MEMORY. */
int mlxzip_bpe_encode(mlxzip_bpe *bpe, int kind, const uint8_t *text, size_t n, uint32_t *dst, size_t *n_out);
/* Encodes a text that is cut already: piece i ends before text[ends[i]], and its ids end before dst[id_ends[i]]. dst:
 * room for ends[n_pieces - 1] ids. MLXZIP_E_ARG for ends that fall or a piece of 4 GiB or more, MLXZIP_E_MEMORY. */
int mlxzip_bpe_encode_pieces(mlxzip_bpe *bpe, const uint8_t *text, const size_t *ends, size_t n_pieces, uint32_t *dst,
                             size_t *id_ends);
/* END CFFI */

/* Returns where the piece that begins at `at` ends; at < n. */
size_t mlxzip_piece_end(int kind, const uint8_t *text, size_t n, size_t at);

#endif

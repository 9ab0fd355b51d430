/* mlxzip bpe: byte pair encoding with merges that come and go. Bytes in, token ids out.
 *
 * Words. A token is a byte (ids 0..255) or what merge m makes (id 256 + m). A merge list is proper: the two parts of a
 * merge are bytes or made by earlier merges. A piece is what the pre-tokenizer cuts; no merge crosses a border.
 *
 * Every merge has a time at which it is applied and a time at which its tokens are split into their two parts, either
 * of which may be never. A piece starts as its bytes; then time runs, and at each moment the one thing that happens
 * then happens everywhere in the piece, from left to right. A part that is itself past its time of splitting is split
 * on. What is due earlier than now never happens. So:
 *
 *   plain BPE, first n merges   applied at their rank, the others never; nothing is split
 *   a kept subset               applied at their rank; those not kept are split after the last
 *   swaps (p out, q in)         the first n at their rank; for swap i, p split at n + 2 i, q applied at n + 2 i + 1
 *
 * Pieces. PIECE_WHOLE cuts nothing. The others cut as the published patterns of GPT-2 and of cl100k_base (Llama 3) do,
 * the last with digits one by one (Qwen). A byte that is not UTF-8 counts as a character that is neither letter,
 * number nor space. Every byte is in exactly one piece, so that the tokens' bytes give the text back.
 *
 * Ownership and threads as in mlxzip.h: an encoder keeps the ids of pieces it has seen, so one thread at a time per
 * encoder; it never holds more than a few MB of them. Splitting holds nothing. On an error output is undefined.
 *
 * Cost. A piece of n bytes that was not seen before: O(k log k) for the k things that happen in it; one that was: a
 * look at its bytes. */
#ifndef MLXZIP_BPE_H
#define MLXZIP_BPE_H

#include <stddef.h>
#include <stdint.h>

/* BEGIN CFFI */
enum { MLXZIP_BPE_LONGEST = 1024 }; /* bytes of a token at most */

enum { MLXZIP_PIECE_WHOLE = 0, MLXZIP_PIECE_GPT2 = 1, MLXZIP_PIECE_CL100K = 2, MLXZIP_PIECE_DIGITS = 3 };

typedef struct mlxzip_bpe mlxzip_bpe;

/* parts: n_merges pairs of tokens. apply_at, split_at: n_merges times up to 2 * n_merges, or 2^32-1 for never; times of
 * applying all differ from each other and from those of splitting. No pair twice among the merges that are applied. */
typedef struct {
  size_t n_merges;
  const uint32_t *parts, *apply_at, *split_at;
} mlxzip_bpe_spec;

/* MLXZIP_OK, and the caller owns *out and gives it back to mlxzip_bpe_free; MLXZIP_E_ARG, also for a token that is too
 * long; MLXZIP_E_MEMORY. On error *out is NULL. */
int mlxzip_bpe_new(const mlxzip_bpe_spec *spec, mlxzip_bpe **out);
void mlxzip_bpe_free(mlxzip_bpe *bpe);

/* Ends of the pieces of a text of n bytes. ends: n places. Returns how many pieces. */
size_t mlxzip_pieces(int kind, const uint8_t *text, size_t n, size_t *ends);
/* Ids of a text. dst: n places. MLXZIP_E_ARG for a kind there is not or a piece of 4 GiB, MLXZIP_E_MEMORY. */
int mlxzip_bpe_encode(mlxzip_bpe *bpe, int kind, const uint8_t *text, size_t n, uint32_t *dst, size_t *n_out);
/* The same of pieces that are cut already: piece i ends before text[ends[i]], its ids before dst[id_ends[i]].
 * MLXZIP_E_ARG also where the ends do not rise. */
int mlxzip_bpe_encode_pieces(mlxzip_bpe *bpe, const uint8_t *text, const size_t *ends, size_t n_pieces, uint32_t *dst,
                             size_t *id_ends);
/* END CFFI */

/* End of the piece that begins at `at`, for at < n. */
size_t mlxzip_piece_end(int kind, const uint8_t *text, size_t n, size_t at);

#endif

/* mlxzip phrases: a dictionary of runs of units, learned by the walk of LZW (MultiTok, arXiv 2410.21548). Unit numbers
 * in, ids out.
 *
 * Words. A unit is a number below `units`: a word's, or another tokenizer's id. A phrase is a run of two units or more.
 * A node is a unit or a phrase, or a run that only leads to longer ones: node u is unit u, node units + slot the run of
 * that slot. Slots stand in the order of their making, so a run's prefix, all of it but its last unit, is a lower node.
 * The id of a node is first_id + node, or as it was given to mlxzip_phrases_from, rising with the slot. A sample is a
 * sequence that phrases do not cross the ends of.
 *
 * Training: at each point of a sample the longest known run of at most `window` units is emitted (0: of any length);
 * where that is not for the window or the sample's end, it and the unit after it become the next phrase, unless there
 * are `limit` of them already. Encoding does the same and adds nothing: it goes on while the run is a phrase (walk), or
 * takes the longest phrase though a shorter run of it be none (longest). The two differ only where a prefix of a phrase
 * is no phrase. A unit not below `units` is emitted as unk_id and is part of no phrase, if has_unk; or it is E_ID.
 *
 * It is the codec's compression with other parameters: phrases of any length, one table for all samples, which can be
 * kept. So a run is not a row but a node and one more unit, found by the hash of the two, in an index as the codec's.
 *
 * Training may be cut anywhere, also within a sample: `mlxzip_phrases_train` goes on where it was left. Its ids come
 * when they are certain, so an id that a piece begins may be emitted by a later one.
 *
 * Ownership and errors as in mlxzip.h: buffers belong to the caller; any numbers give a result or an error; on an error
 * the dictionary is as it was, but for E_MEMORY in training. Training takes one thread at a time; what is
 * declared const may be called by several. Cost: one look into the index per unit. Memory per phrase: 12 bytes and an
 * index of 8 to 16, a quarter more of either where they have just grown, and a bit; per unit 4 bytes and a bit. */
#ifndef MLXZIP_PHRASES_H
#define MLXZIP_PHRASES_H

#include "mlxzip.h"

/* BEGIN CFFI */
enum { MLXZIP_MAX_PHRASES = 1073741823, MLXZIP_NO_ID = -1 }; /* the latter as 32 bits: of a run that is no phrase */

typedef struct mlxzip_phrases mlxzip_phrases;

/* units 1..2^31; first_id + units + limit below 2^32; unk_id, read when has_unk is 1, below first_id + units. */
typedef struct {
  uint32_t units, first_id, window, limit, has_unk, unk_id;
} mlxzip_phrases_spec;

/* Samples one after the other: n units, or ids, in all; sample k ends before place ends[k], rising. */
typedef struct {
  const uint32_t *at;
  const uint64_t *ends;
  size_t n, n_ends;
} mlxzip_samples;

/* On OK the caller owns *out and gives it back to mlxzip_phrases_free; on error *out is NULL. */
mlxzip_status mlxzip_phrases_new(const mlxzip_phrases_spec *spec, mlxzip_phrases **out);
/* One of n runs, in slot order: rows of a prefix (a node) and a last unit; ids, of which MLXZIP_NO_ID is a run that is
 * no phrase, or NULL; uses of all nodes, or NULL. E_ARG with *bad the row at fault: a prefix that is no lower node, a
 * last unit that is none, a run that was there before, an id not above those before it. */
mlxzip_status mlxzip_phrases_from(const mlxzip_phrases_spec *spec, const uint32_t *rows, const uint32_t *ids,
                                  const uint32_t *uses, size_t n, mlxzip_phrases **out, size_t *bad);
void mlxzip_phrases_free(mlxzip_phrases *phrases);

size_t mlxzip_phrases_size(const mlxzip_phrases *phrases); /* slots */
uint64_t mlxzip_phrases_bytes(const mlxzip_phrases *phrases); /* memory held */
/* size * 2 numbers, and units + size of them; valid until the next call that is not const. */
const uint32_t *mlxzip_phrases_rows(const mlxzip_phrases *phrases);
const uint32_t *mlxzip_phrases_uses(const mlxzip_phrases *phrases); /* how often training emitted each node */
/* Units of each node: units + size numbers. */
void mlxzip_phrases_lengths(const mlxzip_phrases *phrases, uint32_t *dst);

/* Feeds units that go on with the sample the last call left open; what follows the last end stays open. dst: n + 1 ids;
 * dst_ends: n_ends places in dst. E_ID with *bad the place at fault; E_ARG for a dictionary whose ids were given, and
 * for ends that fall or lie beyond n; E_MEMORY, of which alone part of the units may have been learnt. */
mlxzip_status mlxzip_phrases_train(mlxzip_phrases *phrases, const mlxzip_samples *samples, uint32_t *dst,
                                   uint64_t *dst_ends, size_t *n_out, size_t *bad);
/* Encodes whole samples by phrases of at most `window` units, and spec.window; the last sample must end at n. Some are
 * read in turns, so that one's wait for memory is the others' time. dst: n ids, of which those behind *n_out are of no
 * meaning; dst_ends: n_ends, not samples->ends. E_ID with *bad the place; E_ARG. */
mlxzip_status mlxzip_phrases_encode(const mlxzip_phrases *phrases, const mlxzip_samples *samples, uint32_t window,
                                    uint32_t longest, uint32_t *dst, uint64_t *dst_ends, size_t *n_out, size_t *bad);
/* The units of ids; that of unk_id, where it is no unit's, is `units`. dst: cap. E_ID with *bad; E_SPACE. */
mlxzip_status mlxzip_phrases_expand(const mlxzip_phrases *phrases, const mlxzip_samples *ids, uint32_t *dst, size_t cap,
                                    uint64_t *dst_ends, size_t *n_out, size_t *bad);
/* END CFFI */

#endif

/* mlxzip phrases: a dictionary of runs of units, learned as in LZW (MultiTok, arXiv 2410.21548). Unit numbers in, ids
 * out.
 *
 * WORDS
 * unit    a number below `units`: the number of a word, or an id of another tokenizer.
 * run     two or more units in a row that the dictionary holds in a slot. Slots are numbered in the order of learning.
 * phrase  a run with an id. A run without an id is only the beginning of longer phrases.
 * node    a unit or a run: node u is unit u, node units + slot is the run of that slot.
 * prefix  a run without its last unit. It is always an earlier node.
 * id      of a node: first_id + node, or the id that was given to mlxzip_phrases_from; ids rise with the slots.
 * sample  a sequence of units; no phrase crosses its end.
 *
 * TRAINING
 * At each position of a sample the longest known run of at most `window` units is emitted (0: of any length). That run
 * plus the next unit becomes a new phrase, unless the run ends at the window or at the end of the sample, or there are
 * `limit` phrases already.
 *
 * ENCODING
 * Encoding adds no phrase. "walk" takes units as long as the run is a phrase. "longest" takes the longest phrase that
 * matches. They differ only if some phrase has a prefix that is no phrase, which pruning can cause.
 * With has_unk, a number that is not below `units` is emitted as unk_id and is part of no phrase; without, it is E_ID.
 *
 * This is the codec's compression with phrases of any length and one table for all samples. So a run is stored as its
 * prefix and its last unit, and is found by the hash of the two.
 *
 * Training may be split into calls anywhere, also within a sample: mlxzip_phrases_train continues where the last call
 * ended. An id is emitted when it is certain, so a phrase that begins in one call may be emitted by a later one.
 *
 * Ownership and errors are as in mlxzip.h; after an error the dictionary is unchanged, except after E_MEMORY in
 * training. Training is for one thread at a time; functions with a const dictionary may run in several threads at once.
 * Cost: one lookup per unit. Memory: per phrase 12 bytes, 8 to 16 bytes of index and one bit, a quarter more after
 * growth; per unit 4 bytes and one bit. */
#ifndef MLXZIP_PHRASES_H
#define MLXZIP_PHRASES_H

#include "mlxzip.h"

/* BEGIN CFFI */
enum { MLXZIP_MAX_PHRASES = 1073741823, MLXZIP_NO_ID = -1 }; /* NO_ID, as 32 bits: a run that is no phrase */

typedef struct mlxzip_phrases mlxzip_phrases;

/* Ranges: units 1..2^31; first_id + units + limit below 2^32; unk_id below first_id + units, read only if has_unk is
 * 1. */
typedef struct {
  uint32_t units, first_id, window, limit, has_unk, unk_id;
} mlxzip_phrases_spec;

/* n_ends samples one after the other, n units (or ids) in all: sample k ends before at[ends[k]]; ends never fall. */
typedef struct {
  const uint32_t *at;
  const uint64_t *ends;
  size_t n, n_ends;
} mlxzip_samples;

/* Makes an empty dictionary. On OK the caller frees *out with mlxzip_phrases_free; on error *out is NULL. */
mlxzip_status mlxzip_phrases_new(const mlxzip_phrases_spec *spec, mlxzip_phrases **out);
/* Makes a dictionary of n runs in slot order. rows: per run its prefix (a node) and its last unit. ids: per run its id,
 * MLXZIP_NO_ID for a run that is no phrase; NULL: consecutive ids. uses: per node; NULL: all 0. E_ARG with *bad = the
 * row at fault: its prefix is no earlier node, its last unit is none, it repeats a run, or its id is not above the ones
 * before. */
mlxzip_status mlxzip_phrases_from(const mlxzip_phrases_spec *spec, const uint32_t *rows, const uint32_t *ids,
                                  const uint32_t *uses, size_t n, mlxzip_phrases **out, size_t *bad);
void mlxzip_phrases_free(mlxzip_phrases *phrases);

size_t mlxzip_phrases_size(const mlxzip_phrases *phrases); /* number of runs */
uint64_t mlxzip_phrases_bytes(const mlxzip_phrases *phrases); /* memory in use */
/* Prefix and last unit of each run: size * 2 numbers, valid until the next call without const. */
const uint32_t *mlxzip_phrases_rows(const mlxzip_phrases *phrases);
/* How often training emitted each node: units + size numbers, valid until the next call without const. */
const uint32_t *mlxzip_phrases_uses(const mlxzip_phrases *phrases);
/* Writes the number of units of each node. dst: room for units + size. */
void mlxzip_phrases_lengths(const mlxzip_phrases *phrases, uint32_t *dst);

/* Learns from samples and encodes them. The first one continues the sample that the last call left open; units after
 * the last end stay open. dst: room for n + 1 ids; dst_ends: room for n_ends, where each sample ends in dst. E_ID with
 * *bad = the index at fault; E_ARG for a dictionary with given ids, and for ends that fall or exceed n; E_MEMORY,
 * after which a part of the units may have been learned. */
mlxzip_status mlxzip_phrases_train(mlxzip_phrases *phrases, const mlxzip_samples *samples, uint32_t *dst,
                                   uint64_t *dst_ends, size_t *n_out, size_t *bad);
/* Encodes whole samples with phrases of at most `window` and spec.window units (0: any number); the last sample must
 * end at n. longest: 1 for "longest", 0 for "walk". Several samples are encoded in turns to hide the latency of
 * memory. dst: room for n ids, undefined after *n_out; dst_ends: room for n_ends, other memory than samples->ends.
 * E_ID with *bad = the index at fault; E_ARG. */
mlxzip_status mlxzip_phrases_encode(const mlxzip_phrases *phrases, const mlxzip_samples *samples, uint32_t window,
                                    uint32_t longest, uint32_t *dst, uint64_t *dst_ends, size_t *n_out, size_t *bad);
/* Expands ids to units; an unk_id that is no unit's id gives the number `units`. dst: room for cap units. E_ID with
 * *bad = the index at fault; E_SPACE. */
mlxzip_status mlxzip_phrases_expand(const mlxzip_phrases *phrases, const mlxzip_samples *ids, uint32_t *dst, size_t cap,
                                    uint64_t *dst_ends, size_t *n_out, size_t *bad);
/* END CFFI */

#endif

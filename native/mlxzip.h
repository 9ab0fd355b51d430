/* mlxzip: the LZW codec of hypertokens. Token ids in, token ids out. C11 and libc only; no globals.
 *
 * WORDS
 * base id      an id below vocab_size: one token of the tokenizer.
 * hypertoken   an id vocab_size + slot, where slot is below codebook_size.
 * entry        the run of 2..merge_size base ids that an installed slot stands for.
 * start entry  an entry that exists before the first id. Start entries take the first slots and are never evicted.
 *              All other entries are called growing entries.
 * disabled id  an id that never merges. It passes through unchanged and separates what comes before it from what
 *              comes after it. The pad id is always disabled. A disabled id may be vocab_size or more; then it is a
 *              separator, even if it is also the id of a slot.
 *
 * ENCODING (mlxzip_compress)
 * At each position the longest installed entry that matches is emitted, or a single id if none matches. The match plus
 * the next id becomes a new entry if it has at most merge_size ids, none of them is disabled, and a slot is free.
 *
 * DECODING (mlxzip_push)
 * The decoder reads emitted ids and installs the same entries, one id later than the encoder. It keeps `prev`: the run
 * of base ids that the next entry begins with. For each id that is read:
 *   1. The id stands for a run `cur`: the entry of its slot, or the base id itself. A disabled id empties prev.
 *   2. If the table is full, prev is emptied.
 *   3. If prev is empty or has merge_size ids, cur becomes prev.
 *   4. Otherwise ids move one by one from the front of cur to the end of prev until prev is no installed entry. That
 *      run is installed. prev becomes the rest of cur, beginning with the id that was moved last. If prev reaches
 *      merge_size ids and is an installed entry, nothing is installed and prev becomes the rest of cur.
 * One id that is not installed is valid: the id of the next free slot. It stands for prev + prev[0], which is
 * installed and becomes prev. (LZW calls this case KwKwK.) Each id installs at most one entry.
 * Without start entries this equals zip2zip-compression 0.3.4 on every stream of installed ids.
 *
 * POLICY: what happens when an entry is to be installed and the table is full
 * FREEZE       nothing is installed any more, as in zip2zip-compression.
 * LRU          the growing entry that was used longest ago is evicted.
 * USE_COUNT    the growing entry with the fewest uses since it was installed is evicted; among equals, the one that was
 *              used longest ago. Counts do not decay.
 * Under LRU and USE_COUNT:
 * - The new entry takes the slot of the evicted one, and step 2 above does not empty prev.
 * - Reading the id of a growing entry is one use of that entry; being installed is one use too. A use is counted before
 *   the id installs anything.
 * - An id stands for what its slot holds when the id is read, before that id installs anything.
 * - The entry whose id is being read is never evicted. If no other growing entry exists, prev is emptied instead.
 * - Encoder and decoder agree because all of this follows from the emitted ids. In a full table every slot has an
 *   entry, so no id is unknown, and the encoder may only emit what the decoder has already installed. Therefore
 *   mlxzip_compress works like mlxzip_continue from the id on that fills the table.
 * - mlxzip_expand and mlxzip_spans use the entries installed now; mlxzip_logged, those installed when an id was read.
 *
 * ERRORS AND OWNERSHIP
 * The caller owns all buffers; none is kept after a call. All functions accept any ids and any bytes. After an error
 * the codebook is exactly as before the call, and output buffers are undefined, except that *bad is the index of the id
 * at fault (for E_ID, E_UNKNOWN, E_NO_PREV, E_PREV_FULL, E_DUPLICATE, E_CLASH) and *n_out is the size needed (for
 * E_SPACE). A pointer may be NULL only if its count is 0 or its comment says so.
 *
 * THREADS
 * A parameter object never changes, may be shared by threads, and must outlive the codebooks made from it. A codebook
 * is used by one thread at a time.
 *
 * COST
 * New codebook: one small allocation; start entries are read from the parameters until the first push.
 * Push: O(1) per id. All memory that the ids may need is allocated before the first of them is read, at least doubling.
 * Mark: O(1). Rewind: O(entries undone); under LRU and USE_COUNT O(ids undone). Copy: O(log) under LRU and USE_COUNT.
 * Memory: 12 bytes per pushed id, 4 * merge_size + 9 bytes per entry, 8 to 32 bytes of index per entry; up to twice as
 * much after growth. LRU and USE_COUNT add 12 to 16 bytes per pushed id, 16 per slot, and 4 * merge_size + 17 for each
 * entry that was ever installed.
 *
 * SAVED FORM: 32-bit little-endian words, in this order
 *   magic "mlxz" "zcb\0"; version; vocab_size; codebook_size; merge_size; has_pad; pad_id (0 if has_pad is 0);
 *   number of disabled ids; number of start entries; only in version 2: policy (LRU or USE_COUNT; version 1 is FREEZE);
 *   disabled ids in rising order; each start entry as its length and its ids;
 *   length of the id log (two words, low word first); the id log;
 *   checksum of all words before it (two words, low word first): h = 14695981039346656037, then for each word
 *   h = (h ^ word) * 1099511628211, modulo 2^64.
 * Reading replays the id log. So any bytes give either a state that push can reach, or E_FORMAT.
 */
#ifndef MLXZIP_H
#define MLXZIP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* BEGIN CFFI */
enum { MLXZIP_MAX_MERGE = 16, MLXZIP_MAX_CODEBOOK = 1048576 };

typedef enum {
  MLXZIP_OK = 0,
  MLXZIP_E_ARG = -1,       /* a parameter outside its documented range */
  MLXZIP_E_MEMORY = -2,    /* out of memory */
  MLXZIP_E_SPACE = -3,     /* the output buffer is too small: *n_out holds the size needed */
  MLXZIP_E_ID = -4,        /* an id that is no base id, not disabled, and no hypertoken that the call accepts */
  MLXZIP_E_UNKNOWN = -5,   /* a hypertoken that is not installed and not the next one */
  MLXZIP_E_NO_PREV = -6,   /* the next hypertoken, but prev is empty */
  MLXZIP_E_PREV_FULL = -7, /* the next hypertoken, but prev has merge_size ids already */
  MLXZIP_E_DUPLICATE = -8, /* the next hypertoken, but prev + prev[0] is an entry already */
  MLXZIP_E_CLASH = -9,     /* compressing would emit a hypertoken whose id is also a disabled id */
  MLXZIP_E_FORMAT = -10,   /* the bytes are no saved codebook */
  MLXZIP_E_MERGE = -11     /* a merge that is not allowed at its place (patches.h) */
} mlxzip_status;

/* What happens when an entry is to be installed and the table is full; see POLICY above. */
typedef enum { MLXZIP_FREEZE = 0, MLXZIP_LRU = 1, MLXZIP_USE_COUNT = 2 } mlxzip_policy;

typedef struct mlxzip_params mlxzip_params;
typedef struct mlxzip_codebook mlxzip_codebook;

/* Parameters of a codec. Ranges: vocab_size 1..2^31, codebook_size 0..2^20, merge_size 1..16, has_pad 0 or 1, policy a
 * mlxzip_policy. pad_id is read only if has_pad is 1. disabled: n_disabled ids of any value, in any order. start: the
 * start entries, n_start <= codebook_size rows of merge_size ids; of row i the first start_lengths[i] ids count. They
 * are 2..merge_size base ids, none of them disabled, and no two entries are equal. */
typedef struct {
  uint32_t vocab_size, codebook_size, merge_size, has_pad, pad_id, policy;
  size_t n_disabled, n_start;
  const uint32_t *disabled;
  const uint32_t *start;
  const uint8_t *start_lengths;
} mlxzip_spec;

/* Makes a parameter object; the arrays of spec are copied. On OK the caller frees *out with mlxzip_params_free; on
 * error *out is NULL. E_ARG, E_MEMORY. */
mlxzip_status mlxzip_params_new(const mlxzip_spec *spec, mlxzip_params **out);
void mlxzip_params_free(mlxzip_params *params);
/* Writes the parameters to *out; disabled ids are in rising order and include the pad id. The pointers in *out are
 * valid as long as params. */
void mlxzip_params_spec(const mlxzip_params *params, mlxzip_spec *out);

/* Returns the maximum number of entries after compressing n ids, start entries included. */
size_t mlxzip_entries_bound(const mlxzip_params *params, size_t n);
/* Compresses a whole sequence of n ids to *n_out ids. dst: room for n ids. *n_entries entries are written in slot
 * order, start entries first. rows: room for entries_bound(n) * merge_size ids; places after the end of an entry hold
 * pad_id, or 0 without one. lengths: room for entries_bound(n). E_ID, E_CLASH, E_MEMORY. */
mlxzip_status mlxzip_compress(const mlxzip_params *params, const uint32_t *ids, size_t n, uint32_t *dst, size_t *n_out,
                              uint32_t *rows, uint8_t *lengths, size_t *n_entries, size_t *bad);

/* Makes a codebook with the start entries, or a copy of one. On OK the caller frees *out with mlxzip_free; on error
 * *out is NULL. E_MEMORY. */
mlxzip_status mlxzip_new(const mlxzip_params *params, mlxzip_codebook **out);
mlxzip_status mlxzip_copy(const mlxzip_codebook *book, mlxzip_codebook **out);
void mlxzip_free(mlxzip_codebook *book);

/* Reads n ids: all of them, or none after an error. Returns the number of entries installed (0 or more) or an error
 * (negative). E_ID, E_UNKNOWN, E_NO_PREV, E_PREV_FULL, E_DUPLICATE, E_MEMORY. */
int mlxzip_push(mlxzip_codebook *book, const uint32_t *ids, size_t n, size_t *bad);
/* Writes the k entries that the last n ids of the log installed, evicted ones included. dst holds, one after the other:
 * k words, the slots; k rows of merge_size padded ids; k bytes, the lengths; n bytes, 1 for an id that installed an
 * entry, else 0. E_ARG if the log has fewer than n ids. */
mlxzip_status mlxzip_installed(const mlxzip_codebook *book, size_t n, uint32_t *dst);
/* Reads one id as mlxzip_push does and, on success, writes what mlxzip_installed(book, 1, dst) does. dst: room for
 * merge_size + 2 words. */
int mlxzip_push_one(mlxzip_codebook *book, uint32_t id, uint32_t *dst);

size_t mlxzip_mark(const mlxzip_codebook *book);        /* number of ids in the log */
size_t mlxzip_size(const mlxzip_codebook *book);        /* installed entries, start entries included */
uint64_t mlxzip_base_length(const mlxzip_codebook *book); /* number of base ids that the log expands to */
const uint32_t *mlxzip_log(const mlxzip_codebook *book);  /* the log; valid until the next call without const */
/* Goes back to the state after the first `mark` ids of the log. E_ARG if the log has fewer ids. */
mlxzip_status mlxzip_rewind(mlxzip_codebook *book, size_t mark);
/* Writes entries first..first+n-1 in slot order. rows: room for n * merge_size padded ids; lengths: room for n; either
 * may be NULL. E_ARG if there are fewer entries. */
mlxzip_status mlxzip_entries(const mlxzip_codebook *book, size_t first, size_t n, uint32_t *rows, uint8_t *lengths);

/* Writes the runs that ids first..first+n-1 of the log stood for when they were read. rows, lengths: as for
 * mlxzip_entries. E_ARG if the log has fewer ids. */
mlxzip_status mlxzip_logged(const mlxzip_codebook *book, size_t first, size_t n, uint32_t *rows, uint8_t *lengths);

/* Expands n ids to *n_out base ids; base ids and disabled ids stay as they are. dst: room for cap ids. E_ID, E_SPACE.
 * */
mlxzip_status mlxzip_expand(const mlxzip_codebook *book, const uint32_t *ids, size_t n, uint32_t *dst, size_t cap,
                            size_t *n_out, size_t *bad);
/* Writes the number of base ids that each of n ids stands for. dst: room for n. E_ID. */
mlxzip_status mlxzip_spans(const mlxzip_codebook *book, const uint32_t *ids, size_t n, int32_t *dst, size_t *bad);
/* Compresses n base ids as a continuation of the log: each emitted id is the longest entry that is installed after the
 * ids before it have been pushed. dst: room for n ids. The codebook is unchanged afterwards. E_ID, E_MEMORY. */
mlxzip_status mlxzip_continue(mlxzip_codebook *book, const uint32_t *ids, size_t n, uint32_t *dst, size_t *n_out,
                              size_t *bad);

/* Writes the saved form of a codebook, *n_out bytes. dst: room for cap bytes. E_SPACE. */
mlxzip_status mlxzip_to_bytes(const mlxzip_codebook *book, uint8_t *dst, size_t cap, size_t *n_out);
/* Read a saved form in two steps: first its parameters, then the codebook, whose parameters must be equal to `params`.
 * E_FORMAT, E_MEMORY. */
mlxzip_status mlxzip_params_from_bytes(const uint8_t *data, size_t n, mlxzip_params **out);
mlxzip_status mlxzip_from_bytes(const mlxzip_params *params, const uint8_t *data, size_t n, mlxzip_codebook **out);
/* END CFFI */

#ifdef __cplusplus
}
#endif
#endif

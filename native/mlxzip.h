/* mlxzip: the LZW codec of hypertokens. Token ids in, token ids out; C11 and libc; no globals.
 *
 * Words. A base id is below vocab_size. A hypertoken is an id vocab_size + slot, slot below codebook_size. An entry
 * is the run of 2..merge_size base ids that a slot stands for. Disabled ids (the pad id is always one of them) never
 * merge: they pass through and separate what stands before them from what comes after. They may lie at or above
 * vocab_size; an id that is disabled is a separator even where it is also the id of a slot.
 *
 * Encoder (mlxzip_compress): at each point the longest installed entry is emitted; that match and the id after it
 * become the next entry when they fit in merge_size, no disabled id is among them and there is room.
 *
 * Decoder (mlxzip_push): keeps `prev`, the run at the end of the stream that the next entry will begin with, and works
 * one step late. An id that is installed, or a base id, gives a run `cur`. Table full: prev is dropped. prev empty or of
 * full length: prev = cur. Otherwise the ids of cur move over to prev until prev is no entry: then it is installed and
 * prev = what is left of cur, starting with the id moved last; when prev reaches full length as a known entry, prev =
 * what is left of cur after it. The one lawful unknown id is exactly the next slot's: it stands for prev + prev[0],
 * which is installed and becomes prev. Each id installs one entry at most. On any stream made of installed ids this
 * equals zip2zip-compression 0.3.4; the start entries, which take the first slots before the first id, are an addition.
 *
 * Policy: what becomes of an entry that is to be installed when the table is full. FREEZE: nothing, as upstream; the
 * above is meant so. LRU and USE_COUNT: a growing entry (no start entry) leaves and gives its slot, so prev is not
 * dropped. An id stands for what its slot holds when it is read, before it installs anything; later the same id stands
 * for the new entry. Reading an id of a growing entry is one use of it, counted before anything is installed, and so is
 * being installed, also by the id that stands for it already. Of all growing entries but that of the id being read, LRU
 * takes the one used longest ago, and USE_COUNT the one used least often since it was installed, among equals the one
 * used longest ago; counts do not age. Where there is none, prev is dropped: with no growing slot, as under FREEZE, and
 * with a single one, whose entry is being read. As all this follows from the id log, both sides know it. In a full table
 * each id has an entry, so none is unknown, and an encoder must not emit what its reader installs only behind that id:
 * mlxzip_compress works as above until it has filled the table, and from there on as mlxzip_continue on a codebook that
 * has read its ids. mlxzip_expand and mlxzip_spans answer by the entries of now, mlxzip_logged by those of then.
 *
 * Ownership. Buffers belong to the caller and are not kept. A parameter object is immutable, may be shared by threads,
 * and outlives the codebooks made from it. One thread at a time per codebook. All functions accept any ids and any
 * bytes. On every error the codebook is exactly as it was before the call; contents of output buffers are then
 * undefined, except that *bad holds the index of the id at fault (for E_ID ... E_CLASH) and *n_out the size needed
 * (for E_SPACE). Pointers must not be NULL unless their count is 0.
 *
 * Cost. A new codebook is one small allocation; it reads the start entries from the parameters until its first push.
 * Push: O(1) per id, no allocation but for the growth of the id log and of the table, by doubling at least and to what
 * the ids at hand may need (all done before the first id is read). Mark: O(1). Rewind: O(entries undone). Memory: 12
 * bytes per id pushed, 4 * merge_size + 9 bytes per entry, and an index of 8 to 32 bytes per entry; up to twice that
 * where it grew by doubling. Under LRU and USE_COUNT rewinding is O(ids undone) and copying reads the log anew; beside
 * that memory, 12 to 16 bytes per id pushed, 16 per slot, and 4 * merge_size + 17 for each entry that ever came.
 *
 * Saved form: 32-bit little-endian words. Magic "mlxz" "zcb\0"; version; vocab_size; codebook_size; merge_size;
 * has_pad; pad_id (0 if none); number of disabled ids; number of start entries; in version 2 the policy, which is not
 * FREEZE there and is FREEZE in version 1, that has no such word; the disabled ids in rising order; each
 * start entry as its length and its ids; the length of the id log (two words, low first); the log; a checksum (two
 * words, low first) of all words before it: h = 14695981039346656037, then h = (h ^ word) * 1099511628211 for each,
 * modulo 2^64. Reading replays the log, so whatever the bytes, the result is a state that push can reach, or E_FORMAT.
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
  MLXZIP_E_MEMORY = -2,    /* the allocator had no more */
  MLXZIP_E_SPACE = -3,     /* the output buffer is too small: *n_out holds the size needed */
  MLXZIP_E_ID = -4,        /* an id that is neither a base id, nor disabled, nor (where allowed) of an existing slot */
  MLXZIP_E_UNKNOWN = -5,   /* a hypertoken that is neither installed nor exactly the next one */
  MLXZIP_E_NO_PREV = -6,   /* the next hypertoken, but nothing before it that it could extend */
  MLXZIP_E_PREV_FULL = -7, /* the next hypertoken, but what it would extend has full length */
  MLXZIP_E_DUPLICATE = -8, /* the next hypertoken, but what it would stand for is already an entry */
  MLXZIP_E_CLASH = -9,     /* compressing would emit a hypertoken whose id is also a disabled id */
  MLXZIP_E_FORMAT = -10,   /* bytes that are not a saved codebook */
  MLXZIP_E_MERGE = -11     /* a merge that cannot stand where it does */
} mlxzip_status;

/* What happens when an entry is to be installed and the table is full. */
typedef enum { MLXZIP_FREEZE = 0, MLXZIP_LRU = 1, MLXZIP_USE_COUNT = 2 } mlxzip_policy;

typedef struct mlxzip_params mlxzip_params;
typedef struct mlxzip_codebook mlxzip_codebook;

/* vocab_size 1..2^31, codebook_size 0..2^20, merge_size 1..16. pad_id is read when has_pad is 1. disabled: any ids, in
 * any order. start: n_start rows of merge_size ids (at most codebook_size rows), of which the first start_lengths[i]
 * count: 2..merge_size base ids, none disabled, no two rows equal. */
typedef struct {
  uint32_t vocab_size, codebook_size, merge_size, has_pad, pad_id, policy;
  size_t n_disabled, n_start;
  const uint32_t *disabled;
  const uint32_t *start;
  const uint8_t *start_lengths;
} mlxzip_spec;

/* On OK the caller owns *out and gives it back to mlxzip_params_free; on error *out is NULL. */
mlxzip_status mlxzip_params_new(const mlxzip_spec *spec, mlxzip_params **out);
void mlxzip_params_free(mlxzip_params *params);
/* What the object was made from, in normal form: disabled rising, with the pad id. Pointers live as long as params. */
void mlxzip_params_spec(const mlxzip_params *params, mlxzip_spec *out);

/* Most entries that compressing n ids can end with, start entries included. */
size_t mlxzip_entries_bound(const mlxzip_params *params, size_t n);
/* Compresses a whole sequence. dst: n ids. rows: entries_bound(n) * merge_size ids, unused places filled with pad_id
 * or 0; lengths: entries_bound(n). Both hold the start entries first. E_ID, E_CLASH, E_MEMORY. */
mlxzip_status mlxzip_compress(const mlxzip_params *params, const uint32_t *ids, size_t n, uint32_t *dst, size_t *n_out,
                              uint32_t *rows, uint8_t *lengths, size_t *n_entries, size_t *bad);

/* On OK the caller owns *out and gives it back to mlxzip_free; on error *out is NULL. */
mlxzip_status mlxzip_new(const mlxzip_params *params, mlxzip_codebook **out);
mlxzip_status mlxzip_copy(const mlxzip_codebook *book, mlxzip_codebook **out);
void mlxzip_free(mlxzip_codebook *book);

/* Feeds n ids, all or none. Returns an error, or the number of entries installed. E_ID, E_UNKNOWN, E_NO_PREV,
 * E_PREV_FULL, E_DUPLICATE, E_MEMORY. */
int mlxzip_push(mlxzip_codebook *book, const uint32_t *ids, size_t n, size_t *bad);
/* What the last n ids of the log installed, k entries in all, also those that have left since: k words, their slots; k
 * rows of merge_size padded ids; k bytes, their lengths; n bytes, 1 for each id that installed one, else 0. E_ARG if
 * the log is shorter. */
mlxzip_status mlxzip_installed(const mlxzip_codebook *book, size_t n, uint32_t *dst);
/* Feeds one id: mlxzip_push and, where that is no error, mlxzip_installed. dst: merge_size + 2 words. */
int mlxzip_push_one(mlxzip_codebook *book, uint32_t id, uint32_t *dst);

size_t mlxzip_mark(const mlxzip_codebook *book);        /* length of the id log */
size_t mlxzip_size(const mlxzip_codebook *book);        /* installed entries, start entries included */
uint64_t mlxzip_base_length(const mlxzip_codebook *book); /* base ids that the log expands to */
const uint32_t *mlxzip_log(const mlxzip_codebook *book);  /* mark() ids, valid until the next call that is not const */
/* Back to the state after the first `mark` ids. E_ARG if the log is shorter. */
mlxzip_status mlxzip_rewind(mlxzip_codebook *book, size_t mark);
/* Copies entries first..first+n-1: rows n * merge_size padded ids, lengths n; either may be NULL. E_ARG if there are
 * fewer. */
mlxzip_status mlxzip_entries(const mlxzip_codebook *book, size_t first, size_t n, uint32_t *rows, uint8_t *lengths);

/* What ids first..first+n-1 of the log stood for when they were read: rows n * merge_size padded ids, lengths n; either
 * may be NULL. E_ARG if the log is shorter. */
mlxzip_status mlxzip_logged(const mlxzip_codebook *book, size_t first, size_t n, uint32_t *rows, uint8_t *lengths);

/* Base ids of installed or base or disabled ids, one after the other, at most cap of them. E_ID, E_SPACE. */
mlxzip_status mlxzip_expand(const mlxzip_codebook *book, const uint32_t *ids, size_t n, uint32_t *dst, size_t cap,
                            size_t *n_out, size_t *bad);
/* Number of base ids that each id stands for. E_ID. */
mlxzip_status mlxzip_spans(const mlxzip_codebook *book, const uint32_t *ids, size_t n, int32_t *dst, size_t *bad);
/* How base ids are best emitted from here on: at each point the longest entry installed by then, where each emitted id
 * is taken as pushed. dst: n ids. Leaves the codebook as it was. E_ID, E_MEMORY. */
mlxzip_status mlxzip_continue(mlxzip_codebook *book, const uint32_t *ids, size_t n, uint32_t *dst, size_t *n_out,
                              size_t *bad);

/* The saved form, at most cap bytes. E_SPACE. */
mlxzip_status mlxzip_to_bytes(const mlxzip_codebook *book, uint8_t *dst, size_t cap, size_t *n_out);
/* Two halves of reading: the parameters, then the codebook, which needs equal ones. E_FORMAT, E_MEMORY. */
mlxzip_status mlxzip_params_from_bytes(const uint8_t *data, size_t n, mlxzip_params **out);
mlxzip_status mlxzip_from_bytes(const mlxzip_params *params, const uint8_t *data, size_t n, mlxzip_codebook **out);
/* END CFFI */

#ifdef __cplusplus
}
#endif
#endif

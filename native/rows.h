/* mlxzip rows: files of stored hyper rows. Base ids in, bytes out; a row is opaque here.
 *
 * Header and cells are mapped for reading, records are read; what changes is written (a write that fails is an error
 * number; a store into a map of a full disk is a signal). A file only grows: cells change once, from 0, records never.
 *
 *   header    MLXZIP_ROWS_HEADER bytes, for the caller
 *   cells     `cells` 64-bit words: 0, or number of a record + 1 below the upper half of its key's hash; open
 *             addressing, linear probing, MLXZIP_ROWS_PROBES cells at most
 *   records   key_words ids, filled up to 8 bytes; row_bytes bytes, filled up to 8; checksum of both
 *
 * All words little-endian, as the host. A record counts only if its ids are those asked for and its checksum is right,
 * whatever led to it: so a torn, stale or hostile file costs a row its place, and never gives a wrong one. Records are
 * checked where they have been read to, for another process may write at any time. `map` holds header and cells, is
 * aligned to 8 bytes, and nothing outside is touched. */
#ifndef MLXZIP_ROWS_H
#define MLXZIP_ROWS_H

#include <stddef.h>
#include <stdint.h>

/* BEGIN CFFI */
enum { MLXZIP_ROWS_HEADER = 4096, MLXZIP_ROWS_PROBES = 512 };

/* All at least 1; cells a power of two. */
typedef struct {
  uint32_t key_words, row_bytes, cells;
} mlxzip_rows_shape;

/* Bytes of one record, a multiple of 8. */
size_t mlxzip_rows_stride(const mlxzip_rows_shape *shape);
/* Makes n records in dst, n * stride bytes. keys: n * key_words; rows: n * row_bytes. */
void mlxzip_rows_seal(const mlxzip_rows_shape *shape, const uint32_t *keys, const uint8_t *rows, size_t n,
                      uint8_t *dst);
/* Looks up the keys i with found[i] == 0. Of those that are there, found[i] becomes 1 and row i is written to rows.
 * Returns for how many of the others a cell names a record that is not it, or not there (but for keys with equal
 * hashes, of which there are hardly any, the file is damaged then). file: open for reading; scratch: one record. */
size_t mlxzip_rows_find(const mlxzip_rows_shape *shape, const uint8_t *map, int file, const uint32_t *keys, size_t n,
                        uint8_t *found, uint8_t *rows, uint8_t *scratch);
/* The cell in which record number `record` of this key belongs, and what to write there; `cells` if there is no room. */
size_t mlxzip_rows_cell(const mlxzip_rows_shape *shape, const uint8_t *map, const uint32_t *key, uint32_t record,
                        uint64_t *value);
/* END CFFI */

#endif

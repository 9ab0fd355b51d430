/* mlxzip rows: files of stored hyper rows. Base ids in, bytes out; the content of a row is opaque here.
 *
 *   header    MLXZIP_ROWS_HEADER bytes, for the caller
 *   cells     `cells` 64-bit words: 0 for an empty cell, else the record's number + 1 in the lower half and the upper
 *             half of its key's hash; open addressing with linear probing over at most MLXZIP_ROWS_PROBES cells
 *   records   key_words ids, padded to 8 bytes; row_bytes bytes, padded to 8 bytes; checksum of both
 *
 * All words are little-endian, as on the host. A file only grows: a cell changes once, from 0, and a record never.
 * Header and cells are memory-mapped for reading; records are read with file calls. All changes are written with file
 * calls, because a failed write returns an error, whereas a store into the map of a full disk raises a signal.
 * A record is used only if its ids are the wanted ones and its checksum is right. So a torn, stale or hostile file can
 * hide a row but never give a wrong one. A record is checked after it has been copied, because another process may
 * write at any time. `map` holds header and cells, is aligned to 8 bytes, and nothing outside of it is touched. */
#ifndef MLXZIP_ROWS_H
#define MLXZIP_ROWS_H

#include <stddef.h>
#include <stdint.h>

/* BEGIN CFFI */
enum { MLXZIP_ROWS_HEADER = 4096, MLXZIP_ROWS_PROBES = 512 };

/* All are at least 1; cells is a power of two. */
typedef struct {
  uint32_t key_words, row_bytes, cells;
} mlxzip_rows_shape;

/* Returns the bytes of one record, a multiple of 8. */
size_t mlxzip_rows_stride(const mlxzip_rows_shape *shape);
/* Writes n records. dst: room for n * stride bytes. keys: n * key_words ids; rows: n * row_bytes bytes. */
void mlxzip_rows_seal(const mlxzip_rows_shape *shape, const uint32_t *keys, const uint8_t *rows, size_t n,
                      uint8_t *dst);
/* Looks up every key i with found[i] == 0. If its record is there, found[i] becomes 1 and its row is written to row i
 * of rows. Returns the number of missing keys whose hash led to a record that is damaged or has another key; more than
 * a few mean that the file is damaged. file: descriptor open for reading; scratch: room for one record. */
size_t mlxzip_rows_find(const mlxzip_rows_shape *shape, const uint8_t *map, int file, const uint32_t *keys, size_t n,
                        uint8_t *found, uint8_t *rows, uint8_t *scratch);
/* Returns the cell for record number `record` of this key, and in *value what to write there; `cells` if there is no
 * room. */
size_t mlxzip_rows_cell(const mlxzip_rows_shape *shape, const uint8_t *map, const uint32_t *key, uint32_t record,
                        uint64_t *value);
/* END CFFI */

#endif

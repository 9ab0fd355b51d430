#include "codebook.h"

size_t mlxzip_entries_bound(const mlxzip_params *p, size_t n) {
  return n < p->codebook_size - p->start.n ? p->start.n + n : p->codebook_size;
}

static bool open_table(mlxzip_table *t, const mlxzip_params *p, size_t cap, uint32_t *rows, uint8_t *lengths) {
  *t = (mlxzip_table){.rows = rows, .lengths = lengths, .n = p->start.n};
  if (t->n) {
    memcpy(rows, p->start.rows, t->n * p->merge_size * sizeof *rows);
    memcpy(lengths, p->start.lengths, t->n);
  }
  size_t size = mlxzip_cells(cap);
  uint32_t *cells = t->block = malloc(size * sizeof *cells);
  if (!cells) return false;
  mlxzip_index(t, cells, size, p->start.hashes);
  return true;
}

static void install(mlxzip_table *t, const mlxzip_params *p, uint32_t *cell, uint64_t hash, const uint32_t *run, size_t n) {
  uint32_t *row = t->rows + t->n * p->merge_size;
  for (size_t i = 0; i < p->merge_size; i++) row[i] = i < n ? run[i] : p->fill;
  t->lengths[t->n] = (uint8_t)n;
  *cell = mlxzip_cell(hash, t->n++);
}

/* Compresses the ids from *bad on, under LRU and USE_COUNT: continues a codebook that has read the n_out ids before. */
static mlxzip_status go_on_in_turn(const mlxzip_params *p, const uint32_t *ids, size_t n, uint32_t *dst, size_t *n_out,
                                   uint32_t *rows, uint8_t *lengths, size_t *n_entries, size_t *bad) {
  mlxzip_codebook *b;
  size_t at = *bad, more = 0;
  mlxzip_status status = mlxzip_new(p, &b);
  if (status != MLXZIP_OK) return status;
  int installed = mlxzip_push(b, dst, *n_out, bad);
  status = installed < 0 ? (mlxzip_status)installed : mlxzip_go_on(b, ids + at, n - at, dst + *n_out, &more, bad);
  if (status == MLXZIP_OK) mlxzip_entries(b, 0, mlxzip_size(b), rows, lengths);
  *n_out += more, *n_entries = mlxzip_size(b), *bad += at;
  mlxzip_free(b);
  return status;
}

mlxzip_status mlxzip_compress(const mlxzip_params *p, const uint32_t *ids, size_t n, uint32_t *dst, size_t *n_out,
                              uint32_t *rows, uint8_t *lengths, size_t *n_entries, size_t *bad) {
  mlxzip_table t;
  size_t cap = mlxzip_entries_bound(p, n), width = p->merge_size, out = 0, at = 0;
  size_t end = n, until = p->turns ? p->codebook_size : SIZE_MAX; /* full table: `mlxzip_go_on` continues */
  if (!open_table(&t, p, cap, rows, lengths)) return MLXZIP_E_MEMORY;
  mlxzip_status status = MLXZIP_OK;
  while (at < end) {
    const uint32_t *run = ids + at;
    uint32_t code = *run;
    if (!mlxzip_plain(p, code)) {
      if (code >= p->vocab_size && !mlxzip_disabled(p, code)) {
        status = MLXZIP_E_ID;
        break;
      }
      dst[out++] = code, at++;
      continue;
    }
    size_t limit = n - at < width ? n - at : width, best = 1;
    uint64_t hash = mlxzip_hash(0, code), miss_hash = 0;
    uint32_t *miss = NULL;
    for (size_t k = 2; k <= limit && mlxzip_plain(p, run[k - 1]); k++) {
      hash = mlxzip_hash(hash, run[k - 1]);
      uint32_t *cell = mlxzip_find(&t, width, hash, run, k);
      if (*cell) {
        code = p->vocab_size + (uint32_t)mlxzip_slot(*cell), best = k, miss = NULL;
        continue;
      }
      if (k == best + 1) miss = cell, miss_hash = hash;
      if (p->closed) break;
    }
    if (best > 1 && p->clash && mlxzip_disabled(p, code)) {
      status = MLXZIP_E_CLASH;
      break;
    }
    if (miss && t.n < cap) {
      install(&t, p, miss, miss_hash, run, best + 1);
      if (t.n == until) end = 0;
    }
    dst[out++] = code, at += best;
  }
  free(t.block);
  *n_out = out, *n_entries = t.n, *bad = at;
  if (status != MLXZIP_OK || at == n) return status;
  return go_on_in_turn(p, ids, n, dst, n_out, rows, lengths, n_entries, bad);
}

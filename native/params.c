#include "table.h"

static int rising(const void *a, const void *b) {
  uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
  return (x > y) - (x < y);
}

size_t mlxzip_cells(size_t cap) {
  size_t size = 16;
  size_t per_entry = cap > 8192 ? 2 : 4; /* a large index is slow because of cache misses, not probes */
  while (size < per_entry * cap) size *= 2;
  return size;
}

void mlxzip_index(mlxzip_table *t, uint32_t *cells, size_t size, const uint64_t *hashes) {
  memset(cells, 0, size * sizeof *cells);
  t->cells = cells, t->mask = size - 1;
  for (size_t slot = 0; slot < t->n; slot++) {
    size_t i = hashes[slot] & t->mask;
    while (cells[i]) i = (i + 1) & t->mask;
    cells[i] = mlxzip_cell(hashes[slot], slot);
  }
}

bool mlxzip_grow(mlxzip_table *t, const mlxzip_params *p, size_t cap) {
  if (cap <= t->cap && t->block) return true;
  size_t width = p->merge_size, least = t->cap ? 2 * t->cap : 128;
  if (cap < least) cap = least < p->codebook_size ? least : p->codebook_size;
  size_t size = mlxzip_cells(cap), row_ids = (cap + 1) * width + MLXZIP_MAX_MERGE;
  uint64_t *hashes = malloc((cap + 1) * sizeof *hashes + (size + row_ids) * sizeof *t->rows + cap + 1);
  if (!hashes) return false;
  uint32_t *cells = (uint32_t *)(hashes + cap + 1), *rows = cells + size;
  uint8_t *lengths = (uint8_t *)(rows + row_ids);
  *hashes++ = 0, *lengths++ = 1;
  for (size_t i = 0; i < width; i++) *rows++ = i ? p->fill : 0;
  if (t->n) {
    memcpy(hashes, t->hashes, t->n * sizeof *hashes);
    memcpy(rows, t->rows, t->n * width * sizeof *rows);
    memcpy(lengths, t->lengths, t->n);
  }
  free(t->block);
  t->block = hashes - 1, t->hashes = hashes, t->rows = rows, t->lengths = lengths, t->cap = cap;
  mlxzip_index(t, cells, size, hashes);
  return true;
}

void mlxzip_table_free(mlxzip_table *t) { free(t->block); }

static bool set_disabled(mlxzip_params *p, const mlxzip_spec *s) {
  size_t n = s->n_disabled, words = 512, kept = 0;
  p->disabled = malloc((n + 1) * sizeof *p->disabled);
  while (words < n) words *= 2;
  p->filter = calloc(words, sizeof *p->filter);
  if (!p->disabled || !p->filter) return false;
  if (n) memcpy(p->disabled, s->disabled, n * sizeof *p->disabled);
  if (s->has_pad) p->disabled[n++] = s->pad_id;
  qsort(p->disabled, n, sizeof *p->disabled, rising);
  p->filter_mask = words - 1;
  for (size_t i = 0; i < n; i++) {
    uint32_t id = p->disabled[i];
    if (kept && p->disabled[kept - 1] == id) continue;
    p->disabled[kept++] = id;
    p->filter[(id >> 6) & p->filter_mask] |= (uint64_t)1 << (id & 63);
    p->clash |= id >= p->vocab_size && id - p->vocab_size < p->codebook_size;
  }
  p->n_disabled = kept;
  return true;
}

static mlxzip_status set_start(mlxzip_params *p, const mlxzip_spec *s) {
  size_t width = p->merge_size;
  if (!mlxzip_grow(&p->start, p, s->n_start)) return MLXZIP_E_MEMORY;
  for (size_t slot = 0; slot < s->n_start; slot++) {
    const uint32_t *row = s->start + slot * width;
    size_t n = s->start_lengths[slot];
    if (n < 2 || n > width) return MLXZIP_E_ARG;
    for (size_t i = 0; i < n; i++)
      if (!mlxzip_plain(p, row[i])) return MLXZIP_E_ARG;
    uint64_t hash = mlxzip_hash_run(row, n);
    uint32_t *cell = mlxzip_find(&p->start, width, hash, row, n);
    if (*cell) return MLXZIP_E_ARG;
    for (size_t i = 0; i < width; i++) p->start.rows[slot * width + i] = i < n ? row[i] : p->fill;
    p->start.lengths[slot] = (uint8_t)n, p->start.hashes[slot] = hash;
    *cell = mlxzip_cell(hash, p->start.n++);
  }
  p->closed = true;
  for (size_t slot = 0; slot < p->start.n; slot++) {
    const uint32_t *row = p->start.rows + slot * width;
    size_t n = (size_t)p->start.lengths[slot] - 1;
    if (n > 1 && !*mlxzip_find(&p->start, width, mlxzip_hash_run(row, n), row, n)) p->closed = false;
  }
  return MLXZIP_OK;
}

mlxzip_status mlxzip_params_new(const mlxzip_spec *s, mlxzip_params **out) {
  *out = NULL;
  if (s->vocab_size < 1 || s->vocab_size > (uint32_t)1 << 31 || s->codebook_size > MLXZIP_MAX_CODEBOOK ||
      s->merge_size < 1 || s->merge_size > MLXZIP_MAX_MERGE || s->has_pad > 1 || s->policy > MLXZIP_USE_COUNT ||
      s->n_start > s->codebook_size || s->n_disabled > SIZE_MAX / 8)
    return MLXZIP_E_ARG;
  mlxzip_params *p = calloc(1, sizeof *p);
  if (!p) return MLXZIP_E_MEMORY;
  p->vocab_size = s->vocab_size, p->codebook_size = s->codebook_size, p->merge_size = s->merge_size;
  p->has_pad = s->has_pad, p->pad_id = p->fill = s->has_pad ? s->pad_id : 0;
  p->policy = s->policy, p->turns = s->policy != MLXZIP_FREEZE && s->n_start < s->codebook_size;
  mlxzip_status status = set_disabled(p, s) ? set_start(p, s) : MLXZIP_E_MEMORY;
  if (status != MLXZIP_OK) mlxzip_params_free(p);
  else *out = p;
  return status;
}

void mlxzip_params_free(mlxzip_params *p) {
  if (!p) return;
  free(p->disabled), free(p->filter), mlxzip_table_free(&p->start), free(p);
}

void mlxzip_params_spec(const mlxzip_params *p, mlxzip_spec *out) {
  *out = (mlxzip_spec){p->vocab_size, p->codebook_size, p->merge_size, p->has_pad, p->pad_id, p->policy,
                       p->n_disabled, p->start.n, p->disabled, p->start.rows, p->start.lengths};
}

#include "codebook.h"

/* Functions that read a codebook, and mlxzip_push_one. */

size_t mlxzip_mark(const mlxzip_codebook *b) { return b->n; }
size_t mlxzip_size(const mlxzip_codebook *b) { return b->table.n; }
uint64_t mlxzip_base_length(const mlxzip_codebook *b) { return b->base_length; }
const uint32_t *mlxzip_log(const mlxzip_codebook *b) { return b->log; }

mlxzip_status mlxzip_entries(const mlxzip_codebook *b, size_t first, size_t n, uint32_t *rows, uint8_t *lengths) {
  size_t width = b->params->merge_size;
  if (first > b->table.n || n > b->table.n - first) return MLXZIP_E_ARG;
  if (n == 0) return MLXZIP_OK;
  if (rows) memcpy(rows, b->table.rows + first * width, n * width * sizeof *rows);
  if (lengths) memcpy(lengths, b->table.lengths + first, n);
  return MLXZIP_OK;
}

/* Like `mlxzip_installed`, under LRU and USE_COUNT. */
static void installed_in_turn(const mlxzip_codebook *b, size_t n, uint32_t *dst) {
  const mlxzip_turns *t = b->turns;
  size_t width = b->params->merge_size, start = b->params->start.n, mark = b->n - n;
  size_t made = mlxzip_turns_made(t, mark), k = t->made - made;
  uint32_t *rows = dst + k;
  uint8_t *lengths = (uint8_t *)(rows + k * width), *by_id = lengths + k;
  for (size_t i = 0; i < k; i++) dst[i] = (uint32_t)start + t->comings[made + i].node - 1;
  memcpy(rows, t->rows + made * width, k * width * sizeof *rows);
  memcpy(lengths, t->lengths + made, k);
  for (size_t i = 0; i < n; i++) by_id[i] = mlxzip_turns_made(t, mark + i + 1) != mlxzip_turns_made(t, mark + i);
}

mlxzip_status mlxzip_installed(const mlxzip_codebook *b, size_t n, uint32_t *dst) {
  if (n > b->n) return MLXZIP_E_ARG;
  if (n == 0) return MLXZIP_OK;
  if (b->turns) {
    installed_in_turn(b, n, dst);
    return MLXZIP_OK;
  }
  size_t width = b->params->merge_size, mark = b->n - n;
  uint64_t before = mlxzip_after(b, mark);
  size_t first = mlxzip_entries_in(before), k = b->table.n - first;
  uint32_t *rows = dst + k;
  uint8_t *lengths = (uint8_t *)(rows + k * width), *by_id = lengths + k;
  for (size_t i = 0; i < k; i++) dst[i] = (uint32_t)(first + i);
  mlxzip_entries(b, first, k, rows, lengths);
  /* an id installs at most one entry, so it did if the parity of the number of entries changed */
  const uint64_t *after = b->after + mark;
  by_id[0] = (after[0] ^ before) >> PREV_BITS & 1;
  for (size_t i = 1; i < n; i++) by_id[i] = (after[i] ^ after[i - 1]) >> PREV_BITS & 1;
  return MLXZIP_OK;
}

int mlxzip_push_one(mlxzip_codebook *b, uint32_t id, uint32_t *dst) {
  size_t bad;
  int installed = mlxzip_push(b, &id, 1, &bad);
  if (installed >= 0) mlxzip_installed(b, 1, dst);
  return installed;
}

mlxzip_status mlxzip_logged(const mlxzip_codebook *b, size_t first, size_t n, uint32_t *rows, uint8_t *lengths) {
  const mlxzip_params *p = b->params;
  if (first > b->n || n > b->n - first) return MLXZIP_E_ARG;
  for (size_t i = 0; i < n; i++) {
    size_t count;
    const uint32_t *run = mlxzip_logged_run(b, first + i, &count);
    if (lengths) lengths[i] = (uint8_t)count;
    for (size_t k = 0; rows && k < p->merge_size; k++) rows[i * p->merge_size + k] = k < count ? run[k] : p->fill;
  }
  return MLXZIP_OK;
}

/* Returns the number of base ids that an id stands for, 0 if it is not known. */
static inline size_t span(const mlxzip_codebook *b, uint32_t id) {
  const mlxzip_params *p = b->params;
  if (id < p->vocab_size || mlxzip_disabled(p, id)) return 1;
  size_t slot = id - p->vocab_size;
  return slot < b->table.n ? b->table.lengths[slot] : 0;
}

mlxzip_status mlxzip_spans(const mlxzip_codebook *b, const uint32_t *ids, size_t n, int32_t *dst, size_t *bad) {
  for (size_t i = 0; i < n; i++) {
    dst[i] = (int32_t)span(b, ids[i]);
    if (dst[i]) continue;
    *bad = i;
    return MLXZIP_E_ID;
  }
  return MLXZIP_OK;
}

mlxzip_status mlxzip_expand(const mlxzip_codebook *b, const uint32_t *ids, size_t n, uint32_t *dst, size_t cap,
                            size_t *n_out, size_t *bad) {
  const mlxzip_params *p = b->params;
  size_t width = p->merge_size, out = 0;
  for (size_t i = 0; i < n; i++) {
    size_t count = span(b, ids[i]);
    if (count == 0) {
      *bad = i;
      return MLXZIP_E_ID;
    }
    if (out <= cap && count <= cap - out) {
      const uint32_t *run = &ids[i];
      if (*run >= p->vocab_size && count > 1) run = b->table.rows + (*run - p->vocab_size) * width;
      for (size_t k = 0; k < count; k++) dst[out + k] = run[k];
    }
    out += count;
  }
  *n_out = out;
  return out > cap ? MLXZIP_E_SPACE : MLXZIP_OK;
}

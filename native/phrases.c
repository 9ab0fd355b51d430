#include "phrase_table.h"

static void put(mlxzip_phrases *p, uint32_t *cell, uint32_t prefix, uint32_t unit) {
  *cell = cell_of(p, hash_of(prefix, unit), p->n);
  p->inner[prefix / 32] |= (uint32_t)1 << prefix % 32;
  p->rows[2 * p->n] = prefix, p->rows[2 * p->n + 1] = unit;
  p->n++;
}

static bool resize(uint32_t **array, size_t n) {
  uint32_t *grown = n > SIZE_MAX / sizeof *grown ? NULL : realloc(*array, n * sizeof *grown);
  if (grown) *array = grown;
  return grown != NULL;
}

/* Replaces the index by one of 2^bits cells. False without memory. */
static bool reindex(mlxzip_phrases *p, unsigned bits) {
  size_t size = (size_t)1 << bits;
  if (!resize(&p->cells, size)) return false;
  memset(p->cells, 0, size * sizeof *p->cells);
  p->mask = size - 1, p->bits = bits;
  for (size_t slot = 0; slot < p->n; slot++) {
    if (slot + AHEAD < p->n) fetch(p, p->rows[2 * (slot + AHEAD)], p->rows[2 * (slot + AHEAD) + 1]);
    uint64_t hash = hash_of(p->rows[2 * slot], p->rows[2 * slot + 1]);
    size_t i = hash & p->mask;
    while (p->cells[i]) i = (i + 1) & p->mask;
    p->cells[i] = cell_of(p, hash, slot);
  }
  return true;
}

/* Makes room for `cap` runs: index, rows and uses. False without memory. */
static bool reserve(mlxzip_phrases *p, size_t cap) {
  unsigned bits = p->bits;
  size_t nodes = p->spec.units + cap, known = p->spec.units + p->cap, words = nodes / 32 + 1, filled = known / 32 + 1;
  while ((size_t)1 << bits < 2 * cap) bits++;
  if (bits > p->bits && !reindex(p, bits)) return false; /* first, because cap must never exceed the index */
  if (!resize(&p->rows, 2 * cap) || !resize(&p->uses, nodes) || !resize(&p->inner, words)) return false;
  memset(p->uses + known, 0, (nodes - known) * sizeof *p->uses);
  memset(p->inner + filled, 0, (words - filled) * sizeof *p->inner);
  p->cap = cap;
  return true;
}

static bool grow(mlxzip_phrases *p) {
  size_t cap = p->cap + p->cap / 4 + 256;
  return reserve(p, cap < p->spec.limit ? cap : p->spec.limit);
}

static mlxzip_status open_phrases(const mlxzip_phrases_spec *s, size_t n, mlxzip_phrases **out) {
  *out = NULL;
  if (s->units < 1 || s->units > (uint32_t)1 << 31 || s->limit > MLXZIP_MAX_PHRASES || s->has_unk > 1 ||
      (uint64_t)s->first_id + s->units + s->limit > UINT32_MAX || n > s->limit ||
      (s->has_unk && (uint64_t)s->unk_id >= (uint64_t)s->first_id + s->units))
    return MLXZIP_E_ARG;
  mlxzip_phrases *p = calloc(1, sizeof *p);
  if (!p) return MLXZIP_E_MEMORY;
  p->spec = *s;
  p->uses = calloc(s->units, sizeof *p->uses), p->inner = calloc(s->units / 32 + 1, sizeof *p->inner);
  if (!p->uses || !p->inner || !reindex(p, 9) || !reserve(p, n ? n : 1)) {
    mlxzip_phrases_free(p);
    return MLXZIP_E_MEMORY;
  }
  *out = p;
  return MLXZIP_OK;
}

mlxzip_status mlxzip_phrases_new(const mlxzip_phrases_spec *spec, mlxzip_phrases **out) {
  return open_phrases(spec, 0, out);
}

static mlxzip_status put_rows(mlxzip_phrases *p, const uint32_t *rows, const uint32_t *ids, size_t n, size_t *bad) {
  uint32_t units = p->spec.units;
  uint64_t least = (uint64_t)p->spec.first_id + units;
  for (*bad = 0; *bad < n; ++*bad) {
    uint32_t prefix = rows[2 * *bad], unit = rows[2 * *bad + 1], id = ids ? ids[*bad] : NO_ID;
    if (prefix >= units + p->n || unit >= units || (id != NO_ID && id < least)) return MLXZIP_E_ARG;
    uint32_t *cell = find(p, prefix, unit);
    if (*cell) return MLXZIP_E_ARG;
    if (id != NO_ID) least = (uint64_t)id + 1;
    put(p, cell, prefix, unit);
  }
  return MLXZIP_OK;
}

mlxzip_status mlxzip_phrases_from(const mlxzip_phrases_spec *s, const uint32_t *rows, const uint32_t *ids,
                                  const uint32_t *uses, size_t n, mlxzip_phrases **out, size_t *bad) {
  *bad = n;
  mlxzip_status status = open_phrases(s, n, out);
  if (status != MLXZIP_OK) return status;
  mlxzip_phrases *p = *out;
  if (ids && !resize(&p->ids, n ? n : 1)) status = MLXZIP_E_MEMORY;
  if (status == MLXZIP_OK) status = put_rows(p, rows, ids, n, bad);
  if (status != MLXZIP_OK) {
    mlxzip_phrases_free(p);
    *out = NULL;
    return status;
  }
  if (ids && n) memcpy(p->ids, ids, n * sizeof *ids);
  if (uses) memcpy(p->uses, uses, (s->units + n) * sizeof *uses);
  return status;
}

void mlxzip_phrases_free(mlxzip_phrases *p) {
  if (!p) return;
  free(p->cells), free(p->rows), free(p->uses), free(p->ids), free(p->inner), free(p);
}

size_t mlxzip_phrases_size(const mlxzip_phrases *p) { return p->n; }
const uint32_t *mlxzip_phrases_rows(const mlxzip_phrases *p) { return p->rows; }
const uint32_t *mlxzip_phrases_uses(const mlxzip_phrases *p) { return p->uses; }

uint64_t mlxzip_phrases_bytes(const mlxzip_phrases *p) {
  uint64_t cap = p->cap, nodes = p->spec.units + cap;
  return sizeof *p + 4 * (p->mask + 1 + 2 * cap + nodes + nodes / 32 + 1 + (p->ids ? p->n : 0));
}

void mlxzip_phrases_lengths(const mlxzip_phrases *p, uint32_t *dst) {
  for (size_t u = 0; u < p->spec.units; u++) dst[u] = 1;
  for (size_t slot = 0; slot < p->n; slot++) dst[p->spec.units + slot] = dst[p->rows[2 * slot]] + 1;
}

bool mlxzip_samples_ordered(const mlxzip_samples *s) {
  for (size_t k = 0; k < s->n_ends; k++)
    if (s->ends[k] > s->n || (k && s->ends[k] < s->ends[k - 1])) return false;
  return true;
}

bool mlxzip_units_known(const mlxzip_phrases *p, const mlxzip_samples *s, size_t *bad) {
  uint32_t greatest = 0;
  for (size_t i = 0; i < s->n; i++) greatest = s->at[i] > greatest ? s->at[i] : greatest;
  if (p->spec.has_unk || greatest < p->spec.units) return true;
  for (*bad = 0; s->at[*bad] < p->spec.units;) ++*bad;
  return false;
}

static inline uint32_t emit(mlxzip_phrases *p, uint32_t node) {
  p->uses[node] += p->uses[node] < UINT32_MAX;
  return p->spec.first_id + node;
}

/* Learns from samples.at[from .. to), which is part of one sample, and writes ids to dst. False without memory. */
static bool feed(mlxzip_phrases *p, const mlxzip_samples *s, size_t from, size_t to, uint32_t *dst, size_t *n_out) {
  uint32_t node = p->open, depth = p->depth, window = p->spec.window ? p->spec.window : UINT32_MAX;
  size_t out = *n_out, i = from;
  for (; i < to; i++) {
    uint32_t unit = s->at[i];
    if (i + AHEAD + 1 < s->n) fetch(p, s->at[i + AHEAD], s->at[i + AHEAD + 1]);
    if (unit >= p->spec.units) {
      if (depth) dst[out++] = emit(p, node);
      dst[out++] = p->spec.unk_id, depth = 0;
      continue;
    }
    if (depth && depth < window) {
      if (p->n == p->cap && p->n < p->spec.limit && !grow(p)) break;
      uint32_t *cell = find(p, node, unit);
      if (*cell) {
        node = p->spec.units + (uint32_t)slot_of(p, *cell), depth++;
        continue;
      }
      if (p->n < p->spec.limit) put(p, cell, node, unit);
    }
    if (depth) dst[out++] = emit(p, node);
    node = unit, depth = 1;
  }
  p->open = node, p->depth = depth, *n_out = out;
  return i == to;
}

mlxzip_status mlxzip_phrases_train(mlxzip_phrases *p, const mlxzip_samples *s, uint32_t *dst, uint64_t *dst_ends,
                                   size_t *n_out, size_t *bad) {
  if (p->ids || !mlxzip_samples_ordered(s)) return MLXZIP_E_ARG;
  if (!mlxzip_units_known(p, s, bad)) return MLXZIP_E_ID;
  size_t from = 0;
  *n_out = 0;
  for (size_t k = 0; k < s->n_ends; k++) {
    if (!feed(p, s, from, s->ends[k], dst, n_out)) return MLXZIP_E_MEMORY;
    if (p->depth) dst[(*n_out)++] = emit(p, p->open);
    p->depth = 0, from = s->ends[k], dst_ends[k] = *n_out;
  }
  return feed(p, s, from, s->n, dst, n_out) ? MLXZIP_OK : MLXZIP_E_MEMORY;
}

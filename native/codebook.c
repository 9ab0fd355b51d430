#include "codebook.h"

static bool reserve(mlxzip_codebook *b, size_t more) {
  const mlxzip_params *p = b->params;
  size_t room = p->codebook_size - b->table.n, entries = b->table.n + (more < room ? more : room);
  if (entries > b->table.cap) {
    if (!mlxzip_grow(&b->table, p->merge_size, entries)) return false;
    int64_t *born = realloc(b->born, b->table.cap * sizeof *born);
    if (!born) return false;
    b->born = born;
  }
  if (more <= b->cap - b->n) return true;
  if (more > MLXZIP_MAX_LOG - b->n) return false;
  size_t cap = b->cap ? b->cap : 256;
  while (cap < b->n + more) cap *= 2;
  uint32_t *log = realloc(b->log, cap * sizeof *log);
  if (log) b->log = log;
  uint64_t *after = realloc(b->after, cap * sizeof *after);
  if (after) b->after = after;
  if (!log || !after) return false;
  b->cap = cap;
  return true;
}

/* Copies a padded row, with a constant size that compilers turn into moves. What lies past the row is scratch: spare
 * places of the destination, or a slot that is not installed yet. */
static inline void copy_row(uint32_t *to, const uint32_t *from, size_t width) {
  if (width <= 4) memcpy(to, from, 4 * sizeof *to);
  else memcpy(to, from, MLXZIP_MAX_MERGE * sizeof *to);
}

static void keep(mlxzip_codebook *b, const uint32_t *ids, size_t n) {
  for (size_t i = 0; i < b->params->merge_size; i++) b->prev[i] = i < n ? ids[i] : b->params->fill;
  b->n_prev = n;
  b->prev_hash = mlxzip_hash_run(ids, n);
}

/* The first n ids of prev and `last` become the next entry. (Writing `last` to prev first would make the processor wait
 * for that write before it can copy the row.) */
static inline void install(mlxzip_codebook *b, uint32_t *cell, uint64_t hash, size_t n, uint32_t last) {
  mlxzip_table *t = &b->table;
  uint32_t *row = t->rows + t->n * b->params->merge_size;
  copy_row(row, b->prev, b->params->merge_size);
  row[n] = last;
  t->lengths[t->n] = (uint8_t)(n + 1), t->hashes[t->n] = hash, b->born[t->n] = (int64_t)b->n;
  *cell = mlxzip_cell(hash, t->n++);
}

/* prev, which has just grown to a known entry, takes more of cur until it is new, or full, or cur runs out. */
static void extend(mlxzip_codebook *b, const uint32_t *cur, size_t n) {
  size_t width = b->params->merge_size, i = 1;
  while (b->n_prev < width && i < n) {
    b->prev[b->n_prev++] = cur[i];
    b->prev_hash = mlxzip_hash(b->prev_hash, cur[i]);
    uint32_t *cell = mlxzip_find(&b->table, width, b->prev_hash, b->prev, b->n_prev);
    if (!*cell) {
      install(b, cell, b->prev_hash, b->n_prev - 1, cur[i]);
      keep(b, cur + i, n - i);
      return;
    }
    i++;
  }
  if (b->n_prev == width) keep(b, cur + i, n - i);
}

/* The run of an installed or base id follows prev. */
static inline void follow(mlxzip_codebook *b, const uint32_t *cur, size_t n, uint64_t cur_hash) {
  size_t width = b->params->merge_size;
  if (b->table.n == b->params->codebook_size) {
    b->n_prev = 0;
    return;
  }
  if (b->n_prev != 0 && b->n_prev != width) {
    uint64_t hash = mlxzip_hash(b->prev_hash, cur[0]);
    uint32_t *cell = mlxzip_probe(&b->table, hash, hash);
    if (*cell) {
      b->prev[b->n_prev] = cur[0];
      cell = mlxzip_find(&b->table, width, hash, b->prev, b->n_prev + 1);
      if (*cell) {
        b->n_prev++, b->prev_hash = hash;
        extend(b, cur, n);
        return;
      }
    }
    install(b, cell, hash, b->n_prev, cur[0]);
  }
  copy_row(b->prev, cur, width);
  b->n_prev = n, b->prev_hash = cur_hash;
}

/* The next hypertoken before it is installed: prev + prev[0]. */
static mlxzip_status repeat(mlxzip_codebook *b) {
  size_t n = b->n_prev, width = b->params->merge_size;
  if (n == 0) return MLXZIP_E_NO_PREV;
  if (n == width) return MLXZIP_E_PREV_FULL;
  b->prev[n] = b->prev[0];
  uint64_t hash = mlxzip_hash(b->prev_hash, b->prev[0]);
  uint32_t *cell = mlxzip_find(&b->table, width, hash, b->prev, n + 1);
  if (*cell) {
    b->prev[n] = b->params->fill;
    return MLXZIP_E_DUPLICATE;
  }
  install(b, cell, hash, n, b->prev[0]);
  b->n_prev = n + 1, b->prev_hash = hash;
  return MLXZIP_OK;
}

/* One id; there is room in the log and in the table. */
static inline mlxzip_status step(mlxzip_codebook *b, uint32_t id) {
  const mlxzip_params *p = b->params;
  size_t n = 1, slot = (size_t)id - p->vocab_size;
  bool base = id < p->vocab_size;
  if (mlxzip_disabled(p, id)) {
    b->n_prev = 0;
  } else if (base || slot < b->table.n) {
    /* base or not is a coin toss to the processor: choose without a branch */
    slot = base ? 0 : slot;
    uint64_t hash = b->table.hashes[slot], base_hash = mlxzip_hash(0, id);
    const uint32_t *cur = b->table.rows + slot * p->merge_size;
    n = b->table.lengths[slot];
    b->base[0] = id;
    n = base ? 1 : n, hash = base ? base_hash : hash, cur = base ? b->base : cur;
    follow(b, cur, n, hash);
  } else {
    if (slot >= p->codebook_size) return MLXZIP_E_ID;
    if (slot > b->table.n) return MLXZIP_E_UNKNOWN;
    mlxzip_status status = repeat(b);
    if (status != MLXZIP_OK) return status;
    n = b->n_prev;
  }
  b->base_length += n;
  b->log[b->n] = id;
  b->after[b->n++] = b->base_length << LENGTH_SHIFT | (uint64_t)b->table.n << PREV_BITS | b->n_prev;
  return MLXZIP_OK;
}

mlxzip_status mlxzip_push(mlxzip_codebook *b, const uint32_t *ids, size_t n, size_t *bad) {
  if (!reserve(b, n)) return MLXZIP_E_MEMORY;
  size_t before = b->n;
  for (size_t i = 0; i < n; i++) {
    mlxzip_status status = step(b, ids[i]);
    if (status == MLXZIP_OK) continue;
    mlxzip_rewind(b, before);
    *bad = i;
    return status;
  }
  return MLXZIP_OK;
}

int mlxzip_push_one(mlxzip_codebook *b, uint32_t id, uint32_t *entry) {
  if (!reserve(b, 1)) return MLXZIP_E_MEMORY;
  size_t slot = b->table.n, width = b->params->merge_size;
  mlxzip_status status = step(b, id);
  if (status != MLXZIP_OK || b->table.n == slot) return status;
  memcpy(entry, b->table.rows + slot * width, width * sizeof *entry);
  entry[width] = (uint32_t)slot;
  return b->table.lengths[slot];
}

/* Puts back the last n_prev base ids of the expanded log. */
static void restore_prev(mlxzip_codebook *b, size_t n_prev) {
  const mlxzip_params *p = b->params;
  uint32_t prev[MLXZIP_MAX_MERGE];
  size_t left = n_prev;
  for (size_t i = b->n; left > 0; i--) {
    const uint32_t *run = b->log + i - 1;
    size_t n = 1;
    if (*run >= p->vocab_size) {
      size_t slot = *run - p->vocab_size;
      run = b->table.rows + slot * p->merge_size, n = b->table.lengths[slot];
    }
    for (; n > 0 && left > 0; n--) prev[--left] = run[n - 1];
  }
  keep(b, prev, n_prev);
}

mlxzip_status mlxzip_rewind(mlxzip_codebook *b, size_t mark) {
  if (mark > b->n) return MLXZIP_E_ARG;
  if (mark == b->n) return MLXZIP_OK;
  size_t width = b->params->merge_size;
  uint64_t after = mark ? b->after[mark - 1] : (uint64_t)b->params->start.n << PREV_BITS;
  size_t entries = after >> PREV_BITS & (((size_t)1 << ENTRY_BITS) - 1);
  while (b->table.n > entries) {
    size_t slot = b->table.n - 1, n = b->table.lengths[slot];
    const uint32_t *row = b->table.rows + slot * width;
    *mlxzip_find(&b->table, width, b->table.hashes[slot], row, n) = 0;
    b->table.n = slot;
  }
  b->n = mark;
  b->base_length = after >> LENGTH_SHIFT;
  restore_prev(b, after & ((1u << PREV_BITS) - 1));
  return MLXZIP_OK;
}

static mlxzip_status open_book(const mlxzip_params *p, const mlxzip_table *table, mlxzip_codebook **out) {
  mlxzip_codebook *b = *out = calloc(1, sizeof *b);
  if (!b) return MLXZIP_E_MEMORY;
  b->params = p;
  bool grown = mlxzip_grow(&b->table, p->merge_size, table->n);
  b->born = grown ? malloc(b->table.cap * sizeof *b->born) : NULL;
  b->table.n = table->n;
  if (b->born) {
    memcpy(b->table.rows, table->rows, table->n * p->merge_size * sizeof *table->rows);
    memcpy(b->table.lengths, table->lengths, table->n);
    memcpy(b->table.hashes, table->hashes, table->n * sizeof *table->hashes);
    for (size_t i = 0; i < MLXZIP_MAX_MERGE; i++) b->base[i] = b->prev[i] = p->fill;
    if (mlxzip_index(&b->table, b->table.cap, table->hashes)) return MLXZIP_OK;
  }
  mlxzip_free(b);
  *out = NULL;
  return MLXZIP_E_MEMORY;
}

mlxzip_status mlxzip_new(const mlxzip_params *p, mlxzip_codebook **out) {
  mlxzip_status status = open_book(p, &p->start, out);
  for (size_t slot = 0; status == MLXZIP_OK && slot < p->start.n; slot++) (*out)->born[slot] = -1;
  return status;
}

mlxzip_status mlxzip_copy(const mlxzip_codebook *from, mlxzip_codebook **out) {
  mlxzip_status status = open_book(from->params, &from->table, out);
  if (status != MLXZIP_OK) return status;
  mlxzip_codebook *b = *out;
  if (!reserve(b, from->n)) {
    mlxzip_free(b);
    *out = NULL;
    return MLXZIP_E_MEMORY;
  }
  memcpy(b->born, from->born, from->table.n * sizeof *b->born);
  if (from->n) {
    memcpy(b->log, from->log, from->n * sizeof *b->log);
    memcpy(b->after, from->after, from->n * sizeof *b->after);
  }
  b->n = from->n, b->base_length = from->base_length, b->n_prev = from->n_prev, b->prev_hash = from->prev_hash;
  memcpy(b->prev, from->prev, sizeof b->prev);
  return MLXZIP_OK;
}

void mlxzip_free(mlxzip_codebook *b) {
  if (!b) return;
  mlxzip_table_free(&b->table), free(b->born), free(b->log), free(b->after), free(b);
}

mlxzip_status mlxzip_continue(mlxzip_codebook *b, const uint32_t *ids, size_t n, uint32_t *dst, size_t *n_out,
                              size_t *bad) {
  const mlxzip_params *p = b->params;
  size_t before = b->n, out = 0, at = 0, width = p->merge_size;
  if (!reserve(b, n)) return MLXZIP_E_MEMORY;
  while (at < n) {
    const uint32_t *run = ids + at;
    uint32_t code = *run;
    if (code >= p->vocab_size && !mlxzip_disabled(p, code)) break;
    size_t limit = n - at < width ? n - at : width, best = 1;
    uint64_t hash = 0;
    for (size_t k = 1; k <= limit && mlxzip_plain(p, run[k - 1]); k++) {
      hash = mlxzip_hash(hash, run[k - 1]);
      if (k == 1) continue;
      uint32_t cell = *mlxzip_find(&b->table, width, hash, run, k);
      uint32_t hyper = p->vocab_size + (uint32_t)mlxzip_slot(cell);
      if (cell && !(p->clash && mlxzip_disabled(p, hyper))) code = hyper, best = k;
    }
    step(b, code); /* cannot fail: the id is a base id, disabled or installed */
    dst[out++] = code, at += best;
  }
  mlxzip_rewind(b, before);
  *n_out = out, *bad = at;
  return at < n ? MLXZIP_E_ID : MLXZIP_OK;
}

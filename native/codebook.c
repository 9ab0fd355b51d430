#include "codebook.h"

/* Makes room for `more` ids. False without memory. */
static bool reserve(mlxzip_codebook *b, size_t more) {
  const mlxzip_params *p = b->params;
  size_t room = p->codebook_size - b->table.n, entries = b->table.n + (more < room ? more : room);
  if (more > MLXZIP_MAX_LOG - b->n || !mlxzip_grow(&b->table, p, entries)) return false;
  if (p->turns) {
    if (!b->turns && !(b->turns = calloc(1, sizeof *b->turns))) return false;
    if (!mlxzip_turns_reserve(b->turns, p, &b->table, b->n + more, more)) return false;
  }
  if (more <= b->cap - b->n) return true;
  size_t cap = b->cap ? 2 * b->cap : 256;
  if (cap < b->n + more) cap = b->n + more;
  uint32_t *log = realloc(b->log, cap * sizeof *log);
  if (log) b->log = log;
  uint64_t *after = realloc(b->after, cap * sizeof *after);
  if (after) b->after = after;
  if (!log || !after) return false;
  b->cap = cap;
  return true;
}

/* Copies a padded row through a buffer of constant size, which compilers keep in registers. It writes past the row,
 * into spare places of the destination or a slot that is not installed yet. */
static inline void copy_row(uint32_t *to, const uint32_t *from, size_t width) {
  uint32_t ids[MLXZIP_MAX_MERGE];
  if (width <= 4) memcpy(ids, from, 4 * sizeof *to), memcpy(to, ids, 4 * sizeof *to);
  else memcpy(ids, from, sizeof ids), memcpy(to, ids, sizeof ids);
}

/* Returns prev as the codebook stores it between calls and during the rare steps. */
static inline mlxzip_run held(const mlxzip_codebook *b) {
  return (mlxzip_run){b->own, b->prev_hash, b->own[0], (uint32_t)b->n_prev};
}

static inline void hold(mlxzip_codebook *b, mlxzip_run prev) {
  if (prev.n) copy_row(b->own, prev.row, b->params->merge_size);
  b->own[0] = prev.first, b->n_prev = prev.n, b->prev_hash = prev.hash;
}

static void hold_ids(mlxzip_codebook *b, const uint32_t *ids, size_t n) {
  for (size_t i = 0; i < b->params->merge_size; i++) b->own[i] = i < n ? ids[i] : b->params->fill;
  b->n_prev = n, b->prev_hash = mlxzip_hash_run(ids, n);
}

/* Installs prev + last as the next entry. */
static inline void install(mlxzip_table *t, size_t width, uint32_t *cell, uint64_t hash, mlxzip_run prev,
                           uint32_t last) {
  size_t slot = t->n++;
  uint32_t *row = t->rows + slot * width;
  copy_row(row, prev.row, width);
  row[0] = prev.first, row[prev.n] = last;
  *cell = mlxzip_cell(hash, slot);
  t->hashes[slot] = hash, t->lengths[slot] = (uint8_t)(prev.n + 1);
}

/* Installs the stored prev + last, which is no entry yet. */
static void add(mlxzip_codebook *b, uint32_t *cell, uint64_t hash, uint32_t last) {
  mlxzip_run prev = held(b);
  b->own[prev.n] = last;
  if (b->turns) mlxzip_turns_install(b->turns, b->params, &b->table, b->own, prev.n + 1, hash);
  else install(&b->table, b->params->merge_size, cell, hash, prev, last);
}

/* Step 4 of decoding, in which the stored prev + cur[0] may be an installed entry: moves ids from cur to prev until
 * prev is new and gets installed, or has merge_size ids, or cur is empty. */
static void extend(mlxzip_codebook *b, mlxzip_run cur) {
  size_t width = b->params->merge_size;
  uint32_t ids[MLXZIP_MAX_MERGE];
  copy_row(ids, cur.row, width);
  ids[0] = cur.first;
  for (size_t i = 0; i < cur.n; i++) {
    mlxzip_run prev = held(b);
    uint64_t hash = mlxzip_hash(prev.hash, ids[i]);
    b->own[prev.n] = ids[i];
    uint32_t *cell = mlxzip_find(&b->table, width, hash, b->own, prev.n + 1);
    if (!*cell) {
      add(b, cell, hash, ids[i]);
      hold_ids(b, ids + i, cur.n - i);
      return;
    }
    b->n_prev++, b->prev_hash = hash;
    if (b->n_prev == width) {
      hold_ids(b, ids + i + 1, cur.n - i - 1);
      return;
    }
  }
}

/* Steps 2 to 4 of decoding for the run cur of an installed or base id; returns the new prev. */
static inline mlxzip_run follow(mlxzip_codebook *b, const mlxzip_params *p, mlxzip_table *t, mlxzip_run prev,
                                mlxzip_run cur) {
  if (t->n == p->codebook_size) return (mlxzip_run){.n = 0};
  if (prev.n == 0 || prev.n == p->merge_size) return cur;
  uint64_t hash = mlxzip_hash(prev.hash, cur.first);
  uint32_t *cell = mlxzip_probe(t, hash, hash);
  if (*cell) {
    b->table.n = t->n;
    hold(b, prev);
    extend(b, cur);
    t->n = b->table.n;
    return held(b);
  }
  install(t, p->merge_size, cell, hash, prev, cur.first);
  return cur;
}

/* Reads the next free slot's id: installs the stored prev + prev[0]. */
static mlxzip_status repeat(mlxzip_codebook *b, size_t slot) {
  const mlxzip_params *p = b->params;
  mlxzip_run prev = held(b);
  if (slot >= p->codebook_size) return MLXZIP_E_ID;
  if (slot > b->table.n) return MLXZIP_E_UNKNOWN;
  if (prev.n == 0) return MLXZIP_E_NO_PREV;
  if (prev.n == p->merge_size) return MLXZIP_E_PREV_FULL;
  uint64_t hash = mlxzip_hash(prev.hash, prev.first);
  b->own[prev.n] = prev.first;
  uint32_t *cell = mlxzip_find(&b->table, p->merge_size, hash, b->own, prev.n + 1);
  if (*cell) {
    b->own[prev.n] = p->fill;
    return MLXZIP_E_DUPLICATE;
  }
  add(b, cell, hash, prev.first);
  b->n_prev++, b->prev_hash = hash;
  return MLXZIP_OK;
}

/* Returns the run of an installed slot or, for slot -1, of a base id. Masks choose between the two, because a branch
 * would be mispredicted half of the time. */
static inline mlxzip_run run_of(const mlxzip_table *t, size_t width, ptrdiff_t slot, uint32_t id) {
  uint64_t base = slot < 0 ? UINT64_MAX : 0;
  const uint32_t *row = t->rows + slot * (ptrdiff_t)width;
  return (mlxzip_run){row, t->hashes[slot] | (mlxzip_hash(0, id) & base), row[0] | (id & (uint32_t)base),
                      t->lengths[slot]};
}

/* Reads n ids, for which there is room, up to the first error; *done is how many were read. prev, the table and the
 * parameters are local copies, which compilers can keep in registers. The rare steps work on the codebook itself, so
 * prev and table.n are stored before them and loaded after them. */
static mlxzip_status feed(mlxzip_codebook *b, const uint32_t *ids, size_t n, size_t *done) {
  const mlxzip_params p = *b->params;
  mlxzip_status status = MLXZIP_OK;
  mlxzip_run prev = held(b);
  uint64_t *after = b->after + b->n, length = b->base_length;
  mlxzip_table t = b->table;
  size_t i = 0;
  for (; i < n; i++) {
    size_t slot = ((size_t)ids[i] - p.vocab_size) | (0 - (size_t)(ids[i] < p.vocab_size)), span = 1;
    if (mlxzip_disabled(b->params, ids[i])) {
      prev.n = 0;
    } else if (slot + 1 <= t.n) {
      mlxzip_run cur = run_of(&t, p.merge_size, (ptrdiff_t)slot, ids[i]);
      span = cur.n;
      prev = follow(b, &p, &t, prev, cur);
    } else {
      b->table.n = t.n;
      hold(b, prev);
      status = repeat(b, slot);
      prev = held(b);
      t.n = b->table.n;
      if (status != MLXZIP_OK) break;
      span = prev.n;
    }
    length += span;
    after[i] = length << LENGTH_SHIFT | (uint64_t)t.n << PREV_BITS | prev.n;
  }
  b->table.n = t.n;
  hold(b, prev);
  memcpy(b->log + b->n, ids, i * sizeof *ids);
  b->n += i, b->base_length = length;
  *done = i;
  return status;
}

/* Like `follow`, under LRU and USE_COUNT, with the stored prev. */
static void follow_in_turn(mlxzip_codebook *b, mlxzip_run cur) {
  uint64_t hash = mlxzip_hash(b->prev_hash, cur.first);
  if (!mlxzip_turns_room(b->turns, b->params, &b->table)) {
    b->n_prev = 0;
  } else if (b->n_prev == 0 || b->n_prev == b->params->merge_size) {
    hold(b, cur);
  } else if (*mlxzip_probe(&b->table, hash, hash)) {
    extend(b, cur);
  } else {
    add(b, NULL, hash, cur.first);
    hold(b, cur); /* the entry being read is not evicted, so cur.row is still valid */
  }
}

/* Like `feed`, under LRU and USE_COUNT: also stores for each id what undoes it. */
static mlxzip_status feed_in_turn(mlxzip_codebook *b, const uint32_t *ids, size_t n, size_t *done) {
  const mlxzip_params *p = b->params;
  mlxzip_turns *turns = b->turns;
  mlxzip_status status = MLXZIP_OK;
  size_t i = 0;
  for (; i < n; i++) {
    uint32_t id = ids[i];
    size_t slot = (size_t)id - p->vocab_size, span = 1;
    mlxzip_step step = {MLXZIP_NONE, MLXZIP_NONE, 0};
    turns->reading = 0;
    if (mlxzip_disabled(p, id)) {
      b->n_prev = 0;
    } else if (id < p->vocab_size) {
      follow_in_turn(b, run_of(&b->table, p->merge_size, -1, id));
    } else if (slot < b->table.n) {
      step.entry = (uint32_t)slot;
      if (slot >= p->start.n) step.entry = mlxzip_turns_use(turns, p, slot, &step.older);
      span = b->table.lengths[slot];
      follow_in_turn(b, run_of(&b->table, p->merge_size, (ptrdiff_t)slot, id));
    } else if ((status = repeat(b, slot)) == MLXZIP_OK) {
      step.entry = (uint32_t)slot, span = b->n_prev;
    } else {
      break;
    }
    step.made = (uint32_t)turns->made;
    turns->steps[b->n] = step;
    b->base_length += span;
    b->after[b->n] = b->base_length << LENGTH_SHIFT | (uint64_t)b->table.n << PREV_BITS | b->n_prev;
    b->log[b->n++] = id;
  }
  *done = i;
  return status;
}

static mlxzip_status read_ids(mlxzip_codebook *b, const uint32_t *ids, size_t n, size_t *done) {
  return b->turns ? feed_in_turn(b, ids, n, done) : feed(b, ids, n, done);
}

int mlxzip_push(mlxzip_codebook *b, const uint32_t *ids, size_t n, size_t *bad) {
  if (n == 0) return 0;
  if (!reserve(b, n)) return MLXZIP_E_MEMORY;
  size_t before = b->n, entries = b->turns ? b->turns->made : b->table.n;
  mlxzip_status status = read_ids(b, ids, n, bad);
  if (status == MLXZIP_OK) return (int)((b->turns ? b->turns->made : b->table.n) - entries);
  mlxzip_rewind(b, before);
  return status;
}

/* Sets prev to the last n_prev base ids of the expanded log. */
static void restore_prev(mlxzip_codebook *b, size_t n_prev) {
  uint32_t prev[MLXZIP_MAX_MERGE];
  size_t left = n_prev;
  for (size_t i = b->n; left > 0; i--) {
    size_t n;
    const uint32_t *run = mlxzip_logged_run(b, i - 1, &n);
    for (; n > 0 && left > 0; n--) prev[--left] = run[n - 1];
  }
  hold_ids(b, prev, n_prev);
}

mlxzip_status mlxzip_rewind(mlxzip_codebook *b, size_t mark) {
  if (mark > b->n) return MLXZIP_E_ARG;
  if (mark == b->n) return MLXZIP_OK;
  size_t width = b->params->merge_size;
  uint64_t after = mlxzip_after(b, mark);
  for (size_t i = b->n; b->turns && i > mark; i--) mlxzip_turns_undo(b->turns, b->params, &b->table, i - 1);
  while (b->table.n > mlxzip_entries_in(after)) {
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

/* Returns a codebook with an empty log that shares the entries of a table until it grows. */
static mlxzip_codebook *open_book(const mlxzip_params *p, const mlxzip_table *t) {
  mlxzip_codebook *b = calloc(1, sizeof *b);
  if (!b) return NULL;
  b->params = p;
  b->table = (mlxzip_table){.rows = t->rows, .lengths = t->lengths, .hashes = t->hashes, .n = t->n};
  return b;
}

mlxzip_status mlxzip_new(const mlxzip_params *p, mlxzip_codebook **out) {
  *out = open_book(p, &p->start);
  return *out ? MLXZIP_OK : MLXZIP_E_MEMORY;
}

/* Copies a codebook under LRU or USE_COUNT by pushing its log. */
static mlxzip_status replay(const mlxzip_codebook *from, mlxzip_codebook **out) {
  size_t bad;
  mlxzip_status status = mlxzip_new(from->params, out);
  if (status == MLXZIP_OK && mlxzip_push(*out, from->log, from->n, &bad) < 0) {
    mlxzip_free(*out);
    *out = NULL, status = MLXZIP_E_MEMORY;
  }
  return status;
}

mlxzip_status mlxzip_copy(const mlxzip_codebook *from, mlxzip_codebook **out) {
  if (from->turns) return replay(from, out);
  mlxzip_codebook *b = *out = open_book(from->params, &from->table);
  if (!b || !reserve(b, from->n)) {
    mlxzip_free(b);
    *out = NULL;
    return MLXZIP_E_MEMORY;
  }
  if (from->n) {
    memcpy(b->log, from->log, from->n * sizeof *b->log);
    memcpy(b->after, from->after, from->n * sizeof *b->after);
  }
  b->n = from->n, b->base_length = from->base_length, b->n_prev = from->n_prev, b->prev_hash = from->prev_hash;
  memcpy(b->own, from->own, sizeof b->own);
  return MLXZIP_OK;
}

void mlxzip_free(mlxzip_codebook *b) {
  if (!b) return;
  mlxzip_table_free(&b->table), mlxzip_turns_free(b->turns), free(b->log), free(b->after), free(b);
}

mlxzip_status mlxzip_continue(mlxzip_codebook *b, const uint32_t *ids, size_t n, uint32_t *dst, size_t *n_out,
                              size_t *bad) {
  size_t before = b->n;
  mlxzip_status status = mlxzip_go_on(b, ids, n, dst, n_out, bad);
  mlxzip_rewind(b, before);
  return status;
}

mlxzip_status mlxzip_go_on(mlxzip_codebook *b, const uint32_t *ids, size_t n, uint32_t *dst, size_t *n_out,
                           size_t *bad) {
  const mlxzip_params *p = b->params;
  size_t out = 0, at = 0, width = p->merge_size;
  *n_out = 0, *bad = 0;
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
    read_ids(b, &code, 1, bad); /* cannot fail: the id is a base id, disabled or installed */
    dst[out++] = code, at += best;
  }
  *n_out = out, *bad = at;
  return at < n ? MLXZIP_E_ID : MLXZIP_OK;
}

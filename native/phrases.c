#include "phrases.h"

#include "table.h"

#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

enum { AHEAD = 12, LANES = 12 }; /* units, and samples in turn: by then what is fetched has come */
#define NO_ID ((uint32_t)MLXZIP_NO_ID)

/* A cell of the index: 0, or slot + 1 in its lower bits, under the top of the hash. Half full at most. */
struct mlxzip_phrases {
  mlxzip_phrases_spec spec;
  uint32_t *cells, *rows, *uses; /* a row: prefix, last unit */
  uint32_t *ids;                 /* NULL where all follow from first_id */
  uint32_t *inner;               /* a bit per node: whether a longer run begins with it */
  size_t mask, n, cap;
  unsigned bits;
  uint32_t open, depth; /* the run at the end of what was trained, while depth > 0 */
};

/* No two runs have the same. */
static uint64_t hash_of(uint32_t prefix, uint32_t unit) { return mlxzip_hash((uint64_t)prefix << 32, unit); }

static uint32_t cell_of(const mlxzip_phrases *p, uint64_t hash, size_t slot) {
  return (uint32_t)(hash >> (32 + p->bits) << p->bits) | (uint32_t)(slot + 1);
}

static size_t slot_of(const mlxzip_phrases *p, uint32_t cell) { return (cell & (((uint32_t)1 << p->bits) - 1)) - 1; }

/* The cell of this run, or the empty one where it belongs. */
static inline uint32_t *find(const mlxzip_phrases *p, uint32_t prefix, uint32_t unit) {
  uint64_t hash = hash_of(prefix, unit);
  uint32_t wanted = cell_of(p, hash, 0);
  for (size_t i = hash & p->mask;; i = (i + 1) & p->mask) {
    uint32_t *cell = &p->cells[i];
    if (!*cell) return cell;
    if ((*cell ^ wanted) >> p->bits) continue;
    const uint32_t *row = p->rows + 2 * slot_of(p, *cell);
    if (row[0] == prefix && row[1] == unit) return cell;
  }
}

/* Whether a longer run begins with a node; no unit that is none does. */
static inline bool begins(const mlxzip_phrases *p, uint32_t node) { return p->inner[node / 32] >> node % 32 & 1; }

static inline void fetch(const mlxzip_phrases *p, uint32_t prefix, uint32_t unit) {
  PREFETCH(&p->cells[hash_of(prefix, unit) & p->mask]);
}

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

/* Takes 2^bits cells into use. */
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

/* Room for `cap` slots: cells, and behind the phrases there are, rows and uses. */
static bool reserve(mlxzip_phrases *p, size_t cap) {
  unsigned bits = p->bits;
  size_t nodes = p->spec.units + cap, known = p->spec.units + p->cap, words = nodes / 32 + 1, filled = known / 32 + 1;
  while ((size_t)1 << bits < 2 * cap) bits++;
  if (bits > p->bits && !reindex(p, bits)) return false; /* first: cap must never be more than the index has room for */
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

/* Whether ends rise and none lies beyond n. */
static bool ordered(const mlxzip_samples *s) {
  for (size_t k = 0; k < s->n_ends; k++)
    if (s->ends[k] > s->n || (k && s->ends[k] < s->ends[k - 1])) return false;
  return true;
}

static bool all_known(const mlxzip_phrases *p, const mlxzip_samples *s, size_t *bad) {
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

/* Feeds samples.at[from .. to), all of one sample; ids go to dst. False without memory. */
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
  if (p->ids || !ordered(s)) return MLXZIP_E_ARG;
  if (!all_known(p, s, bad)) return MLXZIP_E_ID;
  size_t from = 0;
  *n_out = 0;
  for (size_t k = 0; k < s->n_ends; k++) {
    if (!feed(p, s, from, s->ends[k], dst, n_out)) return MLXZIP_E_MEMORY;
    if (p->depth) dst[(*n_out)++] = emit(p, p->open);
    p->depth = 0, from = s->ends[k], dst_ends[k] = *n_out;
  }
  return feed(p, s, from, s->n, dst, n_out) ? MLXZIP_OK : MLXZIP_E_MEMORY;
}

static inline uint32_t id_of(const mlxzip_phrases *p, uint32_t node) {
  return p->ids && node >= p->spec.units ? p->ids[node - p->spec.units] : p->spec.first_id + node;
}

/* A sample being encoded. `node` is the run that ends before place i, the phrase `id` the longest so far, ending before
 * `next`; the run may go on to `end`, the sample does to `stop`. */
typedef struct {
  size_t i, next, end, stop, out, sample;
  uint32_t node, id;
} reader;

typedef struct {
  const mlxzip_phrases *p;
  const mlxzip_samples *s;
  uint32_t window, longest, *dst;
} job;

static inline void begin(const job *j, reader *r) {
  uint32_t unit = j->s->at[r->next];
  bool known = unit < j->p->spec.units;
  r->node = unit, r->id = known ? j->p->spec.first_id + unit : j->p->spec.unk_id;
  r->end = j->window && r->stop - r->next > j->window ? r->next + j->window : r->stop;
  r->i = ++r->next;
  if (!known) r->end = r->next;
}

/* Emits what is certain, up to the next run that must be looked up, whose cell is fetched. False at the sample's end. */
static inline bool settle(const job *j, reader *r) {
  while (r->i == r->end || !begins(j->p, r->node)) {
    j->dst[r->out++] = r->id;
    if (r->next == r->stop) return false;
    begin(j, r);
  }
  fetch(j->p, r->node, j->s->at[r->i]);
  return true;
}

/* Fetches what `look` compares with: the row, and the id, that the first cell tells of. */
static inline void glimpse(const job *j, const reader *r) {
  const mlxzip_phrases *p = j->p;
  uint32_t cell = p->cells[hash_of(r->node, j->s->at[r->i]) & p->mask];
  size_t slot = cell ? slot_of(p, cell) : 0;
  PREFETCH(&p->rows[2 * slot]);
  if (p->ids) PREFETCH(&p->ids[slot]);
}

/* The run and one more unit, if that is a run. */
static inline void look(const job *j, reader *r) {
  uint32_t cell = *find(j->p, r->node, j->s->at[r->i]);
  if (cell) {
    r->node = j->p->spec.units + (uint32_t)slot_of(j->p, cell), r->i++;
    uint32_t longer = id_of(j->p, r->node);
    if (longer != NO_ID) r->id = longer, r->next = r->i;
    if (longer != NO_ID || j->longest) return;
  }
  r->end = r->i;
}

static inline bool settle_or_end(const job *j, reader *r, uint64_t *dst_ends) {
  if (settle(j, r)) return true;
  dst_ends[r->sample] = r->out;
  return false;
}

/* Takes up the next sample that holds something; its ids go where its units are. False when there is none. */
static bool take(const job *j, reader *r, size_t *k, uint64_t *dst_ends) {
  for (; *k < j->s->n_ends; ++*k) {
    size_t start = *k ? j->s->ends[*k - 1] : 0;
    dst_ends[*k] = start;
    if (start == j->s->ends[*k]) continue;
    *r = (reader){.next = start, .stop = j->s->ends[*k], .out = start, .sample = (*k)++};
    begin(j, r);
    return true;
  }
  return false;
}

/* The ids of a sample go from its first unit's place on, up to dst_ends. LANES samples are read in turn: what one needs
 * is fetched while the others look. */
static void encode_in_turn(const job *j, uint64_t *dst_ends) {
  reader readers[LANES];
  size_t n = 0, k = 0;
  do {
    while (n < LANES && take(j, &readers[n], &k, dst_ends)) n += settle_or_end(j, &readers[n], dst_ends);
    for (size_t a = 0; a < n; a++) glimpse(j, &readers[a]);
    for (size_t a = n; a-- > 0;) {
      look(j, &readers[a]);
      if (!settle_or_end(j, &readers[a], dst_ends)) readers[a] = readers[--n];
    }
  } while (n || k < j->s->n_ends);
}

/* The same, one after the other: what can be fetched ahead are the pairs that runs begin with. */
static void encode_one_by_one(const job *j, uint64_t *dst_ends) {
  const mlxzip_phrases *p = j->p;
  const mlxzip_samples *s = j->s;
  for (size_t k = 0, at = 0, seen = 0; k < s->n_ends; k++) {
    size_t out = at;
    while (at < s->ends[k]) {
      for (; seen < at + AHEAD && seen + 1 < s->n; seen++) fetch(p, s->at[seen], s->at[seen + 1]);
      uint32_t node = s->at[at], id = p->spec.first_id + node;
      size_t end = j->window && s->ends[k] - at > j->window ? at + j->window : s->ends[k], next = at + 1;
      if (node >= p->spec.units) id = p->spec.unk_id, end = next;
      for (size_t i = next; i < end && begins(p, node); i++) {
        uint32_t cell = *find(p, node, s->at[i]);
        if (!cell) break;
        node = p->spec.units + (uint32_t)slot_of(p, cell);
        uint32_t longer = id_of(p, node);
        if (longer != NO_ID) id = longer, next = i + 1;
        else if (!j->longest) break;
      }
      j->dst[out++] = id, at = next;
    }
    dst_ends[k] = out;
  }
}

mlxzip_status mlxzip_phrases_encode(const mlxzip_phrases *p, const mlxzip_samples *s, uint32_t window,
                                    uint32_t longest, uint32_t *dst, uint64_t *dst_ends, size_t *n_out, size_t *bad) {
  if (!ordered(s) || (s->n && (!s->n_ends || s->ends[s->n_ends - 1] != s->n))) return MLXZIP_E_ARG;
  if (!all_known(p, s, bad)) return MLXZIP_E_ID;
  if (p->spec.window && (!window || window > p->spec.window)) window = p->spec.window;
  bool in_turn = s->n_ends >= LANES && window != 2; /* what is more than pairs cannot be fetched ahead */
  (in_turn ? encode_in_turn : encode_one_by_one)(&(job){p, s, window, longest, dst}, dst_ends);
  size_t out = 0;
  for (size_t k = 0, start = 0; k < s->n_ends; start = s->ends[k++]) {
    size_t n = dst_ends[k] - start;
    if (n) memmove(dst + out, dst + start, n * sizeof *dst);
    dst_ends[k] = out += n;
  }
  *n_out = out;
  return MLXZIP_OK;
}

/* The node of an id; units + size for none. */
static uint32_t node_of(const mlxzip_phrases *p, uint32_t id) {
  uint32_t none = p->spec.units + (uint32_t)p->n, node = id - p->spec.first_id;
  if (id < p->spec.first_id) return none;
  if (!p->ids || node < p->spec.units) return node < none ? node : none;
  size_t low = 0, high = p->n; /* ids rise, but for those that are none, which the search steps over */
  while (low < high) {
    size_t middle = low + (high - low) / 2, i = middle;
    while (i < high && p->ids[i] == NO_ID) i++;
    if (i == high) high = middle;
    else if (p->ids[i] == id) return p->spec.units + (uint32_t)i;
    else if (p->ids[i] < id) low = i + 1;
    else high = middle;
  }
  return none;
}

mlxzip_status mlxzip_phrases_expand(const mlxzip_phrases *p, const mlxzip_samples *s, uint32_t *dst, size_t cap,
                                    uint64_t *dst_ends, size_t *n_out, size_t *bad) {
  if (!ordered(s)) return MLXZIP_E_ARG;
  uint32_t none = p->spec.units + (uint32_t)p->n;
  size_t out = 0, k = 0;
  for (size_t i = 0; i <= s->n; i++) {
    for (; k < s->n_ends && s->ends[k] == i; k++) dst_ends[k] = out;
    if (i == s->n) break;
    uint32_t node = node_of(p, s->at[i]), length = 1;
    bool unknown = node == none && p->spec.has_unk && s->at[i] == p->spec.unk_id;
    *bad = i;
    if (node == none && !unknown) return MLXZIP_E_ID;
    if (unknown) node = p->spec.units;
    for (uint32_t up = node; !unknown && up >= p->spec.units; up = p->rows[2 * (up - p->spec.units)]) length++;
    size_t end = out += length;
    for (; length > 1; length--, node = p->rows[2 * (node - p->spec.units)])
      if (--end < cap) dst[end] = p->rows[2 * (node - p->spec.units) + 1];
    if (--end < cap) dst[end] = node;
  }
  *n_out = out;
  return out <= cap ? MLXZIP_OK : MLXZIP_E_SPACE;
}

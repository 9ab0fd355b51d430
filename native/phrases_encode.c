#include "phrase_table.h"

enum { LANES = 12 }; /* samples that are encoded in turns */

/* Returns whether a longer run begins with the node; false for an unknown unit. */
static inline bool begins(const mlxzip_phrases *p, uint32_t node) { return p->inner[node / 32] >> node % 32 & 1; }

static inline uint32_t id_of(const mlxzip_phrases *p, uint32_t node) {
  return p->ids && node >= p->spec.units ? p->ids[node - p->spec.units] : p->spec.first_id + node;
}

/* A sample that is being encoded. `node` is the run that ends before place i; `id` is the longest phrase found so far,
 * which ends before `next`. The run ends before `end` at the latest, the sample before `stop`. */
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

/* Emits ids up to the next run that must be looked up, and prefetches its cell. False at the end of the sample. */
static inline bool settle(const job *j, reader *r) {
  while (r->i == r->end || !begins(j->p, r->node)) {
    j->dst[r->out++] = r->id;
    if (r->next == r->stop) return false;
    begin(j, r);
  }
  fetch(j->p, r->node, j->s->at[r->i]);
  return true;
}

/* Prefetches what `look` compares with: row and id of the slot in the first cell. */
static inline void glimpse(const job *j, const reader *r) {
  const mlxzip_phrases *p = j->p;
  uint32_t cell = p->cells[hash_of(r->node, j->s->at[r->i]) & p->mask];
  size_t slot = cell ? slot_of(p, cell) : 0;
  PREFETCH(&p->rows[2 * slot]);
  if (p->ids) PREFETCH(&p->ids[slot]);
}

/* Extends the run by one unit if the result is a run. */
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

/* Starts the next sample that is not empty; its ids are written at the places of its units. False if there is none. */
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

/* Encodes LANES samples in turns, so that memory for one is prefetched while the others are looked up. The ids of a
 * sample are written from the place of its first unit up to dst_ends. */
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

/* Encodes samples one after the other; only the first pair of each run can be prefetched. */
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
  if (!mlxzip_samples_ordered(s) || (s->n && (!s->n_ends || s->ends[s->n_ends - 1] != s->n))) return MLXZIP_E_ARG;
  if (!mlxzip_units_known(p, s, bad)) return MLXZIP_E_ID;
  if (p->spec.window && (!window || window > p->spec.window)) window = p->spec.window;
  bool in_turn = s->n_ends >= LANES && window != 2; /* only pairs can be prefetched */
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

/* Returns the node of an id; units + size if there is none. */
static uint32_t node_of(const mlxzip_phrases *p, uint32_t id) {
  uint32_t none = p->spec.units + (uint32_t)p->n, node = id - p->spec.first_id;
  if (id < p->spec.first_id) return none;
  if (!p->ids || node < p->spec.units) return node < none ? node : none;
  size_t low = 0, high = p->n; /* ids rise; the search skips runs without one */
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
  if (!mlxzip_samples_ordered(s)) return MLXZIP_E_ARG;
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

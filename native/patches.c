#include "patches.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Returns a pair of symbols as one word; words are ordered as pairs are. */
static inline uint32_t key_of(uint16_t left, uint16_t right) { return (uint32_t)left << 16 | right; }

/* ---- an index of pairs: open addressing; a cell is 0 or the number of a pair + 1 */

typedef struct {
  uint32_t *cells;
  size_t mask;
} pair_index;

static bool open_index(pair_index *x, size_t pairs) {
  size_t size = 16;
  while (size < 2 * pairs) size *= 2;
  x->mask = size - 1;
  return (x->cells = calloc(size, sizeof *x->cells)) != NULL;
}

static inline size_t first_cell(const pair_index *x, uint32_t key) {
  uint64_t h = key * 0x9E3779B97F4A7C15u;
  return (h ^ h >> 32) & x->mask;
}

/* ---- learning */

/* A pair of neighbours: its count in the pool, its count in the queue, the first token that has it. */
typedef struct {
  uint32_t key, count, queued, place;
} pair;

/* List of tokens in which a pair occurred; 0 ends the list. */
typedef struct {
  uint32_t token, next;
} place;

typedef struct {
  uint16_t *symbols; /* of all tokens, each at its offset */
  uint32_t *lengths; /* 0: not in the pool */
  pair *pairs;
  place *places;
  uint64_t *queue; /* a heap of count << 32 | ~key: the greatest is what is merged next */
  size_t n_pairs, n_places, n_queue, pool;
  pair_index index;
} learner;

static void push(learner *l, uint32_t count, uint32_t key) {
  uint64_t item = (uint64_t)count << 32 | (uint32_t)~key;
  size_t at = l->n_queue++;
  for (; at > 0 && l->queue[(at - 1) / 2] < item; at = (at - 1) / 2) l->queue[at] = l->queue[(at - 1) / 2];
  l->queue[at] = item;
}

static uint64_t pop(learner *l) {
  uint64_t top = l->queue[0], item = l->queue[--l->n_queue];
  size_t at = 0, n = l->n_queue;
  for (size_t child; (child = 2 * at + 1) < n; at = child) {
    if (child + 1 < n && l->queue[child + 1] > l->queue[child]) child++;
    if (l->queue[child] <= item) break;
    l->queue[at] = l->queue[child];
  }
  l->queue[at] = item;
  return top;
}

/* Returns the pair, which is created if needed. */
static pair *pair_at(learner *l, uint32_t key) {
  size_t cell = first_cell(&l->index, key);
  for (uint32_t i; (i = l->index.cells[cell]); cell = (cell + 1) & l->index.mask)
    if (l->pairs[i - 1].key == key) return &l->pairs[i - 1];
  l->pairs[l->n_pairs] = (pair){.key = key};
  l->index.cells[cell] = (uint32_t)++l->n_pairs;
  return &l->pairs[l->n_pairs - 1];
}

/* Counts a token's pairs and adds the token to the lists of pairs that contain `symbol` (0: of all pairs). */
static void count_pairs(learner *l, size_t token, const uint16_t *s, uint16_t symbol) {
  for (size_t i = 1; i < l->lengths[token]; i++) {
    pair *p = pair_at(l, key_of(s[i - 1], s[i]));
    if (++p->count > p->queued) push(l, p->queued = p->count, p->key);
    if (symbol && s[i - 1] != symbol && s[i] != symbol) continue;
    if (p->place && l->places[p->place].token == token) continue;
    l->places[l->n_places] = (place){(uint32_t)token, p->place};
    p->place = (uint32_t)l->n_places++;
  }
}

static void discount_pairs(learner *l, size_t token, const uint16_t *s) {
  for (size_t i = 1; i < l->lengths[token]; i++) pair_at(l, key_of(s[i - 1], s[i]))->count--;
}

/* Replaces each pair by `symbol`, from left to right; returns the new length. */
static uint32_t replace(uint16_t *s, uint32_t n, uint32_t key, uint16_t symbol) {
  uint32_t out = 0;
  for (uint32_t i = 0; i < n; i++) {
    bool merged = i + 1 < n && key_of(s[i], s[i + 1]) == key;
    s[out++] = merged ? symbol : s[i];
    i += merged;
  }
  return out;
}

static bool stands_in(const uint16_t *s, uint32_t n, uint32_t key) {
  for (uint32_t i = 1; i < n; i++)
    if (key_of(s[i - 1], s[i]) == key) return true;
  return false;
}

/* Merges a pair everywhere in the pool; returns the number of tokens that fit now and leave the pool. */
static uint32_t merge(learner *l, const pair *p, const size_t *offsets, size_t size, uint16_t symbol) {
  uint32_t key = p->key, left = 0;
  for (uint32_t at = p->place; at; at = l->places[at].next) {
    size_t token = l->places[at].token;
    uint16_t *s = l->symbols + offsets[token];
    if (!stands_in(s, l->lengths[token], key)) continue;
    discount_pairs(l, token, s);
    l->lengths[token] = replace(s, l->lengths[token], key, symbol);
    if (l->lengths[token] + 1 > size) count_pairs(l, token, s, symbol);
    else l->lengths[token] = 0, left++;
  }
  return left;
}

/* Returns the most frequent pair. A pair with an outdated count in the queue is queued again. */
static pair *most_frequent(learner *l) {
  for (;;) {
    uint64_t top = pop(l);
    uint32_t count = (uint32_t)(top >> 32);
    pair *p = pair_at(l, ~(uint32_t)top);
    if (count != p->queued) continue;
    if (count == p->count) return p;
    if ((p->queued = p->count)) push(l, p->count, p->key);
  }
}

static bool in_range(const size_t *offsets, size_t n) {
  if (offsets[0] != 0) return false;
  for (size_t i = 0; i < n; i++)
    if (offsets[i + 1] < offsets[i] || offsets[i + 1] - offsets[i] > MLXZIP_MAX_TOKEN_BYTES) return false;
  return true;
}

/* Allocates for the worst case: each merge removes one symbol and creates at most two pairs. */
static bool open_learner(learner *l, const uint8_t *bytes, const size_t *offsets, size_t n, size_t size) {
  size_t total = offsets[n], room = 3 * total + 1;
  l->symbols = malloc((total + 1) * sizeof *l->symbols), l->lengths = calloc(n + 1, sizeof *l->lengths);
  l->pairs = malloc(room * sizeof *l->pairs), l->places = malloc((room + 1) * sizeof *l->places);
  l->queue = malloc(room * sizeof *l->queue);
  if (!l->symbols || !l->lengths || !l->pairs || !l->places || !l->queue || !open_index(&l->index, room)) return false;
  for (size_t i = 0; i < total; i++) l->symbols[i] = bytes[i];
  l->n_places = 1;
  for (size_t i = 0; i < n; i++) {
    uint32_t length = (uint32_t)(offsets[i + 1] - offsets[i]);
    if (length + 1 <= size) continue;
    l->lengths[i] = length, l->pool++;
    count_pairs(l, i, l->symbols + offsets[i], 0);
  }
  return true;
}

mlxzip_status mlxzip_patches_learn(const uint8_t *bytes, const size_t *offsets, size_t n, size_t size,
                                   mlxzip_merge *merges, uint32_t *counts, uint32_t *left, size_t cap,
                                   size_t *n_merges) {
  *n_merges = 0;
  if (size < 2 || size > MLXZIP_MAX_PATCH || n >= UINT32_MAX || cap > MLXZIP_MAX_MERGES || !in_range(offsets, n) ||
      offsets[n] > MLXZIP_MAX_TOKENS_BYTES)
    return MLXZIP_E_ARG;
  learner l = {0};
  mlxzip_status status = open_learner(&l, bytes, offsets, n, size) ? MLXZIP_OK : MLXZIP_E_MEMORY;
  size_t k = 0;
  for (; status == MLXZIP_OK && l.pool > 0; k++) {
    if (k == cap) {
      status = MLXZIP_E_SPACE;
      break;
    }
    const pair *p = most_frequent(&l);
    merges[k] = (mlxzip_merge){(uint16_t)(p->key >> 16), (uint16_t)p->key};
    counts[k] = p->count;
    left[k] = merge(&l, p, offsets, size, (uint16_t)(MLXZIP_MARK + 1 + k));
    l.pool -= left[k];
  }
  free(l.symbols), free(l.lengths), free(l.pairs), free(l.places), free(l.queue), free(l.index.cells);
  *n_merges = k;
  return status;
}

/* ---- encoding */

static mlxzip_status index_merges(pair_index *x, const mlxzip_merge *merges, size_t n, size_t *bad) {
  if (!open_index(x, n)) return MLXZIP_E_MEMORY;
  for (size_t k = 0; k < n; k++) {
    size_t made = MLXZIP_MARK + 1 + k;
    uint16_t a = merges[k].left, b = merges[k].right;
    *bad = k;
    if (a >= made || b >= made || a == MLXZIP_MARK || b == MLXZIP_MARK) return MLXZIP_E_MERGE;
    size_t cell = first_cell(x, key_of(a, b));
    for (uint32_t i; (i = x->cells[cell]); cell = (cell + 1) & x->mask)
      if (merges[i - 1].left == a && merges[i - 1].right == b) return MLXZIP_E_MERGE;
    x->cells[cell] = (uint32_t)k + 1;
  }
  return MLXZIP_OK;
}

/* Returns the first merge that applies to the token; n_merges if none does. */
static size_t next_merge(const pair_index *x, const mlxzip_merge *merges, size_t n_merges, const uint16_t *s,
                         uint32_t n) {
  size_t best = n_merges;
  for (uint32_t i = 1; i < n; i++) {
    size_t cell = first_cell(x, key_of(s[i - 1], s[i]));
    for (uint32_t k; (k = x->cells[cell]); cell = (cell + 1) & x->mask) {
      if (merges[k - 1].left != s[i - 1] || merges[k - 1].right != s[i]) continue;
      if (k - 1 < best) best = k - 1;
      break;
    }
  }
  return best;
}

/* A merge makes a symbol that only later merges use, so the first merge that applies is the next one to apply. */
mlxzip_status mlxzip_patches_encode(const mlxzip_merge *merges, size_t n_merges, size_t size, const uint8_t *bytes,
                                    const size_t *offsets, size_t n, uint16_t *dst, uint32_t *lengths, size_t *bad) {
  if (n_merges > MLXZIP_MAX_MERGES || size > MLXZIP_MAX_PATCH || !in_range(offsets, n)) return MLXZIP_E_ARG;
  pair_index index = {0};
  mlxzip_status status = index_merges(&index, merges, n_merges, bad);
  for (size_t i = 0; status == MLXZIP_OK && i < n; i++) {
    uint16_t *s = dst + offsets[i] + i;
    uint32_t length = (uint32_t)(offsets[i + 1] - offsets[i]);
    for (uint32_t b = 0; b < length; b++) s[b] = bytes[offsets[i] + b];
    while (length + 1 > size) {
      size_t k = next_merge(&index, merges, n_merges, s, length);
      if (k == n_merges) break;
      length = replace(s, length, key_of(merges[k].left, merges[k].right), (uint16_t)(MLXZIP_MARK + 1 + k));
    }
    s[length] = MLXZIP_MARK;
    lengths[i] = length + 1;
  }
  free(index.cells);
  return status;
}

#include "bpe.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "mlxzip.h"

static const uint32_t NEVER = UINT32_MAX, DEAD = UINT32_MAX, NONE = UINT32_MAX;

enum { BYTES = 256 };

/* Cache of pieces: an index by hash, at most half full, and an arena of words. When either is full, both are cleared.
 * */
enum { SEEN_LONGEST = 64, SEEN_CELLS = 1 << 17, SEEN_WORDS = 1 << 20 };

typedef struct {
  uint64_t hash; /* 0: empty */
  uint32_t at;   /* in the arena: n_ids ids, then n_bytes bytes */
  uint8_t n_bytes, n_ids;
} seen_cell;

typedef struct {
  uint64_t pair;
  uint32_t merge;
} pair_cell;

/* The piece that is being encoded. token[i] is the token that begins at byte i, DEAD where none begins; prev[i], the
 * begin of the token before, is defined only where one begins. events is a heap of time << 32 | place. */
typedef struct {
  uint32_t *token, *prev;
  uint64_t *events;
  size_t n, cap, n_events, cap_events;
  int64_t now;
  bool failed; /* out of memory */
} piece;

struct mlxzip_bpe {
  size_t n_merges, pair_mask;
  uint32_t *parts, *apply_at, *split_at, *length; /* length: bytes, by token */
  uint32_t *applied;                              /* by time: the merge, or NONE */
  pair_cell *pairs;
  piece piece;
  seen_cell *seen;
  uint32_t *arena;
  size_t n_seen, n_arena;
};

static uint64_t mix(uint64_t h) {
  h *= 0x9E3779B97F4A7C15u;
  return h ^ (h >> 32);
}

/* ---- the encoder */

/* Returns the cell of a pair, or the empty cell where it belongs. */
static pair_cell *find_pair(const mlxzip_bpe *b, uint32_t left, uint32_t right) {
  uint64_t pair = (uint64_t)left << 32 | right;
  for (size_t i = (size_t)mix(pair) & b->pair_mask;; i = (i + 1) & b->pair_mask)
    if (b->pairs[i].merge == NONE || b->pairs[i].pair == pair) return &b->pairs[i];
}

static bool measure(mlxzip_bpe *b) {
  for (size_t t = 0; t < BYTES; t++) b->length[t] = 1;
  for (size_t m = 0; m < b->n_merges; m++) {
    const uint32_t *part = b->parts + 2 * m;
    if (part[0] >= BYTES + m || part[1] >= BYTES + m) return false;
    b->length[BYTES + m] = b->length[part[0]] + b->length[part[1]];
    if (b->length[BYTES + m] > MLXZIP_BPE_LONGEST) return false;
  }
  return true;
}

static bool schedule(mlxzip_bpe *b) {
  size_t last = 2 * b->n_merges;
  memset(b->applied, 0xFF, (last + 1) * sizeof *b->applied);
  for (size_t m = 0; m < b->n_merges; m++) {
    uint32_t at = b->apply_at[m];
    if (at == NEVER) continue;
    pair_cell *cell = find_pair(b, b->parts[2 * m], b->parts[2 * m + 1]);
    if (at > last || b->applied[at] != NONE || cell->merge != NONE) return false;
    b->applied[at] = (uint32_t)m;
    *cell = (pair_cell){(uint64_t)b->parts[2 * m] << 32 | b->parts[2 * m + 1], (uint32_t)m};
  }
  for (size_t m = 0; m < b->n_merges; m++) {
    uint32_t at = b->split_at[m];
    if (at != NEVER && (at > last || b->applied[at] != NONE)) return false;
  }
  return true;
}

static uint32_t *copy(const uint32_t *from, size_t n) {
  uint32_t *to = malloc((n + 1) * sizeof *to);
  if (to && n) memcpy(to, from, n * sizeof *to);
  return to;
}

int mlxzip_bpe_new(const mlxzip_bpe_spec *spec, mlxzip_bpe **out) {
  size_t n = spec->n_merges, cells = 16;
  *out = NULL;
  if (n > MLXZIP_MAX_CODEBOOK) return MLXZIP_E_ARG;
  while (cells < 3 * n) cells *= 2;
  mlxzip_bpe *b = calloc(1, sizeof *b);
  if (!b) return MLXZIP_E_MEMORY;
  b->n_merges = n, b->pair_mask = cells - 1;
  b->parts = copy(spec->parts, 2 * n);
  b->apply_at = copy(spec->apply_at, n), b->split_at = copy(spec->split_at, n);
  b->length = malloc((BYTES + n) * sizeof *b->length), b->applied = malloc((2 * n + 1) * sizeof *b->applied);
  b->pairs = malloc(cells * sizeof *b->pairs);
  b->seen = calloc(SEEN_CELLS, sizeof *b->seen), b->arena = malloc(SEEN_WORDS * sizeof *b->arena);
  int status = MLXZIP_OK;
  if (!b->parts || !b->apply_at || !b->split_at || !b->length || !b->applied || !b->pairs || !b->seen || !b->arena) {
    status = MLXZIP_E_MEMORY;
  } else {
    for (size_t i = 0; i < cells; i++) b->pairs[i].merge = NONE;
    if (!measure(b) || !schedule(b)) status = MLXZIP_E_ARG;
  }
  if (status == MLXZIP_OK) *out = b;
  else mlxzip_bpe_free(b);
  return status;
}

void mlxzip_bpe_free(mlxzip_bpe *b) {
  if (!b) return;
  free(b->parts), free(b->apply_at), free(b->split_at), free(b->length), free(b->applied), free(b->pairs);
  free(b->seen), free(b->arena), free(b->piece.token), free(b->piece.prev), free(b->piece.events), free(b);
}

/* ---- one piece */

static void push(piece *p, uint32_t time, size_t at) {
  if (p->n_events == p->cap_events) {
    size_t cap = p->cap_events ? 2 * p->cap_events : 256;
    uint64_t *events = realloc(p->events, cap * sizeof *events);
    if (!events) {
      p->failed = true;
      return;
    }
    p->events = events, p->cap_events = cap;
  }
  uint64_t event = (uint64_t)time << 32 | at, *heap = p->events;
  size_t i = p->n_events++;
  for (; i > 0 && heap[(i - 1) / 2] > event; i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
  heap[i] = event;
}

static uint64_t pop(piece *p) {
  uint64_t *heap = p->events, first = heap[0], event = heap[--p->n_events];
  size_t i = 0, n = p->n_events;
  for (size_t child; (child = 2 * i + 1) < n; i = child) {
    if (child + 1 < n && heap[child + 1] < heap[child]) child++;
    if (heap[child] >= event) break;
    heap[i] = heap[child];
  }
  heap[i] = event;
  return first;
}

/* Queues what will happen to the token at `at` alone and together with the next token, unless something else happens
 * to them before. */
static void expect_merge(const mlxzip_bpe *b, piece *p, size_t at) {
  size_t next = at + b->length[p->token[at]];
  if (next >= p->n) return;
  uint32_t merge = find_pair(b, p->token[at], p->token[next])->merge;
  if (merge != NONE && b->apply_at[merge] > p->now) push(p, b->apply_at[merge], at);
}

static void expect_split(const mlxzip_bpe *b, piece *p, size_t at) {
  uint32_t token = p->token[at], time = token < BYTES ? NEVER : b->split_at[token - BYTES];
  if (time != NEVER && time > p->now) push(p, time, at);
}

static void merge(const mlxzip_bpe *b, piece *p, size_t at, uint32_t made) {
  size_t next = at + b->length[p->token[at]], after = next + b->length[p->token[next]];
  p->token[at] = BYTES + made, p->token[next] = DEAD;
  if (after < p->n) p->prev[after] = (uint32_t)at;
  expect_split(b, p, at);
  expect_merge(b, p, at);
  if (at > 0) expect_merge(b, p, p->prev[at]);
}

/* Writes the tokens that a token has been split into by now; returns where the last of them begins. */
static size_t lay(const mlxzip_bpe *b, piece *p, size_t at, uint32_t token) {
  if (token >= BYTES && b->split_at[token - BYTES] <= p->now) {
    const uint32_t *part = b->parts + 2 * (size_t)(token - BYTES);
    size_t second = at + b->length[part[0]], last = lay(b, p, at, part[0]);
    p->prev[second] = (uint32_t)last;
    return lay(b, p, second, part[1]);
  }
  p->token[at] = token;
  expect_split(b, p, at);
  return at;
}

static void split(const mlxzip_bpe *b, piece *p, size_t at) {
  size_t after = at + b->length[p->token[at]], last = lay(b, p, at, p->token[at]);
  if (after < p->n) p->prev[after] = (uint32_t)last;
  for (size_t i = at; i < after; i += b->length[p->token[i]]) expect_merge(b, p, i);
  if (at > 0) expect_merge(b, p, p->prev[at]);
}

static void happen(const mlxzip_bpe *b, piece *p, uint64_t event) {
  size_t at = (size_t)(event & UINT32_MAX);
  uint32_t time = (uint32_t)(event >> 32), token = p->token[at], merged = b->applied[time];
  if (token == DEAD) return;
  p->now = time;
  if (merged == NONE) {
    if (token >= BYTES && b->split_at[token - BYTES] == time) split(b, p, at);
    return;
  }
  size_t next = at + b->length[token];
  const uint32_t *part = b->parts + 2 * (size_t)merged;
  if (next < p->n && part[0] == token && part[1] == p->token[next]) merge(b, p, at, merged);
}

static bool reserve(piece *p, size_t n) {
  if (n <= p->cap) return true;
  size_t cap = p->cap ? 2 * p->cap : 256;
  if (cap < n) cap = n;
  uint32_t *token = realloc(p->token, cap * sizeof *token);
  if (token) p->token = token;
  uint32_t *prev = realloc(p->prev, cap * sizeof *prev);
  if (prev) p->prev = prev;
  if (!token || !prev) return false;
  p->cap = cap;
  return true;
}

/* Encodes a piece of any length; returns the number of ids, or an error. */
static ptrdiff_t encode_piece(mlxzip_bpe *b, const uint8_t *text, size_t n, uint32_t *dst) {
  piece *p = &b->piece;
  if (n >= UINT32_MAX) return MLXZIP_E_ARG;
  if (!reserve(p, n)) return MLXZIP_E_MEMORY;
  p->n = n, p->n_events = 0, p->now = -1, p->failed = false;
  for (size_t i = 0; i < n; i++) p->token[i] = text[i], p->prev[i] = (uint32_t)(i - 1);
  for (size_t i = 0; i < n; i++) expect_merge(b, p, i);
  while (p->n_events && !p->failed) happen(b, p, pop(p));
  if (p->failed) return MLXZIP_E_MEMORY;
  size_t out = 0;
  for (size_t i = 0; i < n; i += b->length[p->token[i]]) dst[out++] = p->token[i];
  return (ptrdiff_t)out;
}

/* ---- the cache of pieces */

static uint64_t hash_of(const uint8_t *text, size_t n) {
  uint64_t h = n, word;
  for (; n >= 8; n -= 8, text += 8) {
    memcpy(&word, text, 8);
    h = mix(h ^ word);
  }
  word = 0;
  memcpy(&word, text, n);
  h = mix(h ^ word);
  return h ? h : 1;
}

static void forget(mlxzip_bpe *b) {
  memset(b->seen, 0, SEEN_CELLS * sizeof *b->seen);
  b->n_seen = b->n_arena = 0;
}

static ptrdiff_t encode_seen(mlxzip_bpe *b, const uint8_t *text, size_t n, uint32_t *dst) {
  if (n == 1) {
    *dst = *text;
    return 1;
  }
  if (n > SEEN_LONGEST) return encode_piece(b, text, n, dst);
  uint64_t hash = hash_of(text, n);
  size_t i = (size_t)hash & (SEEN_CELLS - 1);
  for (; b->seen[i].hash; i = (i + 1) & (SEEN_CELLS - 1)) {
    const seen_cell *cell = &b->seen[i];
    if (cell->hash != hash || cell->n_bytes != n) continue;
    const uint32_t *ids = b->arena + cell->at;
    if (memcmp(ids + cell->n_ids, text, n) != 0) continue;
    for (size_t k = 0; k < cell->n_ids; k++) dst[k] = ids[k];
    return cell->n_ids;
  }
  ptrdiff_t n_ids = encode_piece(b, text, n, dst);
  if (n_ids < 0) return n_ids;
  size_t words = (size_t)n_ids + (n + 3) / 4;
  if (b->n_seen == SEEN_CELLS / 2 || words > SEEN_WORDS - b->n_arena) {
    forget(b);
    i = (size_t)hash & (SEEN_CELLS - 1);
  }
  memcpy(b->arena + b->n_arena, dst, (size_t)n_ids * sizeof *dst);
  memcpy(b->arena + b->n_arena + n_ids, text, n);
  b->seen[i] = (seen_cell){hash, (uint32_t)b->n_arena, (uint8_t)n, (uint8_t)n_ids};
  b->n_seen++, b->n_arena += words;
  return n_ids;
}

int mlxzip_bpe_encode(mlxzip_bpe *b, int kind, const uint8_t *text, size_t n, uint32_t *dst, size_t *n_out) {
  if (kind < MLXZIP_PIECE_WHOLE || kind > MLXZIP_PIECE_DIGITS) return MLXZIP_E_ARG;
  size_t out = 0;
  for (size_t at = 0, end; at < n; at = end) {
    end = mlxzip_piece_end(kind, text, n, at);
    ptrdiff_t n_ids = encode_seen(b, text + at, end - at, dst + out);
    if (n_ids < 0) return (int)n_ids;
    out += (size_t)n_ids;
  }
  *n_out = out;
  return MLXZIP_OK;
}

int mlxzip_bpe_encode_pieces(mlxzip_bpe *b, const uint8_t *text, const size_t *ends, size_t n_pieces, uint32_t *dst,
                             size_t *id_ends) {
  size_t at = 0, out = 0;
  for (size_t i = 0; i < n_pieces; i++) {
    if (ends[i] < at) return MLXZIP_E_ARG;
    ptrdiff_t n_ids = ends[i] == at ? 0 : encode_seen(b, text + at, ends[i] - at, dst + out);
    if (n_ids < 0) return (int)n_ids;
    out += (size_t)n_ids, at = ends[i], id_ends[i] = out;
  }
  return MLXZIP_OK;
}

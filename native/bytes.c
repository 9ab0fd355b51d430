#include "codebook.h"

/* Reads and writes the saved form that mlxzip.h describes. */

enum { MAGIC_LOW = 0x7A786C6D, MAGIC_HIGH = 0x0062637A, VERSION = 1, HEADER_WORDS = 10 };

/* Version 2 has one more word after the header, the policy; the policy of version 1 is FREEZE. */
enum { WITH_POLICY = 2 };

typedef struct {
  uint8_t *dst;
  size_t words;
  uint64_t sum;
} writer;

static void put(writer *w, uint32_t word) {
  uint8_t *at = w->dst + 4 * w->words++;
  for (int i = 0; i < 4; i++) at[i] = (uint8_t)(word >> 8 * i);
  w->sum = (w->sum ^ word) * 1099511628211u;
}

static void put_all(writer *w, const uint32_t *words, size_t n) {
  for (size_t i = 0; i < n; i++) put(w, words[i]);
}

static void put_long(writer *w, uint64_t value) { put(w, (uint32_t)value), put(w, (uint32_t)(value >> 32)); }

static size_t saved_words(const mlxzip_codebook *b) {
  const mlxzip_params *p = b->params;
  size_t words = HEADER_WORDS + (p->policy != MLXZIP_FREEZE) + p->n_disabled + p->start.n + 2 + b->n + 2;
  for (size_t slot = 0; slot < p->start.n; slot++) words += p->start.lengths[slot];
  return words;
}

mlxzip_status mlxzip_to_bytes(const mlxzip_codebook *b, uint8_t *dst, size_t cap, size_t *n_out) {
  const mlxzip_params *p = b->params;
  *n_out = 4 * saved_words(b);
  if (cap < *n_out) return MLXZIP_E_SPACE;
  writer w = {dst, 0, 14695981039346656037u};
  uint32_t version = p->policy == MLXZIP_FREEZE ? VERSION : WITH_POLICY;
  const uint32_t header[HEADER_WORDS] = {MAGIC_LOW, MAGIC_HIGH, version, p->vocab_size, p->codebook_size,
                                         p->merge_size, p->has_pad, p->pad_id, (uint32_t)p->n_disabled,
                                         (uint32_t)p->start.n};
  put_all(&w, header, HEADER_WORDS);
  if (version == WITH_POLICY) put(&w, p->policy);
  put_all(&w, p->disabled, p->n_disabled);
  for (size_t slot = 0; slot < p->start.n; slot++) {
    put(&w, p->start.lengths[slot]);
    put_all(&w, p->start.rows + slot * p->merge_size, p->start.lengths[slot]);
  }
  put_long(&w, b->n);
  put_all(&w, b->log, b->n);
  put_long(&w, w.sum);
  return MLXZIP_OK;
}

/* The words that are not read yet; `left` does not count the checksum. */
typedef struct {
  const uint8_t *at;
  size_t left;
} reader;

static uint32_t word(const uint8_t *at) {
  return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static bool take(reader *r, uint32_t *value) {
  if (r->left == 0) return false;
  *value = word(r->at), r->at += 4, r->left--;
  return true;
}

/* Returns n words as a new array, one word longer so that it is never empty; NULL, with *status set, if there are
 * fewer. */
static uint32_t *take_all(reader *r, size_t n, mlxzip_status *status) {
  *status = n > r->left ? MLXZIP_E_FORMAT : MLXZIP_E_MEMORY;
  uint32_t *words = n > r->left ? NULL : malloc((n + 1) * sizeof *words);
  for (size_t i = 0; words && i < n; i++) take(r, &words[i]);
  if (words) *status = MLXZIP_OK;
  return words;
}

static bool checked(const uint8_t *data, size_t n, reader *r) {
  if (n % 4 || n < 4 * (HEADER_WORDS + 4)) return false;
  uint64_t sum = 14695981039346656037u;
  for (size_t i = 0; i < n - 8; i += 4) sum = (sum ^ word(data + i)) * 1099511628211u;
  *r = (reader){data + 12, n / 4 - 5};
  if (word(data + 8) != VERSION && word(data + 8) != WITH_POLICY) return false;
  return word(data) == MAGIC_LOW && word(data + 4) == MAGIC_HIGH &&
         word(data + n - 8) == (uint32_t)sum && word(data + n - 4) == (uint32_t)(sum >> 32);
}

static mlxzip_status read_start(reader *r, mlxzip_spec *s, uint32_t **rows, uint8_t **lengths) {
  if (s->n_start > r->left || s->merge_size > MLXZIP_MAX_MERGE) return MLXZIP_E_FORMAT;
  *rows = calloc(s->n_start + 1, (s->merge_size + 1) * sizeof **rows);
  *lengths = calloc(s->n_start + 1, 1);
  if (!*rows || !*lengths) return MLXZIP_E_MEMORY;
  s->start = *rows, s->start_lengths = *lengths;
  for (size_t slot = 0; slot < s->n_start; slot++) {
    uint32_t n;
    if (!take(r, &n) || n > s->merge_size) return MLXZIP_E_FORMAT;
    (*lengths)[slot] = (uint8_t)n;
    for (size_t i = 0; i < n; i++)
      if (!take(r, &(*rows)[slot * s->merge_size + i])) return MLXZIP_E_FORMAT;
  }
  return MLXZIP_OK;
}

/* Parameters have exactly one saved form: disabled ids must be in rising order. */
static bool normal(const mlxzip_params *p, const mlxzip_spec *s) {
  return p->pad_id == s->pad_id && p->n_disabled == s->n_disabled &&
         mlxzip_same(p->disabled, s->disabled, s->n_disabled);
}

mlxzip_status mlxzip_params_from_bytes(const uint8_t *data, size_t n, mlxzip_params **out) {
  *out = NULL;
  reader r;
  if (!checked(data, n, &r)) return MLXZIP_E_FORMAT;
  mlxzip_spec s = {0};
  uint32_t n_disabled, n_start, *rows = NULL;
  uint8_t *lengths = NULL;
  if (!take(&r, &s.vocab_size) || !take(&r, &s.codebook_size) || !take(&r, &s.merge_size) || !take(&r, &s.has_pad) ||
      !take(&r, &s.pad_id) || !take(&r, &n_disabled) || !take(&r, &n_start) ||
      (word(data + 8) == WITH_POLICY && (!take(&r, &s.policy) || s.policy == MLXZIP_FREEZE)))
    return MLXZIP_E_FORMAT;
  s.n_disabled = n_disabled, s.n_start = n_start;
  mlxzip_status status;
  uint32_t *disabled = take_all(&r, n_disabled, &status);
  s.disabled = disabled;
  if (status == MLXZIP_OK) status = read_start(&r, &s, &rows, &lengths);
  if (status == MLXZIP_OK) status = mlxzip_params_new(&s, out);
  if (status == MLXZIP_OK && !normal(*out, &s)) {
    mlxzip_params_free(*out);
    *out = NULL, status = MLXZIP_E_FORMAT;
  }
  free(disabled), free(rows), free(lengths);
  return status == MLXZIP_E_ARG ? MLXZIP_E_FORMAT : status;
}

/* Returns the number of words before the length of the log. */
static size_t params_words(const mlxzip_params *p) {
  const mlxzip_codebook empty = {.params = p};
  return saved_words(&empty) - 4;
}

mlxzip_status mlxzip_from_bytes(const mlxzip_params *p, const uint8_t *data, size_t n, mlxzip_codebook **out) {
  *out = NULL;
  reader r;
  size_t skip = params_words(p) - 3, bad;
  uint32_t low, high;
  mlxzip_status status;
  if (!checked(data, n, &r) || skip + 2 > r.left) return MLXZIP_E_FORMAT;
  r.at += 4 * skip, r.left -= skip;
  if (!take(&r, &low) || !take(&r, &high) || (low | (uint64_t)high << 32) != r.left) return MLXZIP_E_FORMAT;
  size_t n_ids = r.left;
  uint32_t *log = take_all(&r, n_ids, &status);
  if (status == MLXZIP_OK) status = mlxzip_new(p, out);
  if (status == MLXZIP_OK) {
    int installed = mlxzip_push(*out, log, n_ids, &bad);
    if (installed < 0) status = (mlxzip_status)installed;
  }
  free(log);
  if (status == MLXZIP_OK) return status;
  mlxzip_free(*out);
  *out = NULL;
  return status == MLXZIP_E_MEMORY ? status : MLXZIP_E_FORMAT;
}

/* Property: any ids, pushed in any pieces with rewinds between them, give a state, or an error that changes nothing;
 * and every state equals that of a new codebook that reads the whole log in one call. */
#include "fuzz.h"

static void same_as_replay(const mlxzip_params *p, mlxzip_codebook *book, size_t width) {
  mlxzip_codebook *fresh;
  size_t bad;
  REQUIRE(mlxzip_new(p, &fresh) == MLXZIP_OK);
  REQUIRE(mlxzip_push(fresh, mlxzip_log(book), mlxzip_mark(book), &bad) >= 0);
  require_equal(book, fresh, width);
  mlxzip_free(fresh);
}

static void push_piece(const mlxzip_spec *s, mlxzip_codebook *book, const uint32_t *ids, size_t n) {
  mlxzip_codebook *before;
  size_t bad = 0, width = s->merge_size, mark = mlxzip_mark(book);
  REQUIRE(mlxzip_copy(book, &before) == MLXZIP_OK);
  int installed = mlxzip_push(book, ids, n, &bad);
  if (installed < 0) {
    REQUIRE(bad < n);
    require_equal(book, before, width);
  } else {
    size_t more = mlxzip_size(book) - mlxzip_size(before);
    REQUIRE(s->policy == MLXZIP_FREEZE ? (size_t)installed == more : (size_t)installed >= more);
    int32_t *spans = malloc((n + 1) * sizeof *spans);
    uint32_t *out = malloc((n * width + 1) * sizeof *out);
    size_t n_out;
    uint64_t sum = 0, read = mlxzip_base_length(book) - mlxzip_base_length(before);
    REQUIRE(spans && out && mlxzip_spans(book, ids, n, spans, &bad) == MLXZIP_OK);
    REQUIRE(mlxzip_expand(book, ids, n, out, n * width, &n_out, &bad) == MLXZIP_OK);
    for (size_t i = 0; i < n; i++) sum += (uint64_t)spans[i];
    REQUIRE(sum == n_out && (sum == read || s->policy != MLXZIP_FREEZE));
    uint8_t *lengths = malloc(n + 1);
    REQUIRE(lengths && mlxzip_logged(book, mark, n, NULL, lengths) == MLXZIP_OK);
    for (size_t i = 0; i < n; i++) read -= lengths[i];
    REQUIRE(read == 0);
    free(spans), free(out), free(lengths);
  }
  mlxzip_free(before);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  bytes b = {data, size};
  mlxzip_params *p = draw_params(&b);
  if (!p) return 0;
  mlxzip_spec s;
  mlxzip_params_spec(p, &s);
  mlxzip_codebook *book;
  REQUIRE(mlxzip_new(p, &book) == MLXZIP_OK);
  while (b.left > 0 && mlxzip_mark(book) < 4096) {
    uint32_t action = draw(&b, 8), ids[64], row[MLXZIP_MAX_MERGE + 2], n = draw(&b, 64);
    if (action == 0) {
      mlxzip_rewind(book, mlxzip_mark(book) * n / 64);
      same_as_replay(p, book, s.merge_size);
      continue;
    }
    /* mostly ids that can be lawful now, sometimes any */
    uint32_t below = s.vocab_size + (uint32_t)mlxzip_size(book) + (action < 3);
    for (uint32_t i = 0; i < n; i++) ids[i] = action == 1 ? draw(&b, 256) * 16843009u : draw(&b, 256) % below;
    if (n == 1) mlxzip_push_one(book, ids[0], row);
    else push_piece(&s, book, ids, n);
  }
  same_as_replay(p, book, s.merge_size);
  mlxzip_free(book), mlxzip_params_free(p);
  return 0;
}

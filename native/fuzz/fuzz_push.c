/* Property: any ids, pushed in any pieces with rewinds between them, give a state or an error that changes nothing; and
 * every state equals that of a fresh codebook which was fed its log in one call. */
#include "fuzz.h"

static void same_as_replay(const mlxzip_params *p, mlxzip_codebook *book, size_t width) {
  mlxzip_codebook *fresh;
  size_t bad;
  REQUIRE(mlxzip_new(p, &fresh) == MLXZIP_OK);
  REQUIRE(mlxzip_push(fresh, mlxzip_log(book), mlxzip_mark(book), &bad) >= 0);
  require_equal(book, fresh, width);
  mlxzip_free(fresh);
}

static void push_piece(mlxzip_codebook *book, const uint32_t *ids, size_t n, size_t width) {
  mlxzip_codebook *before;
  size_t bad = 0;
  REQUIRE(mlxzip_copy(book, &before) == MLXZIP_OK);
  int installed = mlxzip_push(book, ids, n, &bad);
  if (installed < 0) {
    REQUIRE(bad < n);
    require_equal(book, before, width);
  } else {
    REQUIRE((size_t)installed == mlxzip_size(book) - mlxzip_size(before));
    int32_t *spans = malloc((n + 1) * sizeof *spans);
    uint32_t *out = malloc((n * width + 1) * sizeof *out);
    size_t n_out;
    uint64_t sum = 0;
    REQUIRE(spans && out && mlxzip_spans(book, ids, n, spans, &bad) == MLXZIP_OK);
    REQUIRE(mlxzip_expand(book, ids, n, out, n * width, &n_out, &bad) == MLXZIP_OK);
    for (size_t i = 0; i < n; i++) sum += (uint64_t)spans[i];
    REQUIRE(sum == n_out && sum == mlxzip_base_length(book) - mlxzip_base_length(before));
    free(spans), free(out);
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
    else push_piece(book, ids, n, s.merge_size);
  }
  same_as_replay(p, book, s.merge_size);
  mlxzip_free(book), mlxzip_params_free(p);
  return 0;
}

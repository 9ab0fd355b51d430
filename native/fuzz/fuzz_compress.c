/* Property: a new codebook that reads compressed ids expands them to the input and has the encoder's entries; and ids
 * from mlxzip_continue expand to its input, at any point, and leave the codebook unchanged. */
#include "fuzz.h"

static void continues(const mlxzip_params *p, size_t width, const uint32_t *ids, size_t n, const uint32_t *codes,
                      size_t n_codes) {
  mlxzip_codebook *book, *twin;
  size_t n_out, bad;
  uint32_t *out = malloc((n + 1) * sizeof *out);
  REQUIRE(out && mlxzip_new(p, &book) == MLXZIP_OK);
  REQUIRE(mlxzip_push(book, codes, n_codes / 2, &bad) >= 0 && mlxzip_copy(book, &twin) == MLXZIP_OK);
  REQUIRE(mlxzip_continue(book, ids, n, out, &n_out, &bad) == MLXZIP_OK);
  require_equal(book, twin, width);
  REQUIRE(mlxzip_push(book, out, n_out, &bad) >= 0);
  require_text(book, n_codes / 2, width, ids, n);
  mlxzip_free(book), mlxzip_free(twin), free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  bytes b = {data, size};
  mlxzip_params *p = draw_params(&b);
  if (!p) return 0;
  mlxzip_spec s;
  mlxzip_params_spec(p, &s);
  size_t n, n_out, n_entries, bad, width = s.merge_size;
  uint32_t *ids = draw_ids(&b, s.vocab_size + (size % 5 == 0), &n);
  size_t bound = mlxzip_entries_bound(p, n);
  uint32_t *out = malloc((n + 1) * sizeof *out), *rows = malloc((bound * width + 1) * sizeof *rows);
  uint8_t *lengths = malloc(bound + 1);
  REQUIRE(out && rows && lengths);
  mlxzip_status status = mlxzip_compress(p, ids, n, out, &n_out, rows, lengths, &n_entries, &bad);
  REQUIRE(n_entries <= bound);
  if (status == MLXZIP_OK) {
    mlxzip_codebook *book;
    REQUIRE(mlxzip_new(p, &book) == MLXZIP_OK && mlxzip_push(book, out, n_out, &bad) >= 0);
    REQUIRE(mlxzip_size(book) == n_entries && mlxzip_base_length(book) == n);
    uint32_t *back = malloc((n_entries * width + 1) * sizeof *back);
    uint8_t *back_lengths = malloc(n_entries + 1);
    REQUIRE(back && back_lengths);
    require_text(book, 0, width, ids, n);
    REQUIRE(mlxzip_entries(book, 0, n_entries, back, back_lengths) == MLXZIP_OK);
    REQUIRE(!memcmp(rows, back, n_entries * width * sizeof *rows) && !memcmp(lengths, back_lengths, n_entries));
    continues(p, width, ids, n, out, n_out);
    mlxzip_free(book), free(back), free(back_lengths);
  } else {
    REQUIRE((status == MLXZIP_E_ID || status == MLXZIP_E_CLASH) && bad < n);
  }
  free(ids), free(out), free(rows), free(lengths), mlxzip_params_free(p);
  return 0;
}

/* Property: for any merges and times, the tokens' bytes are the text, however it is cut; a cached piece gets the same
 * ids as the first time; and no token remains that is to be split at the end. */
#include "fuzz.h"

#include "../bpe.h"

enum { MERGES = 24 };

typedef struct {
  uint32_t parts[2 * MERGES], apply_at[MERGES], split_at[MERGES];
  size_t n;
} list;

/* Over three letters, so that merges do fire. */
static list draw_list(bytes *b) {
  list l = {.n = draw(b, MERGES + 1)};
  uint32_t odd = draw(b, 32), last = 2 * (uint32_t)l.n;
  for (uint32_t m = 0; m < l.n; m++) {
    for (size_t i = 0; i < 2; i++) {
      uint32_t part = draw(b, 3 + m + (odd == 1));
      l.parts[2 * m + i] = part < 3 ? 'a' + part : 253 + part;
    }
    uint32_t when = draw(b, 64);
    l.apply_at[m] = when % 4 == 0 ? UINT32_MAX : odd % 4 == 2 ? last - 2 - 2 * m : 2 * m;
    l.split_at[m] = when / 4 % 3 == 0 ? last - 1 : when / 4 % 3 == 1 ? 2 * m + 1 : UINT32_MAX;
    if (odd == 3 && when == 63) l.split_at[m] = last + 1;
  }
  return l;
}

static size_t lay_out(const list *l, uint32_t token, uint8_t *dst) {
  if (token < 256) {
    *dst = (uint8_t)token;
    return 1;
  }
  REQUIRE(token - 256 < l->n);
  size_t n = lay_out(l, l->parts[2 * (token - 256)], dst);
  return n + lay_out(l, l->parts[2 * (token - 256) + 1], dst + n);
}

static void require_tokens_of(const list *l, const uint32_t *ids, size_t n_ids, const uint8_t *text, size_t n) {
  uint8_t token[MLXZIP_BPE_LONGEST];
  size_t at = 0;
  for (size_t i = 0; i < n_ids; i++) {
    size_t k = lay_out(l, ids[i], token);
    REQUIRE(k <= n - at && !memcmp(token, text + at, k));
    REQUIRE(ids[i] < 256 || l->split_at[ids[i] - 256] != 2 * l->n - 1);
    at += k;
  }
  REQUIRE(at == n);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  bytes b = {data, size};
  list l = draw_list(&b);
  mlxzip_bpe_spec spec = {l.n, l.parts, l.apply_at, l.split_at};
  mlxzip_bpe *bpe;
  int status = mlxzip_bpe_new(&spec, &bpe), letters = (int)draw(&b, 2);
  REQUIRE((status == MLXZIP_OK) == (bpe != NULL));
  if (!bpe) return 0;
  size_t n = b.left, n_ids, n_again;
  uint8_t *text = malloc(n + 1);
  uint32_t *ids = malloc((n + 1) * sizeof *ids), *again = malloc((n + 1) * sizeof *again);
  size_t *ends = malloc((n + 1) * sizeof *ends), *id_ends = malloc((n + 1) * sizeof *id_ends);
  REQUIRE(text && ids && again && ends && id_ends);
  for (size_t i = 0; i < n; i++) text[i] = (uint8_t)(letters ? 'a' + b.at[i] % 3 : b.at[i]);
  for (int kind = MLXZIP_PIECE_WHOLE; kind <= MLXZIP_PIECE_DIGITS; kind++) {
    REQUIRE(mlxzip_bpe_encode(bpe, kind, text, n, ids, &n_ids) == MLXZIP_OK && n_ids <= n);
    require_tokens_of(&l, ids, n_ids, text, n);
    size_t k = mlxzip_pieces(kind, text, n, ends);
    REQUIRE(k <= n && (n == 0 || ends[k - 1] == n));
    REQUIRE(mlxzip_bpe_encode_pieces(bpe, text, ends, k, again, id_ends) == MLXZIP_OK);
    n_again = k ? id_ends[k - 1] : 0;
    REQUIRE(n_again == n_ids && !memcmp(ids, again, n_ids * sizeof *ids));
  }
  mlxzip_bpe_free(bpe), free(text), free(ids), free(again), free(ends), free(id_ends);
  return 0;
}

/* Property: for any units in any pieces, the ids expand to the units, and a dictionary made from the rows is equal and
 * encodes equally; and any rows, ids and samples give a result or an error. */
#include "fuzz.h"

#include "../phrases.h"

enum { PIECES = 6, MOST = 4096 };

typedef struct {
  uint32_t *ids;
  uint64_t *ends;
  mlxzip_samples samples;
} sequence;

static sequence room(size_t n, size_t n_ends) {
  sequence s = {malloc((n + 1) * 4), malloc((n_ends + 1) * 8), {0}};
  REQUIRE(s.ids && s.ends);
  s.samples = (mlxzip_samples){s.ids, s.ends, n, n_ends};
  return s;
}

static void drop(sequence s) { free(s.ids), free(s.ends); }

/* Checks that ids expand to these units, with `unknown` in place of units from `known` on. */
static void gives(const mlxzip_phrases *p, sequence ids, const uint32_t *units, size_t n, uint32_t known, uint32_t unknown) {
  size_t n_out, bad;
  sequence out = room(n, ids.samples.n_ends);
  mlxzip_status status = mlxzip_phrases_expand(p, &ids.samples, out.ids, n / 2, out.ends, &n_out, &bad);
  REQUIRE(n_out == n && status == (n / 2 < n ? MLXZIP_E_SPACE : MLXZIP_OK));
  REQUIRE(mlxzip_phrases_expand(p, &ids.samples, out.ids, n, out.ends, &n_out, &bad) == MLXZIP_OK);
  for (size_t i = 0; i < n; i++) REQUIRE(out.ids[i] == (units[i] < known ? units[i] : unknown));
  drop(out);
}

/* Checks that a dictionary made from the rows and uses of another is equal to it and encodes samples equally. */
static void copies(const mlxzip_phrases *p, const mlxzip_phrases_spec *s, sequence units, uint32_t window) {
  size_t n = mlxzip_phrases_size(p), nodes = s->units + n, bad, n_a, n_b;
  mlxzip_phrases *copy;
  REQUIRE(mlxzip_phrases_from(s, mlxzip_phrases_rows(p), NULL, mlxzip_phrases_uses(p), n, &copy, &bad) == MLXZIP_OK);
  REQUIRE(!memcmp(mlxzip_phrases_rows(p), mlxzip_phrases_rows(copy), 8 * n));
  REQUIRE(!memcmp(mlxzip_phrases_uses(p), mlxzip_phrases_uses(copy), 4 * nodes));
  sequence a = room(units.samples.n, units.samples.n_ends), b = room(units.samples.n, units.samples.n_ends);
  REQUIRE(mlxzip_phrases_encode(p, &units.samples, window, 0, a.ids, a.ends, &n_a, &bad) == MLXZIP_OK);
  REQUIRE(mlxzip_phrases_encode(copy, &units.samples, window, 1, b.ids, b.ends, &n_b, &bad) == MLXZIP_OK);
  REQUIRE(n_a == n_b && !memcmp(a.ids, b.ids, 4 * n_a) && !memcmp(a.ends, b.ends, 8 * units.samples.n_ends));
  drop(a), drop(b), mlxzip_phrases_free(copy);
}

/* Trains on samples drawn from the bytes, in pieces; returns all samples in `units` and their ids in `ids`. */
static void train(mlxzip_phrases *p, bytes *b, uint32_t below, sequence *units, sequence *ids) {
  size_t n = 0, n_ids = 0, n_ends = 0;
  for (int piece = 0; piece <= PIECES && n < MOST; piece++) {
    size_t length = piece < PIECES ? draw(b, 256) : 0, n_out, bad;
    sequence part = room(length, 4), out = room(length + 1, 4);
    for (size_t i = 0; i < length; i++) units->ids[n + i] = part.ids[i] = draw(b, below);
    part.samples.n_ends = piece < PIECES ? draw(b, 5) : 1;
    for (size_t k = 0, at = 0; k < part.samples.n_ends; k++) part.ends[k] = at += draw(b, 256) % (length - at + 1);
    REQUIRE(mlxzip_phrases_train(p, &part.samples, out.ids, out.ends, &n_out, &bad) == MLXZIP_OK && n_out <= length + 1);
    memcpy(ids->ids + n_ids, out.ids, 4 * n_out);
    for (size_t k = 0; k < part.samples.n_ends; k++, n_ends++) {
      REQUIRE(out.ends[k] <= n_out);
      units->ends[n_ends] = n + part.ends[k], ids->ends[n_ends] = n_ids + out.ends[k];
    }
    n += length, n_ids += n_out;
    drop(part), drop(out);
  }
  units->samples.n = n, ids->samples.n = n_ids, units->samples.n_ends = ids->samples.n_ends = n_ends;
}

/* Rows, ids and samples as the bytes have them: mostly near what is lawful. */
static void try_any(bytes *b, const mlxzip_phrases_spec *s) {
  uint32_t rows[64], ids[32], id = s->first_id + s->units;
  size_t n = draw(b, 32), bad, n_out;
  for (size_t i = 0; i < n; i++) {
    rows[2 * i] = draw(b, s->units + (uint32_t)i + (draw(b, 16) == 0)), rows[2 * i + 1] = draw(b, s->units);
    ids[i] = draw(b, 3) ? id : (uint32_t)MLXZIP_NO_ID, id += 1 + draw(b, 2);
  }
  if (draw(b, 8) == 0 && n) rows[draw(b, 256) % (2 * n)] = draw(b, 256) * 16843009u;
  mlxzip_phrases *p;
  mlxzip_status status = mlxzip_phrases_from(s, rows, ids, NULL, n, &p, &bad);
  REQUIRE(status == MLXZIP_OK ? p != NULL : status == MLXZIP_E_ARG && !p && bad <= n);
  if (!p) return;
  size_t most = b->left, nodes = s->units + n;
  sequence in = room(most, 4), out = room(most, 4);
  uint32_t *lengths = malloc(4 * nodes);
  REQUIRE(lengths);
  mlxzip_phrases_lengths(p, lengths);
  for (in.samples.n = 0; b->left > 0; in.samples.n++) in.ids[in.samples.n] = draw(b, s->units + s->has_unk);
  in.samples.n_ends = 1, in.ends[0] = in.samples.n;
  for (uint32_t longest = 0; longest < 2; longest++) {
    REQUIRE(mlxzip_phrases_encode(p, &in.samples, s->window, longest, out.ids, out.ends, &n_out, &bad) == MLXZIP_OK);
    out.samples.n = n_out, out.samples.n_ends = 1;
    gives(p, out, in.ids, in.samples.n, s->units, s->unk_id < s->first_id ? s->units : s->unk_id - s->first_id);
  }
  in.ends[0] += 1; /* beyond what there is */
  REQUIRE(mlxzip_phrases_encode(p, &in.samples, 0, 0, out.ids, out.ends, &n_out, &bad) == MLXZIP_E_ARG);
  free(lengths), drop(in), drop(out), mlxzip_phrases_free(p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  bytes b = {data, size};
  mlxzip_phrases_spec s = {.units = 1 + draw(&b, 8), .first_id = draw(&b, 4), .window = draw(&b, 6)};
  s.limit = draw(&b, 3) ? 1u << 20 : draw(&b, 64), s.has_unk = draw(&b, 2);
  s.unk_id = draw(&b, s.first_id + s.units + (draw(&b, 16) == 0));
  mlxzip_phrases *p;
  if (mlxzip_phrases_new(&s, &p) != MLXZIP_OK) return 0;
  sequence units = room(MOST + 256, 4 * PIECES + 1), ids = room(MOST + 300, 4 * PIECES + 1);
  train(p, &b, s.units + s.has_unk, &units, &ids);
  REQUIRE(mlxzip_phrases_size(p) <= s.limit);
  gives(p, ids, units.ids, units.samples.n, s.units, s.unk_id < s.first_id ? s.units : s.unk_id - s.first_id);
  copies(p, &s, units, s.window);
  try_any(&b, &s);
  drop(units), drop(ids), mlxzip_phrases_free(p);
  return 0;
}

/* Property: any bytes either load as a codebook that saves to the same bytes, or give E_FORMAT. Half of the inputs get
 * a right magic and checksum, so that the code after these checks is reached. */
#include "fuzz.h"

static void put(uint8_t *at, uint32_t word) {
  for (int i = 0; i < 4; i++) at[i] = (uint8_t)(word >> 8 * i);
}

static void repair(uint8_t *data, size_t n, uint32_t version) {
  uint64_t sum = 14695981039346656037u;
  memcpy(data, "mlxzzcb\0", 8), put(data + 8, version);
  for (size_t i = 0; i < n - 8; i += 4) {
    uint32_t word = data[i] | (uint32_t)data[i + 1] << 8 | (uint32_t)data[i + 2] << 16 | (uint32_t)data[i + 3] << 24;
    sum = (sum ^ word) * 1099511628211u;
  }
  put(data + n - 8, (uint32_t)sum), put(data + n - 4, (uint32_t)(sum >> 32));
}

/* Each byte becomes a small word and the two counts that must fit the length are put right. */
static uint8_t *widen(const uint8_t *data, size_t n, uint32_t version, size_t *size) {
  size_t words = n + 5 < 14 ? 14 : n + 5;
  uint8_t *out = calloc(words, 4);
  REQUIRE(out);
  for (size_t i = 0; i < n; i++) out[12 + 4 * i] = data[i];
  size_t head = 9 + version + (n > 5 ? data[5] : 0u);
  if (head + 4 <= words && (n <= 6 || data[6] == 0)) put(out + 4 * head, (uint32_t)(words - head - 4));
  *size = 4 * words;
  repair(out, *size, version);
  return out;
}

static void try_bytes(const uint8_t *data, size_t n) {
  mlxzip_params *p;
  mlxzip_codebook *book;
  mlxzip_status status = mlxzip_params_from_bytes(data, n, &p);
  if (status != MLXZIP_OK) {
    REQUIRE(status == MLXZIP_E_FORMAT && !p);
    return;
  }
  status = mlxzip_from_bytes(p, data, n, &book);
  if (status == MLXZIP_OK) {
    size_t size;
    uint8_t *again = saved(book, &size);
    REQUIRE(size == n && !memcmp(again, data, n));
    free(again), mlxzip_free(book);
  } else {
    REQUIRE(status == MLXZIP_E_FORMAT && !book);
  }
  mlxzip_params_free(p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
  size_t size;
  try_bytes(data, n);
  for (uint32_t version = 1; version <= 2; version++) {
    uint8_t *wide = widen(data, n, version, &size);
    try_bytes(wide, size);
    free(wide);
  }
  if (n < 56 || n % 4) return 0;
  uint8_t *copy = malloc(n);
  REQUIRE(copy);
  memcpy(copy, data, n);
  repair(copy, n, 1 + data[n - 1] % 2);
  try_bytes(copy, n);
  free(copy);
  return 0;
}

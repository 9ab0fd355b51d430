/* Property: what a lookup proposes is what plain search finds, however the text was cut into appends. */
#include "fuzz.h"

#include "../lookup.h"

enum { MOST = 400, PROPOSED = 9 };

/* Returns the length of the last run of 2, 4, ... 32 ids before the end that the text ends with; *at is its end. */
static size_t found_by_search(const uint32_t *ids, size_t n, size_t *at) {
  for (size_t length = MLXZIP_LOOKUP_LONGEST; length >= MLXZIP_LOOKUP_SHORTEST; length /= 2)
    for (size_t end = n; end-- > length && length <= n;)
      if (!memcmp(ids + end - length, ids + n - length, 4 * length)) return *at = end, length;
  return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  uint32_t ids[MOST], out[PROPOSED];
  size_t n = 0, at = 0;
  mlxzip_lookup *text = mlxzip_lookup_new();
  REQUIRE(text);
  while (size > 1 && n < MOST) {
    size_t more = 1 + data[0] % 7;
    if (more > size - 1) more = size - 1;
    if (more > MOST - n) more = MOST - n;
    for (size_t i = 0; i < more; i++) ids[n + i] = data[1 + i] % 5;
    REQUIRE(!mlxzip_lookup_append(text, ids + n, more));
    n += more, data += 1 + more, size -= 1 + more;
    size_t match = mlxzip_lookup_propose(text, out, PROPOSED), least = found_by_search(ids, n, &at);
    REQUIRE(least ? match >= least && match <= MLXZIP_LOOKUP_LONGEST : !match);
    for (size_t i = 0; match && i < PROPOSED; i++) REQUIRE(out[i] == ids[at + i % (n - at)]);
  }
  mlxzip_lookup_free(text);
  return 0;
}

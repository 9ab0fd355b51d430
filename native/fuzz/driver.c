/* Replaces libFuzzer on machines without it: random inputs and mutations of earlier ones, for argv[1] seconds. */
#include <time.h>

#include "fuzz.h"

enum { LONGEST = 2048, KEPT = 256 };

static uint32_t next(uint64_t *state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(*state >> 33);
}

int main(int argc, char **argv) {
  static uint8_t kept[KEPT][LONGEST];
  static size_t sizes[KEPT];
  uint64_t state = (uint64_t)time(NULL), runs = 0;
  time_t end = time(NULL) + (argc > 1 ? atoi(argv[1]) : 10);
  printf("seed %llu\n", (unsigned long long)state);
  for (; time(NULL) < end; runs++) {
    size_t slot = next(&state) % KEPT;
    if (sizes[slot] == 0 || next(&state) % 4 == 0) {
      sizes[slot] = 1 + next(&state) % (next(&state) % 8 ? 96 : LONGEST);
      uint32_t below = 1 + next(&state) % 256;
      for (size_t i = 0; i < sizes[slot]; i++) kept[slot][i] = (uint8_t)(next(&state) % (i < 16 ? 256 : below));
    }
    for (uint32_t i = next(&state) % 4; i > 0; i--) kept[slot][next(&state) % sizes[slot]] = (uint8_t)next(&state);
    uint8_t *data = malloc(sizes[slot]); /* of exact size, so that a read past the end is seen */
    REQUIRE(data);
    memcpy(data, kept[slot], sizes[slot]);
    LLVMFuzzerTestOneInput(data, sizes[slot]);
    free(data);
  }
  printf("%llu runs, nothing found\n", (unsigned long long)runs);
  return 0;
}

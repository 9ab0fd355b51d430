/* Internal: what a codebook keeps where a full table goes on taking entries (policy lru or use-count): the order in
 * which entries leave, every entry there has been, and for each logged id what undoes it. */
#ifndef MLXZIP_TURNS_H
#define MLXZIP_TURNS_H

#include "table.h"

#define MLXZIP_NONE UINT32_MAX

/* A growing slot in the order of leaving; node i + 1 is slot i behind the start entries, node 0 the two ends. */
typedef struct {
  uint32_t older, newer; /* neighbours: what leaves before it and after it */
  uint32_t uses;         /* its class: under use-count the uses of its entry, under lru 0 */
  uint32_t entry;        /* number of its entry */
} mlxzip_node;

/* An entry that came; entries are numbered in the order of coming, from the start entries on. */
typedef struct {
  uint32_t node;        /* the slot it took */
  uint32_t left;        /* number of the entry that left for it, NONE if the slot was free */
  uint32_t older, uses; /* of the node before that */
} mlxzip_coming;

/* A logged id. */
typedef struct {
  uint32_t entry; /* number of the entry that it stood for, NONE for one base id */
  uint32_t older; /* of its node before this use, NONE where no growing entry was used */
  uint32_t made;  /* entries that had come by then, beside the start entries */
} mlxzip_step;

typedef struct {
  mlxzip_node *nodes;
  uint32_t *last; /* by class: the node of it that leaves last, 0 where the class is empty */
  mlxzip_step *steps;
  mlxzip_coming *comings;
  uint32_t *rows; /* of all entries that came, as padded ids */
  uint8_t *lengths;
  size_t made, cap_nodes, cap_last, cap_steps, cap_comings;
  uint32_t reading; /* node of the id that is being read, which cannot leave; 0 if it has none */
} mlxzip_turns;

/* Room for that many logged ids, of which the last `more` are new. */
bool mlxzip_turns_reserve(mlxzip_turns *t, const mlxzip_params *p, const mlxzip_table *table, size_t ids, size_t more);
void mlxzip_turns_free(mlxzip_turns *t);

/* The entry of a growing slot is read: counts the use. Returns its number; *older is what mlxzip_step keeps. */
uint32_t mlxzip_turns_use(mlxzip_turns *t, const mlxzip_params *p, size_t slot, uint32_t *older);
/* Whether one more entry can be installed. */
bool mlxzip_turns_room(const mlxzip_turns *t, const mlxzip_params *p, const mlxzip_table *table);
/* Installs a padded run that is no entry, where there is room. */
void mlxzip_turns_install(mlxzip_turns *t, const mlxzip_params *p, mlxzip_table *table, const uint32_t *run, size_t n,
                          uint64_t hash);
/* Takes back what logged id number i, the last one, did. */
void mlxzip_turns_undo(mlxzip_turns *t, const mlxzip_params *p, mlxzip_table *table, size_t i);

/* Entries that had come by the first `mark` ids, beside the start entries. */
static inline size_t mlxzip_turns_made(const mlxzip_turns *t, size_t mark) {
  return mark ? t->steps[mark - 1].made : 0;
}

/* The padded row of an entry, by its number. */
static inline const uint32_t *mlxzip_turns_row(const mlxzip_turns *t, const mlxzip_params *p, uint32_t entry,
                                               size_t *n) {
  size_t start = p->start.n, width = p->merge_size;
  *n = entry < start ? p->start.lengths[entry] : t->lengths[entry - start];
  return entry < start ? p->start.rows + entry * width : t->rows + (entry - start) * width;
}

#endif

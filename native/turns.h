/* Internal: what a codebook stores for the policies LRU and USE_COUNT: the order in which entries are evicted, every
 * entry that was ever installed, and for each id of the log what is needed to undo reading it. */
#ifndef MLXZIP_TURNS_H
#define MLXZIP_TURNS_H

#include "table.h"

#define MLXZIP_NONE UINT32_MAX

/* A slot in the list of eviction, a ring in which the next entry to evict comes first. Start entries have no node: node
 * i + 1 is slot start.n + i. Node 0 marks both ends of the list. */
typedef struct {
  uint32_t older, newer; /* neighbours: evicted before it, and after it */
  uint32_t uses;         /* its class: the uses of its entry under USE_COUNT, 0 under LRU */
  uint32_t entry;        /* number of its entry */
} mlxzip_node;

/* An installed entry; entries are numbered in the order of installation, start entries first. */
typedef struct {
  uint32_t node;        /* the slot it took */
  uint32_t left;        /* number of the entry that it evicted, NONE if the slot was free */
  uint32_t older, uses; /* what the node held before the installation */
} mlxzip_coming;

/* A logged id. */
typedef struct {
  uint32_t entry; /* number of the entry that it stood for, NONE for a base id */
  uint32_t older; /* what its node's `older` was before this use, NONE if no growing entry was used */
  uint32_t made;  /* growing entries installed up to this id */
} mlxzip_step;

typedef struct {
  mlxzip_node *nodes;
  uint32_t *last; /* per class (see mlxzip_node.uses): its node that is evicted last, 0 for an empty class */
  mlxzip_step *steps;
  mlxzip_coming *comings;
  uint32_t *rows; /* padded ids of all growing entries ever installed */
  uint8_t *lengths;
  size_t made, cap_nodes, cap_last, cap_steps, cap_comings;
  uint32_t reading; /* node of the id that is being read, which is not evicted; 0 for none */
} mlxzip_turns;

/* Makes room for a log of `ids` ids, of which the last `more` are new. Returns false if there is no memory. */
bool mlxzip_turns_reserve(mlxzip_turns *t, const mlxzip_params *p, const mlxzip_table *table, size_t ids, size_t more);
void mlxzip_turns_free(mlxzip_turns *t);

/* Counts a use of a growing slot's entry. Returns the entry's number; *older is stored in mlxzip_step. */
uint32_t mlxzip_turns_use(mlxzip_turns *t, const mlxzip_params *p, size_t slot, uint32_t *older);
/* Returns whether one more entry can be installed. */
bool mlxzip_turns_room(const mlxzip_turns *t, const mlxzip_params *p, const mlxzip_table *table);
/* Installs a padded run that is no entry; needs room. */
void mlxzip_turns_install(mlxzip_turns *t, const mlxzip_params *p, mlxzip_table *table, const uint32_t *run, size_t n,
                          uint64_t hash);
/* Undoes id i of the log, which must be the last one. */
void mlxzip_turns_undo(mlxzip_turns *t, const mlxzip_params *p, mlxzip_table *table, size_t i);

/* Returns the number of growing entries installed by the first `mark` ids. */
static inline size_t mlxzip_turns_made(const mlxzip_turns *t, size_t mark) {
  return mark ? t->steps[mark - 1].made : 0;
}

/* Returns the padded row of an entry by its number, and its length in *n. */
static inline const uint32_t *mlxzip_turns_row(const mlxzip_turns *t, const mlxzip_params *p, uint32_t entry,
                                               size_t *n) {
  size_t start = p->start.n, width = p->merge_size;
  *n = entry < start ? p->start.lengths[entry] : t->lengths[entry - start];
  return entry < start ? p->start.rows + entry * width : t->rows + (entry - start) * width;
}

#endif

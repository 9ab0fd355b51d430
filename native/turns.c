#include "turns.h"

/* ---- memory */

static bool grow(void *array, size_t *cap, size_t n, size_t size) {
  void **at = array;
  void *more = realloc(*at, n * size);
  if (!more) return false;
  *at = more;
  if (cap) *cap = n;
  return true;
}

static size_t doubled(size_t cap, size_t least) { return 2 * cap > least ? 2 * cap : least; }

bool mlxzip_turns_reserve(mlxzip_turns *t, const mlxzip_params *p, const mlxzip_table *table, size_t ids, size_t more) {
  if (ids >= MLXZIP_NONE - MLXZIP_MAX_CODEBOOK) return false;
  size_t nodes = table->cap - p->start.n + 1, comings = t->made + more;
  if (nodes > t->cap_nodes) {
    bool first = t->cap_nodes == 0;
    if (!grow(&t->nodes, &t->cap_nodes, nodes, sizeof *t->nodes)) return false;
    if (first) t->nodes[0] = (mlxzip_node){.entry = MLXZIP_NONE};
  }
  size_t classes = p->policy == MLXZIP_USE_COUNT ? ids + 2 : 1, had = t->cap_last;
  if (classes > had) {
    if (!grow(&t->last, &t->cap_last, doubled(had, classes), sizeof *t->last)) return false;
    memset(t->last + had, 0, (t->cap_last - had) * sizeof *t->last);
  }
  if (ids > t->cap_steps && !grow(&t->steps, &t->cap_steps, doubled(t->cap_steps, ids), sizeof *t->steps)) return false;
  if (comings <= t->cap_comings) return true;
  comings = doubled(t->cap_comings, comings);
  return grow(&t->rows, NULL, comings * p->merge_size, sizeof *t->rows) && grow(&t->lengths, NULL, comings, 1) &&
         grow(&t->comings, &t->cap_comings, comings, sizeof *t->comings);
}

void mlxzip_turns_free(mlxzip_turns *t) {
  if (!t) return;
  free(t->nodes), free(t->last), free(t->steps), free(t->comings), free(t->rows), free(t->lengths), free(t);
}

/* ---- the order of eviction: classes rise from the oldest node to the newest; within a class, so does the last use */

static uint32_t per_use(const mlxzip_params *p) { return p->policy == MLXZIP_USE_COUNT; }

static void take_out(mlxzip_turns *t, uint32_t node) {
  const mlxzip_node x = t->nodes[node];
  t->nodes[x.older].newer = x.newer, t->nodes[x.newer].older = x.older;
  if (t->last[x.uses] == node) t->last[x.uses] = x.older && t->nodes[x.older].uses == x.uses ? x.older : 0;
}

static void put_behind(mlxzip_turns *t, uint32_t node, uint32_t older) {
  mlxzip_node *x = &t->nodes[node];
  x->older = older, x->newer = t->nodes[older].newer;
  t->nodes[older].newer = t->nodes[x->newer].older = node;
  if (!x->newer || t->nodes[x->newer].uses != x->uses) t->last[x->uses] = node;
}

uint32_t mlxzip_turns_use(mlxzip_turns *t, const mlxzip_params *p, size_t slot, uint32_t *before) {
  uint32_t node = (uint32_t)(slot - p->start.n) + 1;
  mlxzip_node *x = &t->nodes[node];
  uint32_t older = *before = x->older, uses = x->uses;
  t->reading = node;
  take_out(t, node);
  x->uses += per_use(p);
  if (t->last[x->uses]) older = t->last[x->uses];
  else if (t->last[uses]) older = t->last[uses];
  put_behind(t, node, older);
  return x->entry;
}

/* Returns the node whose entry is evicted next, 0 if none can be. */
static uint32_t next_to_leave(const mlxzip_turns *t) {
  uint32_t node = t->nodes[0].newer;
  return node && node == t->reading ? t->nodes[node].newer : node;
}

bool mlxzip_turns_room(const mlxzip_turns *t, const mlxzip_params *p, const mlxzip_table *table) {
  return table->n < p->codebook_size || next_to_leave(t);
}

/* ---- entries */

/* Removes a slot from the index. Later cells of its probe chain move up, because an empty cell ends a chain. */
static void unindex(mlxzip_table *t, size_t slot) {
  size_t gap = t->hashes[slot] & t->mask;
  while (mlxzip_slot(t->cells[gap]) != slot) gap = (gap + 1) & t->mask;
  for (size_t i = (gap + 1) & t->mask; t->cells[i]; i = (i + 1) & t->mask) {
    size_t from = t->hashes[mlxzip_slot(t->cells[i])];
    if (((i - from) & t->mask) < ((i - gap) & t->mask)) continue;
    t->cells[gap] = t->cells[i], gap = i;
  }
  t->cells[gap] = 0;
}

/* Writes a padded row and adds it to the index. */
static void write_slot(mlxzip_table *t, size_t width, size_t slot, const uint32_t *row, size_t n, uint64_t hash) {
  memcpy(t->rows + slot * width, row, width * sizeof *row);
  t->lengths[slot] = (uint8_t)n, t->hashes[slot] = hash;
  size_t i = hash & t->mask;
  while (t->cells[i]) i = (i + 1) & t->mask;
  t->cells[i] = mlxzip_cell(hash, slot);
}

void mlxzip_turns_install(mlxzip_turns *t, const mlxzip_params *p, mlxzip_table *table, const uint32_t *run, size_t n,
                          uint64_t hash) {
  size_t start = p->start.n, width = p->merge_size;
  uint32_t node = (uint32_t)(table->n - start) + 1;
  mlxzip_coming *c = &t->comings[t->made];
  if (table->n < p->codebook_size) {
    *c = (mlxzip_coming){node, MLXZIP_NONE, 0, 0};
    table->n++;
  } else {
    node = next_to_leave(t);
    *c = (mlxzip_coming){node, t->nodes[node].entry, t->nodes[node].older, t->nodes[node].uses};
    take_out(t, node);
    unindex(table, start + node - 1);
  }
  uint32_t uses = t->nodes[node].uses = per_use(p), *row = t->rows + t->made * width;
  put_behind(t, node, t->last[uses]);
  memcpy(row, run, width * sizeof *row);
  t->lengths[t->made] = (uint8_t)n, t->nodes[node].entry = (uint32_t)(start + t->made++);
  write_slot(table, width, start + node - 1, run, n, hash);
}

static void undo_install(mlxzip_turns *t, const mlxzip_params *p, mlxzip_table *table) {
  const mlxzip_coming c = t->comings[--t->made];
  size_t slot = p->start.n + c.node - 1, n;
  take_out(t, c.node);
  unindex(table, slot);
  if (c.left == MLXZIP_NONE) {
    table->n--;
    return;
  }
  const uint32_t *row = mlxzip_turns_row(t, p, c.left, &n);
  write_slot(table, p->merge_size, slot, row, n, mlxzip_hash_run(row, n));
  t->nodes[c.node].uses = c.uses, t->nodes[c.node].entry = c.left;
  put_behind(t, c.node, c.older);
}

void mlxzip_turns_undo(mlxzip_turns *t, const mlxzip_params *p, mlxzip_table *table, size_t i) {
  const mlxzip_step step = t->steps[i];
  if (t->made > mlxzip_turns_made(t, i)) undo_install(t, p, table);
  if (step.older == MLXZIP_NONE) return;
  uint32_t node = step.entry < p->start.n ? 0 : t->comings[step.entry - p->start.n].node;
  take_out(t, node);
  t->nodes[node].uses -= per_use(p);
  put_behind(t, node, step.older);
}

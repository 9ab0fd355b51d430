/* What Python calls without cffi (python.c). */
#ifndef MLXZIP_PYTHON_H
#define MLXZIP_PYTHON_H

#include "mlxzip.h"

/* BEGIN CFFI */
/* Adds the functions `calls_for_one_id`, `words_of` and `ids_of` to the extension module, which must have been imported.
 * E_MEMORY. */
mlxzip_status mlxzip_add_calls(void);
/* END CFFI */

#endif

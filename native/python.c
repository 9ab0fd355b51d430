/* Built-in functions that Python calls without cffi: push and expand of one id and reading one entry, which generation
 * calls at every step, and the conversion of a list of ints and back.
 *
 * cffi makes a tuple of the arguments, releases the interpreter lock and takes it again. Together that takes three times
 * as long as a push of one id. So the calls for one id keep the lock. They read at most merge_size base ids, except that a
 * push may have to enlarge the table; that time is spread over all pushes.
 *
 * All but `ids_of` return None instead of an error, and for an argument that is not exactly an int or a list of ints.
 * The codebook is unchanged then, and the caller uses cffi's function, which accepts more types and says what is wrong.
 */
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include "codebook.h"
#include "python.h"

static const char NAME[] = "mlxzip_codebook";

/* Reads an argument as an id; false if it is none. */
static bool as_id(PyObject *arg, uint32_t *id) {
  int overflow;
  if (!PyLong_CheckExact(arg)) return false;
  long long value = PyLong_AsLongLongAndOverflow(arg, &overflow);
  *id = (uint32_t)value;
  return !overflow && value >= 0 && value <= UINT32_MAX;
}

/* push_one(id: int) -> bytes | None: reads an id; returns what mlxzip_installed(book, 1, dst) writes. */
static PyObject *push_one(PyObject *self, PyObject *arg) {
  mlxzip_codebook *book = PyCapsule_GetPointer(self, NAME);
  uint32_t id, dst[MLXZIP_MAX_MERGE + 2];
  if (!book) return NULL;
  int k = as_id(arg, &id) ? mlxzip_push_one(book, id, dst) : -1;
  if (k < 0) Py_RETURN_NONE;
  size_t n = (size_t)k * (4 * (1 + book->params->merge_size) + 1) + 1;
  return PyBytes_FromStringAndSize((const char *)dst, (Py_ssize_t)n);
}

/* expand_one(id: int) -> bytes | None: returns the base ids that an id stands for, as uint32 words. */
static PyObject *expand_one(PyObject *self, PyObject *arg) {
  const mlxzip_codebook *book = PyCapsule_GetPointer(self, NAME);
  uint32_t id, dst[MLXZIP_MAX_MERGE];
  size_t n, bad;
  if (!book) return NULL;
  if (!as_id(arg, &id) || mlxzip_expand(book, &id, 1, dst, MLXZIP_MAX_MERGE, &n, &bad) != MLXZIP_OK) Py_RETURN_NONE;
  return PyBytes_FromStringAndSize((const char *)dst, (Py_ssize_t)(n * sizeof *dst));
}

/* entry_words(slot: int) -> bytes | None: returns the base ids of the entry in a slot, as uint32 words. */
static PyObject *entry_words(PyObject *self, PyObject *arg) {
  const mlxzip_codebook *book = PyCapsule_GetPointer(self, NAME);
  uint32_t slot, dst[MLXZIP_MAX_MERGE];
  uint8_t n;
  if (!book) return NULL;
  if (!as_id(arg, &slot) || mlxzip_entries(book, slot, 1, dst, &n) != MLXZIP_OK) Py_RETURN_NONE;
  return PyBytes_FromStringAndSize((const char *)dst, (Py_ssize_t)(n * sizeof *dst));
}

static PyMethodDef PUSH_ONE = {"push_one", push_one, METH_O, NULL};
static PyMethodDef EXPAND_ONE = {"expand_one", expand_one, METH_O, NULL};
static PyMethodDef ENTRY_WORDS = {"entry_words", entry_words, METH_O, NULL};

/* words_of(ids: list[int]) -> bytes | None: returns ids as uint32 words. No Python code runs while the list is read. */
static PyObject *words_of(PyObject *module, PyObject *ids) {
  (void)module;
  if (!PyList_CheckExact(ids)) Py_RETURN_NONE;
  Py_ssize_t n = PyList_Size(ids);
  if (n > PY_SSIZE_T_MAX / 4) return PyErr_NoMemory();
  PyObject *words = PyBytes_FromStringAndSize(NULL, 4 * n);
  if (!words) return NULL;
  uint32_t *dst = (uint32_t *)PyBytes_AsString(words);
  for (Py_ssize_t i = 0; i < n; i++) {
    if (as_id(PyList_GetItem(ids, i), dst + i)) continue;
    Py_DECREF(words);
    Py_RETURN_NONE;
  }
  return words;
}

/* ids_of(words: bytes) -> tuple[int, ...]: returns ids that are given as uint32 words. */
static PyObject *ids_of(PyObject *module, PyObject *words) {
  char *bytes;
  Py_ssize_t size;
  (void)module;
  if (PyBytes_AsStringAndSize(words, &bytes, &size) < 0) return NULL;
  PyObject *ids = PyTuple_New(size / 4);
  for (Py_ssize_t i = 0; ids && i < size / 4; i++) {
    uint32_t id;
    memcpy(&id, bytes + 4 * i, sizeof id);
    PyObject *number = PyLong_FromUnsignedLong(id);
    if (!number || PyTuple_SetItem(ids, i, number) < 0) Py_CLEAR(ids);
  }
  return ids;
}

static void forget_owner(PyObject *capsule) { Py_XDECREF(PyCapsule_GetContext(capsule)); }

/* Returns a capsule of the codebook at an address; it keeps the object `owner` alive. */
static PyObject *hold(PyObject *owner, void *book) {
  PyObject *capsule = PyCapsule_New(book, NAME, forget_owner);
  if (!capsule || PyCapsule_SetContext(capsule, owner) < 0) return Py_XDECREF(capsule), NULL;
  Py_INCREF(owner);
  return capsule;
}

/* calls_for_one_id(owner, address) -> (push_one, expand_one, entry_words) of the codebook at this address, which
 * `owner` frees. */
static PyObject *calls_for_one_id(PyObject *module, PyObject *args) {
  PyObject *owner, *address;
  (void)module;
  if (!PyArg_UnpackTuple(args, "calls_for_one_id", 2, 2, &owner, &address)) return NULL;
  void *book = PyLong_AsVoidPtr(address);
  PyObject *capsule = PyErr_Occurred() ? NULL : hold(owner, book);
  if (!capsule) return NULL;
  PyObject *push = PyCFunction_New(&PUSH_ONE, capsule), *expand = PyCFunction_New(&EXPAND_ONE, capsule);
  PyObject *entry = PyCFunction_New(&ENTRY_WORDS, capsule);
  PyObject *all = push && expand && entry ? PyTuple_Pack(3, push, expand, entry) : NULL;
  Py_DECREF(capsule), Py_XDECREF(push), Py_XDECREF(expand), Py_XDECREF(entry);
  return all;
}

static PyMethodDef CALLS = {"calls_for_one_id", calls_for_one_id, METH_VARARGS, NULL};
static PyMethodDef WORDS = {"words_of", words_of, METH_O, NULL};
static PyMethodDef IDS = {"ids_of", ids_of, METH_O, NULL};

static bool add(PyObject *module, PyMethodDef *method) {
  PyObject *function = PyCFunction_New(method, NULL);
  bool added = module && function && PyObject_SetAttrString(module, method->ml_name, function) == 0;
  Py_XDECREF(function);
  return added;
}

mlxzip_status mlxzip_add_calls(void) {
  PyGILState_STATE state = PyGILState_Ensure(); /* cffi has released the lock */
  PyObject *module = PyImport_AddModule("mlx_zip.codec._native");
  bool added = add(module, &CALLS) && add(module, &WORDS) && add(module, &IDS);
  if (!added) PyErr_Clear();
  PyGILState_Release(state);
  return added ? MLXZIP_OK : MLXZIP_E_MEMORY;
}

/* Python's numbers to cells, and which values msgpack knows: the compiled half of jagcodec.kernels.
 *
 * `fill`: one pass over the items of lists and tuples. Only floats are rounded, and nothing wraps
 * around: an item that a cell cannot hold ends the pass, and its place is returned. Items are
 * anyone's objects, and `convert` runs anyone's code, so a list may change while it is read: every
 * item is asked for by its index, which Python checks, every reference is owned while it is used,
 * and no more cells are written than there were items when the call began. There is no global state.
 *
 * Only the limited API of Python 3.11 is used, as in jagcodec.kernels.
 */

#include <pyconfig.h>
#ifndef Py_GIL_DISABLED /* a free-threaded Python has no limited API yet */
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* What the cells of a column are. */
typedef struct {
    char kind; /* 'i' for integers, 'f' for floats, '?' for bools */
    int width;
    int64_t low, high; /* of integers; unsigned ones of 8 bytes go up to twice `high` */
    int precision;     /* of floats: the bits that an int may take, from its first 1 to its last */
    PyObject *convert; /* makes an int, float or bool of anything else that counts as one, or is None */
} Cells;

static bool
cells_of_code(const char *code, Cells *cells)
{
    static const char codes[] = "bhiqBHIQ", widths[] = {1, 2, 4, 8};
    const char *found = strchr(codes, code[0]);
    if (!code[0] || code[1]) {
        return false;
    }
    if (found) {
        bool has_sign = found - codes < 4;
        cells->kind = 'i';
        cells->width = widths[(found - codes) % 4];
        int bits = 8 * cells->width - (has_sign || cells->width == 8);
        cells->high = (int64_t)((UINT64_C(1) << bits) - 1);
        cells->low = has_sign ? -cells->high - 1 : 0;
    } else {
        cells->kind = code[0] == 'd' ? 'f' : code[0];
        cells->width = code[0] == 'd' ? 8 : code[0] == 'f' ? 4 : 1;
    }
    return found || strchr("fd?", code[0]);
}

/* Whether a value is of one of Python's own types of numbers, and not of a subclass. */
static bool
is_number(PyObject *value)
{
    PyTypeObject *type = Py_TYPE(value);
    return type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type;
}

/* The functions below return 1 for a cell that is written, 0 for an item that it cannot hold, and
 * -1 with an exception. */

static int
put_integer(unsigned char *at, int width, int64_t number)
{
    if (width == 8) {
        memcpy(at, &number, 8);
    } else {
        memcpy(at, &number, (size_t)width); /* little-endian: the low bytes come first */
    }
    return 1;
}

static int
put_float(unsigned char *at, int width, double number)
{
    if (width == 8) {
        memcpy(at, &number, sizeof number);
        return 1;
    }
    float rounded = (float)number;
    memcpy(at, &rounded, sizeof rounded);
    return !isinf(rounded) || isinf(number);
}

/* An int in a column of floats, which must be exact. */
static int
put_exactly(const Cells *cells, unsigned char *at, PyObject *item)
{
    double number = PyLong_AsDouble(item);
    if (number == -1.0 && PyErr_Occurred()) {
        PyErr_Clear(); /* more than any float */
        return 0;
    }
    int exponent;
    double scaled = ldexp(frexp(number, &exponent), cells->precision);
    PyObject *back = PyLong_FromDouble(number);
    int exact = back ? PyObject_RichCompareBool(back, item, Py_EQ) : -1;
    Py_XDECREF(back);
    return exact == 1 ? scaled == floor(scaled) && put_float(at, cells->width, number) : exact;
}

static int
put_int(const Cells *cells, unsigned char *at, PyObject *item)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (number == -1 && !overflow && PyErr_Occurred()) {
        return -1;
    }
    if (cells->kind != 'i') {
        int64_t most = INT64_C(1) << cells->precision; /* no int up to this needs more bits */
        if (cells->kind == 'f' && !overflow && -most <= number && number <= most) {
            return put_float(at, cells->width, (double)number);
        }
        return cells->kind == 'f' ? put_exactly(cells, at, item) : 0;
    }
    if (overflow > 0 && !cells->low && cells->width == 8) {
        unsigned long long large = PyLong_AsUnsignedLongLong(item);
        if (large == (unsigned long long)-1 && PyErr_Occurred()) {
            PyErr_Clear();
            return 0;
        }
        return put_integer(at, 8, (int64_t)large);
    }
    return !overflow && number >= cells->low && number <= cells->high
           && put_integer(at, cells->width, number);
}

static int
put(const Cells *cells, unsigned char *at, PyObject *item, PyObject *convert)
{
    if (PyBool_Check(item)) {
        *at = item == Py_True;
        return cells->kind == '?';
    }
    if (PyFloat_Check(item)) {
        return cells->kind == 'f' && put_float(at, cells->width, PyFloat_AsDouble(item));
    }
    if (PyLong_Check(item)) {
        return put_int(cells, at, item);
    }
    if (!convert) {
        return 0;
    }
    PyObject *plain = PyObject_CallFunctionObjArgs(convert, item, NULL);
    int done = plain ? put(cells, at, plain, NULL) : -1;
    Py_XDECREF(plain);
    return done;
}

/* An item of a list or tuple, owned. */
static inline PyObject *
item_of(PyObject *sequence, bool is_list, Py_ssize_t index)
{
#ifdef Py_GIL_DISABLED
    return is_list ? PyList_GetItemRef(sequence, index)
                   : Py_XNewRef(PyTuple_GetItem(sequence, index));
#else
    PyObject *item = is_list ? PyList_GetItem(sequence, index) : PyTuple_GetItem(sequence, index);
    Py_XINCREF(item); /* Py_XNewRef is a call */
    return item;
#endif
}

/* Writes items of the most common type; returns how many come before another, or one too large. */
static inline Py_ssize_t
put_common(PyObject *row, bool is_list, Py_ssize_t count, unsigned char *at, char kind, int width,
           int64_t low, int64_t high)
{
    PyTypeObject *common = kind == 'f' ? &PyFloat_Type : kind == 'i' ? &PyLong_Type : &PyBool_Type;
    bool more = true;
    Py_ssize_t i = 0;
    for (; more && i < count; i += more, at += width) {
#ifdef Py_GIL_DISABLED
        PyObject *item = item_of(row, is_list, i);
#else /* nothing here runs other code, so the row keeps the item */
        PyObject *item = is_list ? PyList_GetItem(row, i) : PyTuple_GetItem(row, i);
#endif
        more = item && Py_TYPE(item) == common;
        if (more && kind == 'f') {
            more = put_float(at, width, PyFloat_AsDouble(item));
        } else if (more && kind == '?') {
            *at = item == Py_True;
        } else if (more) {
            int overflow;
            long long number = PyLong_AsLongLongAndOverflow(item, &overflow);
            more = !overflow && number >= low && number <= high && put_integer(at, width, number);
        }
#ifdef Py_GIL_DISABLED
        Py_XDECREF(item);
#endif
    }
    PyErr_Clear(); /* the list may be shorter by now */
    return i;
}

/* `put_common`, of which the compiler makes a separate loop for each of the usual dtypes. */
static Py_ssize_t
put_most(const Cells *cells, PyObject *row, bool is_list, Py_ssize_t count, unsigned char *at)
{
    if (is_list && cells->kind == 'f' && cells->width == 4) {
        return put_common(row, true, count, at, 'f', 4, 0, 0);
    }
    if (is_list && cells->kind == 'i' && cells->width == 8 && cells->low) {
        return put_common(row, true, count, at, 'i', 8, INT64_MIN, INT64_MAX);
    }
    return put_common(row, is_list, count, at, cells->kind, cells->width, cells->low, cells->high);
}

/* Writes the cells of one row; if the result is not 1, `index` is that of the item. */
static int
put_row(const Cells *cells, PyObject *row, Py_ssize_t count, unsigned char *at, Py_ssize_t *index)
{
    int done = 1;
    bool is_list = PyList_Check(row);
    *index = put_most(cells, row, is_list, count, at);
    at += *index * cells->width;
    for (; *index < count; ++*index) {
        PyObject *item = item_of(row, is_list, *index);
        if (!item) {
            return -1; /* the list is shorter by now */
        }
        if (cells->kind == 'f' && Py_TYPE(item) == &PyFloat_Type) {
            done = put_float(at, cells->width, PyFloat_AsDouble(item));
        } else if (cells->kind == 'i' && Py_TYPE(item) == &PyLong_Type) {
            done = put_int(cells, at, item);
        } else if (cells->convert == Py_None && !is_number(item)) {
            done = 0;
        } else {
            done = put(cells, at, item, cells->convert);
        }
        Py_DECREF(item);
        if (done != 1) {
            return done;
        }
        at += cells->width;
    }
    return 1;
}

/* The length of a list or a tuple; -1 for anything else. */
static Py_ssize_t
length_of(PyObject *row)
{
    return PyList_Check(row) ? PyList_Size(row) : PyTuple_Check(row) ? PyTuple_Size(row) : -1;
}

/* The lengths of rows as a new tuple, and their sum; NULL with an exception. */
static PyObject *
lengths_of(PyObject *rows, Py_ssize_t *total)
{
    Py_ssize_t count = PyTuple_Size(rows);
    PyObject *lengths = PyTuple_New(count);
    *total = 0;
    for (Py_ssize_t row = 0; lengths && row < count; row++) {
        Py_ssize_t length = length_of(PyTuple_GetItem(rows, row));
        PyObject *number = length < 0 ? NULL : PyLong_FromSsize_t(length);
        if (length < 0) {
            PyErr_Format(PyExc_TypeError, "row %zd: expected a list or a tuple", row);
        } else if (length > PY_SSIZE_T_MAX / 8 - *total) {
            PyErr_NoMemory(); /* one list may be many rows */
        } else if (number && !PyTuple_SetItem(lengths, row, Py_NewRef(number))) {
            Py_DECREF(number);
            *total += length;
            continue;
        }
        Py_XDECREF(number);
        Py_CLEAR(lengths);
    }
    return lengths;
}

/* Of three codes, for bools, ints and floats, the first number's; 0 if it has another type. */
static char
code_of_first(PyObject *rows, const char *codes)
{
    char code = 0;
    for (Py_ssize_t row = 0, count = PyTuple_Size(rows); row < count; row++) {
        PyObject *items = PyTuple_GetItem(rows, row);
        PyObject *first = length_of(items) > 0 ? item_of(items, PyList_Check(items), 0) : NULL;
        if (first) {
            PyTypeObject *type = Py_TYPE(first);
            code = type == &PyBool_Type ? codes[0] : type == &PyLong_Type ? codes[1] : 0;
            code = type == &PyFloat_Type ? codes[2] : code;
            Py_DECREF(first);
            break;
        }
        PyErr_Clear(); /* the list is shorter by now */
    }
    return code;
}

/* Whether an item, which a cell of an int cannot hold, is a float. */
static bool
is_float_at(PyObject *rows, Py_ssize_t row, Py_ssize_t index)
{
    PyObject *items = PyTuple_GetItem(rows, row);
    PyObject *item = item_of(items, PyList_Check(items), index);
    bool is_float = item && Py_TYPE(item) == &PyFloat_Type;
    Py_XDECREF(item);
    PyErr_Clear(); /* the list may be shorter by now */
    return is_float;
}

/* The cells of rows of these lengths; if `done` is 0, the item at `row` and `index` does not fit. */
static PyObject *
put_rows(const Cells *cells, PyObject *rows, PyObject *lengths, Py_ssize_t total, int *done,
         Py_ssize_t *row, Py_ssize_t *index)
{
    Py_ssize_t count = PyTuple_Size(rows);
    PyObject *made = PyByteArray_FromStringAndSize(NULL, total * cells->width);
    unsigned char *at = made ? (unsigned char *)PyByteArray_AsString(made) : NULL;
    *done = made ? 1 : -1;
    for (*row = 0; *done == 1 && *row < count; ++*row) {
        PyObject *items = PyTuple_GetItem(rows, *row);
        Py_ssize_t length = PyLong_AsSsize_t(PyTuple_GetItem(lengths, *row));
        if (length_of(items) != length) {
            PyErr_Format(PyExc_ValueError, "row %zd: its length changed", *row);
            *done = -1;
            break;
        }
        *done = put_row(cells, items, length, at, index);
        if (*done != 1) {
            break;
        }
        at += length * cells->width;
    }
    if (*done < 0) {
        Py_CLEAR(made);
    }
    return made;
}

static PyObject *
cells_fill(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *given, *made, *result = NULL;
    const char *codes;
    Cells cells = {0};
    if (!PyArg_ParseTuple(args, "OsiO:fill", &given, &codes, &cells.precision, &cells.convert)) {
        return NULL;
    }
    PyObject *rows = PySequence_Tuple(given); /* a copy, which no other thread can change */
    Py_ssize_t total, row, index;
    bool any = strlen(codes) == 3;
    char code[2] = {rows && any ? code_of_first(rows, codes) : codes[0], 0};
    PyObject *lengths = rows && !(any && !code[0]) ? lengths_of(rows, &total) : NULL;
    int done = -1;
    if (rows && any && !code[0]) {
        result = Py_NewRef(Py_None);
    } else if (lengths && ((!any && codes[0] && codes[1]) || !cells_of_code(code, &cells))) {
        PyErr_SetString(PyExc_ValueError, "expected a code of cells, or three");
    } else if (lengths) {
        made = put_rows(&cells, rows, lengths, total, &done, &row, &index);
        if (!done && any && code[0] == codes[1] && is_float_at(rows, row, index)) {
            Py_DECREF(made);
            code[0] = codes[2];
            made = cells_of_code(code, &cells)
                       ? put_rows(&cells, rows, lengths, total, &done, &row, &index)
                       : NULL;
        }
        PyObject *bad = done ? Py_NewRef(Py_None) : Py_BuildValue("nn", row, index);
        result = made ? Py_BuildValue("sOOO", code, made, lengths, bad) : NULL;
        Py_XDECREF(made);
        Py_XDECREF(bad);
    }
    Py_XDECREF(lengths);
    Py_XDECREF(rows);
    return result;
}

/* The items of a list, all of which are of the type `type`; false if they are not, or do not fit. */
static bool
read_exactly(PyObject *list, Py_ssize_t count, PyTypeObject *type, int64_t *numbers, int64_t *low,
             int64_t *high)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = item_of(list, true, i);
        int overflow = !item || Py_TYPE(item) != type;
        if (!overflow && type == &PyFloat_Type) {
            double number = PyFloat_AsDouble(item);
            memcpy(&numbers[i], &number, sizeof number);
        } else if (!overflow) {
            int64_t number = PyLong_AsLongLongAndOverflow(item, &overflow);
            numbers[i] = number;
            *low = number < *low ? number : *low;
            *high = number > *high ? number : *high;
        }
        Py_XDECREF(item);
        if (overflow) {
            return false;
        }
    }
    return true;
}

static PyObject *
cells_narrow_list(PyObject *Py_UNUSED(module), PyObject *list)
{
    Py_ssize_t count = PyList_Size(list);
    PyObject *first = count > 0 ? item_of(list, true, 0) : NULL, *result = NULL;
    if (!first) {
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    }
    PyTypeObject *type = Py_TYPE(first); /* one of three types that are never freed, or unused */
    Py_DECREF(first);
    bool known = type == &PyLong_Type || type == &PyFloat_Type || type == &PyBool_Type;
    int64_t low = 0, high = 0, *numbers = NULL;
    if (known) {
        numbers = PyMem_Malloc((size_t)count * sizeof(int64_t));
        if (!numbers) {
            return PyErr_NoMemory();
        }
    }
    if (known && read_exactly(list, count, type, numbers, &low, &high)) {
        static const char *const names[] = {"int8", "int16", "int32", "int64"};
        int size = 3;
        for (int64_t most = INT32_MAX; size && type != &PyFloat_Type; size--, most >>= size * 8) {
            if (high > most || low < -most - 1) {
                break;
            }
        }
        const char *name = type == &PyFloat_Type ? "float64" : names[size];
        name = type == &PyBool_Type ? "bool" : name;
        result = Py_BuildValue("sN", name, PyBytes_FromStringAndSize(NULL, count << size));
        char *at = result ? PyBytes_AsString(PyTuple_GetItem(result, 1)) : NULL;
        for (Py_ssize_t i = 0; at && i < count; i++) {
            memcpy(at + (i << size), &numbers[i], (size_t)1 << size);
        }
    } else if (!PyErr_Occurred()) {
        result = Py_NewRef(Py_None);
    }
    PyMem_Free(numbers);
    return result;
}

/* What `is_native` allows, and how many items it may still read. */
typedef struct {
    Py_ssize_t short_bytes, short_list, left;
} Bounds;

static bool has_native_items(PyObject *list, int levels, Bounds *bounds);
static bool has_native_values(PyObject *dict, int levels, Bounds *bounds);

static bool
is_native(PyObject *value, int levels, Bounds *bounds)
{
    PyTypeObject *type = Py_TYPE(value);
    if (type == &PyUnicode_Type || value == Py_None || is_number(value)) {
        return true;
    }
    if (!levels) {
        return false;
    }
    if (type == &PyBytes_Type) {
        return PyBytes_Size(value) < bounds->short_bytes;
    }
    if (type == &PyList_Type) {
        return has_native_items(value, levels - 1, bounds);
    }
    return type == &PyDict_Type && has_native_values(value, levels - 1, bounds);
}

static bool
has_native_items(PyObject *list, int levels, Bounds *bounds)
{
    Py_ssize_t count = PyList_Size(list);
    bool native = count <= bounds->left;
    bounds->left -= count;
    for (Py_ssize_t i = 0; native && i < count; i++) {
        PyObject *item = item_of(list, true, i);
        native = item && is_native(item, levels, bounds)
                 && (i || count < bounds->short_list || !is_number(item));
        Py_XDECREF(item);
    }
    PyErr_Clear(); /* the list may be shorter by now */
    return native;
}

static bool
has_native_values(PyObject *dict, int levels, Bounds *bounds)
{
    Py_ssize_t count = PyDict_Size(dict), at = 0;
    bool native = count <= bounds->left;
    bounds->left -= count;
    PyObject *key, *value;
#ifdef Py_GIL_DISABLED
    Py_BEGIN_CRITICAL_SECTION(dict);
#endif
    /* Nothing here runs other code, so the dict stays as it is. */
    while (native && PyDict_Next(dict, &at, &key, &value)) {
        native = Py_TYPE(key) == &PyUnicode_Type && is_native(value, levels, bounds);
    }
#ifdef Py_GIL_DISABLED
    Py_END_CRITICAL_SECTION();
#endif
    return native;
}

static PyObject *
cells_is_native(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *given;
    int levels;
    Bounds bounds;
    if (!PyArg_ParseTuple(args, "Oinnn:is_native", &given, &levels, &bounds.short_bytes,
                          &bounds.short_list, &bounds.left)) {
        return NULL;
    }
    PyObject *rows = PySequence_Tuple(given); /* a copy, which no other thread can change */
    if (!rows) {
        return NULL;
    }
    Py_ssize_t count = PyTuple_Size(rows);
    bool native = true;
    for (Py_ssize_t row = 0; native && row < count; row++) {
        native = is_native(PyTuple_GetItem(rows, row), levels, &bounds);
    }
    Py_DECREF(rows);
    return PyBool_FromLong(native);
}

static PyMethodDef methods[] = {
    {"fill", cells_fill, METH_VARARGS,
     "fill(rows, codes, precision, convert, /)\n--\n\nSee jagcodec.kernels."},
    {"narrow_list", cells_narrow_list, METH_O, "narrow_list(numbers, /)\n--\n\nSee jagcodec.kernels."},
    {"is_native", cells_is_native, METH_VARARGS,
     "is_native(rows, levels, short_bytes, short_list, most_items, /)\n--\n\nSee jagcodec.kernels."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "jagcodec.kernels._cells",
    .m_doc = "Python's numbers to cells.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__cells(void)
{
    return PyModuleDef_Init(&definition);
}

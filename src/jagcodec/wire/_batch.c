/* The header of a batch, read at once: what jagcodec.wire.header does, for the commonest messages.
 *
 * It knows one form, which most messages have: no checksums, and a TensorDict without dim names whose
 * tensors are dense or jagged, have cells, and are stored as they are. Anything else, and anything that is wrong, is left to the reader in
 * Python, which says what. So this is never more permissive than that one, and has no errors of its
 * own. Every number is checked as there; nothing is read outside of the bytes that are given, which
 * nobody can change meanwhile, and no more is allocated than they stand for.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* See jagcodec.wire.spec. */
enum { TREE = 16, TENSOR = 48, JAGGED = 49, TENSORDICT = 64, MAX_NDIM = 64 };
static const uint64_t MAX_UNBACKED_ROWS = 1 << 24;

/* What is still to be read. */
typedef struct {
    const unsigned char *at, *end;
} Bytes;

typedef struct {
    int code;
    Bytes payload;
} Extension;

/* The types of what is made, and the bytes per element of each dtype by its name. */
typedef struct {
    PyTypeObject *group, *tensor, *jagged, *extension;
    PyObject *dtypes;
} Types;

/* What places are checked against. */
typedef struct {
    uint64_t *buffers; /* their sizes */
    size_t count;
    uint64_t total;
    size_t groups;
} Table;

/* --- msgpack -------------------------------------------------------------------------------- */

/* Each reads one thing, or says false: that there is another, or that the bytes end before it. */

static size_t
left(const Bytes *bytes)
{
    return (size_t)(bytes->end - bytes->at);
}

static bool
take(Bytes *bytes, size_t size, Bytes *taken)
{
    if (left(bytes) < size) {
        return false;
    }
    *taken = (Bytes){bytes->at, bytes->at + size};
    bytes->at += size;
    return true;
}

/* A number of `size` bytes, most significant first. */
static bool
take_number(Bytes *bytes, size_t size, uint64_t *number)
{
    Bytes digits;
    if (!take(bytes, size, &digits)) {
        return false;
    }
    *number = 0;
    while (digits.at < digits.end) {
        *number = *number << 8 | *digits.at++;
    }
    return true;
}

static bool
literal(Bytes *bytes, const char *text, size_t size)
{
    Bytes taken;
    return take(bytes, size, &taken) && !memcmp(taken.at, text, size);
}

#define LITERAL(bytes, text) literal(bytes, text, sizeof(text) - 1)

/* 0 to 2^63 - 1. */
static bool
read_count(Bytes *bytes, uint64_t *count)
{
    uint64_t head;
    if (!take_number(bytes, 1, &head)) {
        return false;
    }
    if (head < 0x80) {
        *count = head;
        return true;
    }
    return 0xcc <= head && head <= 0xcf && take_number(bytes, (size_t)1 << (head - 0xcc), count)
           && *count <= INT64_MAX;
}

/* The count of an array, which has at least a byte for each element. */
static bool
read_array(Bytes *bytes, size_t *count)
{
    uint64_t head, number;
    if (!take_number(bytes, 1, &head)) {
        return false;
    }
    if (0x90 <= head && head <= 0x9f) {
        number = head - 0x90;
    }
    else if ((head != 0xdc && head != 0xdd)
             || !take_number(bytes, head == 0xdc ? 2 : 4, &number)) {
        return false;
    }
    *count = (size_t)number;
    return number <= left(bytes);
}

static bool
read_text(Bytes *bytes, Bytes *text)
{
    uint64_t head, size;
    if (!take_number(bytes, 1, &head)) {
        return false;
    }
    if (0xa0 <= head && head <= 0xbf) {
        size = head - 0xa0;
    }
    else if (head < 0xd9 || head > 0xdb || !take_number(bytes, (size_t)1 << (head - 0xd9), &size)) {
        return false;
    }
    return size <= left(bytes) && take(bytes, (size_t)size, text);
}

static bool
read_extension(Bytes *bytes, Extension *extension)
{
    uint64_t head, size, code;
    if (!take_number(bytes, 1, &head)) {
        return false;
    }
    if (0xd4 <= head && head <= 0xd8) {
        size = (uint64_t)1 << (head - 0xd4);
    }
    else if (head < 0xc7 || head > 0xc9 || !take_number(bytes, (size_t)1 << (head - 0xc7), &size)) {
        return false;
    }
    if (!take_number(bytes, 1, &code) || code > 127 || size > left(bytes)) {
        return false;
    }
    extension->code = (int)code;
    return take(bytes, (size_t)size, &extension->payload);
}

/* --- records -------------------------------------------------------------------------------- */

/* From here on NULL and false are this too, unless Python has an error, such as no memory. */

static PyObject *
make_text(Bytes text)
{
    PyObject *made = PyUnicode_DecodeUTF8((const char *)text.at, (Py_ssize_t)left(&text),
                                          "surrogatepass");
    if (!made && PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) {
        PyErr_Clear();
    }
    return made;
}

static PyObject *
make_bytes(Bytes bytes)
{
    return PyBytes_FromStringAndSize((const char *)bytes.at, (Py_ssize_t)left(&bytes));
}

/* A list of `count` numbers, written to `numbers` too. */
static PyObject *
read_counts(Bytes *bytes, size_t count, uint64_t *numbers)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list && i < count; i++) {
        PyObject *number = NULL;
        if (read_count(bytes, &numbers[i])) {
            number = PyLong_FromUnsignedLongLong(numbers[i]);
        }
        if (!number) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, number);
    }
    return list;
}

/* A named tuple of these fields, references to which it takes over. */
static PyObject *
make_record(PyTypeObject *type, PyObject **fields, Py_ssize_t count)
{
    /* As tuple.__new__ does for types derived from it. */
    PyObject *record = type->tp_alloc(type, count);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (record) {
            PyTuple_SET_ITEM(record, i, fields[i]);
        }
        else {
            Py_DECREF(fields[i]);
        }
    }
    return record;
}

/* The product of some dims, as long as it is at most `limit`. */
static bool
multiply(const uint64_t *dims, size_t count, uint64_t limit, uint64_t *product)
{
    for (size_t i = 0; i < count; i++) {
        if (!dims[i] || *product > limit / dims[i]) {
            return false;
        }
        *product *= dims[i];
    }
    return true;
}

/* (dtype, shape, buffer, offset), then (group, ragged dim): those of cells within their buffer. */
static PyObject *
read_cells(const Extension *extension, const Types *types, const Table *table, uint64_t *size)
{
    enum { DTYPE, SHAPE, BUFFER, OFFSET, GROUP, DIM, FIELDS };
    PyObject *fields[FIELDS] = {NULL};
    uint64_t dims[MAX_NDIM], rest[4];
    Bytes bytes = extension->payload, name;
    size_t count, ndim, numbers = extension->code == JAGGED ? 4 : 2;
    if (!read_array(&bytes, &count) || count != 2 + numbers || !read_text(&bytes, &name)
        || !read_array(&bytes, &ndim) || ndim > MAX_NDIM || !(fields[DTYPE] = make_text(name))
        || !(fields[SHAPE] = read_counts(&bytes, ndim, dims))) {
        goto failed;
    }
    for (size_t i = 0; i < numbers; i++) {
        if (!read_count(&bytes, &rest[i])
            || !(fields[BUFFER + i] = PyLong_FromUnsignedLongLong(rest[i]))) {
            goto failed;
        }
    }
    uint64_t buffer = rest[0], offset = rest[1];
    PyObject *itemsize = PyDict_GetItemWithError(types->dtypes, fields[DTYPE]);
    if (left(&bytes) || !itemsize || buffer >= table->count) {
        goto failed;
    }
    *size = PyLong_AsUnsignedLongLong(itemsize);
    if (PyErr_Occurred() || !multiply(dims, ndim, table->buffers[buffer], size)
        || offset > table->buffers[buffer] || *size > table->buffers[buffer] - offset) {
        goto failed;
    }
    if (extension->code == TENSOR) {
        return make_record(types->tensor, fields, GROUP);
    }
    if (rest[2] < table->groups && 1 <= rest[3] && rest[3] <= ndim) {
        return make_record(types->jagged, fields, FIELDS);
    }
failed:
    for (int i = 0; i < FIELDS; i++) {
        Py_XDECREF(fields[i]);
    }
    return NULL;
}

/* What stands for one column: the record of plain cells, or an extension that holds something else. */
static PyObject *
read_leaf(Bytes *bytes, const Types *types, const Table *table, uint64_t *plain)
{
    Extension extension;
    if (!read_extension(bytes, &extension)) {
        return NULL;
    }
    if (extension.code == TENSOR || extension.code == JAGGED) {
        uint64_t size = 0;
        PyObject *record = read_cells(&extension, types, table, &size);
        *plain += size;
        if (record && *plain > table->total) { /* values that overlap */
            Py_CLEAR(record);
        }
        return record;
    }
    PyObject *fields[] = {PyLong_FromLong(extension.code), make_bytes(extension.payload)};
    if (!fields[0] || !fields[1]) {
        Py_XDECREF(fields[0]);
        Py_XDECREF(fields[1]);
        return NULL;
    }
    return make_record(types->extension, fields, 2);
}

/* The columns of a batch by their names, each of which is there once. */
static PyObject *
read_leaves(Bytes *bytes, const Types *types, const Table *table, uint64_t *plain)
{
    size_t count;
    PyObject *leaves = NULL;
    if (!read_array(bytes, &count) || count % 2 || !(leaves = PyDict_New())) {
        return NULL;
    }
    for (size_t i = 0; i < count; i += 2) {
        Bytes text;
        PyObject *name = read_text(bytes, &text) ? make_text(text) : NULL;
        PyObject *leaf = name ? read_leaf(bytes, types, table, plain) : NULL;
        bool done = leaf && !PyDict_SetItem(leaves, name, leaf);
        Py_XDECREF(name);
        Py_XDECREF(leaf);
        if (!done) {
            Py_DECREF(leaves);
            return NULL;
        }
    }
    if ((size_t)PyDict_GET_SIZE(leaves) != count / 2) {
        Py_CLEAR(leaves);
    }
    return leaves;
}

/* --- the header ----------------------------------------------------------------------------- */

static PyObject *
read_buffers(Bytes *bytes, Table *table)
{
    if (!read_array(bytes, &table->count)) {
        return NULL;
    }
    table->buffers = PyMem_New(uint64_t, table->count + 1);
    if (!table->buffers) {
        return PyErr_NoMemory();
    }
    PyObject *list = read_counts(bytes, table->count, table->buffers);
    for (size_t i = 0; list && i < table->count; i++) {
        table->total += table->buffers[i];
        if (table->total > INT64_MAX) {
            Py_CLEAR(list);
        }
    }
    return list;
}

static PyObject *
read_group(Bytes *bytes, const Types *types, const Table *table, uint64_t *plain)
{
    enum { BUFFER, OFFSET, ROWS, MIN, MAX, FIELDS };
    uint64_t numbers[FIELDS];
    PyObject *fields[FIELDS];
    size_t count;
    if (!read_array(bytes, &count) || count != FIELDS) {
        return NULL;
    }
    for (size_t i = 0; i < FIELDS; i++) {
        if (!read_count(bytes, &numbers[i])) {
            return NULL;
        }
    }
    uint64_t buffer = numbers[BUFFER], offset = numbers[OFFSET], rows = numbers[ROWS];
    if (numbers[MIN] > numbers[MAX] || buffer >= table->count
        || rows >= table->buffers[buffer] / 8 || offset > table->buffers[buffer] - 8 * (rows + 1)) {
        return NULL;
    }
    *plain += 8 * (rows + 1);
    for (Py_ssize_t i = 0; i < FIELDS; i++) {
        fields[i] = PyLong_FromUnsignedLongLong(numbers[i]);
        if (!fields[i]) {
            while (i--) {
                Py_DECREF(fields[i]);
            }
            return NULL;
        }
    }
    return make_record(types->group, fields, FIELDS);
}

static PyObject *
read_groups(Bytes *bytes, const Types *types, Table *table)
{
    uint64_t plain = 0;
    if (!read_array(bytes, &table->groups)) {
        return NULL;
    }
    PyObject *groups = PyList_New((Py_ssize_t)table->groups);
    for (size_t i = 0; groups && i < table->groups; i++) {
        PyObject *group = read_group(bytes, types, table, &plain);
        if (!group || plain > table->total) {
            Py_XDECREF(group);
            Py_CLEAR(groups);
            break;
        }
        PyList_SET_ITEM(groups, (Py_ssize_t)i, group);
    }
    return groups;
}

/* [batch size, no dim names, columns], which fill the payload of an extension. */
static PyObject *
read_tensordict(Extension extension, const Types *types, const Table *table)
{
    Bytes bytes = extension.payload;
    uint64_t dims[MAX_NDIM], rows = 1, plain = 0;
    size_t count, ndim;
    if (extension.code != TENSORDICT || !read_array(&bytes, &count) || count != 3
        || !read_array(&bytes, &ndim) || ndim > MAX_NDIM) {
        return NULL;
    }
    PyObject *batch_size = read_counts(&bytes, ndim, dims), *leaves = NULL;
    if (batch_size && multiply(dims, ndim, MAX_UNBACKED_ROWS, &rows) && LITERAL(&bytes, "\xc0")) {
        leaves = read_leaves(&bytes, types, table, &plain);
    }
    if (!leaves || left(&bytes)) {
        Py_XDECREF(batch_size);
        Py_XDECREF(leaves);
        return NULL;
    }
    return Py_BuildValue("NNK", batch_size, leaves, (unsigned long long)plain);
}

static PyObject *
read_header(Bytes bytes, const Types *types, Table *table)
{
    PyObject *buffers = NULL, *groups = NULL, *tree = NULL, *batch = NULL;
    Extension whole, root;
    if (LITERAL(&bytes, "\x84\xa8jagcodec\x01\xa7""buffers")
        && (buffers = read_buffers(&bytes, table)) && LITERAL(&bytes, "\xa6ragged")
        && (groups = read_groups(&bytes, types, table)) && LITERAL(&bytes, "\xa4tree")
        && read_extension(&bytes, &whole) && whole.code == TREE && !left(&bytes)) {
        bytes = whole.payload;
        if (read_extension(&bytes, &root) && !left(&bytes)
            && (batch = read_tensordict(root, types, table)) && (tree = make_bytes(whole.payload))) {
            return Py_BuildValue("NNNN", buffers, groups, tree, batch);
        }
    }
    Py_XDECREF(buffers);
    Py_XDECREF(groups);
    Py_XDECREF(batch);
    return NULL;
}

/* --- the module ----------------------------------------------------------------------------- */

PyDoc_STRVAR(read_doc,
"read(data, group, tensor, jagged, extension, dtypes)\n--\n\n"
"The header of a plain batch: (buffers, groups, tree, (batch size, leaves, size of the plain ones)),\n"
"or None if it is another. The types are named tuples; dtypes has the bytes per element by name.");

static PyObject *
batch_read(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *data;
    Types types;
    Table table = {0};
    if (!PyArg_ParseTuple(args, "SO!O!O!O!O!:read", &data, &PyType_Type, &types.group,
                          &PyType_Type, &types.tensor, &PyType_Type, &types.jagged, &PyType_Type,
                          &types.extension, &PyDict_Type, &types.dtypes)) {
        return NULL;
    }
    if (!PyType_IsSubtype(types.group, &PyTuple_Type)
        || !PyType_IsSubtype(types.tensor, &PyTuple_Type)
        || !PyType_IsSubtype(types.jagged, &PyTuple_Type)
        || !PyType_IsSubtype(types.extension, &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "expected types derived from tuple");
        return NULL;
    }
    const unsigned char *start = (const unsigned char *)PyBytes_AS_STRING(data);
    PyObject *read = read_header((Bytes){start, start + PyBytes_GET_SIZE(data)}, &types, &table);
    PyMem_Free(table.buffers);
    if (!read && !PyErr_Occurred()) {
        Py_RETURN_NONE;
    }
    return read;
}

static PyMethodDef methods[] = {
    {"read", batch_read, METH_VARARGS, read_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "jagcodec.wire._batch",
    .m_doc = "The header of a batch, read at once.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__batch(void)
{
    return PyModuleDef_Init(&definition);
}

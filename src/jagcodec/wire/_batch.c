/* The header of a batch, at once: what jagcodec.wire.header does, for the commonest messages.
 *
 * It knows one form, which most messages have: no checksums, and a TensorDict without dim names whose
 * tensors are dense or jagged, have cells, and are stored as they are. Anything else, and anything
 * that is wrong, is left to the code in Python, which says what. So reading is never more permissive
 * than it is there, and nothing here has errors of its own. Every number is checked as there; nothing
 * is read outside of the bytes that are given, which nobody can change meanwhile, and no more is
 * allocated than they stand for. What is written is byte for byte what Python writes.
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
#if PY_VERSION_HEX >= 0x030E0000
    if (record) {
        ((PyTupleObject *)record)->ob_hash = -1; /* not yet known */
    }
#endif
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

/* What stands for one column: the record of plain cells, or an extension of something else. */
static PyObject *
read_leaf(Bytes *bytes, const Types *types, const Table *table, uint64_t *held)
{
    Extension extension;
    if (!read_extension(bytes, &extension)) {
        return NULL;
    }
    if (extension.code == TENSOR || extension.code == JAGGED) {
        uint64_t size = 0;
        PyObject *record = read_cells(&extension, types, table, &size);
        *held += size;
        if (record && *held > table->total) { /* values that overlap */
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
read_leaves(Bytes *bytes, const Types *types, const Table *table, uint64_t *held)
{
    size_t count;
    PyObject *leaves = NULL;
    if (!read_array(bytes, &count) || count % 2 || !(leaves = PyDict_New())) {
        return NULL;
    }
    for (size_t i = 0; i < count; i += 2) {
        Bytes text;
        PyObject *name = read_text(bytes, &text) ? make_text(text) : NULL;
        PyObject *leaf = name ? read_leaf(bytes, types, table, held) : NULL;
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
read_group(Bytes *bytes, const Types *types, const Table *table, uint64_t *held)
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
    *held += 8 * (rows + 1);
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
    uint64_t held = 0;
    if (!read_array(bytes, &table->groups)) {
        return NULL;
    }
    PyObject *groups = PyList_New((Py_ssize_t)table->groups);
    for (size_t i = 0; groups && i < table->groups; i++) {
        PyObject *group = read_group(bytes, types, table, &held);
        if (!group || held > table->total) {
            Py_XDECREF(group);
            Py_CLEAR(groups);
            break;
        }
        PyList_SET_ITEM(groups, (Py_ssize_t)i, group);
    }
    return groups;
}

/* [batch size, no dim names, columns], which fill the payload of an extension. */
static bool
read_tensordict(Extension extension, const Types *types, const Table *table, PyObject **batch_size,
                PyObject **leaves, uint64_t *held)
{
    Bytes bytes = extension.payload;
    uint64_t dims[MAX_NDIM], rows = 1;
    size_t count, ndim;
    return extension.code == TENSORDICT && read_array(&bytes, &count) && count == 3
           && read_array(&bytes, &ndim) && ndim <= MAX_NDIM
           && (*batch_size = read_counts(&bytes, ndim, dims))
           && multiply(dims, ndim, MAX_UNBACKED_ROWS, &rows) && LITERAL(&bytes, "\xc0")
           && (*leaves = read_leaves(&bytes, types, table, held)) && !left(&bytes);
}

static PyObject *
read_header(Bytes bytes, const Types *types, Table *table)
{
    PyObject *buffers = NULL, *groups = NULL, *tree = NULL, *batch_size = NULL, *leaves = NULL;
    Extension whole, root;
    uint64_t held = 0;
    if (LITERAL(&bytes, "\x84\xa8jagcodec\x01\xa7""buffers")
        && (buffers = read_buffers(&bytes, table)) && LITERAL(&bytes, "\xa6ragged")
        && (groups = read_groups(&bytes, types, table)) && LITERAL(&bytes, "\xa4tree")
        && read_extension(&bytes, &whole) && whole.code == TREE && !left(&bytes)) {
        bytes = whole.payload;
        if (read_extension(&bytes, &root) && !left(&bytes)
            && read_tensordict(root, types, table, &batch_size, &leaves, &held)
            && (tree = make_bytes(whole.payload))) {
            return Py_BuildValue("NNNNNK", buffers, groups, tree, batch_size, leaves,
                                 (unsigned long long)held);
        }
    }
    Py_XDECREF(buffers);
    Py_XDECREF(groups);
    Py_XDECREF(batch_size);
    Py_XDECREF(leaves);
    return NULL;
}

/* --- writing -------------------------------------------------------------------------------- */

/* What is written so far. Every function says false where it cannot go on, as those above. */
typedef struct {
    unsigned char *data;
    size_t size, room;
} Text;

static bool
put(Text *text, const void *bytes, size_t size)
{
    if (size > text->room - text->size) {
        if (size > SIZE_MAX / 4 || text->size > SIZE_MAX / 4 - 512) {
            PyErr_NoMemory();
            return false;
        }
        size_t room = 2 * (text->size + size) + 512;
        unsigned char *data = PyMem_Realloc(text->data, room);
        if (!data) {
            PyErr_NoMemory();
            return false;
        }
        text->data = data;
        text->room = room;
    }
    memcpy(text->data + text->size, bytes, size);
    text->size += size;
    return true;
}

/* A byte, then a number of so many, most significant first. */
static bool
put_number(Text *text, unsigned head, uint64_t number, size_t size)
{
    unsigned char digits[9] = {(unsigned char)head};
    for (size_t i = size; i; i--, number >>= 8) {
        digits[i] = (unsigned char)number;
    }
    return put(text, digits, 1 + size);
}

/* How many times 1 byte has to be doubled to hold a number. */
static unsigned
doublings(uint64_t number)
{
    return number <= UINT8_MAX ? 0 : number <= UINT16_MAX ? 1 : number <= UINT32_MAX ? 2 : 3;
}

static bool
put_count(Text *text, uint64_t number)
{
    if (number < 0x80) {
        return put_number(text, (unsigned)number, 0, 0);
    }
    unsigned times = doublings(number);
    return put_number(text, 0xcc + times, number, (size_t)1 << times);
}

static bool
put_array(Text *text, Py_ssize_t count)
{
    if (count < 16) {
        return put_number(text, 0x90 + (unsigned)count, 0, 0);
    }
    if (count <= UINT16_MAX) {
        return put_number(text, 0xdc, (uint64_t)count, 2);
    }
    return count <= UINT32_MAX && put_number(text, 0xdd, (uint64_t)count, 4);
}

/* What stands before the payload of an extension. */
static bool
put_extension(Text *text, int code, size_t size)
{
    unsigned times = 0;
    while (times < 4 && size > (size_t)1 << times) {
        times++;
    }
    bool done;
    if (size == (size_t)1 << times) {
        done = put_number(text, 0xd4 + times, 0, 0);
    }
    else {
        times = doublings(size);
        done = times < 3 && put_number(text, 0xc7 + times, size, (size_t)1 << times);
    }
    return done && put_number(text, (unsigned)code, 0, 0);
}

static bool
put_text(Text *text, PyObject *string)
{
    Py_ssize_t size;
    if (!PyUnicode_CheckExact(string)) {
        return false;
    }
    const char *bytes = PyUnicode_AsUTF8AndSize(string, &size);
    if (!bytes) { /* a surrogate */
        if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) {
            PyErr_Clear();
        }
        return false;
    }
    unsigned times = doublings((uint64_t)size);
    return (size < 32 ? put_number(text, 0xa0 + (unsigned)size, 0, 0)
                      : times < 3 && put_number(text, 0xd9 + times, (uint64_t)size,
                                                (size_t)1 << times))
           && put(text, bytes, (size_t)size);
}

static bool
put_int(Text *text, PyObject *number)
{
    if (!PyLong_CheckExact(number)) {
        return false;
    }
    unsigned long long value = PyLong_AsUnsignedLongLong(number);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        PyErr_Clear(); /* negative, or too large */
        return false;
    }
    return put_count(text, value);
}

static bool
put_ints(Text *text, PyObject *numbers)
{
    if (!PyList_CheckExact(numbers) || !put_array(text, PyList_GET_SIZE(numbers))) {
        return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(numbers); i++) {
        if (!put_int(text, PyList_GET_ITEM(numbers, i))) {
            return false;
        }
    }
    return true;
}

/* A record of cells, or an extension that is packed already; `part` is for what is put together. */
static bool
put_leaf(Text *text, PyObject *leaf, const Types *types, Text *part)
{
    PyTypeObject *type = Py_TYPE(leaf);
    if (PyTuple_Check(leaf) && PyTuple_GET_SIZE(leaf) == 2 && type == types->extension) {
        PyObject *payload = PyTuple_GET_ITEM(leaf, 1);
        long code = PyLong_AsLong(PyTuple_GET_ITEM(leaf, 0));
        if (PyErr_Occurred() || code < 0 || code > 127 || !PyBytes_CheckExact(payload)) {
            PyErr_Clear();
            return false;
        }
        size_t size = (size_t)PyBytes_GET_SIZE(payload);
        return put_extension(text, (int)code, size) && put(text, PyBytes_AS_STRING(payload), size);
    }
    if (type != types->tensor && type != types->jagged) {
        return false;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(leaf);
    if (count < 2) {
        return false;
    }
    part->size = 0;
    if (!put_array(part, count) || !put_text(part, PyTuple_GET_ITEM(leaf, 0))
        || !put_ints(part, PyTuple_GET_ITEM(leaf, 1))) {
        return false;
    }
    for (Py_ssize_t i = 2; i < count; i++) {
        if (!put_int(part, PyTuple_GET_ITEM(leaf, i))) {
            return false;
        }
    }
    return put_extension(text, type == types->tensor ? TENSOR : JAGGED, part->size)
           && put(text, part->data, part->size);
}

/* The fields of a TensorDict without dim names. */
static bool
put_tensordict(Text *text, PyObject *batch_size, PyObject *leaves, const Types *types, Text *part)
{
    Py_ssize_t at = 0;
    PyObject *name, *leaf;
    if (!put_array(text, 3) || !put_ints(text, batch_size) || !put(text, "\xc0", 1)
        || PyDict_GET_SIZE(leaves) > PY_SSIZE_T_MAX / 2
        || !put_array(text, 2 * PyDict_GET_SIZE(leaves))) {
        return false;
    }
    while (PyDict_Next(leaves, &at, &name, &leaf)) {
        if (!put_text(text, name) || !put_leaf(text, leaf, types, part)) {
            return false;
        }
    }
    return true;
}

static bool
put_groups(Text *text, PyObject *groups, const Types *types)
{
    if (!put_array(text, PyList_GET_SIZE(groups))) {
        return false;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(groups); i++) {
        PyObject *group = PyList_GET_ITEM(groups, i);
        if (Py_TYPE(group) != types->group || !put_array(text, PyTuple_GET_SIZE(group))) {
            return false;
        }
        for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(group); j++) {
            if (!put_int(text, PyTuple_GET_ITEM(group, j))) {
                return false;
            }
        }
    }
    return true;
}

#define PUT(text, literal) put(text, literal, sizeof(literal) - 1)

/* What stands before the fields of the TensorDict. */
static bool
put_start(Text *text, PyObject *buffers, PyObject *groups, const Types *types, size_t size)
{
    Text root = {0}; /* what stands between the beginning of the tree and those fields */
    bool done = put_extension(&root, TENSORDICT, size)
                && PUT(text, "\x84\xa8jagcodec\x01\xa7""buffers") && put_ints(text, buffers)
                && PUT(text, "\xa6ragged") && put_groups(text, groups, types)
                && PUT(text, "\xa4tree") && put_extension(text, TREE, root.size + size)
                && put(text, root.data, root.size);
    PyMem_Free(root.data);
    return done;
}

/* --- the module ----------------------------------------------------------------------------- */

static bool
are_records(const Types *types)
{
    PyTypeObject *all[] = {types->group, types->tensor, types->jagged, types->extension};
    for (size_t i = 0; i < sizeof(all) / sizeof(*all); i++) {
        if (!PyType_IsSubtype(all[i], &PyTuple_Type)) {
            PyErr_Format(PyExc_TypeError, "expected types derived from tuple, found %s",
                         all[i]->tp_name);
            return false;
        }
    }
    return true;
}

static PyObject *
none_without_error(PyObject *made)
{
    return made || PyErr_Occurred() ? made : Py_NewRef(Py_None);
}

PyDoc_STRVAR(read_doc,
"read(data, group, tensor, jagged, extension, dtypes)\n--\n\n"
"The header of a plain batch: (buffers, groups, tree, batch_size, leaves, bytes that records stand\n"
"for), or None if it is another. The types are those of records; dtypes has the bytes per element.");

static PyObject *
batch_read(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *data;
    Types types;
    Table table = {0};
    if (!PyArg_ParseTuple(args, "SO!O!O!O!O!:read", &data, &PyType_Type, &types.group,
                          &PyType_Type, &types.tensor, &PyType_Type, &types.jagged, &PyType_Type,
                          &types.extension, &PyDict_Type, &types.dtypes)
        || !are_records(&types)) {
        return NULL;
    }
    const unsigned char *start = (const unsigned char *)PyBytes_AS_STRING(data);
    PyObject *read = read_header((Bytes){start, start + PyBytes_GET_SIZE(data)}, &types, &table);
    PyMem_Free(table.buffers);
    return none_without_error(read);
}

PyDoc_STRVAR(write_doc,
"write(buffers, groups, batch_size, leaves, group, tensor, jagged, extension)\n--\n\n"
"The header of a batch of leaves as `read` gives them, or None if something is no such leaf.");

static PyObject *
batch_write(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *buffers, *groups, *batch_size, *leaves, *written = NULL;
    Types types = {0};
    Text fields = {0}, start = {0}, part = {0};
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!O!O!O!:write", &PyList_Type, &buffers, &PyList_Type,
                          &groups, &PyList_Type, &batch_size, &PyDict_Type, &leaves,
                          &PyType_Type, &types.group, &PyType_Type, &types.tensor, &PyType_Type,
                          &types.jagged, &PyType_Type, &types.extension)
        || !are_records(&types)) {
        return NULL;
    }
    if (put_tensordict(&fields, batch_size, leaves, &types, &part)
        && put_start(&start, buffers, groups, &types, fields.size)
        && put(&start, fields.data, fields.size)) {
        written = PyBytes_FromStringAndSize((char *)start.data, (Py_ssize_t)start.size);
    }
    PyMem_Free(fields.data);
    PyMem_Free(start.data);
    PyMem_Free(part.data);
    return none_without_error(written);
}

static PyMethodDef methods[] = {
    {"read", batch_read, METH_VARARGS, read_doc},
    {"write", batch_write, METH_VARARGS, write_doc},
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
    .m_doc = "The header of a batch, at once.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__batch(void)
{
    return PyModuleDef_Init(&definition);
}

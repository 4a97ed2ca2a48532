/* Copies rows of bytes from one buffer to another: the compiled kernel of jagcodec.kernels.
 *
 * A row is a run of cells, and a cell is a fixed number of bytes. Nothing here knows a dtype, numpy
 * or torch: every argument is anything with the buffer protocol. One call takes a list of tasks,
 * one for each column of a batch, because all columns together are worth starting threads for when
 * a single column is not. Every row of every task is checked against its buffers before the first
 * byte is written, so no argument can make this code read or write outside them. The call runs
 * without the GIL, and no other thread may change the buffers meanwhile. There is no global state, and
 * no thread outlives the call that started it.
 *
 * Only the limited API of Python 3.11 is used, so that one binary serves that and all later
 * versions. setup.py says the same to the build.
 */

#include <pyconfig.h>
#ifndef Py_GIL_DISABLED /* a free-threaded Python has no limited API yet */
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    MAX_THREADS = 64,
    MAX_PAD_BYTES = 16, /* of the largest element, a complex128 */
    BLOCK = 4096,       /* bytes of repeated pad bits that long pads are copied from; fits in L1 */
    SCANNED = 256,      /* bytes compared at a time */
    MAX_VIEWS = 6,      /* buffers of one task */
    RECENT = 12,        /* buffers to search for one that was given before */
};

/* Measured on two cores: two threads are level with one at 3 MiB, and a seventh faster at 6. */
static const size_t BYTES_PER_THREAD = 2 << 20;

/* What a thread takes at a time. */
static const size_t CHUNK = 1 << 19;

/* A smaller copy is done before another thread would have woken up and taken the GIL. */
static const size_t BYTES_WITHOUT_GIL = 1 << 16;

/* The row that a thread has reached. Its chunks come in ascending order. */
typedef struct {
    size_t row;
    size_t before; /* bytes of the rows before that one */
} Cursor;

/* Where rows begin, in cells. */
typedef struct {
    int64_t *numbers; /* one for each row; or NULL: */
    int64_t stride;   /* row i begins at i times this; or -1: the rows are end to end */
} Starts;

/* One column. Everything is checked; sizes and positions are in bytes unless a comment says
 * otherwise. */
typedef struct Task {
    void (*run)(const struct Task *task, Cursor *cursor, size_t begin, size_t end);
    size_t bytes;  /* the work, of which `run` does the part from `begin` to `end` */
    size_t chunk;  /* parts begin at multiples of this */
    size_t chunks; /* how many parts there are in this task and those before it */
    unsigned char *dst;
    unsigned char *src; /* read only, as are all numbers but results */
    Starts dst_starts;
    Starts src_starts;
    const unsigned char **from; /* where each row is, if they are in several buffers; or NULL */
    int64_t *lengths;           /* in cells */
    size_t cell;
    /* `pad` only */
    int64_t *left_pad; /* in cells; NULL: no row has any */
    size_t width;      /* of a row of the rectangle */
    int fill;          /* the byte that pads repeat; or -1: */
    size_t block_size;
    unsigned char *block; /* the pad bits over and over */
    /* `ends` only: the results */
    int64_t *row_starts;
    int64_t *row_lengths;
} Task;

/* A buffer in use until the call ends. */
typedef struct {
    Py_buffer buffer;
    PyObject *numbers; /* the object whose int64 numbers these are; NULL for any other buffer */
    bool written;
} View;

/* Several buffers with the rows of a column, as if they were end to end. */
typedef struct {
    PyObject *given; /* the tuple of them; columns of a batch share it */
    const View *views;
    size_t count;
    int64_t *ends; /* in bytes */
} Sources;

/* What one call has to do. */
typedef struct {
    PyObject *given; /* a tuple of the tasks as the caller passed them */
    Sources sources; /* of the last task that had several */
    Task *tasks;
    size_t count;
    View *views; /* of all tasks */
    size_t view_count;
    size_t bytes;
    size_t chunks;
    atomic_size_t next; /* the first part that no thread has taken */
} Batch;

/* The position of a row, which is `at` if rows are end to end. */
static inline size_t
position(Starts starts, size_t row, size_t cell, size_t skip, size_t at)
{
    if (starts.numbers) {
        return (size_t)starts.numbers[row] * cell + skip;
    }
    return starts.stride < 0 ? at : row * (size_t)starts.stride * cell + skip;
}

/* A byte of a row: `skip` from its beginning on, or `at` if rows are end to end. */
static inline const unsigned char *
source(const Task *task, size_t row, size_t skip, size_t at)
{
    if (task->from) {
        return task->from[row] + skip;
    }
    return task->src + position(task->src_starts, row, task->cell, skip, at);
}

/* --- the loops ------------------------------------------------------------------------------ */

/* Copies bytes `begin` to `end` of all rows, counted as if the rows were end to end. */
static void
run_copy(const Task *task, Cursor *cursor, size_t begin, size_t end)
{
    size_t row = cursor->row, before = cursor->before;
    while (before + (size_t)task->lengths[row] * task->cell <= begin) {
        before += (size_t)task->lengths[row++] * task->cell;
    }
    *cursor = (Cursor){row, before};
    size_t skip = begin - before; /* of the first row */
    for (size_t at = begin; at < end; row++, skip = 0) {
        size_t size = (size_t)task->lengths[row] * task->cell - skip;
        if (size > end - at) {
            size = end - at;
        }
        if (size) {
            size_t to = position(task->dst_starts, row, task->cell, skip, at);
            memcpy(task->dst + to, source(task, row, skip, at), size);
            at += size;
        }
    }
}

/* Fills bytes `begin` to `end` of the rectangle; `begin` is a multiple of the size of the bits. */
static void
fill(const Task *task, size_t begin, size_t end)
{
    if (task->fill >= 0) {
        memset(task->dst + begin, task->fill, end - begin);
        return;
    }
    while (begin < end) {
        size_t size = end - begin < task->block_size ? end - begin : task->block_size;
        memcpy(task->dst + begin, task->block, size);
        begin += size;
    }
}

/* Writes bytes `begin` to `end` of the rectangle: pads and cells of each row, in one pass. */
static void
run_pad(const Task *task, Cursor *Py_UNUSED(cursor), size_t begin, size_t end)
{
    size_t row = begin / task->width;
    for (size_t at = begin; at < end; row++) {
        size_t cells = row * task->width;
        size_t stop = cells + task->width < end ? cells + task->width : end;
        cells += task->left_pad ? (size_t)task->left_pad[row] * task->cell : 0;
        size_t tail = cells + (size_t)task->lengths[row] * task->cell;
        if (at < cells) {
            size_t to = cells < stop ? cells : stop;
            fill(task, at, to);
            at = to;
        }
        if (at < tail && at < stop) {
            size_t to = tail < stop ? tail : stop;
            memcpy(task->dst + at, source(task, row, at - cells, 0), to - at);
            at = to;
        }
        if (at < stop) {
            fill(task, at, stop);
            at = stop;
        }
    }
}

/* The first of `size` bytes that differs from the byte one cell further on; `size` if all agree. */
static size_t
first_change(const unsigned char *bytes, size_t size, size_t cell)
{
    size_t at = 0;
    while (size - at >= SCANNED && !memcmp(bytes + at, bytes + at + cell, SCANNED)) {
        at += SCANNED;
    }
    while (at < size && bytes[at] == bytes[at + cell]) {
        at++;
    }
    return at;
}

/* The last of `size` bytes that differs from the byte one cell further on; at least one does. */
static size_t
last_change(const unsigned char *bytes, size_t size, size_t cell)
{
    while (size >= SCANNED
           && !memcmp(bytes + size - SCANNED, bytes + size - SCANNED + cell, SCANNED)) {
        size -= SCANNED;
    }
    while (bytes[size - 1] == bytes[size - 1 + cell]) {
        size--;
    }
    return size - 1;
}

/* Measures the rows of bytes `begin` to `end`, which are whole rows. */
static void
run_ends(const Task *task, Cursor *Py_UNUSED(cursor), size_t begin, size_t end)
{
    for (size_t row = begin / task->width; row < end / task->width; row++) {
        const unsigned char *bytes = task->src + row * (size_t)task->src_starts.stride * task->cell;
        size_t size = task->width - task->cell; /* bytes with a cell after them */
        size_t first = first_change(bytes, size, task->cell);
        int64_t start = 0, stop = 0;
        if (first < size) {
            start = (int64_t)(first / task->cell + 1);
            stop = (int64_t)(last_change(bytes, size, task->cell) / task->cell + 1);
        }
        task->row_starts[row] = start;
        task->row_lengths[row] = stop - start;
    }
}

/* --- threads -------------------------------------------------------------------------------- */

/* Takes parts until none is left. So a thread that the system keeps waiting leaves its share to the
 * others, and rows of very different lengths keep all threads busy. */
static void *
run_chunks(void *argument)
{
    Batch *batch = argument;
    const Task *task = batch->tasks;
    size_t before = 0; /* parts of the tasks before that one */
    Cursor cursor = {0, 0};
    for (;;) {
        size_t part = atomic_fetch_add(&batch->next, 1);
        if (part >= batch->chunks) {
            return NULL;
        }
        while (part >= task->chunks) {
            before = task->chunks;
            cursor = (Cursor){0, 0};
            task++;
        }
        size_t begin = (part - before) * task->chunk, left = task->bytes - begin;
        task->run(task, &cursor, begin, begin + (left < task->chunk ? left : task->chunk));
    }
}

static void
run(Batch *batch, size_t threads)
{
    for (size_t i = 0; i < batch->count; i++) {
        Task *task = &batch->tasks[i];
        if (threads <= 1) {
            task->chunk = task->bytes;
            batch->chunks += task->bytes > 0;
        } else if (task->bytes) {
            batch->chunks += (task->bytes - 1) / task->chunk + 1;
        }
        task->chunks = batch->chunks;
    }
    pthread_t started[MAX_THREADS];
    size_t count = 0;
    while (count + 1 < threads && count < MAX_THREADS
           && pthread_create(&started[count], NULL, run_chunks, batch) == 0) {
        count++; /* if the system starts none, those that run do its work */
    }
    run_chunks(batch);
    while (count > 0) {
        pthread_join(started[--count], NULL);
    }
}

static void
run_without_gil(Batch *batch, Py_ssize_t allowed)
{
    size_t threads = allowed > 1 ? (size_t)allowed : 1, useful = batch->bytes / BYTES_PER_THREAD;
    if (threads > useful) {
        threads = useful;
    }
    if (batch->bytes < BYTES_WITHOUT_GIL) {
        run(batch, threads);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    run(batch, threads);
    Py_END_ALLOW_THREADS
}

/* --- reading and checking the fields of a task ---------------------------------------------- */

/* A new view of the batch; NULL with an error set if `object` has no such buffer. */
static View *
borrow(Batch *batch, PyObject *object, int flags)
{
    View *view = &batch->views[batch->view_count];
    if (PyObject_GetBuffer(object, &view->buffer, flags) < 0) {
        return NULL;
    }
    view->numbers = NULL;
    view->written = flags & PyBUF_WRITABLE;
    batch->view_count++;
    return view;
}

/* A contiguous buffer of whole cells, of which `*cells` becomes the number. */
static bool
get_cells(Batch *batch, PyObject *object, const char *name, int flags, Py_ssize_t cell,
          unsigned char **bytes, Py_ssize_t *cells)
{
    View *view = borrow(batch, object, PyBUF_SIMPLE | flags);
    if (!view) {
        return false;
    }
    Py_ssize_t size = view->buffer.len;
    if (!PyBuffer_IsContiguous(&view->buffer, 'C') || size % cell) {
        PyErr_Format(PyExc_ValueError, "%s: expected contiguous cells of %zd bytes, found %zd bytes",
                     name, cell, size);
        return false;
    }
    *bytes = view->buffer.buf;
    *cells = size / cell;
    return true;
}

/* A view of these numbers that was taken and checked shortly before; NULL if it does not exist.
 * Columns of a batch share their lengths, and asking for a format again takes longer than the rest
 * of a small task. */
static const View *
recent_numbers(const Batch *batch, PyObject *object)
{
    size_t first = batch->view_count > RECENT ? batch->view_count - RECENT : 0;
    for (size_t i = batch->view_count; i > first; i--) {
        if (batch->views[i - 1].numbers == object) {
            return &batch->views[i - 1];
        }
    }
    return NULL;
}

/* A one-dimensional int64 buffer of `*rows` numbers. If that is -1, any number of them will do,
 * and is stored there. */
static bool
get_numbers(Batch *batch, PyObject *object, const char *name, int flags, Py_ssize_t *rows,
            int64_t **numbers)
{
    bool written = flags & PyBUF_WRITABLE;
    const View *view = written ? NULL : recent_numbers(batch, object);
    if (!view) {
        View *new = borrow(batch, object, PyBUF_ND | PyBUF_FORMAT | flags);
        if (!new) {
            return false;
        }
        const Py_buffer *found = &new->buffer;
        const char *format = found->format ? found->format : "B";
        const char *letter = format + (*format == '@' || *format == '=' || *format == '<');
        if (found->ndim != 1 || found->itemsize != (Py_ssize_t)sizeof(int64_t)
            || (strcmp(letter, "l") && strcmp(letter, "q"))
            || (uintptr_t)found->buf % _Alignof(int64_t)) {
            PyErr_Format(PyExc_ValueError,
                         "%s: expected one dim of aligned int64, found %d of '%s'", name,
                         found->ndim, format);
            return false;
        }
        new->numbers = written ? NULL : object;
        view = new;
    }
    Py_ssize_t count = view->buffer.shape[0];
    if (*rows >= 0 && count != *rows) {
        PyErr_Format(PyExc_ValueError, "%s: expected %zd numbers, found %zd", name, *rows, count);
        return false;
    }
    *rows = count;
    *numbers = view->buffer.buf;
    return true;
}

/* Where rows start: int64 numbers, a stride, or None if they are end to end. */
static bool
get_starts(Batch *batch, PyObject *object, const char *name, Py_ssize_t rows, Starts *starts)
{
    *starts = (Starts){NULL, -1};
    if (object == Py_None) {
        return true;
    }
    if (!PyLong_Check(object)) {
        return get_numbers(batch, object, name, 0, &rows, &starts->numbers);
    }
    starts->stride = PyLong_AsLongLong(object);
    if (starts->stride < 0 && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "%s: expected a stride of 0 or more, found %lld", name,
                     (long long)starts->stride);
    }
    return starts->stride >= 0;
}

static bool
get_size(PyObject *object, const char *name, Py_ssize_t least, Py_ssize_t *size)
{
    *size = PyNumber_AsSsize_t(object, PyExc_OverflowError);
    if (*size == -1 && PyErr_Occurred()) {
        return false;
    }
    if (*size < least) {
        PyErr_Format(PyExc_ValueError, "%s: expected %zd or more, found %zd", name, least, *size);
    }
    return *size >= least;
}

/* The fields of a task, which live as long as it does. */
static bool
get_fields(PyObject *given, const char *kind, Py_ssize_t count, PyObject **fields)
{
    Py_ssize_t found = PyTuple_Size(given);
    if (found != count) {
        PyErr_Format(PyExc_TypeError, "%s: expected tasks of %zd fields, found %zd", kind, count,
                     found);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        fields[i] = PyTuple_GetItem(given, i);
    }
    return true;
}

/* Whether all rows are within `limit` cells, and fill them exactly if they are end to end. */
static bool
rows_are_within(const char *name, Starts starts, const int64_t *lengths, Py_ssize_t rows,
                int64_t limit)
{
    int64_t next = 0; /* at most limit + 1, and limits are sizes of buffers: nothing overflows */
    bool end_to_end = !starts.numbers && starts.stride < 0;
    for (Py_ssize_t row = 0; row < rows; row++) {
        int64_t start = starts.numbers ? starts.numbers[row] : next, length = lengths[row];
        if (length < 0 || length > limit || start < 0 || start > limit - length) {
            PyErr_Format(PyExc_ValueError,
                         "%s, row %zd: expected cells within %lld, found %lld from %lld on", name,
                         row, (long long)limit, (long long)length, (long long)start);
            return false;
        }
        if (end_to_end) {
            next = start + length;
        } else if (!starts.numbers) {
            /* One past the end is as wrong as any start further on. */
            next = starts.stride > limit - start ? limit + 1 : start + starts.stride;
        }
    }
    if (end_to_end && next != limit) {
        PyErr_Format(PyExc_ValueError, "%s: expected lengths that add up to %lld cells, found %lld",
                     name, (long long)limit, (long long)next);
        return false;
    }
    return true;
}

/* The buffers of a tuple, borrowed. A task before may have had the same tuple. */
static bool
get_sources(Batch *batch, PyObject *given)
{
    Sources *sources = &batch->sources;
    if (sources->given == given) {
        return true;
    }
    size_t count = (size_t)PyTuple_Size(given);
    PyMem_Free(sources->ends);
    *sources = (Sources){NULL, batch->views + batch->view_count, count, NULL};
    sources->ends = PyMem_Malloc((count + 1) * sizeof(int64_t));
    if (!sources->ends) {
        PyErr_NoMemory();
        return false;
    }
    int64_t end = 0;
    for (size_t i = 0; i < count; i++) {
        unsigned char *bytes;
        Py_ssize_t size;
        if (!get_cells(batch, PyTuple_GetItem(given, (Py_ssize_t)i), "src", 0, 1, &bytes, &size)) {
            return false;
        }
        if (size > INT64_MAX - end) {
            PyErr_SetString(PyExc_ValueError, "src: expected fewer than 2**63 bytes in all");
            return false;
        }
        sources->ends[i] = end += size;
    }
    sources->given = given;
    return true;
}

/* The rows of several buffers, each of which is in one of them. Starts count bytes. */
static bool
get_scattered(Batch *batch, PyObject *given, Py_ssize_t rows, Py_ssize_t cell, Task *task)
{
    const int64_t *starts = task->src_starts.numbers;
    if (!starts) {
        PyErr_SetString(PyExc_ValueError, "src: expected a number per row for several buffers");
        return false;
    }
    if (!get_sources(batch, given)) {
        return false;
    }
    task->from = PyMem_Malloc(((size_t)rows + 1) * sizeof(*task->from));
    if (!task->from) {
        PyErr_NoMemory();
        return false;
    }
    const Sources *sources = &batch->sources;
    size_t in = 0;
    int64_t begin = 0, end = sources->count ? sources->ends[0] : 0; /* of that buffer */
    for (Py_ssize_t row = 0; row < rows; row++) {
        int64_t start = starts[row], length = task->lengths[row];
        if (length == 0) {
            task->from[row] = NULL; /* is nowhere, and is not read */
            continue;
        }
        if (start < begin || start >= end) {
            size_t low = 0, high = sources->count;
            while (low < high) { /* for the first buffer that ends after the start */
                size_t middle = low + (high - low) / 2;
                if (sources->ends[middle] <= start) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            in = low;
            begin = in ? sources->ends[in - 1] : 0;
            end = in < sources->count ? sources->ends[in] : begin;
        }
        if (start < begin || start >= end || length < 0 || length > (end - start) / cell) {
            PyErr_Format(PyExc_ValueError,
                         "src, row %zd: expected %lld cells of %zd bytes within one buffer, found "
                         "byte %lld of %zu buffers", row, (long long)length, cell,
                         (long long)start, sources->count);
            return false;
        }
        task->from[row] = (unsigned char *)sources->views[in].buffer.buf + (start - begin);
    }
    return true;
}

/* Memory of a buffer. */
typedef struct {
    uintptr_t begin, end;
    bool written;
} Span;

static int
by_begin(const void *a, const void *b)
{
    uintptr_t left = ((const Span *)a)->begin, right = ((const Span *)b)->begin;
    return (left > right) - (left < right);
}

/* Whether nothing that is written is also read, or written twice: starts and lengths that changed
 * after they were checked would send a row anywhere. */
static bool
targets_are_apart(const Batch *batch)
{
    size_t count = 0;
    Span *spans = PyMem_Malloc((batch->view_count + 1) * sizeof(Span));
    if (!spans) {
        PyErr_NoMemory();
        return false;
    }
    for (size_t i = 0; i < batch->view_count; i++) {
        const View *view = &batch->views[i];
        if (view->buffer.len) {
            uintptr_t begin = (uintptr_t)view->buffer.buf;
            spans[count++] = (Span){begin, begin + (size_t)view->buffer.len, view->written};
        }
    }
    qsort(spans, count, sizeof(Span), by_begin);
    bool apart = true;
    uintptr_t end = 0, written_end = 0; /* of the spans so far */
    for (size_t i = 0; i < count; i++) {
        Span span = spans[i];
        apart = apart && span.begin >= (span.written ? end : written_end);
        end = span.end > end ? span.end : end;
        written_end = span.written ? end : written_end;
    }
    PyMem_Free(spans);
    if (!apart) {
        PyErr_SetString(PyExc_ValueError,
                        "tasks: expected what is written apart from all else, found an overlap");
    }
    return apart;
}

/* What the rows are read from, one buffer or several; all of them are within it. */
static bool
get_source(Batch *batch, PyObject *given, Py_ssize_t rows, Py_ssize_t cell, Task *task)
{
    Py_ssize_t cells;
    if (PyTuple_Check(given)) {
        return get_scattered(batch, given, rows, cell, task);
    }
    return get_cells(batch, given, "src", 0, cell, &task->src, &cells)
           && rows_are_within("src", task->src_starts, task->lengths, rows, cells);
}

/* --- the three kinds of task ---------------------------------------------------------------- */

/* Turns a task as the caller passed it into what is to be done. */
typedef bool (*Reader)(Batch *batch, PyObject *given, Task *task);

static bool
read_copy(Batch *batch, PyObject *given, Task *task)
{
    enum { DST, SRC, DST_STARTS, SRC_STARTS, LENGTHS, CELL_BYTES, FIELDS };
    PyObject *fields[FIELDS];
    Py_ssize_t cell, dst_cells, rows = -1;
    if (!get_fields(given, "copy", FIELDS, fields)
        || !get_size(fields[CELL_BYTES], "cell_bytes", 1, &cell)
        || !get_cells(batch, fields[DST], "dst", PyBUF_WRITABLE, cell, &task->dst, &dst_cells)
        || !get_numbers(batch, fields[LENGTHS], "lengths", 0, &rows, &task->lengths)
        || !get_starts(batch, fields[DST_STARTS], "dst_starts", rows, &task->dst_starts)
        || !get_starts(batch, fields[SRC_STARTS], "src_starts", rows, &task->src_starts)
        || !rows_are_within("dst", task->dst_starts, task->lengths, rows, dst_cells)
        || !get_source(batch, fields[SRC], rows, cell, task)) {
        return false;
    }
    size_t bytes = 0;
    for (Py_ssize_t row = 0; row < rows; row++) {
        /* Rows of `src` may repeat. Rows of `dst` should not, but that is the caller's affair. */
        size_t size = (size_t)task->lengths[row] * (size_t)cell;
        if (size > (size_t)PY_SSIZE_T_MAX - bytes) {
            PyErr_SetString(PyExc_ValueError, "lengths: expected fewer than 2**63 bytes in all");
            return false;
        }
        bytes += size;
    }
    task->run = run_copy;
    task->bytes = bytes;
    task->chunk = CHUNK;
    task->cell = (size_t)cell;
    return true;
}

/* How pad cells are written: by memset if all bytes of the pad bits are equal, or else from a block
 * that repeats them. */
static bool
prepare_fill(Task *task, const unsigned char *bits, size_t size)
{
    task->fill = bits[0];
    for (size_t i = 1; i < size; i++) {
        task->fill = bits[i] == bits[0] ? task->fill : -1;
    }
    if (task->fill >= 0) {
        return true;
    }
    task->block_size = (task->bytes < BLOCK ? task->bytes : BLOCK) / size * size;
    task->block = PyMem_Malloc(task->block_size);
    if (!task->block) {
        PyErr_NoMemory();
        return false;
    }
    memcpy(task->block, bits, size);
    for (size_t filled = size; filled < task->block_size;) {
        size_t left = task->block_size - filled, part = filled < left ? filled : left;
        memcpy(task->block + filled, task->block, part);
        filled += part;
    }
    return true;
}

static bool
read_pad(Batch *batch, PyObject *given, Task *task)
{
    enum { DST, SRC, STARTS, LENGTHS, LEFT_PAD, WIDTH, CELL_BYTES, PAD_BITS, FIELDS };
    PyObject *fields[FIELDS];
    unsigned char *pad_bits;
    Py_ssize_t width, cell, dst_cells, bits, rows = -1;
    if (!get_fields(given, "pad", FIELDS, fields)
        || !get_size(fields[WIDTH], "width", 0, &width)
        || !get_size(fields[CELL_BYTES], "cell_bytes", 1, &cell)
        || !get_cells(batch, fields[DST], "dst", PyBUF_WRITABLE, cell, &task->dst, &dst_cells)
        || !get_cells(batch, fields[PAD_BITS], "pad_bits", 0, 1, &pad_bits, &bits)
        || !get_numbers(batch, fields[LENGTHS], "lengths", 0, &rows, &task->lengths)
        || !get_starts(batch, fields[STARTS], "starts", rows, &task->src_starts)
        || (fields[LEFT_PAD] != Py_None
            && !get_numbers(batch, fields[LEFT_PAD], "left_pad", 0, &rows, &task->left_pad))) {
        return false;
    }
    if (!task->src_starts.numbers && task->src_starts.stride < 0) {
        PyErr_SetString(PyExc_ValueError, "starts: expected numbers or a stride, found None");
        return false;
    }
    /* By division, because rows * width may overflow. */
    if (rows && width ? dst_cells % width || dst_cells / width != rows : dst_cells) {
        PyErr_Format(PyExc_ValueError, "dst: expected %zd rows of %zd cells, found %zd cells", rows,
                     width, dst_cells);
        return false;
    }
    if (bits < 1 || bits > MAX_PAD_BYTES || cell % bits) {
        PyErr_Format(PyExc_ValueError,
                     "pad_bits: expected 1 to %d bytes that divide a cell of %zd, found %zd",
                     MAX_PAD_BYTES, cell, bits);
        return false;
    }
    if (!get_source(batch, fields[SRC], rows, cell, task)) {
        return false;
    }
    for (Py_ssize_t row = 0; row < rows; row++) {
        int64_t length = task->lengths[row], left = task->left_pad ? task->left_pad[row] : 0;
        if (length > width || left < 0 || left > width - length) {
            PyErr_Format(PyExc_ValueError,
                         "dst, row %zd: expected cells within a width of %zd, found %lld from %lld "
                         "on", row, width, (long long)length, (long long)left);
            return false;
        }
    }
    if (!dst_cells) {
        return true; /* nothing to write, and width * cell may overflow */
    }
    task->run = run_pad;
    task->cell = (size_t)cell;
    task->width = (size_t)width * task->cell;
    task->bytes = (size_t)dst_cells * task->cell;
    task->chunk = CHUNK / (size_t)bits * (size_t)bits;
    return prepare_fill(task, pad_bits, (size_t)bits);
}

static bool
read_ends(Batch *batch, PyObject *given, Task *task)
{
    enum { SRC, STRIDE, WIDTH, CELL_BYTES, STARTS, LENGTHS, FIELDS };
    PyObject *fields[FIELDS];
    Py_ssize_t stride, width, cell, src_cells, rows = -1;
    if (!get_fields(given, "ends", FIELDS, fields)
        || !get_size(fields[STRIDE], "stride", 0, &stride)
        || !get_size(fields[WIDTH], "width", 1, &width)
        || !get_size(fields[CELL_BYTES], "cell_bytes", 1, &cell)
        || !get_cells(batch, fields[SRC], "src", 0, cell, &task->src, &src_cells)
        || !get_numbers(batch, fields[STARTS], "starts", PyBUF_WRITABLE, &rows, &task->row_starts)
        || !get_numbers(batch, fields[LENGTHS], "lengths", PyBUF_WRITABLE, &rows,
                        &task->row_lengths)) {
        return false;
    }
    if (!rows) {
        return true; /* nothing to measure, and width * cell may overflow */
    }
    /* By division, because rows * stride may overflow. */
    if (width > src_cells || (rows > 1 && stride > (src_cells - width) / (rows - 1))) {
        PyErr_Format(PyExc_ValueError, "src: expected %zd rows of %zd cells, one every %zd, found "
                     "%zd cells", rows, width, stride, src_cells);
        return false;
    }
    task->run = run_ends;
    task->src_starts = (Starts){NULL, stride};
    task->cell = (size_t)cell;
    task->width = (size_t)width * task->cell;
    if (task->width > (size_t)PY_SSIZE_T_MAX / (size_t)rows) {
        PyErr_SetString(PyExc_ValueError, "src: expected fewer than 2**63 bytes in all");
        return false;
    }
    task->bytes = (size_t)rows * task->width;
    task->chunk = CHUNK > task->width ? CHUNK / task->width * task->width : task->width;
    return true;
}

/* --- the functions -------------------------------------------------------------------------- */

static bool
read_tasks(Batch *batch, Reader read)
{
    for (size_t i = 0; i < batch->count; i++) {
        PyObject *given = PyTuple_GetItem(batch->given, (Py_ssize_t)i);
        Task *task = &batch->tasks[i];
        if (!PyTuple_Check(given)) {
            PyErr_Format(PyExc_TypeError, "tasks[%zu]: expected a tuple, found %R", i,
                         (PyObject *)Py_TYPE(given));
            return false;
        }
        if (!read(batch, given, task)) {
            return false;
        }
        if (task->bytes > (size_t)PY_SSIZE_T_MAX - batch->bytes) {
            PyErr_SetString(PyExc_ValueError, "tasks: expected fewer than 2**63 bytes in all");
            return false;
        }
        batch->bytes += task->bytes;
    }
    return targets_are_apart(batch);
}

/* How many buffers tasks have at most. Tuples do not change while they are read. */
static size_t
count_views(PyObject *given)
{
    size_t count = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(given); i++) {
        PyObject *task = PyTuple_GetItem(given, i);
        bool has_source = PyTuple_Check(task) && PyTuple_Size(task) > 1;
        PyObject *source = has_source ? PyTuple_GetItem(task, 1) : Py_None;
        count += MAX_VIEWS + (PyTuple_Check(source) ? (size_t)PyTuple_Size(source) : 0);
    }
    return count;
}

static PyObject *
do_batch(PyObject *const *args, Py_ssize_t nargs, const char *name, Reader read)
{
    Batch batch = {0};
    Py_ssize_t threads;
    bool done = false;
    if (nargs != 2) {
        PyErr_Format(PyExc_TypeError, "%s: expected tasks and threads, found %zd arguments", name,
                     nargs);
        return NULL;
    }
    if (!get_size(args[1], "threads", PY_SSIZE_T_MIN, &threads)) {
        return NULL;
    }
    batch.given = PySequence_Tuple(args[0]); /* a copy, which no other thread can change */
    if (!batch.given) {
        return NULL;
    }
    batch.count = (size_t)PyTuple_Size(batch.given);
    batch.tasks = PyMem_Calloc(batch.count + 1, sizeof(Task));
    batch.views = PyMem_Malloc((count_views(batch.given) + 1) * sizeof(View));
    if (!batch.tasks || !batch.views) {
        PyErr_NoMemory();
    } else if (read_tasks(&batch, read)) {
        run_without_gil(&batch, threads);
        done = true;
    }
    for (size_t i = 0; batch.tasks && i < batch.count; i++) {
        PyMem_Free(batch.tasks[i].block);
        PyMem_Free(batch.tasks[i].from);
    }
    for (size_t i = 0; i < batch.view_count; i++) {
        PyBuffer_Release(&batch.views[i].buffer);
    }
    PyMem_Free(batch.sources.ends);
    PyMem_Free(batch.tasks);
    PyMem_Free(batch.views);
    Py_DECREF(batch.given);
    return done ? Py_NewRef(Py_None) : NULL;
}

static PyObject *
kernel_copy(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    return do_batch(args, nargs, "copy", read_copy);
}

static PyObject *
kernel_pad(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    return do_batch(args, nargs, "pad", read_pad);
}

static PyObject *
kernel_ends(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    return do_batch(args, nargs, "ends", read_ends);
}

#define METHOD(name, function, task) \
    {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, \
     name "(tasks, threads, /)\n--\n\nSee jagcodec.kernels.tasks." task "."}

static PyMethodDef methods[] = {
    METHOD("copy", kernel_copy, "Copy"),
    METHOD("pad", kernel_pad, "Pad"),
    METHOD("ends", kernel_ends, "Ends"),
    {NULL, NULL, 0, NULL},
};

/* --- the module ----------------------------------------------------------------------------- */

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "jagcodec.kernels._kernel",
    .m_doc = "Copies rows of bytes from one buffer to another.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__kernel(void)
{
    return PyModuleDef_Init(&definition);
}

/* Rows of bytes, copied from one buffer to another: the compiled kernel of jagcodec.rowcopy.
 *
 * A row is a run of cells, a cell a fixed number of bytes. Nothing here knows a dtype, numpy or
 * torch: arguments are anything with the buffer protocol. A call has a list of tasks, which are the
 * columns of a batch: together they are worth threads that one of them is not. Every row of every
 * task is checked against its buffers before the first byte is written, so that no argument can
 * make this read or write outside of them. The buffers must not be changed by others during a call,
 * which runs without the GIL. There is no global state, and no thread outlives the call that
 * started it.
 */

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
    MAX_PATTERN = 16,
    BLOCK = 4096, /* bytes of repeated pattern that long pads are copied from; fits in L1 */
    SCANNED = 256, /* bytes compared at a time */
};

/* Measured on two cores: two threads are level with one at 3 MiB, and a seventh faster at 6. */
static const size_t BYTES_PER_THREAD = 2 << 20;

/* What a thread takes at a time. */
static const size_t CHUNK = 1 << 19;

/* Below this the copy is done before another thread would have woken up to the GIL. */
static const size_t BYTES_WITHOUT_GIL = 1 << 16;

/* Where a thread has come to in the rows; its chunks lie further and further on. */
typedef struct {
    size_t row;
    size_t before; /* bytes of the rows before that one */
} Cursor;

/* Where rows begin, in cells. */
typedef struct {
    const int64_t *numbers; /* one for each row; or NULL: */
    int64_t stride;         /* row i begins at i times this; or -1: the rows lie end to end */
} Starts;

/* One column. Everything is checked; sizes and places are in bytes unless said. */
typedef struct Task {
    void (*run)(const struct Task *task, Cursor *cursor, size_t begin, size_t end);
    unsigned written; /* which views are written to, a bit for each */
    size_t bytes;  /* the work, of which `run` does the part from `begin` to `end` */
    size_t chunk;  /* parts begin at multiples of this */
    size_t chunks; /* how many parts there are in this task and those before it */
    unsigned char *dst;
    const unsigned char *src;
    Starts dst_starts;
    Starts src_starts;
    const int64_t *lengths; /* in cells */
    size_t cell;
    /* of `pad` alone */
    const int64_t *leads; /* in cells; NULL: none */
    size_t width;         /* of a row of the rectangle */
    int fill;             /* the byte that the pattern repeats; or -1: */
    size_t block_size;
    unsigned char *block; /* the pattern over and over */
    /* of `ends` alone, which are written */
    int64_t *row_starts;
    int64_t *row_lengths;
} Task;

enum { DST, SRC, VIEWS = 6 }; /* buffers of a task, of which each kind has its own others */

/* What one call is to do. */
typedef struct {
    PyObject *given; /* a tuple of the tasks as they came */
    Task *tasks;
    Py_buffer *views; /* VIEWS for each task */
    size_t count;
    size_t bytes;
    size_t chunks;
    atomic_size_t next; /* the first part that no thread has taken */
} Batch;

/* The place of a row whose end-to-end place is `at`. */
static inline size_t
place(Starts starts, size_t row, size_t cell, size_t skip, size_t at)
{
    if (starts.numbers) {
        return (size_t)starts.numbers[row] * cell + skip;
    }
    return starts.stride < 0 ? at : row * (size_t)starts.stride * cell + skip;
}

/* --- the loops ------------------------------------------------------------------------------ */

/* Copies bytes `begin` to `end` of all rows, as if the rows lay end to end. */
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
            size_t to = place(task->dst_starts, row, task->cell, skip, at);
            size_t from = place(task->src_starts, row, task->cell, skip, at);
            memcpy(task->dst + to, task->src + from, size);
            at += size;
        }
    }
}

/* Fills bytes `begin` to `end` of the rectangle, `begin` being a multiple of the pattern. */
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
        cells += task->leads ? (size_t)task->leads[row] * task->cell : 0;
        size_t tail = cells + (size_t)task->lengths[row] * task->cell;
        if (at < cells) {
            size_t to = cells < stop ? cells : stop;
            fill(task, at, to);
            at = to;
        }
        if (at < tail && at < stop) {
            size_t to = tail < stop ? tail : stop;
            size_t from = place(task->src_starts, row, task->cell, at - cells, 0);
            memcpy(task->dst + at, task->src + from, to - at);
            at = to;
        }
        if (at < stop) {
            fill(task, at, stop);
            at = stop;
        }
    }
}

/* The first byte of `size` that is unlike the one `cell` bytes on; `size` if none is. */
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

/* The last byte of `size` that is unlike the one `cell` bytes on; there is one. */
static size_t
last_change(const unsigned char *bytes, size_t size, size_t cell)
{
    while (size >= SCANNED && !memcmp(bytes + size - SCANNED, bytes + size - SCANNED + cell, SCANNED)) {
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
        size_t size = task->width - task->cell; /* of what has a cell behind it */
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

/* Takes parts until there are none: a thread that the system lets wait then leaves its share to
 * the others, and rows of very different lengths keep all of them busy. */
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
    size_t useful = batch->bytes / BYTES_PER_THREAD;
    threads = useful < threads ? useful : threads;
    for (size_t i = 0; i < batch->count; i++) {
        Task *task = &batch->tasks[i];
        if (threads <= 1) {
            task->chunk = task->bytes;
        }
        batch->chunks += task->bytes / (task->chunk ? task->chunk : 1)
                         + (task->chunk && task->bytes % task->chunk);
        task->chunks = batch->chunks;
    }
    pthread_t started[MAX_THREADS];
    size_t count = 0;
    while (count + 1 < threads && count < MAX_THREADS
           && pthread_create(&started[count], NULL, run_chunks, batch) == 0) {
        count++; /* where no thread can be had, those there are do the work */
    }
    run_chunks(batch);
    while (count > 0) {
        pthread_join(started[--count], NULL);
    }
}

static void
run_without_gil(Batch *batch, Py_ssize_t threads)
{
    size_t allowed = threads > 1 ? (size_t)threads : 1;
    if (batch->bytes < BYTES_WITHOUT_GIL) {
        run(batch, allowed);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    run(batch, allowed);
    Py_END_ALLOW_THREADS
}

/* --- checks --------------------------------------------------------------------------------- */

/* Borrows a one-dimensional int64 buffer of `rows` numbers, or of any number if that is -1. */
static bool
borrow_numbers(PyObject *object, const char *name, Py_ssize_t rows, Py_buffer *view, int flags)
{
    if (PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_FORMAT | flags) < 0) {
        return false;
    }
    const char *format = view->format ? view->format : "B";
    format += *format == '@' || *format == '=' || *format == '<';
    if (view->ndim != 1 || view->itemsize != (Py_ssize_t)sizeof(int64_t)
        || (strcmp(format, "l") && strcmp(format, "q"))
        || (uintptr_t)view->buf % _Alignof(int64_t)) {
        PyErr_Format(PyExc_ValueError, "%s: expected one dim of aligned int64, found %d of '%s'",
                     name, view->ndim, view->format ? view->format : "B");
    } else if (rows >= 0 && view->shape[0] != rows) {
        PyErr_Format(PyExc_ValueError, "%s: expected %zd numbers, found %zd", name, rows,
                     view->shape[0]);
    } else {
        return true;
    }
    PyBuffer_Release(view);
    return false;
}

static bool
get_numbers(PyObject *object, const char *name, Py_ssize_t rows, Py_buffer *view)
{
    return borrow_numbers(object, name, rows, view, PyBUF_SIMPLE);
}

/* As `get_numbers`, but None is allowed; `*numbers` is then NULL. */
static bool
get_optional(PyObject *object, const char *name, Py_ssize_t rows, Py_buffer *view,
             const int64_t **numbers)
{
    if (object == Py_None) {
        return true;
    }
    if (!get_numbers(object, name, rows, view)) {
        return false;
    }
    *numbers = view->buf;
    return true;
}

/* Where rows begin: int64 numbers, a stride, or None where they lie end to end. */
static bool
get_starts(PyObject *object, const char *name, Py_ssize_t rows, Py_buffer *view, Starts *starts)
{
    *starts = (Starts){NULL, -1};
    if (!PyLong_Check(object)) {
        return get_optional(object, name, rows, view, &starts->numbers);
    }
    starts->stride = PyLong_AsLongLong(object);
    if (starts->stride < 0 && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError, "%s: expected a stride of 0 or more, found %lld", name,
                     (long long)starts->stride);
    }
    return starts->stride >= 0;
}

/* A number of cells from a number of bytes; -1 with an error set if that is not whole. */
static Py_ssize_t
cells_of(const Py_buffer *view, const char *name, Py_ssize_t cell)
{
    if (view->len % cell) {
        PyErr_Format(PyExc_ValueError, "%s: expected whole cells of %zd bytes, found %zd bytes",
                     name, cell, view->len);
        return -1;
    }
    return view->len / cell;
}

/* Whether all rows lie within `limit` cells; where they lie end to end, fill them exactly. */
static bool
rows_are_within(const char *name, Starts starts, const int64_t *lengths, Py_ssize_t rows,
                int64_t limit)
{
    int64_t total = 0; /* of a row that begins within `limit`, so nothing overflows */
    bool end_to_end = !starts.numbers && starts.stride < 0;
    for (Py_ssize_t row = 0; row < rows; row++) {
        int64_t start = starts.numbers ? starts.numbers[row] : total, length = lengths[row];
        if (length < 0 || length > limit || start < 0 || start > limit - length) {
            PyErr_Format(PyExc_ValueError,
                         "%s, row %zd: expected cells within %lld, found %lld from %lld on", name,
                         row, (long long)limit, (long long)length, (long long)start);
            return false;
        }
        if (end_to_end) {
            total = start + length;
        } else if (!starts.numbers) {
            /* Past the end is as wrong as far past it. */
            total = starts.stride > limit - start ? limit + 1 : start + starts.stride;
        }
    }
    if (end_to_end && total != limit) {
        PyErr_Format(PyExc_ValueError, "%s: expected lengths that add up to %lld cells, found %lld",
                     name, (long long)limit, (long long)total);
        return false;
    }
    return true;
}

static bool
cell_is_positive(Py_ssize_t cell)
{
    if (cell < 1) {
        PyErr_Format(PyExc_ValueError, "cell_bytes: expected 1 or more, found %zd", cell);
    }
    return cell >= 1;
}

/* --- the functions -------------------------------------------------------------------------- */

/* A task as it came -> what to do; releasing a view that was never taken does nothing. */
typedef bool (*Reader)(PyObject *given, Task *task, Py_buffer *views);

static void
end_batch(Batch *batch)
{
    for (size_t i = 0; i < batch->count; i++) {
        PyMem_Free(batch->tasks[i].block);
        for (size_t j = 0; j < VIEWS; j++) {
            PyBuffer_Release(&batch->views[i * VIEWS + j]);
        }
    }
    PyMem_Free(batch->tasks);
    PyMem_Free(batch->views);
    Py_XDECREF(batch->given);
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
    Span *spans = PyMem_Calloc(batch->count * VIEWS + 1, sizeof(Span));
    if (!spans) {
        PyErr_NoMemory();
        return false;
    }
    for (size_t i = 0; i < batch->count * VIEWS; i++) {
        const Py_buffer *view = &batch->views[i];
        if (view->len) {
            uintptr_t begin = (uintptr_t)view->buf;
            bool written = batch->tasks[i / VIEWS].written >> i % VIEWS & 1;
            spans[count++] = (Span){begin, begin + (size_t)view->len, written};
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

static PyObject *
do_batch(PyObject *args, const char *format, Reader read)
{
    Batch batch = {0};
    PyObject *tasks, *done = NULL;
    Py_ssize_t threads;
    if (!PyArg_ParseTuple(args, format, &tasks, &threads)) {
        return NULL;
    }
    batch.given = PySequence_Tuple(tasks); /* of our own: nobody can change it */
    if (!batch.given) {
        return NULL;
    }
    size_t count = (size_t)PyTuple_GET_SIZE(batch.given);
    batch.tasks = PyMem_Calloc(count ? count : 1, sizeof(Task));
    batch.views = PyMem_Calloc(count ? count * VIEWS : 1, sizeof(Py_buffer));
    if (!batch.tasks || !batch.views) {
        PyErr_NoMemory();
        goto end;
    }
    batch.count = count;
    for (size_t i = 0; i < count; i++) {
        PyObject *given = PyTuple_GET_ITEM(batch.given, i);
        Task *task = &batch.tasks[i];
        if (!PyTuple_Check(given)) {
            PyErr_Format(PyExc_TypeError, "tasks[%zu]: expected a tuple, found %s", i,
                         Py_TYPE(given)->tp_name);
            goto end;
        }
        if (!read(given, task, &batch.views[i * VIEWS])) {
            goto end;
        }
        if (task->bytes > (size_t)PY_SSIZE_T_MAX - batch.bytes) {
            PyErr_SetString(PyExc_ValueError, "tasks: expected fewer than 2**63 bytes in all");
            goto end;
        }
        batch.bytes += task->bytes;
    }
    if (!targets_are_apart(&batch)) {
        goto end;
    }
    run_without_gil(&batch, threads);
    done = Py_NewRef(Py_None);
end:
    end_batch(&batch);
    return done;
}

static bool
read_copy(PyObject *given, Task *task, Py_buffer *views)
{
    enum { DST_STARTS = SRC + 1, SRC_STARTS, LENGTHS };
    PyObject *dst_starts, *src_starts, *lengths;
    Py_ssize_t cell, dst_cells, src_cells;
    if (!PyArg_ParseTuple(given, "w*y*OOOn:copy", &views[DST], &views[SRC], &dst_starts,
                          &src_starts, &lengths, &cell)) {
        return false; /* which has released what it took */
    }
    if (!cell_is_positive(cell) || !get_numbers(lengths, "lengths", -1, &views[LENGTHS])) {
        return false;
    }
    Py_ssize_t rows = views[LENGTHS].shape[0];
    task->lengths = views[LENGTHS].buf;
    if (!get_starts(dst_starts, "dst_starts", rows, &views[DST_STARTS], &task->dst_starts)
        || !get_starts(src_starts, "src_starts", rows, &views[SRC_STARTS], &task->src_starts)
        || (dst_cells = cells_of(&views[DST], "dst", cell)) < 0
        || (src_cells = cells_of(&views[SRC], "src", cell)) < 0
        || !rows_are_within("dst", task->dst_starts, task->lengths, rows, dst_cells)
        || !rows_are_within("src", task->src_starts, task->lengths, rows, src_cells)) {
        return false;
    }
    task->run = run_copy;
    task->written = 1 << DST;
    task->chunk = CHUNK;
    task->dst = views[DST].buf;
    task->src = views[SRC].buf;
    task->cell = (size_t)cell;
    for (Py_ssize_t row = 0; row < rows; row++) {
        /* Rows of `src` may repeat, and of `dst` should not, but that is the caller's affair. */
        size_t size = (size_t)task->lengths[row] * task->cell;
        if (size > (size_t)PY_SSIZE_T_MAX - task->bytes) {
            PyErr_SetString(PyExc_ValueError, "lengths: expected fewer than 2**63 bytes in all");
            return false;
        }
        task->bytes += size;
    }
    return true;
}

static bool
read_pad(PyObject *given, Task *task, Py_buffer *views)
{
    enum { PATTERN = SRC + 1, STARTS, LENGTHS, LEADS };
    PyObject *starts, *lengths, *leads;
    Py_ssize_t width, cell, dst_cells, src_cells;
    if (!PyArg_ParseTuple(given, "w*y*OOOnny*:pad", &views[DST], &views[SRC], &starts, &lengths,
                          &leads, &width, &cell, &views[PATTERN])) {
        return false;
    }
    if (!cell_is_positive(cell) || !get_numbers(lengths, "lengths", -1, &views[LENGTHS])) {
        return false;
    }
    Py_ssize_t rows = views[LENGTHS].shape[0];
    task->lengths = views[LENGTHS].buf;
    if (!get_starts(starts, "starts", rows, &views[STARTS], &task->src_starts)
        || !get_optional(leads, "leads", rows, &views[LEADS], &task->leads)
        || (dst_cells = cells_of(&views[DST], "dst", cell)) < 0
        || (src_cells = cells_of(&views[SRC], "src", cell)) < 0) {
        return false;
    }
    if (!task->src_starts.numbers && task->src_starts.stride < 0) {
        PyErr_SetString(PyExc_ValueError, "starts: expected numbers or a stride, found None");
        return false;
    }
    /* By division, because rows * width may overflow. */
    bool fits = rows && width > 0 ? dst_cells % width == 0 && dst_cells / width == rows
                                  : width >= 0 && dst_cells == 0;
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "dst: expected %zd rows of %zd cells, found %zd cells", rows,
                     width, dst_cells);
        return false;
    }
    Py_ssize_t pattern = views[PATTERN].len;
    if (pattern < 1 || pattern > MAX_PATTERN || cell % pattern) {
        PyErr_Format(PyExc_ValueError,
                     "pattern: expected 1 to %d bytes that divide a cell of %zd, found %zd",
                     MAX_PATTERN, cell, pattern);
        return false;
    }
    if (!rows_are_within("src", task->src_starts, task->lengths, rows, src_cells)) {
        return false;
    }
    for (Py_ssize_t row = 0; row < rows; row++) {
        int64_t length = task->lengths[row], lead = task->leads ? task->leads[row] : 0;
        if (length > width || lead < 0 || lead > width - length) {
            PyErr_Format(PyExc_ValueError,
                         "dst, row %zd: expected cells within a width of %zd, found %lld from %lld "
                         "on", row, width, (long long)length, (long long)lead);
            return false;
        }
    }
    task->run = run_pad;
    task->written = 1 << DST;
    task->dst = views[DST].buf;
    task->src = views[SRC].buf;
    task->cell = (size_t)cell;
    task->width = (size_t)width * task->cell;
    task->bytes = (size_t)views[DST].len;
    task->chunk = CHUNK / (size_t)pattern * (size_t)pattern;
    const unsigned char *element = views[PATTERN].buf;
    task->fill = element[0];
    for (Py_ssize_t i = 1; i < pattern; i++) {
        task->fill = element[i] == element[0] ? task->fill : -1;
    }
    if (task->fill >= 0) {
        return true;
    }
    task->block_size = BLOCK / (size_t)pattern * (size_t)pattern;
    task->block = PyMem_Malloc(task->block_size);
    if (!task->block) {
        PyErr_NoMemory();
        return false;
    }
    memcpy(task->block, element, (size_t)pattern);
    for (size_t filled = (size_t)pattern; filled < task->block_size;) {
        size_t left = task->block_size - filled, size = filled < left ? filled : left;
        memcpy(task->block + filled, task->block, size);
        filled += size;
    }
    return true;
}

static bool
read_ends(PyObject *given, Task *task, Py_buffer *views)
{
    enum { STARTS = SRC + 1, LENGTHS };
    PyObject *starts, *lengths;
    Py_ssize_t stride, width, cell, src_cells;
    if (!PyArg_ParseTuple(given, "y*nnnOO:ends", &views[SRC], &stride, &width, &cell, &starts,
                          &lengths)) {
        return false;
    }
    if (!cell_is_positive(cell) || (src_cells = cells_of(&views[SRC], "src", cell)) < 0
        || !borrow_numbers(starts, "starts", -1, &views[STARTS], PyBUF_WRITABLE)) {
        return false;
    }
    Py_ssize_t rows = views[STARTS].shape[0];
    if (!borrow_numbers(lengths, "lengths", rows, &views[LENGTHS], PyBUF_WRITABLE)) {
        return false;
    }
    /* By division, because rows * stride may overflow. */
    if (width < 1 || stride < 0
        || (rows && (width > src_cells || (rows > 1 && stride > (src_cells - width) / (rows - 1))))) {
        PyErr_Format(PyExc_ValueError,
                     "src: expected %zd rows of %zd cells, 1 or more, every %zd, found %zd cells",
                     rows, width, stride, src_cells);
        return false;
    }
    task->run = run_ends;
    task->written = 1 << STARTS | 1 << LENGTHS;
    task->src = views[SRC].buf;
    task->src_starts = (Starts){NULL, stride};
    task->cell = (size_t)cell;
    task->width = (size_t)width * task->cell;
    task->row_starts = views[STARTS].buf;
    task->row_lengths = views[LENGTHS].buf;
    if (rows && task->width > (size_t)PY_SSIZE_T_MAX / (size_t)rows) {
        PyErr_SetString(PyExc_ValueError, "src: expected fewer than 2**63 bytes in all");
        return false;
    }
    task->bytes = (size_t)rows * task->width;
    task->chunk = CHUNK > task->width ? CHUNK / task->width * task->width : task->width;
    return true;
}

PyDoc_STRVAR(copy_doc,
"copy(tasks, threads)\n--\n\n"
"Of each task (dst, src, dst_starts, src_starts, lengths, cell_bytes) copy row i, cells\n"
"src_starts[i] on, to cells dst_starts[i] on. An int: rows begin at multiples of it; None: they\n"
"lie end to end.");

static PyObject *
rowcopy_copy(PyObject *Py_UNUSED(module), PyObject *args)
{
    return do_batch(args, "On:copy", read_copy);
}

PyDoc_STRVAR(pad_doc,
"pad(tasks, threads)\n--\n\n"
"Of each task (dst, src, starts, lengths, leads, width, cell_bytes, pattern) write row i of a\n"
"rectangle: leads[i] pad cells (None: 0), lengths[i] cells of src from starts[i] on (an int: from\n"
"multiples of it on), and pad cells up to width. A pad cell is the pattern over and over.");

static PyObject *
rowcopy_pad(PyObject *Py_UNUSED(module), PyObject *args)
{
    return do_batch(args, "On:pad", read_pad);
}

PyDoc_STRVAR(ends_doc,
"ends(tasks, threads)\n--\n\n"
"Of each task (src, stride, width, cell_bytes, starts, lengths) write to starts[i] how many equal\n"
"cells row i of width cells begins with, and to lengths[i] how many there are from there to the\n"
"equal cells that it ends with: 0 and 0 where all are equal. Row i begins at cell i * stride.");

static PyObject *
rowcopy_ends(PyObject *Py_UNUSED(module), PyObject *args)
{
    return do_batch(args, "On:ends", read_ends);
}

PyDoc_STRVAR(sums_doc,
"sums(lengths, offsets)\n--\n\n"
"Write the N + 1 sums of N lengths, from 0 on, to offsets. Returns the least and the greatest\n"
"length, 0 without any. Sums past 2**63 wrap around.");

static PyObject *
rowcopy_sums(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *lengths, *offsets, *done = NULL;
    Py_buffer source = {0}, target = {0};
    if (!PyArg_ParseTuple(args, "OO:sums", &lengths, &offsets)
        || !get_numbers(lengths, "lengths", -1, &source)) {
        return NULL;
    }
    Py_ssize_t rows = source.shape[0];
    if (borrow_numbers(offsets, "offsets", rows + 1, &target, PyBUF_WRITABLE)) {
        const int64_t *numbers = source.buf;
        int64_t *sums = target.buf, low = rows ? numbers[0] : 0, high = low;
        uint64_t sum = 0;
        sums[0] = 0;
        for (Py_ssize_t row = 0; row < rows; row++) {
            int64_t length = numbers[row];
            low = length < low ? length : low;
            high = length > high ? length : high;
            sum += (uint64_t)length;
            sums[row + 1] = (int64_t)sum;
        }
        done = Py_BuildValue("LL", (long long)low, (long long)high);
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    return done;
}

PyDoc_STRVAR(differences_doc,
"differences(offsets, lengths)\n--\n\n"
"Write the N differences of N + 1 offsets to lengths. Returns the least and the greatest of them,\n"
"0 without any, and whether no offset is below the one before it: otherwise they may have wrapped\n"
"around.");

static PyObject *
rowcopy_differences(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *offsets, *lengths, *done = NULL;
    Py_buffer source = {0}, target = {0};
    if (!PyArg_ParseTuple(args, "OO:differences", &offsets, &lengths)
        || !borrow_numbers(lengths, "lengths", -1, &target, PyBUF_WRITABLE)) {
        return NULL;
    }
    Py_ssize_t rows = target.shape[0];
    if (get_numbers(offsets, "offsets", rows + 1, &source)) {
        const int64_t *numbers = source.buf;
        int64_t *differences = target.buf, low = 0, high = 0;
        bool rising = true;
        for (Py_ssize_t row = 0; row < rows; row++) {
            int64_t before = numbers[row], after = numbers[row + 1];
            int64_t length = (int64_t)((uint64_t)after - (uint64_t)before);
            low = row && low < length ? low : length;
            high = row && high > length ? high : length;
            rising = rising && after >= before;
            differences[row] = length;
        }
        done = Py_BuildValue("LLO", (long long)low, (long long)high, rising ? Py_True : Py_False);
    }
    PyBuffer_Release(&source);
    PyBuffer_Release(&target);
    return done;
}

/* --- the module ----------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"copy", rowcopy_copy, METH_VARARGS, copy_doc},
    {"pad", rowcopy_pad, METH_VARARGS, pad_doc},
    {"ends", rowcopy_ends, METH_VARARGS, ends_doc},
    {"sums", rowcopy_sums, METH_VARARGS, sums_doc},
    {"differences", rowcopy_differences, METH_VARARGS, differences_doc},
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
    .m_name = "jagcodec.rowcopy._kernel",
    .m_doc = "Rows of bytes, copied from one buffer to another.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__kernel(void)
{
    return PyModuleDef_Init(&definition);
}

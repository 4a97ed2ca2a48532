/* Rows of bytes, copied from one buffer to another: the compiled kernel of jagcodec.rowcopy.
 *
 * A row is a run of cells, a cell a fixed number of bytes. Nothing here knows a dtype, numpy or
 * torch: arguments are anything with the buffer protocol. Every row is checked against both
 * buffers before the first byte is written, so that no argument can make this read or write
 * outside of them. The buffers must not be changed by others during a call, which runs without
 * the GIL. There is no global state, and no thread outlives the call that started it.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {
    MAX_THREADS = 64,
    MAX_PATTERN = 16,
    BLOCK = 4096, /* bytes of repeated pattern that long pads are copied from; fits in L1 */
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

/* What one call is to do. Everything is checked; sizes and places are in bytes unless said. */
typedef struct Job {
    void (*run)(const struct Job *job, Cursor *cursor, size_t begin, size_t end);
    size_t bytes;       /* the work, of which `run` does the part from `begin` to `end` */
    size_t chunk;       /* parts begin at multiples of this */
    atomic_size_t next; /* the first part that no thread has taken */
    unsigned char *dst;
    const unsigned char *src;
    const int64_t *dst_starts; /* in cells; NULL: the rows lie end to end */
    const int64_t *src_starts; /* in cells; NULL: the rows lie end to end */
    const int64_t *lengths;    /* in cells */
    size_t cell;
    /* of `pad` alone */
    const int64_t *leads; /* in cells; NULL: none */
    size_t width;         /* of a row of the rectangle */
    bool uniform;         /* all bytes of the pattern are equal */
    size_t block_size;
    unsigned char block[BLOCK]; /* the pattern over and over */
} Job;

/* --- the loops ------------------------------------------------------------------------------ */

/* Copies bytes `begin` to `end` of all rows, as if the rows lay end to end. */
static void
run_copy(const Job *job, Cursor *cursor, size_t begin, size_t end)
{
    size_t row = cursor->row, before = cursor->before;
    while (before + (size_t)job->lengths[row] * job->cell <= begin) {
        before += (size_t)job->lengths[row++] * job->cell;
    }
    *cursor = (Cursor){row, before};
    size_t skip = begin - before; /* of the first row */
    for (size_t at = begin; at < end; row++, skip = 0) {
        size_t size = (size_t)job->lengths[row] * job->cell - skip;
        if (size > end - at) {
            size = end - at;
        }
        if (size) {
            size_t to = job->dst_starts ? (size_t)job->dst_starts[row] * job->cell + skip : at;
            size_t from = job->src_starts ? (size_t)job->src_starts[row] * job->cell + skip : at;
            memcpy(job->dst + to, job->src + from, size);
            at += size;
        }
    }
}

/* Fills bytes `begin` to `end` of the rectangle, `begin` being a multiple of the pattern. */
static void
fill(const Job *job, size_t begin, size_t end)
{
    if (job->uniform) {
        memset(job->dst + begin, job->block[0], end - begin);
        return;
    }
    while (begin < end) {
        size_t size = end - begin < job->block_size ? end - begin : job->block_size;
        memcpy(job->dst + begin, job->block, size);
        begin += size;
    }
}

/* Writes bytes `begin` to `end` of the rectangle: pads and cells of each row, in one pass. */
static void
run_pad(const Job *job, Cursor *Py_UNUSED(cursor), size_t begin, size_t end)
{
    size_t row = begin / job->width;
    for (size_t at = begin; at < end; row++) {
        size_t cells = row * job->width;
        size_t stop = cells + job->width < end ? cells + job->width : end;
        cells += job->leads ? (size_t)job->leads[row] * job->cell : 0;
        size_t tail = cells + (size_t)job->lengths[row] * job->cell;
        if (at < cells) {
            size_t to = cells < stop ? cells : stop;
            fill(job, at, to);
            at = to;
        }
        if (at < tail && at < stop) {
            size_t to = tail < stop ? tail : stop;
            size_t from = (size_t)job->src_starts[row] * job->cell + (at - cells);
            memcpy(job->dst + at, job->src + from, to - at);
            at = to;
        }
        if (at < stop) {
            fill(job, at, stop);
            at = stop;
        }
    }
}

/* --- threads -------------------------------------------------------------------------------- */

/* Takes chunks until there are none: a thread that the system lets wait then leaves its share to
 * the others, and rows of very different lengths keep all of them busy. */
static void *
run_chunks(void *argument)
{
    Job *job = argument;
    Cursor cursor = {0, 0};
    for (;;) {
        size_t begin = atomic_fetch_add(&job->next, job->chunk);
        if (begin >= job->bytes) {
            return NULL;
        }
        size_t left = job->bytes - begin;
        job->run(job, &cursor, begin, begin + (left < job->chunk ? left : job->chunk));
    }
}

static void
run(Job *job, size_t threads)
{
    size_t useful = job->bytes / BYTES_PER_THREAD;
    threads = useful < threads ? useful : threads;
    if (threads <= 1) {
        job->chunk = job->bytes;
    }
    pthread_t started[MAX_THREADS];
    size_t count = 0;
    while (count + 1 < threads && count < MAX_THREADS
           && pthread_create(&started[count], NULL, run_chunks, job) == 0) {
        count++; /* where no thread can be had, those there are do the work */
    }
    run_chunks(job);
    while (count > 0) {
        pthread_join(started[--count], NULL);
    }
}

static void
run_without_gil(Job *job, Py_ssize_t threads)
{
    size_t allowed = threads > 1 ? (size_t)threads : 1;
    if (job->bytes < BYTES_WITHOUT_GIL) {
        run(job, allowed);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    run(job, allowed);
    Py_END_ALLOW_THREADS
}

/* --- checks --------------------------------------------------------------------------------- */

/* Borrows a one-dimensional int64 buffer of `rows` numbers, or of any number if that is -1. */
static bool
get_numbers(PyObject *object, const char *name, Py_ssize_t rows, Py_buffer *view)
{
    if (PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_FORMAT) < 0) {
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
        PyErr_Format(PyExc_ValueError, "%s: expected %zd rows like lengths, found %zd", name, rows,
                     view->shape[0]);
    } else {
        return true;
    }
    PyBuffer_Release(view);
    return false;
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

static bool
buffers_are_apart(const Py_buffer *dst, const Py_buffer *src)
{
    uintptr_t d = (uintptr_t)dst->buf, s = (uintptr_t)src->buf;
    if (dst->len && src->len && d < s + (size_t)src->len && s < d + (size_t)dst->len) {
        PyErr_SetString(PyExc_ValueError, "dst: expected memory apart from src, found an overlap");
        return false;
    }
    return true;
}

/* Whether all rows lie within `limit` cells; where they lie end to end, fill them exactly. */
static bool
rows_are_within(const char *name, const int64_t *starts, const int64_t *lengths, Py_ssize_t rows,
                int64_t limit)
{
    int64_t total = 0; /* never above `limit`, so nothing overflows */
    for (Py_ssize_t row = 0; row < rows; row++) {
        int64_t start = starts ? starts[row] : total, length = lengths[row];
        if (length < 0 || length > limit || start < 0 || start > limit - length) {
            PyErr_Format(PyExc_ValueError,
                         "%s, row %zd: expected cells within %lld, found %lld from %lld on", name,
                         row, (long long)limit, (long long)length, (long long)start);
            return false;
        }
        total = starts ? 0 : start + length;
    }
    if (!starts && total != limit) {
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

/* Releasing a view that was never taken does nothing. */
static void
release(Py_buffer *views, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        PyBuffer_Release(&views[i]);
    }
}

/* --- the functions -------------------------------------------------------------------------- */

PyDoc_STRVAR(copy_doc,
"copy(dst, src, dst_starts, src_starts, lengths, cell_bytes, threads)\n--\n\n"
"Copy row i, cells src_starts[i] on, to cells dst_starts[i] on; None: rows lie end to end.");

static PyObject *
rowcopy_copy(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { DST, SRC, DST_STARTS, SRC_STARTS, LENGTHS, VIEWS };
    Py_buffer views[VIEWS] = {0};
    PyObject *dst_starts, *src_starts, *lengths, *done = NULL;
    Py_ssize_t cell, threads, dst_cells, src_cells;
    Job job = {.run = run_copy, .chunk = CHUNK};
    if (!PyArg_ParseTuple(args, "w*y*OOOnn:copy", &views[DST], &views[SRC], &dst_starts,
                          &src_starts, &lengths, &cell, &threads)) {
        return NULL; /* which has released what it took */
    }
    if (!cell_is_positive(cell) || !get_numbers(lengths, "lengths", -1, &views[LENGTHS])) {
        goto end;
    }
    Py_ssize_t rows = views[LENGTHS].shape[0];
    job.lengths = views[LENGTHS].buf;
    if (!get_optional(dst_starts, "dst_starts", rows, &views[DST_STARTS], &job.dst_starts)
        || !get_optional(src_starts, "src_starts", rows, &views[SRC_STARTS], &job.src_starts)
        || (dst_cells = cells_of(&views[DST], "dst", cell)) < 0
        || (src_cells = cells_of(&views[SRC], "src", cell)) < 0
        || !buffers_are_apart(&views[DST], &views[SRC])
        || !rows_are_within("dst", job.dst_starts, job.lengths, rows, dst_cells)
        || !rows_are_within("src", job.src_starts, job.lengths, rows, src_cells)) {
        goto end;
    }
    job.dst = views[DST].buf;
    job.src = views[SRC].buf;
    job.cell = (size_t)cell;
    for (Py_ssize_t row = 0; row < rows; row++) {
        /* Rows of `src` may repeat, and of `dst` should not, but that is the caller's affair. */
        size_t size = (size_t)job.lengths[row] * job.cell;
        if (size > (size_t)PY_SSIZE_T_MAX - job.bytes) {
            PyErr_SetString(PyExc_ValueError, "lengths: expected fewer than 2**63 bytes in all");
            goto end;
        }
        job.bytes += size;
    }
    run_without_gil(&job, threads);
    done = Py_NewRef(Py_None);
end:
    release(views, VIEWS);
    return done;
}

PyDoc_STRVAR(pad_doc,
"pad(dst, src, starts, lengths, leads, width, cell_bytes, pattern, threads)\n--\n\n"
"Write row i of a rectangle: leads[i] pad cells (None: 0), lengths[i] cells of src from\n"
"starts[i] on, and pad cells up to width. A pad cell is the pattern over and over.");

static PyObject *
rowcopy_pad(PyObject *Py_UNUSED(module), PyObject *args)
{
    enum { DST, SRC, PATTERN, STARTS, LENGTHS, LEADS, VIEWS };
    Py_buffer views[VIEWS] = {0};
    PyObject *starts, *lengths, *leads, *done = NULL;
    Py_ssize_t width, cell, threads, dst_cells, src_cells;
    Job job = {.run = run_pad};
    if (!PyArg_ParseTuple(args, "w*y*OOOnny*n:pad", &views[DST], &views[SRC], &starts, &lengths,
                          &leads, &width, &cell, &views[PATTERN], &threads)) {
        return NULL;
    }
    if (!cell_is_positive(cell) || !get_numbers(lengths, "lengths", -1, &views[LENGTHS])) {
        goto end;
    }
    Py_ssize_t rows = views[LENGTHS].shape[0];
    job.lengths = views[LENGTHS].buf;
    if (!get_numbers(starts, "starts", rows, &views[STARTS])
        || !get_optional(leads, "leads", rows, &views[LEADS], &job.leads)
        || (dst_cells = cells_of(&views[DST], "dst", cell)) < 0
        || (src_cells = cells_of(&views[SRC], "src", cell)) < 0
        || !buffers_are_apart(&views[DST], &views[SRC])) {
        goto end;
    }
    job.src_starts = views[STARTS].buf;
    /* By division, because rows * width may overflow. */
    bool fits = rows && width > 0 ? dst_cells % width == 0 && dst_cells / width == rows
                                  : width >= 0 && dst_cells == 0;
    if (!fits) {
        PyErr_Format(PyExc_ValueError, "dst: expected %zd rows of %zd cells, found %zd cells", rows,
                     width, dst_cells);
        goto end;
    }
    Py_ssize_t pattern = views[PATTERN].len;
    if (pattern < 1 || pattern > MAX_PATTERN || cell % pattern) {
        PyErr_Format(PyExc_ValueError,
                     "pattern: expected 1 to %d bytes that divide a cell of %zd, found %zd",
                     MAX_PATTERN, cell, pattern);
        goto end;
    }
    if (!rows_are_within("src", job.src_starts, job.lengths, rows, src_cells)) {
        goto end;
    }
    for (Py_ssize_t row = 0; row < rows; row++) {
        int64_t length = job.lengths[row], lead = job.leads ? job.leads[row] : 0;
        if (length > width || lead < 0 || lead > width - length) {
            PyErr_Format(PyExc_ValueError,
                         "dst, row %zd: expected cells within a width of %zd, found %lld from %lld "
                         "on", row, width, (long long)length, (long long)lead);
            goto end;
        }
    }
    job.dst = views[DST].buf;
    job.src = views[SRC].buf;
    job.cell = (size_t)cell;
    job.width = (size_t)width * job.cell;
    job.bytes = (size_t)views[DST].len;
    job.chunk = CHUNK / (size_t)pattern * (size_t)pattern;
    job.block_size = BLOCK / (size_t)pattern * (size_t)pattern;
    const unsigned char *element = views[PATTERN].buf;
    job.uniform = true;
    for (Py_ssize_t i = 0; i < pattern; i++) {
        job.uniform = job.uniform && element[i] == element[0];
    }
    memcpy(job.block, element, (size_t)pattern);
    for (size_t filled = (size_t)pattern; !job.uniform && filled < job.block_size;) {
        size_t size = filled < job.block_size - filled ? filled : job.block_size - filled;
        memcpy(job.block + filled, job.block, size);
        filled += size;
    }
    run_without_gil(&job, threads);
    done = Py_NewRef(Py_None);
end:
    release(views, VIEWS);
    return done;
}

/* --- the module ----------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"copy", rowcopy_copy, METH_VARARGS, copy_doc},
    {"pad", rowcopy_pad, METH_VARARGS, pad_doc},
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
    .m_name = "jagcodec.rowcopy._compiled",
    .m_doc = "Rows of bytes, copied from one buffer to another.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__compiled(void)
{
    return PyModuleDef_Init(&definition);
}

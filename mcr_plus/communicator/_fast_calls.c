/* Repeated calls without Python in between: the optional counterpart of `Operations._call`.
 *
 * A `FastCalls` keeps the operations of one group by their call: name, tensors (dtype, shape; contiguous, on the
 * CPU, without a gradient or a lazy negation), lists of equal tensors that are adjacent in memory, and the other
 * arguments. A call that it knows runs the operation's
 * function, or, for a small synchronous operation over shared memory, the compiled kernel itself (`NativeRun`);
 * for any other call it returns NotImplemented. Tensors are read through DLPack's exchange API
 * (`__dlpack_c_exchange_api__`, DLPack 1.3), so the module needs no header of torch and fits all its versions.
 *
 * The GIL is held throughout: kernels of a `NativeRun` return within microseconds, and no other thread can be
 * in the middle of an operation of the work queue while that queue is empty. Messages, which any thread may issue
 * or move, run under the engine's lock, until Python has taken over those that are not complete.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#ifdef Py_GIL_DISABLED
#error "needs the GIL; calls of free-threaded Python stay in Python"
#endif

/* --- DLPack 1.x, as specified in dlpack.h: only what is read ------------------------------------------- */

typedef struct { int32_t device_type, device_id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;
typedef struct {
    struct { uint32_t major, minor; } version;
    void *prev_api;
    void *managed_tensor_allocator, *managed_tensor_from_py_object, *managed_tensor_to_py_object;
    int (*dltensor_from_py_object)(void *, DLTensor *);
    void *current_work_stream;
} DLPackExchangeAPI;

enum { CPU = 1, MOST_DIMS = 6, MOST_TENSORS = 2, MOST_ARGUMENTS = 8, MOST_CALLS = 1024, BUCKETS = 256 };

static PyTypeObject *tensor_type;
static const DLPackExchangeAPI *api;
static PyGetSetDef *requires_grad;
static PyCFunction is_neg;
static PyObject *name_deferred, *name_calm, *name_relay, *name_thread, *name_sequence, *name_acquire, *name_release;

typedef struct {
    DLDataType dtype;
    int32_t ndim;
    int64_t shape[MOST_DIMS];
    Py_ssize_t parts; /* tensors of a list, or 0 for a tensor */
    int64_t nbytes;
    char *data;
} Facts;

/* Read a tensor; return 0 if it is one for the slow path. Runs Python code in a TorchFunctionMode. */
static int read_tensor(PyObject *object, Facts *facts)
{
    if (Py_TYPE(object) != tensor_type)
        return 0;
    PyObject *flag = requires_grad->get(object, requires_grad->closure);
    int special = flag != Py_False;
    Py_XDECREF(flag);
    if (!special) {
        flag = is_neg(object, NULL);
        special = flag != Py_False;
        Py_XDECREF(flag);
    }
    DLTensor tensor;
    if (special || api->dltensor_from_py_object(object, &tensor) != 0) {
        PyErr_Clear();
        return 0;
    }
    if (tensor.device.device_type != CPU || tensor.ndim > MOST_DIMS)
        return 0;
    int64_t stride = 1;
    for (int32_t dim = tensor.ndim - 1; dim >= 0; dim--) {
        if (tensor.strides != NULL && tensor.shape[dim] != 1 && tensor.strides[dim] != stride)
            return 0;
        stride *= tensor.shape[dim];
        facts->shape[dim] = tensor.shape[dim];
    }
    facts->dtype = tensor.dtype;
    facts->ndim = tensor.ndim;
    facts->parts = 0;
    facts->nbytes = stride * ((tensor.dtype.bits * tensor.dtype.lanes + 7) / 8);
    facts->data = (char *)tensor.data + tensor.byte_offset;
    return stride > 0 && tensor.data != NULL;
}

static int is_value(PyObject *object)
{
    return Py_TYPE(object) == tensor_type || PyList_CheckExact(object) || PyTuple_CheckExact(object);
}

static int same_facts(const Facts *one, const Facts *other)
{
    return one->ndim == other->ndim && one->parts == other->parts && memcmp(&one->dtype, &other->dtype, sizeof(DLDataType)) == 0
        && memcmp(one->shape, other->shape, one->ndim * sizeof(int64_t)) == 0;
}

/* Read a tensor, or a list of equal tensors that lie one after the other, as `read_tensor`. */
static int read_value(PyObject *object, Facts *facts)
{
    if (Py_TYPE(object) == tensor_type)
        return read_tensor(object, facts);
    if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object))
        return 0;
    PyObject *tensors = PySequence_Tuple(object); /* the list may change while tensors are read */
    int fits = tensors != NULL && PyTuple_GET_SIZE(tensors) > 0 && read_tensor(PyTuple_GET_ITEM(tensors, 0), facts);
    Py_ssize_t parts = fits ? PyTuple_GET_SIZE(tensors) : 0;
    for (Py_ssize_t index = 1; fits && index < parts; index++) {
        Facts next;
        fits = read_tensor(PyTuple_GET_ITEM(tensors, index), &next) && same_facts(facts, &next)
            && next.data == facts->data + index * facts->nbytes;
    }
    PyErr_Clear();
    Py_XDECREF(tensors);
    if (fits) {
        facts->parts = parts;
        facts->nbytes *= parts;
    }
    return fits;
}

/* --- small synchronous operations over shared memory ---------------------------------------------------- */

typedef int64_t (*Begin)(int64_t *state, int64_t source, int64_t target);
typedef int64_t (*Advance)(int64_t *state, int64_t patient);

typedef struct {
    PyObject_HEAD
    Begin begin;
    Advance advance;
    int polls;         /* calls of `advance` before Python waits, which may sleep */
    int64_t *words;    /* the operation's state */
    uint64_t *counter; /* of the group's board */
    int64_t *active;   /* a number that must be 0; or NULL */
    int64_t shift;     /* source - target where they may overlap; INT64_MIN: nowhere */
    int reads, writes;
    PyObject *running; /* the work queue: a deque; for messages the list of deferred ones */
    PyObject *lock;    /* held for messages; or None */
    PyObject *operation, *group, *waiting, *remember, *place, *signature;
    PyObject *take; /* (source, target, tensors) -> a function that waits for an operation that has begun */
    PyObject *retain; /* (the function): keep the operation in flight */
    PyObject *keep;   /* owner of `words` */
    PyObject *fixed;  /* of a persistent operation: its tensors, output first; or NULL */
    PyObject *otherwise; /* () */
    char *places[MOST_TENSORS];
} NativeRun;

/* Return whether an attribute is an object, which is immortal or held by its owner; -1 after an error. */
static int attribute_is(PyObject *owner, PyObject *name, PyObject *value)
{
    PyObject *found = PyObject_GetAttr(owner, name);
    if (found == NULL)
        return -1;
    Py_DECREF(found);
    return found == value;
}

/* Return whether no operation is in progress that may come first. */
static int is_idle(const NativeRun *self)
{
    return Py_SIZE(self->running) == 0 && (self->active == NULL || *self->active == 0);
}

/* Return whether the operation may run now: by this thread, in an open group, behind no other; -1 after an error. */
static int is_ready(NativeRun *self)
{
    if (!is_idle(self))
        return 0;
    PyObject *thread = PyObject_GetAttr(self->group, name_thread);
    if (thread == NULL)
        return -1;
    unsigned long ident = PyLong_AsUnsignedLong(thread);
    Py_DECREF(thread);
    if (ident != PyThread_get_thread_ident()) {
        PyErr_Clear();
        return 0;
    }
    return attribute_is(self->operation, name_deferred, Py_False);
}

enum { BEGUN = 2 };

/* Return 1 if the operation is complete, BEGUN, 0 if Python must run it, -1 after an error. */
static int run_now(NativeRun *self, int64_t source, int64_t target)
{
    int is_message = PyTuple_GET_SIZE(self->place) != 0;
    PyObject *note = PyTuple_New(3 + is_message); /* first: it may collect garbage, whose finalizers may do anything */
    if (note == NULL)
        return -1;
    int ready = is_ready(self);
    if (ready <= 0) {
        Py_DECREF(note);
        return ready;
    }
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    PyObject *number = NULL, *done = NULL;
    PyObject *time = PyLong_FromLongLong((long long)now.tv_sec * 1000000000LL + now.tv_nsec);
    PyTuple_SET_ITEM(note, 1 + is_message, Py_NewRef(self->signature));
    PyTuple_SET_ITEM(note, 2 + is_message, time);
    if (is_message) /* has no number in the group's order */
        for (int index = 0; index < 2; index++)
            PyTuple_SET_ITEM(note, index, Py_NewRef(PyTuple_GET_ITEM(self->place, index)));
    else
        PyTuple_SET_ITEM(note, 0, number = PyLong_FromUnsignedLongLong(*self->counter + 1));
    if (time != NULL
        && (is_message || (number != NULL && PyObject_SetAttr(self->group, name_sequence, number) == 0)))
        done = PyObject_CallOneArg(self->remember, note);
    Py_DECREF(note);
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    *self->counter += !is_message;
    int complete = self->begin(self->words, source, target) != 0;
    for (int poll = 0; poll < self->polls && !complete; poll++)
        complete = self->advance(self->words, 1) != 0;
    if (!complete)
        return BEGUN;
    int calm = attribute_is(self->waiting, name_calm, Py_True);
    if (calm == 0) {
        done = PyObject_CallMethodNoArgs(self->waiting, name_relay);
        Py_XDECREF(done);
        return done == NULL ? -1 : 1;
    }
    return calm;
}

/* Release the lock; keeps the error that is set. */
static void unlock(NativeRun *self)
{
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject *done = PyObject_CallMethodNoArgs(self->lock, name_release);
    Py_XDECREF(done);
    PyErr_Restore(kind, value, trace);
}

/* Let Python take an operation over, release the lock, and wait. After an interrupt the operation stays in flight. */
static int resume(NativeRun *self, PyObject *const *tensors, int count, int64_t source, int64_t target)
{
    PyObject *held = PyTuple_New(count), *rest, *done, *kind = NULL, *value = NULL, *trace = NULL;
    for (int index = 0; held != NULL && index < count; index++) {
        PyObject *each = tensors[index]; /* of a list its tensors, since a list may change */
        each = PyList_CheckExact(each) ? PySequence_Tuple(each) : Py_NewRef(each);
        if (each == NULL) { /* no memory: peers still need the operation */
            PyErr_Clear();
            each = Py_NewRef(tensors[index]);
        }
        PyTuple_SET_ITEM(held, index, each);
    }
    rest = held == NULL ? NULL : PyObject_CallFunction(self->take, "LLO", (long long)source, (long long)target, held);
    if (held != NULL && rest == NULL && is_idle(self)) { /* interrupted; peers depend on the operation */
        PyErr_Fetch(&kind, &value, &trace);
        rest = PyObject_CallFunction(self->take, "LLO", (long long)source, (long long)target, held);
    }
    Py_XDECREF(held);
    if (self->lock != Py_None)
        unlock(self);
    done = rest == NULL || kind != NULL ? NULL : PyObject_CallNoArgs(rest);
    if (done == NULL && rest != NULL && (kind != NULL || !PyErr_ExceptionMatches(PyExc_Exception))) {
        if (kind == NULL)
            PyErr_Fetch(&kind, &value, &trace);
        PyObject *kept = PyObject_CallOneArg(self->retain, rest);
        Py_XDECREF(kept);
    }
    if (kind != NULL)
        PyErr_Restore(kind, value, trace);
    Py_XDECREF(rest);
    Py_XDECREF(done);
    return done == NULL ? -1 : 1;
}

/* Return 1 if the operation is complete, 0 if Python must run it, -1 after an error. */
static int native_run(NativeRun *self, PyObject *const *tensors, const Facts *facts, int count)
{
    int64_t target = self->writes ? (int64_t)facts[0].data : 0;
    int64_t source = count == 2 ? (int64_t)facts[1].data : self->reads ? (int64_t)facts[0].data : target;
    int locks = self->lock != Py_None;
    if (locks) {
        PyObject *done = PyObject_CallMethodOneArg(self->lock, name_acquire, Py_False);
        Py_XDECREF(done); /* a bool */
        if (done != Py_True) /* another thread is inside the engine */
            return done == NULL ? -1 : 0;
    }
    int state = run_now(self, source, target);
    if (state == BEGUN)
        return resume(self, tensors, count, source, target);
    if (locks)
        unlock(self);
    return state;
}

static int native_init(NativeRun *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"begin", "advance", "polls", "words", "counter", "active", "shift", "reads", "writes", "running", "lock", "operation",
                            "group", "waiting", "remember", "place", "signature", "take", "retain", "keep", NULL};
    unsigned long long begin, advance, words, counter, active;
    long long shift;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "KKiKKKLppOOOOOOO!OOOO:NativeRun", names, &begin, &advance, &self->polls, &words, &counter, &active, &shift,
            &self->reads, &self->writes, &self->running, &self->lock, &self->operation, &self->group, &self->waiting,
            &self->remember, &PyTuple_Type, &self->place, &self->signature, &self->take, &self->retain, &self->keep))
        return -1;
    self->begin = (Begin)(uintptr_t)begin;
    self->advance = (Advance)(uintptr_t)advance;
    self->words = (int64_t *)(uintptr_t)words;
    self->counter = (uint64_t *)(uintptr_t)counter;
    self->active = (int64_t *)(uintptr_t)active;
    self->shift = shift;
    PyObject *held[] = {self->running, self->lock, self->operation, self->group, self->waiting, self->remember,
                        self->place, self->signature, self->take, self->retain, self->keep};
    for (size_t index = 0; index < sizeof(held) / sizeof(*held); index++)
        Py_INCREF(held[index]);
    return 0;
}

/* fix(otherwise, tensors, addresses): make a call without arguments run the operation on these tensors */
static PyObject *native_fix(NativeRun *self, PyObject *args)
{
    PyObject *otherwise, *tensors, *addresses;
    if (!PyArg_ParseTuple(args, "OO!O!:fix", &otherwise, &PyTuple_Type, &tensors, &PyTuple_Type, &addresses))
        return NULL;
    if (PyTuple_GET_SIZE(tensors) > MOST_TENSORS || PyTuple_GET_SIZE(tensors) != PyTuple_GET_SIZE(addresses))
        return PyErr_Format(PyExc_ValueError, "expected up to %d tensors and their addresses", MOST_TENSORS);
    for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(tensors); index++)
        self->places[index] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(addresses, index));
    if (PyErr_Occurred())
        return NULL;
    Py_XSETREF(self->fixed, Py_NewRef(tensors));
    Py_XSETREF(self->otherwise, Py_NewRef(otherwise));
    Py_RETURN_NONE;
}

static PyObject *native_call(NativeRun *self, PyObject *args, PyObject *kwargs)
{
    if (self->fixed == NULL || PyTuple_GET_SIZE(args) || (kwargs != NULL && PyDict_GET_SIZE(kwargs)))
        return PyErr_Format(PyExc_TypeError, "NativeRun: call it without arguments, after fix()");
    int count = (int)PyTuple_GET_SIZE(self->fixed);
    Facts facts[MOST_TENSORS];
    PyObject *tensors[MOST_TENSORS];
    for (int index = 0; index < count; index++) {
        facts[index].data = self->places[index];
        tensors[index] = PyTuple_GET_ITEM(self->fixed, index);
    }
    Py_INCREF((PyObject *)self);
    int state = native_run(self, tensors, facts, count);
    PyObject *result = state > 0 ? Py_NewRef(Py_None) : state ? NULL : PyObject_CallNoArgs(self->otherwise);
    Py_DECREF((PyObject *)self);
    return result;
}

static PyMethodDef native_methods[] = {
    {"fix", (PyCFunction)native_fix, METH_VARARGS,
     "fix(otherwise, tensors, addresses)\n--\n\nMake a call without arguments run the operation on these tensors, "
     "output first; `otherwise()` is called where Python must run it."},
    {NULL},
};

static int native_traverse(NativeRun *self, visitproc visit, void *arg)
{
    Py_VISIT(self->running);
    Py_VISIT(self->lock);
    Py_VISIT(self->operation);
    Py_VISIT(self->group);
    Py_VISIT(self->waiting);
    Py_VISIT(self->remember);
    Py_VISIT(self->place);
    Py_VISIT(self->signature);
    Py_VISIT(self->take);
    Py_VISIT(self->retain);
    Py_VISIT(self->keep);
    Py_VISIT(self->fixed);
    Py_VISIT(self->otherwise);
    return 0;
}

static int native_clear(NativeRun *self)
{
    Py_CLEAR(self->running);
    Py_CLEAR(self->lock);
    Py_CLEAR(self->operation);
    Py_CLEAR(self->group);
    Py_CLEAR(self->waiting);
    Py_CLEAR(self->remember);
    Py_CLEAR(self->place);
    Py_CLEAR(self->signature);
    Py_CLEAR(self->take);
    Py_CLEAR(self->retain);
    Py_CLEAR(self->keep);
    Py_CLEAR(self->fixed);
    Py_CLEAR(self->otherwise);
    return 0;
}

static void native_dealloc(NativeRun *self)
{
    PyObject_GC_UnTrack(self);
    native_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject native_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mcr_plus.communicator._fast_calls.NativeRun",
    .tp_doc = "NativeRun(begin, advance, polls, words, counter, active, shift, reads, writes, running, lock, operation, group, waiting, "
              "remember, place, signature, take, retain, keep)\n--\n\nA small synchronous operation over shared memory; "
              "`place`: peer and tag of a message, or ().",
    .tp_basicsize = sizeof(NativeRun),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)native_init,
    .tp_methods = native_methods,
    .tp_call = (ternaryfunc)native_call,
    .tp_traverse = (traverseproc)native_traverse,
    .tp_clear = (inquiry)native_clear,
    .tp_dealloc = (destructor)native_dealloc,
};

/* --- calls ---------------------------------------------------------------------------------------------- */

typedef struct KnownCall {
    struct KnownCall *next;
    PyObject *name;
    int tensors, arguments;
    Facts facts[MOST_TENSORS];
    PyObject *rest[MOST_ARGUMENTS];
    PyObject *run;     /* (*tensors) */
    NativeRun *native; /* or NULL */
} KnownCall;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    int count;
    KnownCall *buckets[BUCKETS]; /* by `bucket_of` */
} FastCalls;

static unsigned bucket_of(PyObject *name, const Facts *facts, int tensors)
{
    uint64_t hash = (uint64_t)(uintptr_t)name >> 4;
    for (int index = 0; index < tensors; index++)
        hash = (hash + (uint64_t)facts[index].nbytes + (uint64_t)facts[index].ndim) * 0x9E3779B97F4A7C15u;
    return (unsigned)(hash >> 32) % BUCKETS;
}

static void free_call(KnownCall *call)
{
    Py_XDECREF(call->name);
    for (int index = 0; index < call->arguments; index++)
        Py_XDECREF(call->rest[index]);
    Py_XDECREF(call->run);
    Py_XDECREF((PyObject *)call->native);
    PyMem_Free(call);
}

static int equal_arguments(PyObject *one, PyObject *other)
{
    if (one == other)
        return 1;
    if (Py_TYPE(one) != Py_TYPE(other) || !(PyUnicode_CheckExact(one) || PyLong_CheckExact(one)))
        return 0;
    return PyObject_RichCompareBool(one, other, Py_EQ) == 1; /* of exact types, so it cannot raise */
}

static int is_call(const KnownCall *call, PyObject *const *args, Py_ssize_t given, const Facts *facts, int tensors)
{
    if (call->name != args[0] || call->tensors != tensors || call->tensors + call->arguments + 1 != given)
        return 0;
    for (int index = 0; index < tensors; index++)
        if (!same_facts(&call->facts[index], &facts[index]))
            return 0;
    for (int index = 0; index < call->arguments; index++)
        if (!equal_arguments(call->rest[index], args[1 + tensors + index]))
            return 0;
    return 1;
}

/* (name, *tensors, *arguments) -> the result of the known call, or NotImplemented */
static PyObject *call_known(FastCalls *self, PyObject *const *args, size_t flags, PyObject *Py_UNUSED(kwnames))
{
    Py_ssize_t given = PyVectorcall_NARGS(flags);
    Facts facts[MOST_TENSORS];
    int tensors = 0;
    for (; tensors < MOST_TENSORS && 1 + tensors < given && is_value(args[1 + tensors]); tensors++)
        if (!read_value(args[1 + tensors], &facts[tensors]))
            Py_RETURN_NOTIMPLEMENTED;
    if (given < 1)
        Py_RETURN_NOTIMPLEMENTED;
    KnownCall *call = self->buckets[bucket_of(args[0], facts, tensors)]; /* from here to `run`, no Python code runs */
    while (call != NULL && !is_call(call, args, given, facts, tensors))
        call = call->next;
    if (call == NULL)
        Py_RETURN_NOTIMPLEMENTED;
    PyObject *run = Py_NewRef(call->run); /* the functions may clear this object */
    NativeRun *native = call->native;
    int state = 0;
    int fits = tensors < 2 || facts[0].data >= facts[1].data + facts[1].nbytes
        || facts[1].data >= facts[0].data + facts[0].nbytes
        || (native != NULL && (intptr_t)facts[1].data - (intptr_t)facts[0].data == native->shift);
    if (native != NULL && fits) {
        Py_INCREF((PyObject *)native);
        state = native_run(native, args + 1, facts, tensors);
        Py_DECREF((PyObject *)native);
    }
    PyObject *result = state > 0 ? Py_NewRef(Py_None) : state ? NULL : PyObject_Vectorcall(run, args + 1, tensors, NULL);
    Py_DECREF(run);
    return result;
}

/* learn(run, native, name, tensors, arguments) */
static PyObject *learn_call(FastCalls *self, PyObject *args)
{
    PyObject *run, *native, *name, *tensors, *arguments;
    if (!PyArg_ParseTuple(args, "OOUO!O!:learn", &run, &native, &name, &PyTuple_Type, &tensors, &PyTuple_Type,
                          &arguments))
        return NULL;
    if (self->count >= MOST_CALLS || PyTuple_GET_SIZE(tensors) > MOST_TENSORS
        || PyTuple_GET_SIZE(arguments) > MOST_ARGUMENTS)
        Py_RETURN_FALSE;
    KnownCall *call = PyMem_Calloc(1, sizeof(KnownCall));
    if (call == NULL)
        return PyErr_NoMemory();
    for (; call->tensors < PyTuple_GET_SIZE(tensors); call->tensors++)
        if (!read_value(PyTuple_GET_ITEM(tensors, call->tensors), &call->facts[call->tensors])) {
            free_call(call);
            Py_RETURN_FALSE;
        }
    for (; call->arguments < PyTuple_GET_SIZE(arguments); call->arguments++)
        call->rest[call->arguments] = Py_NewRef(PyTuple_GET_ITEM(arguments, call->arguments));
    call->name = Py_NewRef(name);
    PyUnicode_InternInPlace(&call->name);
    call->run = Py_NewRef(run);
    call->native = native == Py_None ? NULL : (NativeRun *)Py_NewRef(native);
    KnownCall **bucket = &self->buckets[bucket_of(call->name, call->facts, call->tensors)];
    call->next = *bucket;
    *bucket = call;
    self->count++;
    Py_RETURN_TRUE;
}

static int calls_clear(FastCalls *self)
{
    self->count = 0;
    for (int bucket = 0; bucket < BUCKETS; bucket++)
        while (self->buckets[bucket] != NULL) {
            KnownCall *call = self->buckets[bucket];
            self->buckets[bucket] = call->next;
            free_call(call);
        }
    return 0;
}

static PyObject *clear_calls(FastCalls *self, PyObject *Py_UNUSED(ignored))
{
    calls_clear(self);
    Py_RETURN_NONE;
}

static int calls_traverse(FastCalls *self, visitproc visit, void *arg)
{
    for (int bucket = 0; bucket < BUCKETS; bucket++)
        for (KnownCall *call = self->buckets[bucket]; call != NULL; call = call->next) {
            for (int index = 0; index < call->arguments; index++)
                Py_VISIT(call->rest[index]);
            Py_VISIT(call->run);
            Py_VISIT((PyObject *)call->native);
        }
    return 0;
}

static void calls_dealloc(FastCalls *self)
{
    PyObject_GC_UnTrack(self);
    calls_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *calls_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    FastCalls *self = (FastCalls *)type->tp_alloc(type, 0);
    if (self != NULL)
        self->vectorcall = (vectorcallfunc)call_known;
    return (PyObject *)self;
}

static PyObject *is_full(FastCalls *self, PyObject *Py_UNUSED(ignored))
{
    return PyBool_FromLong(self->count >= MOST_CALLS);
}

static PyMethodDef calls_methods[] = {
    {"learn", (PyCFunction)learn_call, METH_VARARGS,
     "learn(run, native, name, tensors, arguments) -> bool\n--\n\nKeep an operation for calls like this one; "
     "`native` is a NativeRun or None. False: calls of these tensors or arguments cannot be kept."},
    {"is_full", (PyCFunction)is_full, METH_NOARGS, "Return whether no more calls are kept."},
    {"clear", (PyCFunction)clear_calls, METH_NOARGS, "Forget all calls."},
    {NULL},
};

static PyTypeObject calls_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "mcr_plus.communicator._fast_calls.FastCalls",
    .tp_doc = "FastCalls()\n--\n\nThe repeated calls of a group: fast(name, *tensors, *arguments). A list of tensors counts as one.",
    .tp_basicsize = sizeof(FastCalls),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(FastCalls, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = calls_new,
    .tp_methods = calls_methods,
    .tp_traverse = (traverseproc)calls_traverse,
    .tp_clear = (inquiry)calls_clear,
    .tp_dealloc = (destructor)calls_dealloc,
};

/* use(torch.Tensor): read tensors of this class; raises ImportError if its version has no exchange API */
static PyObject *use(PyObject *Py_UNUSED(module), PyObject *type)
{
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const DLPackExchangeAPI *found =
        capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    PyObject *flag = PyObject_GetAttrString(type, "requires_grad");
    PyObject *method = PyObject_GetAttrString(type, "is_neg");
    PyErr_Clear();
    int fits = found != NULL && found->version.major == 1 && found->dltensor_from_py_object != NULL
        && flag != NULL && Py_IS_TYPE(flag, &PyGetSetDescr_Type) && method != NULL
        && Py_IS_TYPE(method, &PyMethodDescr_Type)
        && ((PyMethodDescrObject *)method)->d_method->ml_flags == METH_NOARGS;
    if (fits) { /* descriptors of a class that is never freed */
        api = found;
        requires_grad = ((PyGetSetDescrObject *)flag)->d_getset;
        is_neg = ((PyMethodDescrObject *)method)->d_method->ml_meth;
        tensor_type = (PyTypeObject *)Py_NewRef(type);
    }
    Py_XDECREF(capsule);
    Py_XDECREF(flag);
    Py_XDECREF(method);
    if (!fits)
        return PyErr_Format(PyExc_ImportError, "%R has no usable __dlpack_c_exchange_api__", type);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"use", use, METH_O, "use(type)\n--\n\nRead tensors of this class; raises ImportError if it has no exchange API."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_fast_calls",
    .m_doc = "Repeated calls without Python in between.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__fast_calls(void)
{
    name_deferred = PyUnicode_InternFromString("deferred");
    name_calm = PyUnicode_InternFromString("calm");
    name_relay = PyUnicode_InternFromString("relay");
    name_thread = PyUnicode_InternFromString("fast_path_thread");
    name_sequence = PyUnicode_InternFromString("sequence");
    name_acquire = PyUnicode_InternFromString("acquire");
    name_release = PyUnicode_InternFromString("release");
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddIntConstant(module, "INTERFACE", 5) < 0 /* see fast_calls.py */
        || PyModule_AddType(module, &calls_type) < 0 || PyModule_AddType(module, &native_type) < 0)
        return NULL;
    return module;
}

// Python function for operations that ranks have done before (World::repeat). It reads the tensor's attributes itself
// and converts only what it needs: pybind11's conversion of ten arguments takes as long as all the rest.
//
//   small, and the caller waits   done in one shot; returns the result
//   larger, and it waits          submitted and waited for; returns the result
//   it does not wait              submitted; returns its handle, its result and its name
//   not done before               returns None: the caller does it the usual way, which raises the errors
#include <algorithm>
#include <array>

#include "bindings/operations.h"
#include "collectives/collective.h"

namespace sordino::bindings {
namespace {

// State of the function.
struct Caller {
  std::shared_ptr<World> world;
  py::object tensor_type;
  std::array<py::object, kDTypeCount> dtypes;  // by the core's code
  py::object note_change;                      // called with a tuple of a tensor that was given for the result
  py::dict in_flight;  // names of operations that no call has waited for yet, as (process set, name)
  py::object number;   // called with a label and a process set; returns the name of an unnamed operation
};

constexpr const char* kCapsule = "sordino.Caller";

struct Names {
  PyObject *dtype, *shape, *is_cpu, *is_contiguous, *is_neg, *data_ptr, *new_empty;
};

const Names& names() {
  static const Names interned{PyUnicode_InternFromString("dtype"),    PyUnicode_InternFromString("shape"),
                              PyUnicode_InternFromString("is_cpu"),   PyUnicode_InternFromString("is_contiguous"),
                              PyUnicode_InternFromString("is_neg"),   PyUnicode_InternFromString("data_ptr"),
                              PyUnicode_InternFromString("new_empty")};
  return interned;
}

py::object taken(PyObject* object) { return py::reinterpret_steal<py::object>(object); }

bool is_true(const py::object& value) { return value.ptr() == Py_True; }

std::byte* data_of(PyObject* tensor) {
  const py::object address = taken(PyObject_CallMethodNoArgs(tensor, names().data_ptr));
  return address ? static_cast<std::byte*>(PyLong_AsVoidPtr(address.ptr())) : nullptr;
}

// Reads a tensor's type and shape. False for tensors that the usual path has to handle, or refuse with an error.
bool describe(const Caller& caller, PyObject* tensor, DType& type, std::vector<std::int64_t>& extents) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != caller.tensor_type.ptr()) return false;
  if (!is_true(taken(PyObject_GetAttr(tensor, names().is_cpu)))) return false;
  if (!is_true(taken(PyObject_CallMethodNoArgs(tensor, names().is_contiguous))))
    return false;  // raises if it is sparse
  // A tensor with the negative bit (the imaginary part of a conjugate) stores its values negated.
  if (is_true(taken(PyObject_CallMethodNoArgs(tensor, names().is_neg)))) return false;
  const py::object dtype = taken(PyObject_GetAttr(tensor, names().dtype));
  const py::object shape = taken(PyObject_GetAttr(tensor, names().shape));
  if (!dtype || !shape || !PyTuple_Check(shape.ptr())) return false;
  int code = 0;
  while (code < kDTypeCount && caller.dtypes[static_cast<std::size_t>(code)].ptr() != dtype.ptr()) ++code;
  if (code == kDTypeCount) return false;
  type = static_cast<DType>(code);
  extents.clear();
  for (Py_ssize_t axis = 0; axis < PyTuple_GET_SIZE(shape.ptr()); ++axis)
    extents.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), axis)));
  return PyErr_Occurred() == nullptr;
}

bool read_op(PyObject* given, ReduceOp& op) {
  if (given == Py_None) {
    op = ReduceOp::kAverage;
    return true;
  }
  if (!PyLong_CheckExact(given)) return false;
  const long code = PyLong_AsLong(given);
  op = static_cast<ReduceOp>(code);
  return code >= 0 && code <= static_cast<long>(ReduceOp::kProduct);
}

bool read_splits(PyObject* given, std::vector<std::int64_t>& splits) {
  splits.clear();
  if (given == Py_None) return true;
  if (!PyList_CheckExact(given)) return false;
  for (Py_ssize_t index = 0; index < PyList_GET_SIZE(given); ++index)
    splits.push_back(PyLong_AsLongLong(PyList_GET_ITEM(given, index)));
  return PyErr_Occurred() == nullptr;
}

// The name of the request, such as "allreduce.loss", or that of its repeats if it is unnamed. False if it is no name.
bool read_name(PyObject* given, Opcode opcode, std::string& name) {
  name = collective(opcode).name;
  if (given == Py_None) {
    name += kUnnamed;
    return true;
  }
  Py_ssize_t length = 0;
  const char* text = PyUnicode_CheckExact(given) ? PyUnicode_AsUTF8AndSize(given, &length) : nullptr;
  if (text) (name += '.').append(text, static_cast<std::size_t>(length));
  return text != nullptr;
}

// Whether no call has waited yet for an operation of this name.
bool is_in_flight(const Caller& caller, PyObject* set, const std::string& name) {
  if (PyDict_GET_SIZE(caller.in_flight.ptr()) == 0) return false;
  const py::object text = taken(PyUnicode_FromStringAndSize(name.data(), static_cast<Py_ssize_t>(name.size())));
  const py::object key = text ? taken(PyTuple_Pack(2, set, text.ptr())) : py::object();
  return !key || PyDict_Contains(caller.in_flight.ptr(), key.ptr()) != 0;
}

// One call. Members keep their memory between calls of a thread.
struct Call {
  // The arguments after kSet may be omitted.
  enum Argument { kOpcode, kWaits, kSource, kTarget, kName, kSet, kOp, kPrescale, kPostscale, kRoot, kSplits, kCount };
  static constexpr Py_ssize_t kLeast = kOp;

  std::string name;
  Signature what;
  std::vector<std::int64_t> shape;  // of the target
  int set = 0;
  bool busy = false;

  bool read(const Caller& caller, PyObject* const* given) {
    if (!PyLong_Check(given[kOpcode]) || !PyLong_CheckExact(given[kSet]) || !PyFloat_CheckExact(given[kPrescale]) ||
        !PyFloat_CheckExact(given[kPostscale]) || !PyLong_Check(given[kRoot]))
      return false;
    const long code = PyLong_AsLong(given[kOpcode]);
    if (code < 0 || code > static_cast<long>(kLastOpcode)) return false;
    what.opcode = static_cast<Opcode>(code);
    what.prescale = PyFloat_AS_DOUBLE(given[kPrescale]);
    what.postscale = PyFloat_AS_DOUBLE(given[kPostscale]);
    what.root = static_cast<int>(PyLong_AsLong(given[kRoot]));
    set = static_cast<int>(PyLong_AsLong(given[kSet]));
    if (PyErr_Occurred() || !read_op(given[kOp], what.op) || !read_splits(given[kSplits], what.splits) ||
        !read_name(given[kName], what.opcode, name) || is_in_flight(caller, given[kSet], name))
      return false;
    if (given[kSource] != Py_None) return describe(caller, given[kSource], what.dtype, what.shape);
    what.dtype = Signature().dtype;
    what.shape.assign(1, 0);
    return true;
  }

  // The tensor for the result: the one that was given, or a new one. Null if the given one does not fit.
  py::object target(const Caller& caller, const Repeat& repeat, PyObject* source, PyObject* given) {
    const std::vector<std::int64_t>& wanted = repeat.recipe.takes.empty() ? what.shape : repeat.recipe.shape;
    if (given == Py_None) {
      const py::object extents = taken(PyTuple_New(static_cast<Py_ssize_t>(wanted.size())));
      for (std::size_t axis = 0; axis < wanted.size(); ++axis)
        PyTuple_SET_ITEM(extents.ptr(), static_cast<Py_ssize_t>(axis), PyLong_FromLongLong(wanted[axis]));
      return taken(PyObject_CallMethodOneArg(source, names().new_empty, extents.ptr()));
    }
    DType dtype = what.dtype;
    if (given == source) {
      shape = what.shape;
    } else if (!describe(caller, given, dtype, shape)) {
      return {};
    }
    return dtype == what.dtype && shape == wanted ? py::reinterpret_borrow<py::object>(given) : py::object();
  }
};

PyRequest request_of(const Call& call, const Repeat& found, std::string name, std::byte* input, std::byte* output) {
  const Signature& what = call.what;
  PyRequest made;
  Request& request = made.request;
  request.name = std::move(name);
  request.opcode = what.opcode;
  request.set = call.set;
  request.op = what.op;
  request.prescale = what.prescale;
  request.postscale = what.postscale;
  request.root = what.root;
  request.splits = what.splits;
  const std::size_t whole = count_of(what.shape) * size_of(what.dtype);
  const std::size_t received = found.recipe.takes.empty() ? whole : found.recipe.result_bytes();
  request.tensors = {{what.dtype, what.shape, input, output, received}};
  return made;
}

void note_change(const Caller& caller, PyObject* tensor) {
  const py::object changed = taken(PyTuple_Pack(1, tensor));
  if (changed) taken(PyObject_CallOneArg(caller.note_change.ptr(), changed.ptr()));
}

// Whether the result may be written while the input is read: they are apart, or this rank's part of the input lies
// where it goes.
bool may_share(const Call& call, const Repeat& repeat, const std::byte* input, const std::byte* output) {
  const Recipe& recipe = repeat.recipe;
  if (recipe.takes.empty()) return true;  // an all-reduce, whose tensors are one or apart
  const std::size_t given = count_of(call.what.shape) * size_of(call.what.dtype);
  if (output + recipe.result_bytes() <= input || input + given <= output) return true;
  std::size_t before = 0;
  for (std::size_t member = 0; !recipe.folds && member < recipe.me; ++member) before += recipe.takes[member].bytes;
  const std::size_t begin = recipe.folds ? recipe.takes[recipe.me].begin : 0;
  return call.what.opcode == Opcode::kBroadcast
             ? input == output
             : call.what.opcode != Opcode::kAlltoall && input + begin == output + before;
}

// Python code may run within a call, and call this function again.
struct InCall {
  explicit InCall(Call& call) : call(call) { call.busy = true; }
  InCall(const InCall&) = delete;
  ~InCall() { call.busy = false; }
  Call& call;
};

py::object repeat(const Caller& caller, PyObject* const* given) {
  thread_local Call call;
  if (call.busy) return {};
  const InCall in_call(call);
  if (!call.read(caller, given)) return {};
  const std::shared_ptr<const Repeat> found = caller.world->find(call.set, call.name, call.what);
  const bool waits = given[Call::kWaits] == Py_True;
  if (!found || (waits && !found->carried && is_unnamed(found->name))) return {};
  PyObject* const source = given[Call::kSource];
  if (source == Py_None) {
    bool done = waits && found->carried;
    if (done) {
      py::gil_scoped_release released;
      done = caller.world->repeat(call.set, found, nullptr, nullptr);
    }
    return done ? py::object(py::bool_(true)) : py::object();
  }
  const py::object target = call.target(caller, *found, source, given[Call::kTarget]);
  if (!target) return {};
  std::byte *const input = data_of(source), *const output = target.ptr() == source ? input : data_of(target.ptr());
  if (PyErr_Occurred() || (!input && count_of(call.what.shape) > 0)) return {};  // a tensor without storage
  if ((!output && found->recipe.result_bytes() > 0) || !may_share(call, *found, input, output)) return {};
  const bool is_given = given[Call::kTarget] != Py_None;
  if (waits && found->carried) {
    {
      py::gil_scoped_release released;
      if (!caller.world->repeat(call.set, found, input, output)) return {};
    }
    if (is_given) note_change(caller, target.ptr());
    return target;
  }
  std::string name = call.name;
  py::object numbered;
  if (is_unnamed(found->name)) {
    numbered = caller.number(collective(call.what.opcode).name, py::none(), call.set);
    name = numbered.cast<std::string>();
  }
  PyRequest request = request_of(call, *found, name, input, output);
  request.keep = py::make_tuple(py::reinterpret_borrow<py::object>(source), target);
  if (is_given) note_change(caller, target.ptr());
  auto handle = start(caller.world, request, waits);
  if (!waits) return py::make_tuple(std::move(handle), target, numbered ? numbered : py::str(name));
  handle->wait();
  if (!handle->handle->results.empty()) return py::cast(std::move(handle));  // of another size than before
  return target;
}

PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  static PyObject* const defaults[] = {PyLong_FromLong(static_cast<long>(ReduceOp::kSum)), PyFloat_FromDouble(1),
                                       PyFloat_FromDouble(1), PyLong_FromLong(0), Py_None};
  if (count < Call::kLeast || count > Call::kCount) {
    PyErr_SetString(PyExc_TypeError, "repeat() takes 6 to 11 arguments");
    return nullptr;
  }
  PyObject* all[Call::kCount];
  std::copy_n(given, count, all);
  std::copy(defaults + (count - Call::kLeast), std::end(defaults), all + count);
  given = all;
  try {
    py::object result = repeat(*static_cast<Caller*>(PyCapsule_GetPointer(self, kCapsule)), given);
    if (result) return PyErr_Occurred() ? nullptr : result.release().ptr();
    PyErr_Clear();  // the usual path raises the error
    Py_RETURN_NONE;
  } catch (py::error_already_set& error) {  // from a signal handler
    error.restore();
  } catch (...) {
    py::detail::try_translate_exceptions();
  }
  return nullptr;
}

PyMethodDef kMethod{
    "repeat", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call)), METH_FASTCALL,
    "repeat(opcode, waits, source, target, name, process_set, op, prescale, postscale, root, splits) -> if it waits, "
    "the result, or a Handle with a result of another size than before; if it does not, the handle, the result and the "
    "name; None if the operation has to be submitted"};

}  // namespace

py::object repeat_of(std::shared_ptr<World> world, py::object tensor_type, const py::dict& codes,
                     py::object note_change, py::dict in_flight, py::object number) {
  auto caller = std::make_unique<Caller>(Caller{
      std::move(world), std::move(tensor_type), {}, std::move(note_change), std::move(in_flight), std::move(number)});
  for (const auto& [dtype, code] : codes)
    caller->dtypes[static_cast<std::size_t>(dtype_of(code.cast<int>()))] = py::reinterpret_borrow<py::object>(dtype);
  py::capsule self(caller.release(), kCapsule,
                   [](PyObject* capsule) { delete static_cast<Caller*>(PyCapsule_GetPointer(capsule, kCapsule)); });
  return taken(PyCFunction_NewEx(&kMethod, self.ptr(), nullptr));
}

}  // namespace sordino::bindings

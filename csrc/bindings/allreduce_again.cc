// Python function for the blocking one-shot all-reduce of a small tensor (World::allreduce_again). It reads the
// tensor's attributes itself and converts only what it needs: pybind11's conversion of ten arguments takes as long as
// all the rest.
#include <array>

#include "bindings/bindings.h"
#include "engine/world.h"

namespace sordino::bindings {
namespace {

// State of the function.
struct Caller {
  std::shared_ptr<World> world;
  py::object tensor_type;
  std::array<py::object, kDTypeCount> dtypes;  // by the core's code
  py::object note_change;                      // called with a tuple of the tensor that was reduced in place
};

constexpr const char* kCapsule = "sordino.Caller";

struct Names {
  PyObject *dtype, *shape, *is_cpu, *is_contiguous, *is_neg, *data_ptr;
};

const Names& names() {
  static const Names interned{PyUnicode_InternFromString("dtype"),  PyUnicode_InternFromString("shape"),
                              PyUnicode_InternFromString("is_cpu"), PyUnicode_InternFromString("is_contiguous"),
                              PyUnicode_InternFromString("is_neg"), PyUnicode_InternFromString("data_ptr")};
  return interned;
}

py::object taken(PyObject* object) { return py::reinterpret_steal<py::object>(object); }

bool is_true(const py::object& value) { return value.ptr() == Py_True; }

std::byte* data_of(PyObject* tensor) {
  const py::object address = taken(PyObject_CallMethodNoArgs(tensor, names().data_ptr));
  return address ? static_cast<std::byte*>(PyLong_AsVoidPtr(address.ptr())) : nullptr;
}

// Fills `what` except for the factors. False for tensors that the usual path has to handle, or refuse with an error.
bool describe(const Caller& caller, PyObject* tensor, OneShot::What& what) {
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
  what.dtype = static_cast<DType>(code);
  what.shape.clear();
  for (Py_ssize_t axis = 0; axis < PyTuple_GET_SIZE(shape.ptr()); ++axis)
    what.shape.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), axis)));
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

// The name as the world remembers it. Null if it is no name, or that of an operation that no call has waited for yet.
const char* read_name(PyObject* given, PyObject* set, PyObject* in_flight, std::string_view& name) {
  if (given == Py_None) {
    name = kUnnamed;
    return name.data();
  }
  Py_ssize_t length = 0;
  const char* text = PyUnicode_CheckExact(given) ? PyUnicode_AsUTF8AndSize(given, &length) : nullptr;
  if (!text) return nullptr;
  name = {text, static_cast<std::size_t>(length)};
  if (PyDict_GET_SIZE(in_flight) == 0) return text;
  const py::object label = taken(PyUnicode_FromFormat("%s%U", kAllreduceLabel, given));
  const py::object key = label ? taken(PyTuple_Pack(2, set, label.ptr())) : py::object();
  return key && PyDict_Contains(in_flight, key.ptr()) == 0 ? text : nullptr;
}

bool reduce(const Caller& caller, PyObject* const* given) {
  thread_local OneShot::What what;  // keeps its memory between calls
  PyObject *source = given[0], *target = given[1], *set = given[6], *in_flight = given[7];
  std::string_view name;
  if (!PyLong_CheckExact(set) || !PyDict_Check(in_flight) || !PyFloat_CheckExact(given[4]) ||
      !PyFloat_CheckExact(given[5]) || !read_op(given[3], what.op) || !read_name(given[2], set, in_flight, name) ||
      !describe(caller, source, what))
    return false;
  what.prescale = PyFloat_AS_DOUBLE(given[4]);
  what.postscale = PyFloat_AS_DOUBLE(given[5]);
  std::byte* const input = data_of(source);
  std::byte* const output = target == source ? input : data_of(target);
  const long id = PyLong_AsLong(set);
  if (PyErr_Occurred()) return false;
  if ((!input || !output) && what.count() > 0) return false;  // a tensor without storage
  bool done = false;
  {
    py::gil_scoped_release released;
    done = caller.world->allreduce_again(static_cast<int>(id), name, what, input, output);
  }
  if (done && target == source) {
    const py::object changed = taken(PyTuple_Pack(1, target));
    if (changed) taken(PyObject_CallOneArg(caller.note_change.ptr(), changed.ptr()));
  }
  return done;
}

PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  if (count != 8) {
    PyErr_SetString(PyExc_TypeError, "allreduce_again() takes 8 arguments");
    return nullptr;
  }
  try {
    const bool done = reduce(*static_cast<Caller*>(PyCapsule_GetPointer(self, kCapsule)), given);
    if (!done) PyErr_Clear();  // the usual path raises the error
    return PyErr_Occurred() ? nullptr : PyBool_FromLong(done);
  } catch (py::error_already_set& error) {  // from a signal handler
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef kMethod{"allreduce_again", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call)), METH_FASTCALL,
                    "allreduce_again(source, target, name, op, prescale, postscale, process_set, in_flight) -> whether "
                    "it is done"};

}  // namespace

py::object allreduce_again_of(std::shared_ptr<World> world, py::object tensor_type, const py::dict& codes,
                              py::object note_change) {
  auto caller = std::make_unique<Caller>(Caller{std::move(world), std::move(tensor_type), {}, std::move(note_change)});
  for (const auto& [dtype, code] : codes)
    caller->dtypes[static_cast<std::size_t>(dtype_of(code.cast<int>()))] = py::reinterpret_borrow<py::object>(dtype);
  py::capsule self(caller.release(), kCapsule,
                   [](PyObject* capsule) { delete static_cast<Caller*>(PyCapsule_GetPointer(capsule, kCapsule)); });
  return taken(PyCFunction_NewEx(&kMethod, self.ptr(), nullptr));
}

}  // namespace sordino::bindings

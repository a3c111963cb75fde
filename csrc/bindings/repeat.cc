// Python function for operations on tensors in host memory. It reads the tensors' attributes itself and converts only
// what it needs: pybind11's conversion of ten arguments takes as long as all the rest.
//
//   small and done before, and the caller waits    done in one shot; returns the result
//   this rank is alone, and the caller does not
//   wait                                           done at once; returns a handle that is done, the result and the name
//   any other, and the caller waits                submitted and waited for; returns the result, or a handle with it
//   members have sent different numbers of rows
//   into a given tensor                            returns a handle even if the caller waits, so that the caller can
//                                                  check the numbers
//   any other, and it does not wait                submitted; returns its handle, its result and its name
//   an unusual tensor, an invalid argument, or
//   a call within a call of this thread            returns None: Python does it, or raises the error
#include <algorithm>
#include <array>
#include <functional>
#include <optional>

#include "bindings/host_tensors.h"
#include "bindings/operations.h"
#include "collectives/collective.h"

namespace sordino::bindings {
namespace {

struct Caller {
  std::shared_ptr<World> world;
  HostTensors tensors;
  py::object note_change;  // called with a tuple of a tensor that was given for the result
  py::dict in_flight;      // names of operations that no call has waited for yet, as (process set, name)
  py::object number;       // called with a label and a process set; returns the name of an unnamed operation
};

constexpr const char* kCapsule = "sordino.Caller";
constexpr std::size_t kMostWithGil = 32 * 1024;  // bytes of all inputs with which a call keeps the GIL

PyObject* name_of_new_empty() {
  static PyObject* const interned = PyUnicode_InternFromString("new_empty");
  return interned;
}

// A new tensor like another one. Passes each extent as an argument, because torch takes 0.3 us longer to convert a
// tuple.
py::object new_empty(PyObject* like, const std::vector<std::int64_t>& shape) {
  if (shape.empty()) return taken(PyObject_CallMethodOneArg(like, name_of_new_empty(), py::tuple().ptr()));
  std::vector<py::object> extents;
  std::vector<PyObject*> arguments{like};
  for (const std::int64_t extent : shape)
    arguments.push_back(extents.emplace_back(taken(PyLong_FromLongLong(extent))).ptr());
  return taken(PyObject_VectorcallMethod(name_of_new_empty(), arguments.data(), arguments.size(), nullptr));
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

// Reads the name of the request, such as "allreduce.loss", or of its repeats if it is unnamed. False without a string.
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

// Whether an operation of this name is in flight, and no call has waited for it.
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
  HostTensor source, target;
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
    const long root = PyLong_AsLong(given[kRoot]), id = PyLong_AsLong(given[kSet]);
    what.root = static_cast<int>(root);
    set = static_cast<int>(id);
    if (what.root != root || set != id || PyErr_Occurred() || !read_op(given[kOp], what.op) ||
        !read_splits(given[kSplits], what.splits) || !read_name(given[kName], what.opcode, name) ||
        is_in_flight(caller, given[kSet], name))
      return false;
    if (given[kSource] == Py_None) {
      source = {};
      what.shape.assign(1, 0);
    } else if (caller.tensors.describe_given(given[kSource], source)) {
      what.shape = source.shape;
    } else {
      return false;
    }
    what.dtype = source.dtype;
    target.data = nullptr;
    if (given[kTarget] == given[kSource]) {
      target = source;
    } else if (given[kTarget] != Py_None && !caller.tensors.describe_given(given[kTarget], target)) {
      return false;
    }
    return what.opcode != Opcode::kAlltoall || given[kSplits] != Py_None || divide_evenly(*caller.world);
  }

  // Whether this rank can submit the operation. For operations that it does not know from before.
  bool is_valid(const World& world) const {
    try {
      const std::vector<int> members = world.members(set);
      return std::find(members.begin(), members.end(), world.rank()) != members.end() &&
             sordino::is_valid(what, members);
    } catch (const UsageError&) {
      return false;  // there is no such set
    }
  }

  // Shape of the result; null if other ranks determine it, or the core has to allocate it for another reason.
  const std::vector<std::int64_t>* shape_of_result(const Repeat* found) const {
    if (found && !found->recipe.takes.empty()) return &found->recipe.shape;
    return what.opcode == Opcode::kAllreduce || what.opcode == Opcode::kBroadcast || found ? &what.shape : nullptr;
  }

  // The tensor for the result: the one that was given, or a new one. Null if the given one does not fit.
  py::object make_target(const Caller& caller, const std::vector<std::int64_t>& wanted, PyObject* from,
                         PyObject* given) {
    if (given == Py_None) {
      py::object made = new_empty(from, wanted);
      return made && caller.tensors.describe(made.ptr(), target) ? made : py::object();
    }
    const bool fits = target.dtype == what.dtype && target.shape == wanted;
    return fits ? py::reinterpret_borrow<py::object>(given) : py::object();
  }

 private:
  // An all-to-all without splits has the same number of rows for each member.
  bool divide_evenly(const World& world) {
    const std::size_t members = set == 0 ? static_cast<std::size_t>(world.size()) : members_of_set(world);
    const auto count = static_cast<std::int64_t>(members);
    if (what.shape.empty() || members == 0 || what.shape[0] % count != 0) return false;
    what.splits.assign(members, what.shape[0] / count);
    return true;
  }

  std::size_t members_of_set(const World& world) const {
    try {
      return world.members(set).size();
    } catch (const UsageError&) {
      return 0;  // there is no such set
    }
  }
};

PyRequest request_of(const Call& call, const Repeat* found, std::string name) {
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
  const std::size_t received = found && !found->recipe.takes.empty() ? found->recipe.result_bytes() : whole;
  request.tensors = {{what.dtype, what.shape, call.source.data, call.target.data, received}};
  return made;
}

void note_change(const Caller& caller, PyObject* tensor) {
  const py::object changed = taken(PyTuple_Pack(1, tensor));
  if (changed) taken(PyObject_CallOneArg(caller.note_change.ptr(), changed.ptr()));
}

// Whether the result may be written while the input is read. That is so if they do not overlap, or if this rank's part
// of the input already lies where the result needs it.
bool overlap_is_safe(const Call& call, const Repeat& repeat, const std::byte* input, const std::byte* output) {
  const Recipe& recipe = repeat.recipe;
  if (recipe.takes.empty()) return true;  // an all-reduce: one tensor, or two that do not overlap
  const std::size_t given = count_of(call.what.shape) * size_of(call.what.dtype);
  if (output + recipe.result_bytes() <= input || input + given <= output) return true;
  std::size_t before = 0;
  for (std::size_t member = 0; !recipe.folds && member < recipe.me; ++member) before += recipe.takes[member].bytes;
  const std::size_t begin = recipe.folds ? recipe.takes[recipe.me].begin : 0;
  return call.what.opcode == Opcode::kBroadcast
             ? input == output
             : call.what.opcode != Opcode::kAlltoall && input + begin == output + before;
}

// Whether all members have sent equally many rows.
bool are_equal(const std::vector<std::int64_t>& rows) {
  return std::adjacent_find(rows.begin(), rows.end(), std::not_equal_to<>()) == rows.end();
}

// Python code may run within a call, and call this function again.
struct InCall {
  explicit InCall(Call& call) : call(call) { call.busy = true; }
  InCall(const InCall&) = delete;
  ~InCall() { call.busy = false; }
  Call& call;
};

// Name of a submission. Unnamed ones use up a number.
py::object name_of_submission(const Caller& caller, const Call& call, bool named) {
  if (named) return py::str(call.name);
  return caller.number(collective(call.what.opcode).name, py::none(), call.set);
}

// Does an operation in turns. A quick one keeps the GIL: to release it and to take it again costs as much as a tenth of
// a small operation. But other ranks on threads of this process need it to enter, so a call that waits releases it.
bool repeat_now(World& world, const Call& call, World::Found what) {
  std::optional<py::gil_scoped_release> released;
  const auto release = [&] { released.emplace(); };
  const Repeat& repeat = *what.repeat;
  const bool quick = !repeat.in_two_turns() && repeat.recipe.most * repeat.recipe.takes.size() <= kMostWithGil;
  if (!quick) release();
  return world.repeat(call.set, std::move(what), call.source.data, call.target.data,
                      quick ? std::function<void()>(release) : nullptr);
}

// The call of this thread. Not inlined, because each use of a thread-local variable looks it up.
[[gnu::noinline]] Call& call_of_thread() {
  thread_local Call call;
  return call;
}

py::object repeat(const Caller& caller, PyObject* const* given) {
  Call& call = call_of_thread();
  if (call.busy) return {};
  const InCall in_call(call);
  if (!call.read(caller, given)) return {};
  const bool waits = given[Call::kWaits] == Py_True;
  PyObject* const source = given[Call::kSource];
  const bool is_given = given[Call::kTarget] != Py_None;
  World::Found place = caller.world->find(call.set, call.name, call.what);
  const std::shared_ptr<const Repeat> found = place.repeat;
  // To make a tensor may run Python code, such as finalizers, which must not find this thread holding the turn.
  if (!is_given && source != Py_None) place.turn = {};
  if (!found && !call.is_valid(*caller.world)) return {};
  py::object target = py::none();
  if (source == Py_None) {
    target = py::bool_(true);
  } else if (const auto* shape = call.shape_of_result(found.get())) {
    target = call.make_target(caller, *shape, source, given[Call::kTarget]);
    if (!target || (found && !overlap_is_safe(call, *found, call.source.data, call.target.data))) return {};
    static std::byte empty;  // an empty tensor has no address, and would count as no target
    if (!call.target.data) call.target.data = &empty;
  } else {
    call.target.data = nullptr;
  }
  const bool named = given[Call::kName] != Py_None;
  // A rank that is alone completes even an asynchronous call at once.
  if (found && found->carried() && (waits || found->recipe.takes.size() == 1)) {
    if (repeat_now(*caller.world, call, std::move(place))) {
      if (is_given) note_change(caller, target.ptr());
      if (waits && (!is_given || are_equal(found->recipe.rows))) return target;
      auto handle = std::make_shared<Handle>();
      handle->rows = found->recipe.rows;
      handle->finish();
      auto over = std::make_unique<PyHandle>(caller.world, std::move(handle), py::none());
      if (waits) return py::cast(std::move(over));
      return py::make_tuple(std::move(over), target, name_of_submission(caller, call, named));
    }
  }
  place.turn = {};
  const py::object name = name_of_submission(caller, call, named);
  PyRequest request = request_of(call, found.get(), name.cast<std::string>());
  if (source == Py_None) request.request.tensors.clear();
  request.keep = py::make_tuple(py::reinterpret_borrow<py::object>(source), target);
  if (is_given && !target.is_none()) note_change(caller, target.ptr());
  auto handle = start(caller.world, request, waits);
  if (!waits) return py::make_tuple(std::move(handle), target, name);
  handle->wait();
  const bool in_core = !handle->handle->results.empty();  // the result
  if (in_core || (is_given && !are_equal(handle->handle->rows))) return py::cast(std::move(handle));
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
  return answer([&] { return repeat(*static_cast<Caller*>(PyCapsule_GetPointer(self, kCapsule)), all); });
}

PyMethodDef kMethod{
    "repeat", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call)), METH_FASTCALL,
    "repeat(opcode, waits, source, target, name, process_set, op, prescale, postscale, root, splits) -> if it waits, "
    "the result, or a Handle if that is in memory of the core or ranks have sent different numbers of rows; if it does "
    "not, the handle, the result if its memory "
    "is known, and the name; None if Python has to do the operation, or refuse it"};

}  // namespace

py::object repeat_of(std::shared_ptr<World> world, py::object tensor_type, const py::dict& codes,
                     py::object note_change, py::dict in_flight, py::object number) {
  auto caller = std::make_unique<Caller>(Caller{std::move(world), HostTensors(std::move(tensor_type), codes),
                                                std::move(note_change), std::move(in_flight), std::move(number)});
  py::capsule self(caller.release(), kCapsule,
                   [](PyObject* capsule) { delete static_cast<Caller*>(PyCapsule_GetPointer(capsule, kCapsule)); });
  return taken(PyCFunction_NewEx(&kMethod, self.ptr(), nullptr));
}

}  // namespace sordino::bindings

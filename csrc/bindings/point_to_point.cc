// Python function that sends and receives messages from and to tensors in host memory. Like repeat.cc it reads its
// arguments without pybind11, because their conversion would take as long as a message.
#include "bindings/host_tensors.h"
#include "bindings/operations.h"

namespace sordino::bindings {
namespace {

struct Messenger {
  std::shared_ptr<World> world;
  HostTensors tensors;
  py::object note_change;  // called with a tuple of a tensor that is written
};

constexpr const char* kMessengerCapsule = "sordino.Messenger";
enum MessageArgument { kSends, kWaits, kTensor, kPeer, kTag, kMessageSet, kMessageArguments };

// Reads the arguments. False if Python has to handle or refuse them.
bool read(const Messenger& messenger, PyObject* const* given, Posting& call) {
  const bool any = given[kPeer] == Py_None && given[kSends] != Py_True;
  if (!(any || PyLong_CheckExact(given[kPeer])) || !PyLong_CheckExact(given[kTag]) ||
      !PyLong_CheckExact(given[kMessageSet]))
    return false;
  HostTensor tensor;
  if (!messenger.tensors.describe_given(given[kTensor], tensor)) return false;
  call.sends = given[kSends] == Py_True;
  call.data = tensor.data;
  call.dtype = tensor.dtype;
  call.bytes = tensor.bytes();
  const long peer = any ? Posting::kAnySource : PyLong_AsLong(given[kPeer]);
  const long set = PyLong_AsLong(given[kMessageSet]);
  call.tag = PyLong_AsLongLong(given[kTag]);
  call.peer = static_cast<int>(peer);
  call.set = static_cast<int>(set);
  return PyErr_Occurred() == nullptr && call.peer == peer && call.set == set && (any || peer >= 0);
}

py::object message(const Messenger& messenger, PyObject* const* given) {
  auto call = std::make_shared<Posting>();
  if (!read(messenger, given, *call)) return {};
  const bool waits = given[kWaits] == Py_True, sends = call->sends;
  if (!sends) {
    const py::object changed = taken(PyTuple_Pack(1, given[kTensor]));
    if (changed) taken(PyObject_CallOneArg(messenger.note_change.ptr(), changed.ptr()));
    if (PyErr_Occurred()) throw py::error_already_set();
  }
  const auto handle = [&](std::shared_ptr<Handle> started) {
    return std::make_unique<PyHandle>(messenger.world, std::move(started),
                                      py::reinterpret_borrow<py::object>(given[kTensor]));
  };
  if (!waits) {
    std::shared_ptr<Handle> started;
    {
      py::gil_scoped_release released;
      started = messenger.world->start_message(std::move(call));
    }
    return py::cast(handle(std::move(started)));
  }
  const std::shared_ptr<Handle> ended(call, &call->handle);
  try {
    py::gil_scoped_release released;
    messenger.world->run_message(std::move(call));
  } catch (const UsageError&) {
    throw;  // refused before it has begun
  } catch (...) {
    handle(ended);  // keeps the memory if the call is not over, such as after a signal
    throw;
  }
  if (ended->error) handle(ended)->wait();  // raises it
  return sends ? py::bool_(true) : py::object(py::int_(ended->source));
}

PyObject* call_messenger(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  if (count != kMessageArguments) {
    PyErr_SetString(PyExc_TypeError, "message() takes 6 arguments");
    return nullptr;
  }
  return answer(
      [&] { return message(*static_cast<Messenger*>(PyCapsule_GetPointer(self, kMessengerCapsule)), given); });
}

PyMethodDef kMessageMethod{
    "message", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_messenger)), METH_FASTCALL,
    "message(sends, waits, tensor, peer, tag, process_set) -> if it waits, the source of the message, or True for a "
    "send; if it does not, a Handle; None if Python has to convert an argument, or refuse it. peer None: any source"};

}  // namespace

py::object messages_of(std::shared_ptr<World> world, py::object tensor_type, const py::dict& dtypes,
                       py::object note_change) {
  auto messenger = std::make_unique<Messenger>(
      Messenger{std::move(world), HostTensors(std::move(tensor_type), dtypes), std::move(note_change)});
  py::capsule self(messenger.release(), kMessengerCapsule, [](PyObject* capsule) {
    delete static_cast<Messenger*>(PyCapsule_GetPointer(capsule, kMessengerCapsule));
  });
  return taken(PyCFunction_NewEx(&kMessageMethod, self.ptr(), nullptr));
}

}  // namespace sordino::bindings

// Counts the gradients that a backward pass has completed, so that Python is called once per bucket, not per tensor.
//
// Each parameter has two hooks, both C functions:
//
//   hook          registered on                     runs                                       does
//   note_hook     the tensor (post-accumulate-grad)  after the gradient was added to            notes the gradient
//   count_hook    the AccumulateGrad node (post)     after all post-accumulate-grad hooks       counts the gradient
//
// Only count_hook may complete a bucket, because the user's hooks that change a gradient run before it, whenever they
// were registered. note_hook finds gradients that were not counted: a cast gives a parameter another AccumulateGrad
// node, but keeps the hooks of its tensor. Python is called for the first gradient of a backward pass, for a gradient
// that comes once too often, and when the last gradient of a set is complete.
//
// Autograd may produce the gradients of a set on several streams of a GPU. count_hook runs where the stream of its
// gradient is the current one, so it notes that stream, for the reduction to wait for.
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/device.h"

namespace sordino::bindings {
namespace {

class GradientCounter : public std::enable_shared_from_this<GradientCounter> {
 public:
  GradientCounter(std::size_t parameters, int passes, py::object backward, py::object tell)
      : counts_(parameters, 0),
        notes_(parameters, 0),
        set_of_(parameters, -1),
        passes_(passes),
        backward_(std::move(backward)),
        tell_(std::move(tell)) {}

  py::object note_hook(std::size_t index);
  py::object count_hook(std::size_t index);

  // Called when a gradient has been added to, before the user's hooks can change it.
  void note(std::size_t index) {
    const auto now = backward_().cast<long long>();
    if (done || now < 0 || now != seen_) {
      tell("backward_adds", index);
      seen_ = now;
    }
    if (!accumulates) ++notes_[index];
  }

  // Called when the user's hooks have finished with the gradient.
  void count(std::size_t index) {
    if (accumulates) return;
    if (done) note(index);  // a hook of the tensor has called synchronize() since
    if (counts_[index] >= passes_) {
      tell("exceeded", index);
      return;
    }
    const long set = set_of_[index];
    if (set >= 0) note_stream(sets_[static_cast<std::size_t>(set)]);
    if (++counts_[index] < passes_) return;
    order_.push_back(index);
    if (set >= 0 && --sets_[static_cast<std::size_t>(set)].waiting == 0)
      tell("completed", static_cast<std::size_t>(set));
  }

  std::size_t watch(std::vector<std::size_t> members, std::shared_ptr<PyDevice> device) {
    const std::size_t number = sets_.size();
    for (const std::size_t index : members) set_of_.at(index) = static_cast<long>(number);
    count_incomplete(sets_.emplace_back(Set{std::move(members), std::move(device), {}, 0}));
    return number;
  }

  // Streams that have produced gradients of the parameter's set. At the end of a backward pass, autograd lets the
  // caller's stream wait for all of them, and they need not live any longer.
  std::vector<Stream> streams(std::size_t index) const {
    const long set = set_of_.at(index);
    return set >= 0 ? sets_[static_cast<std::size_t>(set)].streams : std::vector<Stream>{};
  }
  void forget_streams() {
    for (Set& set : sets_) set.streams.clear();
  }

  void forget() {
    std::fill(set_of_.begin(), set_of_.end(), -1);
    sets_.clear();
  }

  void begin_cycle() {
    std::fill(counts_.begin(), counts_.end(), 0);
    std::fill(notes_.begin(), notes_.end(), 0);
    order_.clear();
    for (Set& set : sets_) count_incomplete(set);
    forget_streams();
    done = false;
    seen_ = kNone;
  }

  std::vector<std::size_t> order() const { return order_; }

  std::vector<std::size_t> uncounted() const {
    std::vector<std::size_t> found;
    for (std::size_t index = 0; index < counts_.size(); ++index)
      if (notes_[index] > counts_[index]) found.push_back(index);
    return found;
  }

  bool has_all(const std::vector<std::size_t>& of) const {
    return std::all_of(of.begin(), of.end(), [&](std::size_t index) { return counts_.at(index) >= passes_; });
  }

  bool accumulates = false;
  bool done = false;

 private:
  static constexpr long long kNone = -1;

  struct Set {
    std::vector<std::size_t> members;  // parameters
    std::shared_ptr<PyDevice> device;  // of the gradients; null: the host
    std::vector<Stream> streams;       // on which the current backward passes have produced gradients, each once
    long waiting;                      // number of incomplete gradients
  };

  void require_parameter(std::size_t index) const {
    if (index >= counts_.size()) throw UsageError("there is no parameter " + std::to_string(index));
  }

  void tell(const char* method, std::size_t number) const { tell_(method, number); }

  void count_incomplete(Set& set) const {
    set.waiting = std::count_if(set.members.begin(), set.members.end(),
                                [&](std::size_t index) { return counts_[index] < passes_; });
  }

  static void note_stream(Set& set) {
    if (!set.device) return;
    const Stream now = set.device->stream();
    if (std::find(set.streams.begin(), set.streams.end(), now) == set.streams.end()) set.streams.push_back(now);
  }

  std::vector<int> counts_;   // by parameter: backward passes in this cycle
  std::vector<int> notes_;    // by parameter: the same, as seen by the hooks of tensors
  std::vector<long> set_of_;  // by parameter; -1: none
  std::vector<Set> sets_;
  std::vector<std::size_t> order_;  // indices in the order of completion in this cycle
  long long seen_ = kNone;          // last backward pass that was reported
  const int passes_;
  py::object backward_, tell_;
};

struct Hook {
  std::shared_ptr<GradientCounter> counter;
  std::size_t index;
};

// Function of a hook that calls a method of the counter. It ignores its arguments: torch passes the tensor, or the
// gradients of the node.
template <void (GradientCounter::*kMethod)(std::size_t)>
PyObject* call_hook(PyObject* self, PyObject* const*, Py_ssize_t) {
  const auto* hook = static_cast<const Hook*>(PyCapsule_GetPointer(self, nullptr));
  if (!hook) return nullptr;
  try {
    ((*hook->counter).*kMethod)(hook->index);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

template <void (GradientCounter::*kMethod)(std::size_t)>
PyCFunction hook_function() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&call_hook<kMethod>));
}

PyMethodDef kNoteHook = {"note_gradient", hook_function<&GradientCounter::note>(), METH_FASTCALL,
                         "Notes the gradient of a parameter."};
PyMethodDef kCountHook = {"count_gradient", hook_function<&GradientCounter::count>(), METH_FASTCALL,
                          "Counts the gradient of a parameter."};

py::object make_hook(PyMethodDef& method, std::shared_ptr<GradientCounter> counter, std::size_t index) {
  const py::capsule self(new Hook{std::move(counter), index}, [](void* hook) { delete static_cast<Hook*>(hook); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, self.ptr()));
}

py::object GradientCounter::note_hook(std::size_t index) {
  require_parameter(index);
  return make_hook(kNoteHook, shared_from_this(), index);
}

py::object GradientCounter::count_hook(std::size_t index) {
  require_parameter(index);
  return make_hook(kCountHook, shared_from_this(), index);
}

}  // namespace

void register_gradient_counter(py::module_& module) {
  py::class_<GradientCounter, std::shared_ptr<GradientCounter>>(
      module, "GradientCounter",
      "Counts gradients. A gradient is complete after `passes` backward passes in a cycle. `backward()` returns the "
      "number of the backward pass in progress. `tell(method, number)` is called with \"backward_adds\" and a gradient "
      "before it is counted, if it is the first of a backward pass or comes while all are done; with \"exceeded\" "
      "and a gradient that is complete already; with \"completed\" and a set whose gradients are all complete.")
      .def(py::init<std::size_t, int, py::object, py::object>(), py::arg("parameters"), py::arg("passes"),
           py::arg("backward"), py::arg("tell"))
      .def("note_hook", &GradientCounter::note_hook, py::arg("index"), "The post-accumulate-grad hook of a parameter.")
      .def("count_hook", &GradientCounter::count_hook, py::arg("index"),
           "The post hook of the AccumulateGrad node of a parameter.")
      .def("count", &GradientCounter::count, py::arg("index"), "Count a gradient, as the count_hook does.")
      .def_property_readonly("uncounted", &GradientCounter::uncounted,
                             "Parameters whose gradients were noted but not counted in this cycle.")
      .def("watch", &GradientCounter::watch, py::arg("members"), py::arg("device") = py::none(),
           "Make a set of these parameters, whose gradients are on this device (None: the host). Returns its number, "
           "from 0 on.")
      .def("streams", &GradientCounter::streams, py::arg("index"),
           "Streams of the device on which the backward passes in progress have produced gradients of the parameter's "
           "set.")
      .def("forget_streams", &GradientCounter::forget_streams,
           "Forget the streams, at the end of a backward pass: autograd lets the caller's stream wait for them.")
      .def("forget", &GradientCounter::forget, "Forget all sets.")
      .def("begin_cycle", &GradientCounter::begin_cycle, "Begin a cycle: no gradient is complete.")
      .def("has_all", &GradientCounter::has_all, py::arg("of"),
           "Whether the gradients of these parameters are complete.")
      .def_property_readonly("order", &GradientCounter::order, "The parameters, in the order of completion.")
      .def_readwrite("accumulates", &GradientCounter::accumulates,
                     "Whether gradients accumulate without being counted.")
      .def_readwrite("done", &GradientCounter::done, "Whether this cycle's gradients have been reduced.");
}

}  // namespace sordino::bindings

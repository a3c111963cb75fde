// Counts the gradients that a backward has completed, so that Python hears of them by the bucket, not by the tensor.
//
// Each parameter's hook is a C function: it looks at the number of the backward under way, and counts. Python is called
// for the first gradient of a backward, for one that comes once too often, and when the last one of a set is
// complete.
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/bindings.h"

namespace sordino::bindings {
namespace {

class GradientCounter : public std::enable_shared_from_this<GradientCounter> {
 public:
  GradientCounter(std::size_t parameters, int passes, py::object backward, py::object watcher)
      : counts_(parameters, 0),
        set_of_(parameters, -1),
        passes_(passes),
        backward_(std::move(backward)),
        watcher_(std::move(watcher)) {}

  py::object hook(std::size_t index);

  // Of a parameter whose gradient has been added to.
  void count(std::size_t index) {
    const auto now = backward_().cast<long long>();
    if (done || now < 0 || now != seen_) {
      tell("backward_adds", index);
      seen_ = now;
    }
    if (accumulates) return;
    if (counts_[index] >= passes_) {
      tell("exceeded", index);
      return;
    }
    if (++counts_[index] < passes_) return;
    order_.push_back(index);
    const long set = set_of_[index];
    if (set >= 0 && --waiting_[static_cast<std::size_t>(set)] == 0) tell("completed", static_cast<std::size_t>(set));
  }

  std::size_t watch(const std::vector<std::size_t>& members) {
    const std::size_t set = sets_.size();
    for (const std::size_t index : members) set_of_.at(index) = static_cast<long>(set);
    sets_.push_back(members);
    waiting_.push_back(0);
    await(set);
    return set;
  }

  void forget() {
    std::fill(set_of_.begin(), set_of_.end(), -1);
    sets_.clear();
    waiting_.clear();
  }

  void begin_cycle() {
    std::fill(counts_.begin(), counts_.end(), 0);
    order_.clear();
    for (std::size_t set = 0; set < sets_.size(); ++set) await(set);
    done = false;
    seen_ = kNone;
  }

  std::vector<std::size_t> order() const { return order_; }
  bool has_all(const std::vector<std::size_t>& of) const {
    return std::all_of(of.begin(), of.end(), [&](std::size_t index) { return counts_.at(index) >= passes_; });
  }

  bool accumulates = false;
  bool done = false;

 private:
  static constexpr long long kNone = -1;

  // Calls a method of the watcher, if that is alive.
  void tell(const char* method, std::size_t number) const {
    const py::object alive = watcher_();
    if (!alive.is_none()) alive.attr(method)(number);
  }

  void await(std::size_t set) {
    waiting_[set] = std::count_if(sets_[set].begin(), sets_[set].end(),
                                  [&](std::size_t index) { return counts_[index] < passes_; });
  }

  std::vector<int> counts_;                     // by parameter: backward passes in this cycle
  std::vector<long> set_of_;                    // by parameter; -1: none
  std::vector<std::vector<std::size_t>> sets_;  // their parameters
  std::vector<long> waiting_;                   // by set: how many are not complete
  std::vector<std::size_t> order_;              // of completion in this cycle
  long long seen_ = kNone;                      // the backward that the watcher was told of last
  const int passes_;
  py::object backward_, watcher_;
};

struct Hook {
  std::shared_ptr<GradientCounter> counter;
  std::size_t index;
};

PyObject* call_hook(PyObject* self, PyObject*) {
  const auto* hook = static_cast<const Hook*>(PyCapsule_GetPointer(self, nullptr));
  if (!hook) return nullptr;
  try {
    hook->counter->count(hook->index);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef kHook = {"count_gradient", &call_hook, METH_O, "Counts the gradient of a parameter."};

py::object GradientCounter::hook(std::size_t index) {
  if (index >= counts_.size()) throw UsageError("there is no parameter " + std::to_string(index));
  const py::capsule self(new Hook{shared_from_this(), index}, [](void* hook) { delete static_cast<Hook*>(hook); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&kHook, self.ptr()));
}

}  // namespace

void register_gradient_counter(py::module_& module) {
  py::class_<GradientCounter, std::shared_ptr<GradientCounter>>(
      module, "GradientCounter",
      "Counts gradients that backward passes have completed. One is complete after `passes` in a cycle. `backward()` "
      "numbers the backward under way. `watcher` is a weak reference; its object's backward_adds(index) is called with "
      "the first gradient of a backward, and with any while they are done, before that is counted; exceeded(index) "
      "with one that is complete already, completed(number) when all of a set are.")
      .def(py::init<std::size_t, int, py::object, py::object>(), py::arg("parameters"), py::arg("passes"),
           py::arg("backward"), py::arg("watcher"))
      .def("hook", &GradientCounter::hook, py::arg("index"), "The function that a parameter is to call.")
      .def("watch", &GradientCounter::watch, py::arg("members"),
           "Makes these parameters a set; returns its number, from 0 on.")
      .def("forget", &GradientCounter::forget, "Forgets all sets.")
      .def("begin_cycle", &GradientCounter::begin_cycle, "Has no gradient complete.")
      .def("has_all", &GradientCounter::has_all, py::arg("of"), "Whether those of these parameters are complete.")
      .def_property_readonly("order", &GradientCounter::order, "The parameters, in the order of completion.")
      .def_readwrite("accumulates", &GradientCounter::accumulates, "Whether nothing is counted.")
      .def_readwrite("done", &GradientCounter::done, "Whether this cycle's gradients are reduced already.");
}

}  // namespace sordino::bindings

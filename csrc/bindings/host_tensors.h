// Reads tensors in host memory without pybind11: by DLPack's table of C functions, or by their attributes if torch is
// older than that table.
#pragma once

#include <array>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/dlpack.h"

namespace sordino::bindings {

// A tensor's address, type and shape.
struct HostTensor {
  std::byte* data = nullptr;
  DType dtype = DType::kUInt8;
  std::vector<std::int64_t> shape;

  std::size_t bytes() const { return count_of(shape) * size_of(dtype); }
};

class HostTensors {
 public:
  // `codes`: the core's code of each dtype.
  HostTensors(py::object tensor_type, const py::dict& codes);

  // False for a tensor that has no storage, is not row-major, or is not on the host. A Python error may be set then.
  bool describe(PyObject* tensor, HostTensor& out) const;
  // As describe(), for any object of a caller. Also false if it is not an ordinary tensor, or its values are negated in
  // memory: then Python has to handle it, or refuse it with an error.
  bool describe_given(PyObject* tensor, HostTensor& out) const;

 private:
  void find_table();
  bool describe_by_table(PyObject* tensor, HostTensor& out) const;
  bool describe_by_attributes(PyObject* tensor, HostTensor& out) const;

  py::object tensor_type_;
  py::object is_neg_;                                  // the type's method
  std::array<py::object, kDTypeCount> dtypes_;         // by the core's code
  dlpack::Describe table_ = nullptr;                   // null if torch does not have it
  std::array<dlpack::DataType, kDTypeCount> codes_{};  // DLPack's types, by the core's code
};

// Converts the result of a function that Python calls without pybind11. No result becomes None: Python has to do the
// call, or refuse it. An error becomes null, with Python's error set.
template <class Function>
PyObject* answer(const Function& function) {
  try {
    py::object result = function();
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

inline py::object taken(PyObject* object) { return py::reinterpret_steal<py::object>(object); }

}  // namespace sordino::bindings

#include "bindings/host_tensors.h"

#include <algorithm>
#include <utility>

namespace sordino::bindings {
namespace {

struct AttributeNames {
  PyObject *dtype, *shape, *is_cpu, *is_contiguous, *data_ptr;
};

const AttributeNames& attribute_names() {
  static const AttributeNames interned{
      PyUnicode_InternFromString("dtype"), PyUnicode_InternFromString("shape"), PyUnicode_InternFromString("is_cpu"),
      PyUnicode_InternFromString("is_contiguous"), PyUnicode_InternFromString("data_ptr")};
  return interned;
}

bool is_true(const py::object& value) { return value.ptr() == Py_True; }

}  // namespace

HostTensors::HostTensors(py::object tensor_type, const py::dict& codes)
    : tensor_type_(std::move(tensor_type)), is_neg_(tensor_type_.attr("is_neg")) {
  for (const auto& [dtype, code] : codes)
    dtypes_[static_cast<std::size_t>(dtype_of(code.cast<int>()))] = py::reinterpret_borrow<py::object>(dtype);
  find_table();
}

// Uses DLPack's table if it describes a tensor of each type.
void HostTensors::find_table() {
  const dlpack::Describe describe = dlpack::describe_of(tensor_type_);
  const py::object empty = py::module_::import("torch").attr("empty");
  for (std::size_t code = 0; describe && code < codes_.size(); ++code) {
    const py::object example = empty(0, py::arg("dtype") = dtypes_[code], py::arg("device") = "cpu");
    dlpack::Tensor found;
    if (Py_TYPE(example.ptr()) != reinterpret_cast<PyTypeObject*>(tensor_type_.ptr()) ||
        describe(example.ptr(), &found) != 0)
      return PyErr_Clear();
    codes_[code] = found.dtype;
  }
  table_ = describe;
}

bool HostTensors::describe_by_table(PyObject* tensor, HostTensor& out) const {
  dlpack::Tensor found;
  if (table_(tensor, &found) != 0) return false;
  if (found.device_type != dlpack::kCpu || !dlpack::is_row_major(found)) return false;
  const auto code = std::find(codes_.begin(), codes_.end(), found.dtype);
  if (code == codes_.end()) return false;
  out.dtype = static_cast<DType>(code - codes_.begin());
  out.data = static_cast<std::byte*>(found.data) + found.offset;
  out.shape.assign(found.shape, found.shape + found.dimensions);
  return true;
}

bool HostTensors::describe_by_attributes(PyObject* tensor, HostTensor& out) const {
  const AttributeNames& names = attribute_names();
  if (!is_true(taken(PyObject_GetAttr(tensor, names.is_cpu)))) return false;
  if (!is_true(taken(PyObject_CallMethodNoArgs(tensor, names.is_contiguous)))) return false;  // raises if it is sparse
  const py::object dtype = taken(PyObject_GetAttr(tensor, names.dtype));
  const py::object shape = taken(PyObject_GetAttr(tensor, names.shape));
  const py::object address = taken(PyObject_CallMethodNoArgs(tensor, names.data_ptr));
  if (!dtype || !shape || !address || !PyTuple_Check(shape.ptr())) return false;
  const auto same = [&](const py::object& known) { return known.is(dtype); };
  const auto code = std::find_if(dtypes_.begin(), dtypes_.end(), same);
  if (code == dtypes_.end()) return false;
  out.dtype = static_cast<DType>(code - dtypes_.begin());
  out.data = static_cast<std::byte*>(PyLong_AsVoidPtr(address.ptr()));
  out.shape.clear();
  for (Py_ssize_t axis = 0; axis < PyTuple_GET_SIZE(shape.ptr()); ++axis)
    out.shape.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), axis)));
  return PyErr_Occurred() == nullptr;
}

bool HostTensors::describe(PyObject* tensor, HostTensor& out) const {
  return (table_ ? describe_by_table(tensor, out) : describe_by_attributes(tensor, out)) &&
         (out.data || count_of(out.shape) == 0);
}

bool HostTensors::describe_given(PyObject* tensor, HostTensor& out) const {
  if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != tensor_type_.ptr()) return false;
  if (!describe(tensor, out)) return false;
  // A tensor with the negative bit (the imaginary part of a conjugate) stores its values negated.
  return !is_true(taken(PyObject_CallOneArg(is_neg_.ptr(), tensor)));
}

}  // namespace sordino::bindings

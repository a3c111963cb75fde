// Translates the typed errors of base/error.h to the classes of sordino.errors.
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/bindings.h"

namespace sordino::bindings {
namespace {

template <class... Extra>
void raise(const char* type, const std::exception& error, Extra&&... extra) {
  const py::object python_type = py::module_::import("sordino.errors").attr(type);
  const py::object instance = python_type(error.what(), std::forward<Extra>(extra)...);
  PyErr_SetObject(python_type.ptr(), instance.ptr());
}

}  // namespace

void register_errors(py::module_&) {
  py::register_exception_translator([](std::exception_ptr failure) {
    try {
      if (failure) std::rethrow_exception(failure);
    } catch (const PeerLost& error) {
      raise("PeerLost", error, error.ranks);
    } catch (const Timeout& error) {
      raise("Timeout", error, error.operation, error.missing);
    } catch (const OperationMismatch& error) {
      raise("OperationMismatch", error);
    } catch (const UsageError& error) {
      raise("UsageError", error);
    } catch (const NoQuorum& error) {
      raise("NoQuorum", error);
    } catch (const Evicted& error) {
      raise("Evicted", error);
    } catch (const TransportError& error) {
      raise("TransportError", error);
    } catch (const DeviceError& error) {
      raise("DeviceError", error);
    } catch (const NotBuilt& error) {
      raise("NotBuilt", error);
    } catch (const Error& error) {
      raise("SordinoError", error);
    }
  });
}

}  // namespace sordino::bindings

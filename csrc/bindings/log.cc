// Log lines of the core, for Python (python/sordino/log).
#include "base/log.h"

#include "base/config.h"
#include "bindings/bindings.h"

namespace sordino::bindings {

void register_log(py::module_& module) {
  module.def(
      "log_level", [] { return Config::from_environment().log_level; },
      "The level in SORDINO_LOG_LEVEL; empty if it is not set.");
  module.def(
      "open_log", [](int least) { log::open(static_cast<log::Level>(least)); }, py::arg("least"),
      "From now on, keep lines for take_log_line(). least: the lowest level that is written to stderr.");
  module.def("wait_for_log_line", &log::wait, py::call_guard<py::gil_scoped_release>(),
             "Wait for a line, without Python's lock. False: close_log() was called.");
  module.def(
      "take_log_line",
      []() -> py::object {
        const auto line = log::take();
        if (!line) return py::none();
        // A text may quote a peer or the system, in any encoding.
        auto text = py::reinterpret_steal<py::object>(
            PyUnicode_DecodeUTF8(line->text.data(), static_cast<py::ssize_t>(line->text.size()), "replace"));
        if (!text) throw py::error_already_set();
        return py::make_tuple(static_cast<int>(line->level), line->rank, std::move(text), line->on_stderr);
      },
      "The oldest line: (level, rank, text, on_stderr), or None. on_stderr: the core has written it to stderr.");
  module.def("close_log", &log::close, py::call_guard<py::gil_scoped_release>(),
             "From now on, write lines to stderr at once. Lines that were kept can still be taken.");
  module.def(
      "say",
      [](int level, int rank, std::string text) { log::say(static_cast<log::Level>(level), rank, std::move(text)); },
      py::arg("level"), py::arg("rank"), py::arg("text"), "Write a line as the core does; for tests.");
}

}  // namespace sordino::bindings

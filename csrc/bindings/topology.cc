// Topologies, and schedules of all-reduce, for algorithms, tests and simulations.
#include "topology/topology.h"

#include <pybind11/stl.h>

#include <optional>

#include "bindings/bindings.h"
#include "topology/roulette.h"
#include "topology/schedule.h"

namespace sordino::bindings {
namespace {

using topology::At;
using topology::Topology;
using SharedTopology = std::shared_ptr<Topology>;

void check_rank(const Topology& self, int rank) {
  if (rank < 0 || rank >= self.size())
    throw UsageError("rank " + std::to_string(rank) + " is not one of the " + std::to_string(self.size()) + " workers");
}

int checked_size(int size) {
  if (size < 1) throw UsageError("a topology needs at least one worker, not " + std::to_string(size));
  return size;
}

template <class Kind>
auto define(py::module_& module, const char* name, const char* doc) {
  return py::class_<Kind, Topology, std::shared_ptr<Kind>>(module, name, doc);
}

void register_schedules(py::module_& module) {
  using topology::Round;
  py::class_<Round>(module, "Round",
                    "Messages in flight at the same time, between members of a team. Each carries `share` of the "
                    "vector. The round is repeated `repeats` times.")
      .def_readonly("sources", &Round::sources)
      .def_readonly("targets", &Round::targets)
      .def_readonly("share", &Round::share)
      .def_readonly("repeats", &Round::repeats);
  module.attr("MOST_DOUBLED") = topology::kSmall;
  module.def(
      "all_reduce_rounds", [](int size, bool small) { return topology::all_reduce_rounds(checked_size(size), small); },
      py::arg("size"), py::arg("small"), "The messages of an all-reduce among the members of a team.");
  module.def(
      "all_reduce_teams",
      [](const std::vector<std::vector<int>>& nodes, bool small) {
        if (nodes.empty()) throw UsageError("an all-reduce needs at least one node");
        return topology::teams_of(nodes, small);
      },
      py::arg("nodes"), py::arg("small"),
      "The teams of an all-reduce among ranks that are listed by node. Each team reduces an equal share of the "
      "vector.");
}

}  // namespace

void register_topology(py::module_& module) {
  register_schedules(module);
  py::class_<Topology, SharedTopology>(module, "Topology", "The ranks that each rank mixes with, by round and segment.")
      .def_property_readonly("size", &Topology::size)
      .def(
          "row",
          [](const Topology& self, std::uint64_t round, std::uint32_t segment, int rank) {
            check_rank(self, rank);
            topology::Row row;
            self.row(At{round, segment}, rank, row);
            return std::tuple(row.sources, row.keeps_own, row.scale);
          },
          py::arg("round"), py::arg("segment"), py::arg("rank"),
          "(sources, keeps_own, scale): the segment becomes scale * (own value if keeps_own + the sources' values).")
      .def(
          "destinations",
          [](const Topology& self, std::uint64_t round, std::uint32_t segment, int rank) {
            check_rank(self, rank);
            std::vector<int> ranks;
            self.destinations(At{round, segment}, rank, ranks);
            return ranks;
          },
          py::arg("round"), py::arg("segment"), py::arg("rank"), "The ranks in whose rows `rank` is a source.")
      .def(
          "all_sources",
          [](const Topology& self, std::uint64_t round, std::uint32_t segment) {
            std::vector<std::vector<int>> sources(static_cast<std::size_t>(self.size()));
            topology::Row row;
            for (int rank = 0; rank < self.size(); ++rank) {
              self.row(At{round, segment}, rank, row);
              sources[static_cast<std::size_t>(rank)] = row.sources;
            }
            return sources;
          },
          py::arg("round"), py::arg("segment"), "The sources of every rank.")
      .def_property_readonly("is_mean_of_all", &Topology::is_mean_of_all,
                             "Whether every rank always takes the mean of all ranks' parameters.");

  define<topology::RandomCycle>(module, "RandomCycle",
                                "A random cycle through all workers (Crossover-SGD, section 3.2).")
      .def(py::init([](int size, std::uint64_t seed) {
             return std::make_shared<topology::RandomCycle>(checked_size(size), seed);
           }),
           py::arg("size"), py::arg("seed"));
  define<topology::Roulette>(module, "Roulette", "Random permutations that follow a matrix of weights.")
      .def(py::init([](int size, std::uint64_t seed, std::vector<double> weights) {
             return std::make_shared<topology::Roulette>(checked_size(size), seed, std::move(weights));
           }),
           py::arg("size"), py::arg("seed"), py::arg("weights"))
      .def_property_readonly("probabilities", &topology::Roulette::probabilities,
                             "The doubly stochastic matrix that draws follow, by rows.");
  define<topology::Ring>(module, "Ring", "Both neighbors on a ring (D-PSGD).")
      .def(py::init([](int size) { return std::make_shared<topology::Ring>(checked_size(size)); }), py::arg("size"));
  define<topology::Exponential>(module, "Exponential",
                                "Each rank sends to ranks at distances that are powers of two (SGP).")
      .def(py::init([](int size, std::map<std::uint64_t, int> peers) {
             return std::make_shared<topology::Exponential>(checked_size(size), std::move(peers));
           }),
           py::arg("size"), py::arg("peers"));
  define<topology::Dissemination>(
      module, "Dissemination", "As Exponential, with one distance per round, after a random permutation of the ranks.")
      .def(py::init([](int size, std::uint64_t seed) {
             return std::make_shared<topology::Dissemination>(checked_size(size), seed);
           }),
           py::arg("size"), py::arg("seed"));
  define<topology::RandomPull>(module, "RandomPull", "Each segment is pulled from random other workers (COMBO).")
      .def(py::init([](int size, std::uint64_t seed, int segments, int replicas) {
             return std::make_shared<topology::RandomPull>(checked_size(size), seed, segments, replicas);
           }),
           py::arg("size"), py::arg("seed"), py::arg("segments"), py::arg("replicas"));
  define<topology::RandomGroups>(module, "RandomGroups", "Random groups of workers that average with each other.")
      .def(py::init([](int size, std::uint64_t seed, int peers) {
             return std::make_shared<topology::RandomGroups>(checked_size(size), seed, peers);
           }),
           py::arg("size"), py::arg("seed"), py::arg("peers"));
  define<topology::Grouped>(module, "Grouped", "A topology among groups of neighboring ranks.")
      .def(py::init([](const SharedTopology& among, int group_size, bool leaders_only) {
             return std::make_shared<topology::Grouped>(among, group_size, leaders_only);
           }),
           py::arg("among"), py::arg("group_size"), py::arg("leaders_only"));
  define<topology::Star>(module, "Star", "Every member of a group takes the value of its first rank.")
      .def(py::init([](int size, int group_size) {
             return std::make_shared<topology::Star>(checked_size(size), group_size);
           }),
           py::arg("size"), py::arg("group_size"));
  const auto serve = [](auto kind, int size, std::optional<int> workers) {
    using Kind = typename decltype(kind)::type;
    return std::make_shared<Kind>(checked_size(size), workers.value_or(size));
  };
  define<topology::ToOwner>(module, "ToOwner",
                            "The owner of segment s, rank s modulo size, takes the mean of the workers.")
      .def(py::init([serve](int size, std::optional<int> workers) {
             return serve(TypeTag<topology::ToOwner>{}, size, workers);
           }),
           py::arg("size"), py::arg("workers") = py::none());
  define<topology::FromOwner>(module, "FromOwner", "Workers take segment s from its owner, rank s modulo size.")
      .def(py::init([serve](int size, std::optional<int> workers) {
             return serve(TypeTag<topology::FromOwner>{}, size, workers);
           }),
           py::arg("size"), py::arg("workers") = py::none());
  define<topology::Mean>(module, "Mean", "Every worker takes the mean of all workers.")
      .def(py::init([serve](int size, std::optional<int> workers) {
             return serve(TypeTag<topology::Mean>{}, size, workers);
           }),
           py::arg("size"), py::arg("workers") = py::none());
}

}  // namespace sordino::bindings

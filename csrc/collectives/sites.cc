#include "collectives/sites.h"

#include <map>

namespace sordino {

Sites::Sites(const Transport& transport, const std::vector<int>& ranks, int me, bool on_host) : on_host(on_host) {
  const auto& node_of = transport.node_of();
  std::map<int, std::size_t> sites;  // by node
  for (int index = 0; index < static_cast<int>(ranks.size()); ++index) {
    const int rank = ranks[static_cast<std::size_t>(index)];
    std::size_t site = all.size();
    if (transport.node_shares_memory(rank))
      site = sites.try_emplace(node_of[static_cast<std::size_t>(rank)], all.size()).first->second;
    if (site == all.size()) all.emplace_back();
    if (index == me) {
      mine = site;
      place = all[site].size();
    }
    all[site].push_back(index);
  }
}

}  // namespace sordino

#include "transport/roster.h"

#include <algorithm>

namespace ringcomm {

std::string sizes_text(Rank rank, int theirs, int ours) {
  return str("rank ", rank, " was started with a world size of ", theirs, ", and this one with ",
             ours, ": give every rank the same world size");
}

void Roster::find_hosts(const std::vector<Card>& cards, const Apart& apart) {
  std::vector<std::vector<Rank>> hosts;
  host_of.clear();
  names.clear();
  pids.clear();
  const auto card = [&](Rank rank) -> const Card& { return cards[static_cast<size_t>(rank)]; };
  for (Rank rank = 0; rank < static_cast<Rank>(cards.size()); ++rank) {
    const auto fits = [&](const std::vector<Rank>& host) {
      return std::ranges::all_of(host, [&](Rank other) {
        return card(rank).shares_host(card(other)) && !apart.contains({other, rank});
      });
    };
    auto host = std::ranges::find_if(hosts, fits);
    if (host == hosts.end()) {
      host = hosts.emplace(hosts.end());
      names.push_back(card(rank).host);
    }
    host->push_back(rank);
    host_of.push_back(static_cast<int>(host - hosts.begin()));
    pids.push_back(card(rank).pid);
  }
}

std::vector<Rank> Roster::ranks_of(int host) const {
  std::vector<Rank> ranks;
  for (size_t rank = 0; rank < host_of.size(); ++rank) {
    if (host_of[rank] == host) ranks.push_back(static_cast<Rank>(rank));
  }
  return ranks;
}

std::vector<Rank> Roster::first_ranks() const {
  std::vector<Rank> ranks;
  for (size_t rank = 0; rank < host_of.size(); ++rank) {
    if (host_of[rank] == std::ssize(ranks)) ranks.push_back(static_cast<Rank>(rank));
  }
  return ranks;
}

std::string Roster::to_text() const {
  const std::string asked = algorithm.empty() ? "-" : algorithm;
  std::string text = str(host_of.size(), ' ', group_id, ' ', asked, ' ', names.size());
  for (const std::string& name : names) text += ' ' + name;
  for (size_t rank = 0; rank < host_of.size();) {
    size_t end = rank;
    while (end < host_of.size() && host_of[end] == host_of[rank]) ++end;
    text += str(' ', host_of[rank], ' ', end - rank);
    rank = end;
  }
  uint64_t before = 0;
  for (const int64_t pid : pids) {
    text += str(' ', static_cast<int64_t>(static_cast<uint64_t>(pid) - before));
    before = static_cast<uint64_t>(pid);
  }
  return str(text, '\n', costs_text);
}

Roster Roster::from_text(const std::string& text, int size) {
  const size_t line = std::min(text.find('\n'), text.size());
  TextReader in(text.substr(0, line));
  Roster roster;
  size_t ranks_there = 0, hosts = 0;
  in >> ranks_there >> roster.group_id >> roster.algorithm >> hosts;
  if (roster.algorithm == "-") roster.algorithm.clear();
  for (std::string name; roster.names.size() < hosts && in >> name;) roster.names.push_back(name);
  size_t host = 0, ranks = 0;
  const auto all = static_cast<size_t>(size);
  if (in && ranks_there != all)
    throw PeerError(0, sizes_text(0, static_cast<int>(ranks_there), size));
  while (roster.host_of.size() < all && in >> host >> ranks && host < hosts && ranks > 0 &&
         ranks <= all - roster.host_of.size()) {
    roster.host_of.insert(roster.host_of.end(), ranks, static_cast<int>(host));
  }
  uint64_t pid = 0;  // any word of rank 0's may be wrong: it wraps around
  for (int64_t more = 0; roster.pids.size() < all && in >> more;) {
    roster.pids.push_back(static_cast<int64_t>(pid += static_cast<uint64_t>(more)));
  }
  const bool whole = roster.host_of.size() == all && roster.pids.size() == all;
  if (!whole || roster.first_ranks().size() != hosts) {
    throw PeerError(0, str("rank 0 describes the group as '", text.substr(0, 40),
                           "', which this version of ringcomm does not understand: install the "
                           "same version everywhere"));
  }
  roster.costs_text = text.substr(std::min(line + 1, text.size()));
  return roster;
}

}  // namespace ringcomm

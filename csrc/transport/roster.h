// A roster tells who shares a host with whom in a group, and what else is the same on all its
// ranks. Rank 0 makes it of all cards; the others read it, and the cards of their own host.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "transport/host.h"

namespace ringcomm {

struct Roster : Whereabouts {
  uint64_t group_id = 0;   // of no other group
  std::string algorithm;   // that rank 0 asks for; empty: none
  std::string costs_text;  // of rank 0, one line

  // Pairs that cannot share memory, the lower rank first, though their cards would allow it.
  using Apart = std::set<std::pair<Rank, Rank>>;
  // On a host, each reaches each.
  void find_hosts(const std::vector<Card>& cards, const Apart& apart);
  int host(Rank rank) const { return host_of[static_cast<size_t>(rank)]; }
  std::vector<Rank> ranks_of(int host) const;
  std::vector<Rank> first_ranks() const;  // of each host

  // Ranks of one host that follow one another are one pair of numbers. A process's number is told
  // by its difference from the one before, because a host numbers those that start together alike.
  std::string to_text() const;
  static Roster from_text(const std::string& text, int size);  // throws PeerError
};

// Returns the words of a rank that meets another one with another world size.
std::string sizes_text(Rank rank, int theirs, int ours);

}  // namespace ringcomm

// The ranks of the whole job that make a group together, as one of them names them to others.
#pragma once

#include <string>
#include <vector>

#include "base/error.h"

namespace ringcomm {

struct Members {
  Rank rank = 0;           // in the group, of the one that says it
  uint64_t world = 0;      // see RendezvousOptions
  std::string id;          // of that rank in its meeting
  std::string told = "-";  // the id of the rank whose word it answers
  std::vector<int> ranks;  // in the job

  static Members all(int size);
  // Returns Members without ranks if the text is malformed.
  static Members from_text(const std::string& text);
  std::string to_text() const;
  // Returns the ranks for people: [0-7, 9, 12].
  std::string shown() const;
  int number() const { return ranks.at(static_cast<size_t>(rank)); }
  bool overlap(const Members& other) const;
};

}  // namespace ringcomm

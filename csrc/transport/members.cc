#include "transport/members.h"

#include <algorithm>
#include <numeric>

namespace ringcomm {
namespace {

constexpr size_t kMost = 4096;
constexpr int kHighest = 1 << 24;  // a rank's number; a store with garbage makes no longer loops

// Runs of three and more as their ends: 0-7,9,12.
std::string runs(const std::vector<int>& ranks, const char* comma) {
  std::string text;
  for (size_t at = 0; at < ranks.size(); ++at) {
    size_t last = at;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += str(at == 0 ? "" : comma, ranks[at]);
    if (last < at + 2) continue;
    text += str('-', ranks[last]);
    at = last;
  }
  return text;
}

std::vector<int> ranks_from(const std::string& text) {
  std::vector<int> ranks;
  TextReader in(text);
  for (std::string item; std::getline(in, item, ',');) {
    TextReader ends(item);
    int first = 0, last = 0;
    char dash = 0;
    if (!(ends >> first) || first < 0) return {};
    if (!(ends >> dash >> last)) last = first;
    if (last < first || last > kHighest) return {};
    if (last - first >= static_cast<int>(kMost) || ranks.size() > kMost) return {};
    for (int rank = first; rank <= last; ++rank) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

Members Members::all(int size) {
  Members members;
  members.ranks.resize(static_cast<size_t>(size));
  std::iota(members.ranks.begin(), members.ranks.end(), 0);
  return members;
}

Members Members::from_text(const std::string& text) {
  Members members;
  std::string list;
  TextReader in(text);
  if (!(in >> members.rank >> members.world >> members.id >> members.told >> list)) return {};
  members.ranks = ranks_from(list);
  if (members.rank < 0 || members.rank >= std::ssize(members.ranks)) return {};
  return members;
}

std::string Members::to_text() const {
  return str(rank, ' ', world, ' ', id, ' ', told, ' ', runs(ranks, ","));
}

std::string Members::shown() const { return '[' + runs(ranks, ", ") + ']'; }

bool Members::overlap(const Members& other) const {
  return std::ranges::find_first_of(ranks, other.ranks) != ranks.end();
}

}  // namespace ringcomm
